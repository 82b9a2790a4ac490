"""Convert entries between storages: other dtypes, 8-bit codes, other compensations."""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import any_torch_dispatch_mode_on_stack

from optimi_func.core import codes
from optimi_func.core.checks import warn_user
from optimi_func.core.distributed import (
    distribute_like,
    from_local,
    leaf_to_local,
    to_local,
    whole,
)
from optimi_func.core.leaf import init_leaf, leaf_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.pairs import as_real, stored
from optimi_func.core.rule import Leaf, Numbers, Rule, Storage
from optimi_func.core.storage import (
    cached_init,
    decode,
    entry_of,
    field_of,
    missing_fields,
    names_in,
    own_names,
    state_in,
)
from optimi_func.core.torch_private import (
    TENSOR_FACTS,
    is_plain,
    is_unwatched,
    transform_level,
)
from optimi_func.core.tree import tensor_of
from optimi_func.pure.casts import called
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import TRAIN_PARAM, Entry, checked

# Fields without which moments are in other coordinates.
_TURNED = frozenset(("bases", "factors"))


def fit(
    bound: FunctionalOptimizer,
    p: Tensor,
    entry: Entry,
    storage: Storage,
    capturable: bool,
    keep_dtypes: bool,
    copy: bool,
) -> Entry:
    """Return the tensors of a parameter's entry, completed and converted to a storage.

    Fields, counts and a compensation that the entry lacks get their first values. The
    compensation is left out if the storage has none.

    Args:
        bound: The pure optimizer of the parameter's group.
        p: The parameter.
        entry: The entry of p, after `check_entry`. Values of other code are left out. The
            entry of a parameter that has not stepped is empty.
        storage: The storage of the parameter's group.
        capturable: Put the step count and the running scalars on p's device instead of the
            CPU.
        keep_dtypes: Keep the floating dtypes of the entry instead of converting to those
            of fresh state. Moments are still converted to 8-bit codes and back.
        copy: Copy every tensor to p's device and memory order. If False, the result shares
            all tensors that need no conversion with the entry.
    """
    rule = bound.rule
    if missing := missing_fields(rule, entry):
        leaf = init_leaf(rule, bound.init_numbers, p, storage)
        fresh = entry_of(leaf.state, None)
        entry = entry | {k: x for k, x in fresh.items() if field_of(k) in missing}
        if len(missing) == len(rule.state._fields):
            # Restart if momentum is turned on later: its first step initializes the buffer.
            entry.pop("step", None)
    device = p.device if capturable else torch.device("cpu")
    result: Entry = {}
    for name, first in {"step": 0.0, **rule.running()._asdict()}.items():
        dtype = torch.float32 if name == "step" else scalar_dtype(device)
        if copy or name not in entry:
            x = entry[name].detach() if name in entry else first
            result[name] = tensor_of(x, dtype, device)
        else:
            result[name] = entry[name].to(device)
    moments = {name: entry[name] for name in names_in(rule.state._fields, entry)}
    comp = moments.pop("kahan_comp", None)
    if copy or storage.coded or has_codes(rule, moments):
        state, _ = state_in(rule, moments)
        pairs = zip(state, fresh_like(rule, bound.shape_numbers, p, storage).state)
        fields = [_fit_field(p, *pair, keep_dtypes, copy) for pair in pairs]
        moments = entry_of(rule.state(*fields), None)
    result.update(moments)
    if (dtype := codes.remainder_dtype(p, storage.param)) is None:
        return result
    if comp is None:
        # Without it, `load_master_state_dict` would have no place for the rest.
        comp = torch.zeros_like(p, dtype=dtype)
    else:
        weight = _compensated(rule, p, entry)
        comp = _laid_out(weight, comp, comp.dtype) if copy else comp
        if not codes.alike(comp.dtype, dtype):
            comp = codes.recast_remainder(weight, comp, dtype)
        elif not keep_dtypes:
            comp = comp.to(dtype)
    return {**result, "kahan_comp": comp}


def loading(
    bound: FunctionalOptimizer, capturable: bool, storage: Storage, keep_dtypes: bool
) -> Callable[[object, Tensor, Entry], Entry]:
    """Return a function that checks, converts and copies a saved entry.

    The function takes the parameter's name, the parameter and its saved entry, which may
    contain tensors of other code. `keep_dtypes` and `capturable` are those of `fit`.

    Except for the check of the step count, the result depends only on the `_facts` of the
    entry. If an entry was copied without a conversion, entries with the same facts are
    copied without checks.
    """
    rule, known = bound.rule, set[object]()

    def load(name: object, p: Tensor, saved: Entry) -> Entry:
        kind = _facts(p, saved)
        if kind in known and saved["step"].item() >= 0.0:
            return {key: x.detach().clone() for key, x in saved.items()}
        entry = checked(bound, "state", name, p, saved)
        if keep_dtypes and (storage.coded or has_codes(rule, entry)):
            raise ValueError(
                f"keep_dtypes=True with storage={storage} and a state that holds "
                f"{sorted(entry)}: codes are not cast. Leave it out, and the state is "
                "converted to the optimizer's storage"
            )
        others = {key: x for key, x in entry.items() if key not in own_names(rule)}
        copies = pytree.tree_map_only(Tensor, partial(_copied, p), others)
        if "step" in entry:
            entry = fit(bound, p, entry, storage, capturable, keep_dtypes, copy=True)
            entry.update(copies)
        else:
            entry = copies  # the parameter has not stepped
        if kind is not None and kind == _facts(p, entry):
            known.add(kind)
        return entry

    return load


def _facts(p: Tensor, entry: Entry) -> object:
    """Return the facts about an entry and its parameter, or None if there are others."""
    if type(entry) is not dict or not is_unwatched() or transform_level():
        return None
    tensors = [p, *entry.values()]
    plain = _PLAIN.issuperset(map(type, tensors)) and not p.is_complex()
    if not plain or {x.layout for x in tensors} != {torch.strided}:
        return None
    if "step" not in entry or entry["step"].device.type != "cpu":
        return None  # nothing to check, or to wait for
    return *entry, *[tuple(map(fact, tensors)) for fact in TENSOR_FACTS]


_PLAIN = {Tensor, torch.nn.Parameter}


def fresh_like(rule: Rule, numbers: Numbers, p: Tensor, storage: Storage) -> Leaf:
    """Return a leaf with fresh state without memory, which is not written to."""
    odd = not is_plain(p) or p.layout != torch.strided
    if odd or any_torch_dispatch_mode_on_stack():
        # `empty_like` is dense, and state in codes is only for parameters that are.
        dense = p.layout != torch.strided or codes.is_dense(p)
        like = torch.empty_like(p, device="meta") if dense else p.detach()
        return init_leaf(rule, numbers, like, storage)
    shape, stride, dtype = tuple(p.shape), p.stride(), p.dtype

    def make() -> Leaf:
        like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return init_leaf(rule, numbers, like, storage)

    return cached_init(rule, numbers, make, shape, stride, dtype, storage)


def has_codes(rule: Rule, entry: Entry) -> bool:
    """Return True if a moment or the compensation of an entry is in codes."""
    names = names_in(rule.state._fields, entry)
    kinds = [entry[name] for name in names]
    return not all(x.is_floating_point() or x.is_complex() for x in kinds)


def _fit_field(p: Tensor, field: Any, like: Any, keep_dtypes: bool, copy: bool) -> object:
    """Convert a field of a state to the dtype or the codes of `like`: see `fit`."""
    if not copy and isinstance(field, Tensor) == isinstance(like, Tensor):
        return field
    if p.is_complex():
        field, like = pytree.tree_map(as_real, (field, like))
        return stored(p, _fit_field(as_real(p.detach()), field, like, keep_dtypes, copy))
    if isinstance(field, Tensor):
        x = field
    else:
        field = codes.in_own_order(field, p)
        if type(field) is type(like) and codes.same_order(p, field.q):
            q = _laid_out(p, field.q, field.q.dtype)
            scale = distribute_like(p, field.scale.detach().to(p.device, copy=True))
            return type(like)(q, scale)
        q, scale = map(whole, field)
        if q is not field.q:  # a gathered tensor is contiguous, and its groups may not be
            ordered = torch.empty_strided(
                q.shape, field.q.stride(), dtype=q.dtype, device=q.device
            )
            q = ordered.copy_(q)
        x = type(field)(q, scale).decode(torch.float32)
    if isinstance(like, Tensor):
        keeps = keep_dtypes and isinstance(field, Tensor)
        # Of its own shape, if the rule's map of whole tensors keeps it.
        return _laid_out(p, x, x.dtype if keeps else like.dtype, like)
    (part,) = to_local([_laid_out(p, x, torch.float32)])
    fresh = type(like).zeros(p)
    locals_ = to_local(list(fresh))
    for target, new in zip(locals_, type(fresh)(*locals_).encode(part, codes.NEAREST)):
        target.copy_(new)
    return fresh


def _compensated(rule: Rule, p: Tensor, entry: Entry) -> Tensor:
    """Return the tensor that an entry's compensation belongs to: in eval mode not p."""
    before = entry.get(TRAIN_PARAM) if rule.eval_point is not None else None
    return p if before is None else _laid_out(p, before, p.dtype)


def _laid_out(
    p: Tensor, x: Tensor, dtype: torch.dtype, like: Tensor | None = None
) -> Tensor:
    """Copy x to a dtype and p's device, and the memory order and placements of `like`."""
    same = type(like) is Tensor and (like.shape, like.stride()) == (p.shape, p.stride())
    like = p if like is None or same else like
    result = torch.empty_like(like, dtype=dtype, device=p.device, requires_grad=False)
    result.copy_(distribute_like(result, x.detach()))
    return result


def _copied(p: Tensor, x: Tensor) -> Tensor:
    """Copy a tensor that other code keeps in p's entry."""
    x = x.detach().to(p.device, copy=True)
    return distribute_like(p, x) if x.shape == p.shape else x


def decoded(rule: Rule, p: Tensor, entry: Entry) -> Entry:
    """Decode moments to plain tensors and a remainder in codes to float32."""
    result: Entry = {}
    names = names_in(rule.state._fields, entry)
    for key, x in entry.items():
        if key == "kahan_comp" and not x.is_floating_point():
            result[key] = codes.recast_remainder(
                _compensated(rule, p, entry), x, torch.float32
            )
        elif key in names and key.endswith("_q"):
            name = key.removesuffix("_q")
            q, scale = to_local([x, entry[name + "_scale"]])
            decoded = codes.CODECS[q.dtype](q, scale).decode(torch.float32)
            result[name] = from_local(decoded, as_real(p))
        elif key not in names or not key.endswith("_scale"):
            # A complex tensor cannot be of pairs in 16 bits.
            low = p.is_complex() and key in rule.state._fields and x.dtype in codes.LOW
            result[key] = x.float() if low else x
    return {k: stored(p, x) if k in rule.state._fields else x for k, x in result.items()}


def with_whole_codes(rule: Rule, p: Tensor, storage: Storage, entry: Entry) -> Entry:
    """Return an entry with the codes that one process has, if shards of p cut groups.

    Processes that have the shards gather the moments and have all scales. Other numbers of
    processes find the same names and shapes in a checkpoint then.
    """
    like = as_real(p.detach())
    if codes.is_eligible(like):
        return entry
    result: Entry = {}
    kinds = _codecs(rule, p, storage)
    for name, x in entry.items():
        if name not in kinds:
            result[name] = x
            continue
        field = kinds[name].encode(whole(as_real(x.detach())), codes.NEAREST)
        q = distribute_like(like, field.q)
        result.update({f"{name}_q": q, f"{name}_scale": field.scale})
    return result


def lacks_moments(rule: Rule, p: Tensor, storage: Storage, entry: Entry) -> bool:
    """Return True if all moments that codes are for are 0 after steps, in this process.

    A load that leaves out what a checkpoint has in another form keeps these zeros.
    """
    if p.is_meta or not is_unwatched():
        return False  # there are no values
    names = _codecs(rule, p, storage)
    if not names or not entry.get("step"):
        return False
    held = [name if name in entry else f"{name}_scale" for name in names]
    found = to_local([entry[name] for name in held])
    return all(x.numel() for x in found) and not any(bool(x.any()) for x in found)


def _codecs(rule: Rule, p: Tensor, storage: Storage) -> dict[str, codes.Codes]:
    """Return fresh fields, without memory, that one process keeps in codes for p."""
    if not storage.coded or not codes.has_groups(as_real(p.detach())):
        return {}
    like = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
    # No hyperparameter decides which fields are in codes.
    fresh = fresh_like(rule, None, like, storage).state
    return {k: x for k, x in fresh._asdict().items() if isinstance(x, codes.Codes)}


def fitting(bound: FunctionalOptimizer, p: Tensor, saved: Entry) -> tuple[Entry, list[str]]:
    """Return an entry with what fits of another rule's, and the fields that are taken."""
    rule = bound.rule
    entry = decoded(rule, p, {k: x for k, x in saved.items() if x is not None})
    fresh = plain_entry(bound, p)
    names = [
        name
        for name, x in fresh.items()
        if isinstance(entry.get(name), Tensor) and entry[name].shape == x.shape
    ]
    if _TURNED.intersection(entry) - {*fresh}:
        names = []
    elif len(names) < len(fresh) or not {*rule.counted} <= {*entry}:
        # What does not depend on the step serves whatever the other fields are.
        steady = rule.eval_point is None and _is_steady(bound)
        names = names if steady and not rule.running._fields else []
        entry = {"step": entry.get("step", 0.0), **entry} if names else entry
    comp = {"kahan_comp": entry["kahan_comp"]} if "kahan_comp" in entry else {}
    if not names:
        return with_rest(bound, p, None, comp) if comp else {}, []
    values = {name: entry[name] for name in (*names, *rule.counted)}
    return {**fresh, **comp, **values}, names


def with_rest(
    bound: FunctionalOptimizer, p: Tensor, saved: Entry | None, current: Entry
) -> Entry:
    """Return a saved entry, or that of a parameter without steps, with a compensation."""
    if not saved:
        running = bound.rule.running()._asdict()
        saved = {**plain_entry(bound, p), **running, "step": 0.0}
    return {**saved, "kahan_comp": current["kahan_comp"]}


def plain_entry(bound: FunctionalOptimizer, p: Tensor) -> Entry:
    """Return fresh state for a parameter as an entry, without codes and compensation."""
    leaf = init_leaf(bound.rule, bound.init_numbers, p.detach(), Storage("plain"))
    return entry_of(leaf.state, None)


def _is_steady(bound: FunctionalOptimizer) -> bool:
    """Return True if a rule does the same at each step, but for its state."""
    coefficients: list[list[object]] = []
    for t in (2.0, 3.0):
        coeffs, _ = bound.rule.advance(t, 1.0, bound.rule.running(), called(bound, 1.0))
        coefficients.append([x for name, x in coeffs._asdict().items() if name != "whole"])
    # Of an instance, because it may be a property.
    mapped = getattr(bound.owner.with_values(bound), "whole", lambda: None)
    return coefficients[0] == coefficients[1] and "t" not in signature(mapped).parameters


def master(p: Tensor, rest: Tensor | None) -> Tensor:
    """Copy a parameter with its compensation added to float32, or to its own wide dtype."""
    low = p.is_floating_point() and p.element_size() < 4
    wide = torch.float32 if low else p.dtype
    if rest is None:
        return p.detach().to(wide, copy=True)
    part, here = to_local([p.detach(), rest])
    return from_local(codes.widen(part, here, wide)[1], p)


def weight_of(part: Tensor, rest: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return `master` of local tensors after a step, to which the compensation belongs."""
    if rest is None or not rest.is_floating_point():
        return codes.widen(part, rest, wide)[1]
    return codes.to(part, wide) + rest


def set_master(p: Tensor, rest: Tensor | None, x: Tensor) -> None:
    """Write x, a float32, to a parameter and its compensation."""
    part, x = to_local([p.detach(), distribute_like(p, x.detach().to(p.device))])
    if rest is None:
        if p.requires_grad and p.element_size() < min(4, x.element_size()):
            warn_user("weights without compensation, as with kahan_sum=False, are rounded")
        part.copy_(x)
        return
    (here,) = to_local([rest])
    x = x.to(torch.float32)
    if here.is_floating_point():
        part.copy_(x)
        here.copy_(codes.remainder(x, part, here.dtype))
        return
    for target, new in zip((part, here), codes.narrow(x, part, here)):
        target.copy_(new)


# First values, for `reset` and for what was written in eval mode


def rows_of(rule: Rule, path: object, p: Tensor, rows: object) -> Tensor:
    """Return a bool for each p[i], True where `rows` indexes it. Raise if it cannot."""
    if rule.whole_fields:
        raise ValueError(
            f"reset(rows=...) of params{path}, which follows {rule.name}: its "
            f"{', '.join(rule.whole_fields)} are of the whole tensor. Allowed is rows=None"
        )
    mask = torch.zeros(p.shape[:1], dtype=torch.bool, device="cpu")
    try:
        index = torch.as_tensor(rows, device="cpu")
        index = index.long() if index.numel() == 0 else index
        mask[index] = True
        if not (p.dim() and index.dim() == 1):
            raise IndexError
    except (IndexError, RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"reset(rows={rows!r:.80}): allowed are indices, or a bool for each, of the "
            f"first dimension of params{path}, of shape {tuple(p.shape)}"
        ) from None
    return mask


def mask_like(p: Tensor, rows: Tensor) -> Tensor:
    """Return the local shard of a mask of p's elements, from a bool for each p[i]."""
    p = as_real(p.detach())
    wide = rows.to(p.device).view(-1, *[1] * (p.dim() - 1)).expand(p.shape)
    return to_local([distribute_like(p, wide)])[0]


def begin(
    bound: FunctionalOptimizer,
    coeffs: object,
    p: Tensor,
    storage: Storage,
    entry: Entry,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    moments: bool = True,
) -> None:
    """Write the first values of p's state and compensation into a complete entry.

    `mask` is of p's local elements that begin anew, and `rows` that of `rows_of` if it was
    made of one; None means all. If not `moments`, only fields that follow the parameter do,
    such as z. `coeffs` are those of a first step.
    """
    p, entry = as_real(p.detach()), {name: as_real(x) for name, x in entry.items()}
    rule = bound.rule
    leaf = leaf_to_local(init_leaf(rule, bound.init_numbers, p, storage))
    new, following = entry_of(leaf.state, leaf.comp), ["kahan_comp"]
    told = rule.measure or rule.after_means or rule.extras  # which are of a step
    if mask is not None and rule.after is not None and not told:
        # Counts stay, by which a first step would tell that z is the parameter.
        _, x, _ = codes.widen(leaf.p, leaf.comp, leaf_dtype(leaf, leaf.p))
        state = type(leaf.state)(*[decode(s, x.dtype) for s in leaf.state])
        _, moved = rule.after(x, torch.zeros_like(x), state, coeffs)
        pairs = zip(rule.state._fields, state, moved)
        new.update(new_fields := {name: b for name, a, b in pairs if a is not b})
        following += new_fields
    for name in names_in(rule.state._fields, entry):
        (x,), row_mask = to_local([entry[name]]), mask
        if not (moments or name in following):
            continue
        if row_mask is not None and name.endswith("_scale"):
            if rows is None or p.dim() < 2 or p.stride(0) != max(p.stride()):
                continue  # its groups of elements are not of whole rows
            row_mask = mask_like(entry[name], rows)
        x.copy_(new[name] if row_mask is None else torch.where(row_mask, new[name], x))
