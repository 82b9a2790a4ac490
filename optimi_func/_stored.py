"""Between storages: saved states as an optimizer keeps its own, codes as plain tensors."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func._codes import (
    NEAREST,
    alike,
    in_own_order,
    moment_codes,
    narrow,
    recast_remainder,
    remainder,
    same_layout,
    second_moment_codes,
    widen,
)
from optimi_func._distributed import distribute_like, from_local, to_local, whole
from optimi_func._leaf import init_leaf
from optimi_func._rule import Rule, Storage
from optimi_func._saved import TRAIN_PARAM, Entry, own_names
from optimi_func._storage import codes_of, names_in, names_of, state_in, tensors_of
from optimi_func._tree import running_tensors


def owned(
    rule: Rule[Any, Any],
    p: Tensor,
    group: dict[str, Any],
    storage: Storage,
    entry: Entry,
    keep_dtypes: bool,
) -> Entry:
    """An entry in memory of its own, in p's layout, on its device, kept as asked.

    Args:
        rule: The mathematics.
        p: The parameter.
        group: The optimizer's, with the options to come.
        storage: How its state is to be kept.
        entry: As `checked` gives it.
        keep_dtypes: Keep the file's, where else they are those of fresh state.

    Raises:
        ValueError: keep_dtypes of an entry, or for an optimizer, with codes.
    """
    if keep_dtypes and (storage.moments == "8bit" or has_codes(rule, entry)):
        raise ValueError(
            f"keep_dtypes=True with storage={storage} and a state that holds "
            f"{sorted(entry)}: codes are not cast. Leave it out: the state is decoded, and "
            "kept as the optimizer is asked to"
        )
    made: Entry = {}
    if "step" in entry:
        device = p.device if group["capturable"] else "cpu"
        made["step"] = entry["step"].detach().to(device, torch.float32, copy=True)
        running = rule.running(*[entry[name].detach() for name in rule.running._fields])
        made.update(running_tensors(running, torch.device(device))._asdict())
        state, comp = state_in(rule, entry)
        fresh = init_leaf(rule, torch.empty_like(p, device="meta"), storage)
        for name, field, like in zip(rule.state._fields, state, fresh.state):
            kept = _kept(p, field, like, keep_dtypes)
            made.update(zip(names_of(name, kept), tensors_of(kept)))
        if comp is not None and fresh.comp is not None:
            mine = _compensated(rule, p, entry)
            made["kahan_comp"] = _kept_beside(mine, comp, fresh.comp.dtype, keep_dtypes)
    for name, x in entry.items():
        if name not in own_names(rule):
            made[name] = pytree.tree_map_only(Tensor, partial(_copied, p), x)
    return made


def has_codes(rule: Rule[Any, Any], entry: Entry) -> bool:
    """Whether anything in an entry is kept in codes."""
    names = names_in(rule.state._fields, entry)
    return any([not entry[name].is_floating_point() for name in names])


def _kept(p: Tensor, field: Any, like: Any, keep_dtypes: bool) -> Any:
    """A saved field as another is kept, in memory of its own."""
    if isinstance(field, Tensor) and isinstance(like, Tensor):
        return _laid_out(p, field, field.dtype if keep_dtypes else like.dtype)
    if not isinstance(field, Tensor):
        field = in_own_order(field, p)
    if (
        not isinstance(field, Tensor)
        and type(field) is type(like)
        and same_layout(p, field.q)
    ):
        q = _laid_out(p, field.q, field.q.dtype)
        scale = distribute_like(p, field.scale.detach().to(p.device, copy=True))
        return type(like)(q, scale)
    if not isinstance(field, Tensor):
        q, scale = map(whole, field)
        field = type(field)(q, scale).decode(torch.float32)
    if isinstance(like, Tensor):
        return _laid_out(p, field, like.dtype)
    x = _laid_out(p, field, torch.float32)
    (part,) = to_local([x])
    zeros = second_moment_codes if like.q.dtype == torch.uint8 else moment_codes
    fresh = zeros(p)
    parts = type(fresh)(*to_local(list(fresh))).encode(part, NEAREST)
    for mine, new in zip(to_local(list(fresh)), parts):
        mine.copy_(new)
    return fresh


def restored(rule: Rule[Any, Any], p: Tensor, entry: Entry, name: str, like: Any) -> Entry:
    """An entry of which one field is kept as another.

    Args:
        rule: The mathematics.
        p: The parameter.
        entry: Of an optimizer.
        name: The field's.
        like: A field of p that is kept as asked.
    """
    state, _ = state_in(rule, entry)
    old = getattr(state, name)
    gone = names_of(name, old)
    kept = _kept(p, old, like, False)
    rest = {k: x for k, x in entry.items() if k not in gone}
    return {**rest, **dict(zip(names_of(name, kept), tensors_of(kept)))}


def _compensated(rule: Rule[Any, Any], p: Tensor, entry: Entry) -> Tensor:
    """What an entry's compensation belongs to: in eval mode not what the parameter is."""
    before = entry.get(TRAIN_PARAM) if rule.eval_point is not None else None
    return p if before is None else _laid_out(p, before, p.dtype)


def _kept_beside(p: Tensor, rest: Tensor, dtype: torch.dtype, keep: bool) -> Tensor:
    """What was kept beside p, in a dtype, in memory of its own."""
    mine = _laid_out(p, rest, rest.dtype)
    if alike(rest.dtype, dtype):
        return mine if keep else mine.to(dtype)
    return recast_remainder(p, mine, dtype)


def _laid_out(p: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of x as p lies, in a dtype."""
    made = torch.empty_like(p, dtype=dtype, requires_grad=False)
    made.copy_(distribute_like(p, x))
    return made


def _copied(p: Tensor, x: Tensor) -> Tensor:
    """A tensor that others keep with p, in memory of its own."""
    x = x.detach().to(p.device, copy=True)
    return distribute_like(p, x) if x.shape == p.shape else x


def decoded(rule: Rule[Any, Any], p: Tensor, entry: Entry) -> Entry:
    """An entry whose moments are plain, and whose remainder is a float32.

    Args:
        rule: The mathematics.
        p: The parameter.
        entry: Of an optimizer; the rest of it stays as it is.
    """
    found: Entry = {}
    names = names_in(rule.state._fields, entry)
    for key, x in entry.items():
        if key == "kahan_comp" and not x.is_floating_point():
            found[key] = recast_remainder(_compensated(rule, p, entry), x, torch.float32)
        elif key in names and key.endswith("_q"):
            q, scale = to_local([x, entry[key.removesuffix("_q") + "_scale"]])
            plain = codes_of(q, scale).decode(torch.float32)
            found[key.removesuffix("_q")] = from_local(plain, p)
        elif key not in names or not key.endswith("_scale"):
            found[key] = x
    return found


def master(p: Tensor, rest: Tensor | None) -> Tensor:
    """A parameter as it is meant, in float32 at least; in memory of its own."""
    wide = torch.promote_types(p.dtype, torch.float32)
    if rest is None:
        return p.detach().to(wide, copy=True)
    part, here = to_local([p.detach(), rest])
    return from_local(widen(part, here, wide)[1], p)


def set_master(p: Tensor, rest: Tensor | None, x: Tensor) -> None:
    """Write x, a float32, into a parameter and what is kept beside it."""
    parts = [p.detach()] if rest is None else [p.detach(), rest]
    part, *beside = to_local(parts)
    (x,) = to_local([distribute_like(p, x.detach().to(p.device))])
    if not beside:
        part.copy_(x)
        return
    (here,) = beside
    x = x.to(torch.float32)
    if here.is_floating_point():
        part.copy_(x)
        here.copy_(remainder(x, part, here.dtype))
        return
    for target, new in zip((part, here), narrow(x, part, here)):
        target.copy_(new)
