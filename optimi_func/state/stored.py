"""Convert entries between storages: other dtypes, 8-bit codes, other compensations."""

from collections.abc import Callable
from functools import lru_cache, partial
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
from optimi_func.core.pairs import as_real, stored
from optimi_func.core.rule import Leaf, Rule, Storage
from optimi_func.core.storage import (
    decode,
    entry_of,
    field_of,
    names_in,
    own_names,
    state_in,
)
from optimi_func.core.torch_private import FACTS, is_plain, is_unwatched, transform_level
from optimi_func.pure.casts import called
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.pure.tree import running_tensors
from optimi_func.state.convert import TRAIN_PARAM, Entry, checked

# Fields without which moments are in other coordinates.
_TURNED = frozenset(("bases", "factors"))


def owned(
    rule: Rule,
    p: Tensor,
    capturable: bool,
    storage: Storage,
    entry: Entry,
    keep_dtypes: bool,
) -> Entry:
    """Copy an entry that is `checked` to p's device and memory order, in a storage.

    keep_dtypes keeps the dtypes of the entry instead of those of fresh state. capturable
    puts the step count and running scalars on p's device.
    """
    if keep_dtypes and (storage.coded or has_codes(rule, entry)):
        raise ValueError(
            f"keep_dtypes=True with storage={storage} and a state that holds "
            f"{sorted(entry)}: codes are not cast. Leave it out, and the state is "
            "converted to the optimizer's storage"
        )
    result: Entry = {}
    if "step" in entry:
        device = p.device if capturable else "cpu"
        result["step"] = entry["step"].detach().to(device, torch.float32, copy=True)
        running = rule.running(*[entry[name].detach() for name in rule.running._fields])
        result.update(running_tensors(running, torch.device(device))._asdict())
        state, comp = state_in(rule, entry)
        fresh = fresh_like(rule, p, storage)
        pairs = zip(state, fresh.state)
        new_state = rule.state(*[_kept(p, old, like, keep_dtypes) for old, like in pairs])
        dtype = None if fresh.comp is None else fresh.comp.dtype
        # Without it, `load_master_state_dict` would have no place for the rest.
        new_comp = None if dtype is None else torch.zeros_like(p, dtype=dtype)
        if comp is not None and dtype is not None:
            before = _compensated(rule, p, entry)
            new_comp = _laid_out(before, comp, comp.dtype)
            if not codes.alike(comp.dtype, dtype):
                new_comp = codes.recast_remainder(before, new_comp, dtype)
            elif not keep_dtypes:
                new_comp = new_comp.to(dtype)
        result.update(entry_of(new_state, new_comp))
    names = own_names(rule)
    for name, x in entry.items():
        if name not in names:
            result[name] = pytree.tree_map_only(Tensor, partial(_copied, p), x)
    return result


def loading(
    rule: Rule, capturable: bool, storage: Storage, keep_dtypes: bool
) -> Callable[[object, Tensor, Entry], Entry]:
    """Return a function of a name, a parameter and its saved entry: `checked` and `owned`.

    What these do follows from facts, but for the check of the step count. If they copied
    an entry as it was, others with the same facts are copied at once.
    """
    known = set[object]()

    def load(name: object, p: Tensor, saved: Entry) -> Entry:
        kind = _facts(p, saved)
        if kind in known and saved["step"].item() >= 0.0:
            return {key: x.detach().clone() for key, x in saved.items()}
        entry = checked(rule, "state", name, p, saved)
        entry = owned(rule, p, capturable, storage, entry, keep_dtypes)
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
    return *entry, *[tuple(map(fact, tensors)) for fact in FACTS]


_PLAIN = {Tensor, torch.nn.Parameter}


def fresh_like(rule: Rule, p: Tensor, storage: Storage) -> Leaf:
    """Return a leaf with fresh state without memory, which is not written to."""
    odd = not is_plain(p) or p.layout != torch.strided
    if odd or any_torch_dispatch_mode_on_stack():
        # `empty_like` is dense, and state in codes is only for parameters that are.
        dense = p.layout != torch.strided or codes.is_dense(p)
        like = torch.empty_like(p, device="meta") if dense else p.detach()
        return init_leaf(rule, like, storage)
    return _fresh_like(rule, tuple(p.shape), p.stride(), p.dtype, storage)


# torch takes 0.1 ms a tensor without memory, and models have many of one shape.
@lru_cache(256)
def _fresh_like(
    rule: Rule,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    storage: Storage,
) -> Leaf:
    p = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return init_leaf(rule, p, storage)


def has_codes(rule: Rule, entry: Entry) -> bool:
    """Return True if a moment or the compensation of an entry is in codes."""
    names = names_in(rule.state._fields, entry)
    kinds = [entry[name] for name in names]
    return not all(x.is_floating_point() or x.is_complex() for x in kinds)


def _kept(p: Tensor, field: Any, like: Any, keep_dtypes: bool) -> object:
    """Copy a field of a state to the dtype or the codes of `like`, in p's memory order."""
    if p.is_complex():
        field, like = pytree.tree_map(as_real, (field, like))
        return stored(p, _kept(as_real(p.detach()), field, like, keep_dtypes))
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


def restored(rule: Rule, p: Tensor, entry: Entry, name: str, like: object) -> Entry:
    """Return an entry with one field converted to the dtype or the codes of `like`."""
    state, comp = state_in(rule, entry)
    field = _kept(p, getattr(state, name), like, False)
    rest = {k: x for k, x in entry.items() if field_of(k) != name}
    return {**rest, **entry_of(state._replace(**{name: field}), comp)}


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
            low = p.is_complex() and key in rule.state._fields and codes.is_low(x.dtype)
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
    fresh = fresh_like(rule, like, storage).state
    return {k: x for k, x in fresh._asdict().items() if isinstance(x, codes.Codes)}


def fitting(bound: FunctionalOptimizer, p: Tensor, saved: Entry) -> tuple[Entry, list[str]]:
    """Return an entry with what fits of another rule's, and the fields that are taken."""
    rule = bound.starting_rule
    entry = decoded(rule, p, {k: x for k, x in saved.items() if x is not None})
    fresh = entry_of(init_leaf(rule, p.detach(), Storage("plain")).state, None)
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
        return with_rest(rule, p, None, comp) if comp else {}, []
    values = {name: entry[name] for name in (*names, *rule.counted)}
    return {**fresh, **comp, **values}, names


def with_rest(rule: Rule, p: Tensor, saved: Entry | None, current: Entry) -> Entry:
    """Return a saved entry, or that of a parameter without steps, with a compensation."""
    if not saved:
        fresh = entry_of(init_leaf(rule, p.detach(), Storage("plain")).state, None)
        saved = {**fresh, **rule.running()._asdict(), "step": 0.0}
    return {**saved, "kahan_comp": current["kahan_comp"]}


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
    rule: Rule,
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
    leaf = leaf_to_local(init_leaf(rule, p, storage))
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
