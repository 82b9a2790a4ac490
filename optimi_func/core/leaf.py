"""The update of one tensor in five stages: decode, rule, delta, add, encode.

Pure: nothing passed in is written. Every executor calls `leaf_step`, so that executors
differ in where they compute and write, but not in the formula.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.codes import narrow, remainder_dtype, round_to, to, widen
from optimi_func.core.distributed import distribute_like, on_whole, whole
from optimi_func.core.hooks import Keyed, TakeMeans, hook_rounds, hooked
from optimi_func.core.math import plus, scalar_dtype, times
from optimi_func.core.pairs import as_complex, as_real, stored
from optimi_func.core.rule import (
    WHOLE_BATCH,
    DecayKind,
    Leaf,
    Microbatch,
    Numbers,
    Rates,
    Rule,
    Scalar,
    Scalars,
)
from optimi_func.core.storage import Storage, decode, encode


def whole_means(tensors: list[Tensor], tops: int = 0) -> list[Tensor]:
    """Return the mean of each tensor, and of the last ones the maximum, of no shard."""
    # The mean of no elements is NaN, which derivatives would multiply by 0.
    end = len(tensors) - tops
    return [
        x.sum() if not x.numel() else x.mean() if i < end else x.amax()
        for i, x in enumerate(tensors)
    ]


def count_means(rule: Rule, rates: Rates, write: bool = True) -> tuple[int, ...]:
    """Return the number of means over the whole tensor in each round of a step.

    A round is before the direction (`Rule.measure`), of hooks or of sums after it
    (`Rule.sums`), or of the finished delta (`Rule.after_means`). Those of the first are
    known with the number of elements before them.
    """
    return tuple([number for number, _ in _rounds(rule, rates, write)])


def count_tops(rule: Rule, rates: Rates, write: bool = True) -> tuple[int, ...]:
    """Return how many of the last in each round are maxima."""
    return tuple([tops for _, tops in _rounds(rule, rates, write)])


def _rounds(rule: Rule, rates: Rates, write: bool) -> list[tuple[int, int]]:
    before, sums, after = rule.measure, rule.sums, rule.after_means
    rounds = [] if before is None else [(before.number, before.tops)]
    if write:
        rounds += [(n, 0) for n in hook_rounds(rates.hooks[rule.mapped_hooks :])]
        rounds += [] if sums is None else [(sums.number, 0)]
        rounds += [] if after is None else [(after.number, after.tops)]
    return [x for x in rounds if x[0]]


def count_beforehand(rule: Rule, rates: Rates) -> int:
    """Return the number of values of a tensor that are known before any means.

    They are the number of elements, which `Rule.measure` and some hooks read, and the
    fields that `measure` keeps.
    """
    if rule.measure is not None:
        return 1 + len(rule.measure.kept)
    return int(any([x.sized for _, x in rates.hooks[rule.mapped_hooks :]]))


def taking(
    rule: Rule, rates: Rates, known: Sequence[Tensor], mean: TakeMeans
) -> Callable[[list[Any], int], list[Any]]:
    """Return a `take_means` of known means, which calls `mean` for the others.

    The first known are those that are known beforehand.
    """
    left: list[Any] = list(known)
    beforehand = count_beforehand(rule, rates)

    def take(tensors: list[Any], tops: int) -> list[Any]:
        first = beforehand if len(left) == len(known) else 0
        count = len(tensors) + first
        if count > len(left):
            left[first:] = mean(tensors, tops)
        now, left[:] = left[:count], left[count:]
        return [x.to(tensors[0].dtype) for x in now]

    return take


def with_given(
    rule: Rule, leaf: Leaf, scalars: Scalars, tensors: Sequence[Tensor]
) -> tuple[Leaf, Scalars]:
    """Return a leaf and scalars with the tensors that a step is given besides.

    They are for what a rule is given and these scalars have None for. One more has random
    bits, by which the parameter is rounded.
    """
    if not tensors:
        return leaf, scalars
    names = [name for name in rule.given if getattr(scalars.coeffs, name) is None]
    if len(tensors) > len(names):
        *tensors, bits = tensors
        leaf = leaf._replace(comp=bits)
    coeffs = scalars.coeffs._replace(**dict(zip(names, tensors, strict=True)))
    return leaf, scalars._replace(coeffs=coeffs)


def leaf_sums(rule: Rule, leaf: Leaf, coeffs: Any, means: list[Tensor] | None) -> Tensor:
    """Return the sums that a rule joins; without means gradient and extras count as 0."""
    leaf = _real(leaf)
    p, wide = leaf.p, leaf_dtype(leaf, leaf.p)
    if means is not None:
        averages = torch.stack([whole(x) for x in means])
        return averages.to(scalar_dtype(p.device)) * p.numel()
    zeros = torch.zeros((), dtype=wide, device=p.device).expand(p.shape)
    state = type(leaf.state)(*[decode(s, wide) for s in leaf.state])
    assert rule.sums is not None
    coeffs = coeffs._replace(**dict.fromkeys(rule.extras, zeros)) if rule.extras else coeffs
    measured = rule.sums.measure(zeros, to(p, wide), state, coeffs)
    return torch.stack([whole(x.sum()) for x in measured]).to(scalar_dtype(p.device))


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 if a dtype is that wide, else float32."""
    wide = torch.float64 in dtypes or torch.complex128 in dtypes
    return torch.float64 if wide else torch.float32


def held_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype that holds results of the arithmetic: complex if any dtype is."""
    return reduce(torch.promote_types, dtypes, compute_dtype(*dtypes))


def leaf_dtype(leaf: Leaf, g: Tensor) -> torch.dtype:
    """Return the dtype of one leaf's arithmetic."""
    # Codes are no float64.
    fields = [x.dtype for x in leaf.state if isinstance(x, Tensor)]
    return compute_dtype(leaf.p.dtype, g.dtype, *fields)


def leaf_step(
    rule: Rule,
    leaf: Leaf,
    g: Tensor,
    scalars: Scalars,
    write: bool,
    take_means: TakeMeans,
    wide: torch.dtype | None = None,
) -> Leaf:
    """Return one parameter after one step.

    x is the parameter with its compensation, p + comp. State and x are decoded from their
    storage first, and encoded again at the end:

        g <- grad_scale * g + l2 * x
        coeffs, kept <- measure.settle(mean(measure(g, x, state)))
        d, state <- direction(g, state)
        d, fields <- whole(d, x, fields)
        d <- hook(d, g, x)                                              for each hook
        u <- -(lr * d + decay * x)
        u, state <- after(x, u, state, mean(after_means(x, u, state)))
        p <- round(p + (comp + u)),   comp <- what that rounding lost

    Decay is part of the delta, because a bfloat16 parameter times 1 - 1e-5 is itself, while
    its compensation keeps the 1e-5. Cautious decay (arXiv:2510.12402) leaves out decay * x,
    and a proximal kind's division, for elements of d and x that differ in sign. The map
    `whole` applies the first hooks itself if their norms are those of matrices or rows.

    write=False moves only the state (accumulating). take_means returns the mean of each
    tensor over the whole parameter, of which the leaf may be a shard, and of so many of the
    last the maximum. `wide` is the leaf's dtype of arithmetic, if it is known.
    """
    if leaf.p.dtype.is_complex:
        real, rest = _real(leaf), (scalars, write, take_means, wide)
        pairs = leaf_step(rule, real, as_real(g.resolve_conj()), *rest)
        return pytree.tree_map(_as_before, pairs, real, leaf)
    moved = _moved(rule, leaf, g, scalars, write, take_means, wide)
    (p, state, comp), (p32, x, wide_comp), new = leaf, moved.widened, moved.new
    if write:
        u = moved.u
        if rule.after is not None:
            means: list[Tensor] = []  # Dynamo knows no list[Tensor]()
            if (told := rule.after_means) is not None:
                means = take_means(told.measure(x, u, new, moved.coeffs), told.tops)
            u, new = rule.after(x, u, new, moved.coeffs, *means)
        p, comp = _add(p, p32, x, comp, wide_comp, u)
    own = new[: len(state) - len(moved.mapped)]
    results = _apart([*own, *moved.mapped], moved.old, x, scalars.rates.lr)
    # Fields that the rule returned unchanged are not encoded again.
    rows = zip(results, moved.old, state)
    fields = [s if n is o else encode(n, s, scalars.dither) for n, o, s in rows]
    return Leaf(p, type(state)(*fields), comp)


class _Moved(NamedTuple):
    """A step before `after`, the sum and the storage."""

    u: Tensor  # or d, if nothing is written
    widened: tuple[Tensor, Tensor, Tensor | None]  # see `widen`
    old: list[Any]  # the decoded state
    new: Any  # the state of `direction`, with None for the fields of `whole`
    mapped: tuple[Any, ...]  # the fields of `whole`
    coeffs: Any


def _moved(
    rule: Rule,
    leaf: Leaf,
    g: Tensor,
    scalars: Scalars,
    write: bool,
    take_means: TakeMeans,
    wide: torch.dtype | None = None,
) -> _Moved:
    """Return the first part of `leaf_step`; the leaf is not complex."""
    p, state, comp = leaf
    wide = leaf_dtype(leaf, g) if wide is None else wide
    c, r, dither = scalars
    _, x, _ = widened = widen(p, comp, wide)
    old: list[Any] = [s if s is None else decode(s, wide) for s in state]
    g = plus(times(r.grad_scale, to(g, wide)), r.l2, x)
    more = (x,) if rule.reads_param else ()
    count = len(old) - len(rule.whole_fields)
    mapped = tuple(old[count:])
    partial_state = type(state)(*old[:count], *[None] * len(mapped))
    numel = None
    if rule.measure is not None:
        known = take_means(rule.measure.measure(g, x, partial_state, c), rule.measure.tops)
        if len(known) == rule.measure.number:  # else a kernel is given what is before them
            numel = torch.full((), x.numel(), dtype=x.dtype, device=x.device)
            known = [numel, *map(whole, mapped), *known]
        numel = known[0]
        c, kept = rule.measure.settle(known, c)
        if write and mapped and mapped[0] is not None:
            mapped = tuple(map(distribute_like, state[count:], map(whole, kept)))
    d, new = rule.direction(g, partial_state, c, *more)
    if write:
        if rule.whole is not None:
            read: list[Tensor] = []
            for name in rule.whole.reads:
                i = -1 if name == "x" else rule.fields.index(name)
                read.append(x if i < 0 else _stored(new[i], old[i], state[i], dither))
            given = d, tuple(read), mapped, c, r
            d, new_fields = on_whole(rule.whole.map, *given, by_matrix=rule.whole.by_matrix)
            # Results share no memory with arguments.
            mapped = tuple([y.clone() if y is x else y for x, y in zip(mapped, new_fields)])
        if r.hooks:
            d = hooked(r.hooks[rule.mapped_hooks :], d, g, x, r.lr, take_means, numel)
        if rule.sums is not None:
            take_means(rule.sums.measure(g, x, new, c), 0)
        d = _delta(x, d, r)
    return _Moved(d, widened, old, new, mapped, c)


def _as_before(new: Any, pairs: object, old: Any) -> object:
    """Return a result of real pairs as its complex tensor was."""
    return old if new is pairs else as_complex(new, old)


def _real(leaf: Leaf) -> Leaf:
    """Return a leaf with complex tensors as real pairs."""
    return pytree.tree_map(as_real, leaf) if leaf.p.dtype.is_complex else leaf


def _stored(new: Tensor, old: Tensor, before: Any, dither: Scalar) -> Tensor:
    """Return a field as it is after storage, where executors find it for a map."""
    return old if new is old else decode(encode(new, before, dither), new.dtype)


def _apart(fields: list[Tensor], old: list[Tensor], x: Tensor, lr: Scalar) -> list[Tensor]:
    """Copy fields that are another tensor of the step, which may be written before them."""
    tensors = [x, *old]
    for i, (new, before) in enumerate(zip(fields, old)):
        if new is before:
            continue
        if not any([new is y for y in tensors]):
            tensors.append(new)
        elif isinstance(lr, Tensor) and torch.compiler.is_compiling():
            # Inductor leaves out clones, and reads what is written. Reading lr, as the
            # move does, keeps this in the one loop that list kernels are made of.
            fields[i] = torch.where(lr == lr, new, lr)
        else:
            fields[i] = new.clone()
    return fields


def leaf_eval_point(rule: Rule, leaf: Leaf, coeffs: object) -> Tensor:
    """Return the parameter to evaluate with, in the dtype of the arithmetic.

    `coeffs` are those of the next step; the rule has an `eval_point`.
    """
    p, state, comp = _real(leaf)
    wide = leaf_dtype(leaf, p)
    _, x, _ = widen(p, comp, wide)
    assert rule.eval_point is not None
    point = rule.eval_point(x, type(state)(*[decode(s, wide) for s in state]), coeffs)
    return as_complex(point, leaf.p)


def _delta(x: Tensor, d: Tensor, r: Rates) -> Tensor:
    """Return the delta of a direction, with decay."""
    lr, decaying = r.lr, x
    for undecayed_lr in r.undecayed_lr:
        # 0 if the signs differ, else 1.
        decays = (d.sign() * x.sign()).clamp_max(0.0) + 1.0
        lr = undecayed_lr + decays * (lr - undecayed_lr)
        decaying = decays * x
    return -plus(lr * d, r.decay, decaying)


def leaf_round(
    rule: Rule, leaf: Leaf, g: Tensor, scalars: Scalars, known: Sequence[Tensor]
) -> list[Tensor]:
    """Return the tensors whose means a step takes after those known (see `taking`).

    A compiler drops all else of the step.
    """
    found: list[list[Tensor]] = []

    def mean(tensors: list[Tensor], tops: int) -> list[Tensor]:
        found.append(tensors)
        return whole_means(tensors, tops)

    # Where nothing is compiled, what follows the last of the means costs time.
    run = _moved if rule.after_means is None else leaf_step
    run(rule, leaf, g, scalars, True, taking(rule, scalars.rates, known, mean))
    return found[0]


def _add(
    p: Tensor,
    p32: Tensor,
    x: Tensor,
    comp: Tensor | None,
    own: Tensor | None,
    u: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return p + u in p's dtype, and the compensation if there is one (Kahan 1965).

    `own` is the compensation in the dtype of u, unless it is in codes.
    """
    if comp is None:
        return to(p32 + u, p.dtype), None
    if own is None:
        new, rest = narrow(x + u, p, comp)
        return new, None if comp.dtype == torch.int32 else rest
    u = u + own
    new = round_to(p32 + u, p.dtype)
    return to(new, p.dtype), to(u - (new - p32), comp.dtype)


def init_leaf(rule: Rule, numbers: Numbers, p: Tensor, storage: Storage) -> Leaf:
    """Return a leaf with fresh state. See `Rule.init` for the numbers."""
    dtype = remainder_dtype(p, storage.param)
    comp = None if dtype is None else torch.zeros_like(p, dtype=dtype)
    x = as_real(p)
    state = rule.init(x, storage.moments or x.dtype, numbers)
    return Leaf(p, stored(p, state), comp)


def microbatch_scalars(
    rule: Rule, scalars: Scalars, microbatch: Microbatch, write: bool
) -> Scalars:
    """Return a step's scalars for a gradient that is a part of it, or scaled.

    If the parameter does not move now (`write`), the gradient has no l2 part, because decay
    belongs to the move. The rule has `accumulate` if `microbatch.accumulate`.
    """
    coeffs, r, _ = scalars
    if microbatch.accumulate:
        assert rule.accumulate is not None
        coeffs = rule.accumulate(coeffs)
    if microbatch.grad_scale is not WHOLE_BATCH.grad_scale:
        r = r._replace(grad_scale=microbatch.grad_scale * r.grad_scale)
    return Scalars(coeffs, r if write else r._replace(l2=0.0), scalars.dither)


def rates(
    lr: Scalar,
    weight_decay: Scalar,
    kind: DecayKind,
    max_lr: Scalar | None,
    maximize: bool,
    cautious_decay: bool,
    hooks: tuple[Keyed, ...] = (),
) -> Rates:
    """Return the rates for a kind of decay.

    | kind        | the parameter loses, per step                          |
    |-------------|--------------------------------------------------------|
    | l2          | nothing by itself: weight_decay * p joins the gradient |
    | own         | nothing: the rule reads weight_decay                   |
    | decoupled   | lr * weight_decay * p                                  |
    | fully       | lr / max_lr * weight_decay * p                         |
    | corrected   | lr^2 / max_lr * weight_decay * p (arXiv:2506.02285)    |
    | proximal    | like the three above, but implicitly, after the move:  |
    |             | p <- (p - lr * d) / (1 + share)                        |

    Only the fully and corrected kinds use max_lr, the largest scheduled lr; with l2,
    cautious_decay has no effect.
    """
    grad_scale = -1.0 if maximize else 1.0
    if kind in ("l2", "own"):
        l2 = weight_decay if kind == "l2" else 0.0
        return Rates(lr, 0.0, l2, grad_scale, (), hooks)
    scheduled = lr
    if kind.startswith("fully") and max_lr is not None:
        scheduled = lr / max_lr
    elif kind.startswith("corrected") and max_lr is not None:
        scheduled = lr * (lr / max_lr)
    undecayed = (lr,) if cautious_decay else ()
    share = scheduled * weight_decay
    if kind.endswith("proximal"):
        # (p - lr*d) / (1 + share) = p - (lr*d + share*p) / (1 + share)
        shrunk = 1.0 + share
        return Rates(lr / shrunk, share / shrunk, 0.0, grad_scale, undecayed, hooks)
    return Rates(lr, share, 0.0, grad_scale, undecayed, hooks)
