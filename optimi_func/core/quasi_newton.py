"""The line search and the history of L-BFGS, for scalars that are floats or tensors.

The class `LBFGS` computes with Python floats, and branches on them. The pure step computes
with 0-d tensors, so that it vmaps and traces. Both call the functions of this file.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.math import sqrt
from optimi_func.core.rule import Scalar

# True or False in the class, a 0-d tensor in the pure step.
Truth: TypeAlias = bool | Tensor
# The Wolfe conditions: a decrease by this share of the slope, and a flatter slope.
_DECREASE, _CURVATURE = 1e-4, 0.9
# The least product of move and change of the gradient that the history takes.
_LEAST_PRODUCT = 1e-10


def pick(condition: Truth, yes: Any, no: Any) -> Any:
    """Return yes where the condition holds, else no: a scalar, a vector or a tuple."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    if isinstance(yes, tuple):
        kind: Any = getattr(type(yes), "_make", tuple)
        return kind([pick(condition, x, y) for x, y in zip(yes, no)])
    return torch.where(condition, yes, no)


def negated(condition: Truth) -> Truth:
    """Return the opposite of a condition."""
    return condition.logical_not() if isinstance(condition, Tensor) else not condition


def ratio(x: Scalar, y: Scalar) -> Scalar:
    """Return x / y; a division of numbers by 0 gives inf or nan, as that of tensors."""
    if isinstance(x, Tensor) or isinstance(y, Tensor) or y != 0:
        return x / y
    return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan


class Point(NamedTuple):
    """A point of a line search."""

    t: Scalar  # the step length
    f: Scalar  # the loss
    slope: Scalar  # the derivative of the loss along the direction
    g: Any  # the gradient, flat


class Search(NamedTuple):
    """A line search for the strong Wolfe conditions, between two evaluations."""

    t: Scalar  # the step length to try next
    a: Point  # the point before; with `zooms` one end of the bracket
    b: Point  # with `zooms` the other end
    low_is_b: Truth  # True if b is the lower end
    zooms: Truth  # True once a minimum lies in the bracket
    stalled: Truth  # True if the last trial was close to an end of the bracket
    count: Any  # evaluations after the first


def begun(t: Scalar, start: Point, no: Truth, count: Any) -> Search:
    """Return a search that will try t first; `no` is False, and `count` 0."""
    return Search(t, start, start, no, no, no, count)


def cubic(p: Point, q: Point, low: Scalar, high: Scalar) -> Scalar:
    """Return the minimizer in [low, high] of a cubic through p and q, or the middle."""
    d1 = p.slope + q.slope - 3 * ratio(p.f - q.f, p.t - q.t)
    square = d1 * d1 - p.slope * q.slope
    d2 = sqrt(pick(square >= 0, square, 0.0))
    near, far = pick(p.t <= q.t, p[:3], q[:3]), pick(p.t <= q.t, q[:3], p[:3])
    share = ratio(far[2] + d2 - d1, far[2] - near[2] + 2 * d2)
    t = far[0] - (far[0] - near[0]) * share
    t = pick(t < low, low, t)
    return pick(square >= 0, pick(t > high, high, t), (low + high) / 2.0)


def searched(
    s: Search, new: Point, start: Point, width: Scalar, most: Scalar, least: Scalar
) -> tuple[Search, Truth, Point]:
    """Return the search after an evaluation, True if it has ended, and its best point.

    Args:
        s: The search before.
        new: The point that was evaluated, at `s.t`.
        start: The point with t = 0.
        width: The largest element of the direction.
        most: The largest number of evaluations after the first.
        least: The smallest width of a bracket.
    """
    rises = new.f > start.f + _DECREASE * new.t * start.slope
    flat = abs(new.slope) <= -_CURVATURE * start.slope
    last = s.count >= most
    # Bracketing: is there a minimum between the point before and this one?
    over = rises | ((s.count > 1) & (new.f >= s.a.f))
    found = negated(over) & flat
    brackets = over | (negated(flat) & (new.slope >= 0))
    first = pick(last, start, s.a)
    wider = cubic(s.a, new, new.t + 0.01 * (new.t - s.a.t), new.t * 10)
    # Zooming: the new point takes the place of an end.
    low, high = pick(s.low_is_b, s.b, s.a), pick(s.low_is_b, s.a, s.b)
    worse = rises | (new.f >= low.f)
    turns = negated(flat) & (new.slope * (high.t - low.t) >= 0)
    high = pick(worse, new, pick(turns, low, high))
    low = pick(worse, low, new)
    a = pick(s.zooms, pick(s.low_is_b, high, low), first)
    b = pick(s.zooms, pick(s.low_is_b, low, high), new)
    lower = negated(a.f <= b.f)
    low_is_b = pick(
        s.zooms, pick(worse, lower, s.low_is_b), lower | (negated(last) & found)
    )
    # What ends the search, and else the next length to try.
    zooms = s.zooms | brackets
    narrow = zooms & (abs(b.t - a.t) * width < least)
    ended = last | narrow | pick(s.zooms, negated(worse) & flat, found)
    left, right = pick(a.t < b.t, a.t, b.t), pick(a.t < b.t, b.t, a.t)
    t, edge = cubic(a, b, left, right), 0.1 * (right - left)
    close = (right - t < edge) | (t - left < edge)
    inside = pick(abs(t - right) < abs(t - left), right - edge, left + edge)
    outside = s.stalled | (t >= right) | (t <= left)
    t = pick(zooms, pick(close & outside, inside, t), wider)
    stalled = zooms & close & negated(outside)
    after = Search(t, pick(zooms, a, new), b, low_is_b, zooms, stalled, s.count + 1)
    return after, ended, pick(low_is_b, b, a)


class History(NamedTuple):
    """The last moves and changes of the gradient, as rows of flat tensors."""

    pairs: Tensor  # (2, m, n): moves s, and changes y of the gradient; 0 if empty
    products: Tensor  # (2, m, m): s_i * y_j where y_j is not older than s_i; y_i * y_j
    count: Any  # the pairs so far; in the class row count % m is written next
    scale: Any  # of the inverse Hessian before these moves


def empty_history(m: int, g: Tensor, count: Any, scale: Any) -> History:
    """Return a history of m rows without moves."""
    return History(g.new_zeros(2, m, g.numel()), g.new_zeros(2, m, m), count, scale)


def remembered(h: History, s: Tensor, y: Tensor, takes: Tensor | None) -> History:
    """Return the history with one more pair if the curvature along s is positive.

    In the class, where `takes` is None, it writes to the tensors of the history.
    """
    ys, m = y.dot(s), h.pairs.shape[1]
    if takes is None:
        if not ys > _LEAST_PRODUCT:
            return h
        i = h.count % m
        h.pairs[0, i], h.pairs[1, i] = s, y
        columns = h.pairs @ y
        h.products[..., i] = columns
        h.products[1, i] = columns[1]
        return h._replace(count=h.count + 1, scale=ys / columns[1, i])
    # The rows move up, so that the newest is the last.
    pairs = torch.cat([h.pairs[:, 1:], torch.stack([s, y])[:, None]], 1)
    columns = pairs @ y
    products = torch.nn.functional.pad(h.products[:, 1:, 1:], (0, 0, 0, 1))
    products = torch.cat([products, columns[..., None]], 2)
    products = torch.stack([products[0], torch.cat([products[1, :-1], columns[1:]])])
    new = History(pairs, products, h.count + 1, ys / columns[1, -1])
    return pick((ys > _LEAST_PRODUCT) & takes, new, h)


def direction(h: History, g: Tensor) -> Tensor:
    """Return minus the inverse Hessian times g.

    The two loops over the history as products with it and two triangular systems (Byrd,
    Nocedal & Schnabel 1994).
    """
    pairs, products, first = h.pairs, h.products, 0
    if isinstance(h.count, Tensor):
        # A row without a pair gets no share.
        empty = torch.where(products[0].diagonal() == 0, 1.0, 0.0).diag()
        products = torch.stack([products[0] + empty.to(g.dtype), products[1]])
    else:
        first = _first(h)
        pairs, products = pairs[:, : h.count], products[:, : h.count, : h.count]
    given = pairs @ g
    if first:
        given, products = given.roll(-first, 1), products.roll((-first, -first), (1, 2))
    sg, yg = given[..., None]
    a = torch.linalg.solve_triangular(products[0], sg, upper=True)
    rest = products[0].diagonal()[:, None] * a + h.scale * (products[1] @ a - yg)
    b = torch.linalg.solve_triangular(products[0].mT, rest, upper=False)
    shares = torch.cat([-b, h.scale * a], 1).mT
    shares = shares.roll(first, 1) if first else shares
    return torch.addmv(-h.scale * g, pairs.flatten(0, 1).mT, shares.flatten())


def _first(h: History) -> int:
    """Return the row of the oldest pair, in the class."""
    return h.count % h.pairs.shape[1] if h.count > h.pairs.shape[1] else 0


def rows_of(h: History) -> list[int]:
    """Return the rows that have a pair, the oldest first."""
    m, first = h.pairs.shape[1], _first(h)
    return [(i + first) % m for i in range(min(h.count, m))]


def with_room(h: History, most: int) -> History:
    """Return the history with room for one more pair: it doubles up to `most` rows."""
    rows = h.pairs.shape[1]
    if rows == most or h.count < rows:
        return h
    order = rows_of(h)[-most:]  # a loaded one may be longer
    more = max(min(2 * rows, most) - rows, 0)
    pairs = torch.nn.functional.pad(h.pairs[:, order], (0, 0, 0, more))
    products = torch.nn.functional.pad(
        h.products[:, order][:, :, order], (0, more, 0, more)
    )
    return h._replace(pairs=pairs, products=products, count=len(order))
