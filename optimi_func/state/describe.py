"""The tables of `optimizer.describe()`."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from optimi_func.core.codes import CODECS, MOMENTS
from optimi_func.core.distributed import to_local
from optimi_func.core.lists import table
from optimi_func.core.math import iterated_in
from optimi_func.core.storage import dtype_name, entry_of, group_storage, names_in, seed_of
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Group
from optimi_func.state.stored import fresh_like

_HEAD = tuple("group,tensors,elements,parameters,moments,in codes,bytes,each".split(","))


def describe(
    states: Mapping[Tensor, Entry],
    groups: list[Group],
    bound_of: Callable[[Group], FunctionalOptimizer],
) -> str:
    """Return the table of storage and bytes, and the dtypes of iterations over matrices."""
    rows: list[tuple[str, ...]] = []
    totals = [0, 0, 0, 0]
    for i, group in enumerate(groups):
        bound = bound_of(group)
        params: list[Tensor] = group["params"]
        found = [_kept(bound, group, p, states.get(p, {})) for p in params]
        counts = [len(params), *map(sum, zip(*[x[2:] for x in found]))]
        counts += [0] * (4 - len(counts))
        totals = [a + b for a, b in zip(totals, counts)]
        kinds = [x[0] for x in found], [x[1] for x in found]
        how = [", ".join(sorted({*some} - {""})) or "-" for some in kinds]
        rows.append((str(i), *_cells(counts, how)))
    if len(groups) > 1:
        rows.append(("all", *_cells(totals, ["", ""])))
    lines = [table([_HEAD, *rows])]
    for i, group in enumerate(groups):
        if "ns_dtype" in group:
            wide = partial(torch.promote_types, torch.float32)
            found = {
                dtype_name(group["ns_dtype"] or iterated_in(p.device, wide(p.dtype)))
                for p in group["params"]
            }
            lines.append(f"group {i} iterates in {', '.join(sorted(found))} (ns_dtype)")
    return "\n".join(lines)


def listed(groups: list[Group]) -> str:
    """Return a line for each parameter: its rule, its shape and its name."""
    rows = [
        (group["rule"], " x ".join(map(str, p.shape)) or "1", name)
        for group in groups
        for name, p in zip(group["param_names"], group["params"])
    ]
    return table(rows, left=range(3))


def _kept(
    bound: FunctionalOptimizer, group: Group, p: Tensor, state: Entry
) -> tuple[str, str, int, int, int]:
    """Return the storage of p and of its moments, and local elements, coded ones, bytes."""
    names = names_in(bound.rule.state._fields, state)
    entry = {name: state[name] for name in names if isinstance(state[name], Tensor)}
    (part,) = to_local([p])
    if not entry and p.requires_grad:
        leaf = fresh_like(bound.rule, bound.shape_numbers, p, group_storage(group))
        entry = entry_of(leaf.state, leaf.comp)
    local = dict(zip(entry, to_local(list(entry.values()))))
    comp = local.get("kahan_comp")
    name = dtype_name(p.dtype) + ("" if comp is None else f" + {dtype_name(comp.dtype)}")
    if seed_of(group_storage(group), p) is not None:
        name += " stochastic"
    coded = {CODECS.get(x.dtype) for key, x in local.items() if key.endswith("_q")}
    moments = [str(name) for name, kinds in MOMENTS.items() if not coded.isdisjoint(kinds)]
    suffixes = ("kahan_comp", "_q", "_scale")
    moments += [dtype_name(x.dtype) for k, x in entry.items() if not k.endswith(suffixes)]
    numel = part.numel()
    nbytes = part.nbytes + sum(x.nbytes for x in local.values())
    return name, ", ".join(sorted(set(moments))), numel, numel if coded else 0, nbytes


def _cells(counts: list[int], how: list[str]) -> tuple[str, ...]:
    tensors, elements, coded, nbytes = counts
    share = f"{100 * coded / elements:.1f} %" if elements else "-"
    per_element = f"{nbytes / elements:.3f}" if elements else "-"
    return (f"{tensors:,}", f"{elements:,}", *how, share, f"{nbytes:,}", per_element)
