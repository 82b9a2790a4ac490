"""`reset`: the state of parameters begins anew, in the tensors that are there."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from optimi_func.core.rule import Named, Storage
from optimi_func.core.storage import group_storage
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry
from optimi_func.state.entry import ensure_state, insert_made
from optimi_func.state.stored import begin, mask_like, rows_of

if TYPE_CHECKING:
    from optimi_func.classes.base import BaseOptimizer


def reset(
    optimizer: "BaseOptimizer", params: Tensor | Iterable[Tensor] | None, rows: object
) -> None:
    """Set the state of parameters, or of some of their rows, to its first values."""
    optimizer.check_train_mode("reset()")
    if optimizer.in_cycle():
        raise ValueError("reset() inside an accumulation cycle: end the cycle first")
    if rows is not None and params is None:
        raise ValueError("reset(rows=...) without params: say of which parameters")
    every = [p for group in optimizer.param_groups for p in group["params"]]
    some = [params] if isinstance(params, Tensor) else params
    targets = every if some is None else list(some)
    works: list[
        tuple[FunctionalOptimizer, Named, Tensor, Storage, Tensor | None, bool]
    ] = []
    made = dict[Tensor, Entry]()
    for p in targets:
        if not isinstance(p, Tensor):
            raise TypeError(f"reset(params=...) got {p!r:.80}: allowed are parameters")
        group = optimizer.group_of(p)
        capturable = group["capturable"]
        bound = optimizer.bound_of(group, [p], capturable)
        where = optimizer.path_of(group, p)
        rule, storage = bound.rule, group_storage(group)
        anew = None if rows is None else rows_of(rule, where, p, rows)
        if "step" in optimizer.state.get(p, {}):
            ensure_state(optimizer.state, made, where, p, bound, storage, capturable)
            coeffs, _ = bound.advance(1.0, rule.running())
            units = [] if rule.join is None else optimizer.unit_of(group)
            together = {q for x in units for q in x["params"]} <= {*targets}
            works.append((bound, coeffs, p, storage, anew, together))
    insert_made(optimizer.state, made)
    for bound, coeffs, p, storage, anew, together in works:
        entry, mask = optimizer.state[p], None if anew is None else mask_like(p, anew)
        begin(bound, coeffs, p, storage, entry, mask, anew)
        if mask is None:
            entry["step"].zero_()
            for name, x in bound.rule.running()._asdict().items() if together else ():
                entry[name].fill_(x)
    optimizer.note_loaded()
