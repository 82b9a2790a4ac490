"""Packing: the scalars of a step as kernels take them, in one tensor or array."""

from collections.abc import Sequence

from torch import Tensor

from optimi_func.core.checks import check_given
from optimi_func.core.codes import NEAREST, dither_at
from optimi_func.core.leaf import microbatch_scalars
from optimi_func.core.packed import Packed
from optimi_func.core.rule import (
    WHOLE_BATCH,
    BoundRule,
    Microbatch,
    Named,
    Rule,
    Scalar,
    Scalars,
)


def pack(
    rule: Rule,
    scalars: list[Scalars],
    at: list[int],
    microbatches: list[Microbatch] | None,
    write: bool,
) -> tuple[list[Packed], list[int]]:
    """Pack the scalars of several parameters, equal ones once.

    `at` is the index in `scalars` for each parameter, and the second result the index among
    the packed ones. `microbatches` are what each gradient is to its step, or None if it is
    the whole of it. write=False moves the state alone.
    """
    if rule.given:
        check_given(rule, scalars[0].coeffs)
    if microbatches is None:
        if not write:
            scalars = [microbatch_scalars(rule, s, WHOLE_BATCH, write) for s in scalars]
        return list(map(Packed, scalars)), at
    places: dict[object, int] = {}
    packed: list[Packed] = []
    indices: list[int] = []
    for i, m in zip(at, microbatches):
        key = (i, m.grad_scale, m.accumulate, id(m.finite))
        if key not in places:
            places[key] = len(places)
            packed.append(Packed(microbatch_scalars(rule, scalars[i], m, write), m.finite))
        indices.append(places[key])
    return packed, indices


def scalars_after(
    bound: BoundRule,
    counts: Sequence[tuple[Scalar, Sequence[Scalar]]],
    coded: bool,
) -> tuple[list[Scalars], list[Named]]:
    """Return the scalars of the next step, and the running scalars after it.

    There are as many as `counts`, which are pairs of steps taken and running scalars. coded
    is True if any state is in codes, so that the step needs a dither.
    """
    rule = bound.rule
    scalars: list[Scalars] = []
    after: list[Named] = []
    for count, running in counts:
        t = (count.double() if isinstance(count, Tensor) else count) + 1.0
        coeffs, new = bound.advance(t, rule.running(*running))
        rates = bound.rates_at(t) if bound.every_hook else bound.rates_now
        scalars.append(Scalars(coeffs, rates, dither_at(t) if coded else NEAREST))
        after.append(new)
    return scalars, after
