"""Parts of L-BFGS: flat parameters, line search, history.

They compute with 0-d tensors and never branch on them, so that a step vmaps and traces.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.math import scalar_dtype
from optimi_func.core.pairs import as_complex, as_real
from optimi_func.core.rule import PyTree
from optimi_func.core.torch_private import serializable

# The Wolfe conditions: a decrease by this share of the slope, and a flatter slope.
_DECREASE, _CURVATURE = 1e-4, 0.9
# The least product of move and change of the gradient that the history takes.
_LEAST_PRODUCT = 1e-10


def pick(condition: Tensor, yes: Any, no: Any) -> Any:
    """Return yes where the condition holds, else no: a tensor or a tuple of them."""
    if isinstance(yes, tuple):
        kind = getattr(type(yes), "_make", tuple)
        return kind([pick(condition, x, y) for x, y in zip(yes, no)])
    return torch.where(condition, yes, no)


@serializable
class Point(NamedTuple):
    """A point of a line search."""

    t: Tensor  # the step length
    f: Tensor  # the loss
    slope: Tensor  # the derivative of the loss along the direction
    g: Tensor  # the gradient, flat


@serializable
class Search(NamedTuple):
    """A line search for the strong Wolfe conditions, between two evaluations."""

    t: Tensor  # the step length to try next
    a: Point  # the point before; with `zooms` one end of the bracket
    b: Point  # with `zooms` the other end
    low_is_b: Tensor  # True if b is the lower end
    zooms: Tensor  # True once a minimum lies in the bracket
    stalled: Tensor  # True if the last trial was close to an end of the bracket
    bends: Tensor  # True once the slope was flatter
    count: Any  # evaluations after the first


def minimizer(p: Point, q: Point, low: Tensor, high: Tensor) -> Tensor:
    """Return the minimizer in [low, high] of a cubic through p and q, or the middle."""
    d1 = p.slope + q.slope - 3 * ((p.f - q.f) / (p.t - q.t))
    square = d1 * d1 - p.slope * q.slope
    d2 = pick(square >= 0, square, 0.0).sqrt()
    near, far = pick(p.t <= q.t, p[:3], q[:3]), pick(p.t <= q.t, q[:3], p[:3])
    share = (far[2] + d2 - d1) / (far[2] - near[2] + 2 * d2)
    t = far[0] - (far[0] - near[0]) * share
    t = pick(t < low, low, t)
    known = (square >= 0) & ~t.isnan()  # it is NaN if an end has no finite loss
    return pick(known, pick(t > high, high, t), (low + high) / 2.0)


def advance(
    s: Search, new: Point, start: Point, width: Tensor, most: int, least: float
) -> tuple[Search, Tensor, Tensor, Point]:
    """Return the search after an evaluation, if it ended and succeeded, and its best point.

    `new` was evaluated at `s.t`, with a loss of inf if it is not finite, and `start` is the
    point with t = 0. At most `most` evaluations follow the first. `width` is the largest
    element of the direction, and `least` the smallest move across a bracket.
    """
    rises = new.f > start.f + _DECREASE * new.t * start.slope
    flat = abs(new.slope) <= -_CURVATURE * start.slope
    last = s.count >= most
    # Bracketing: is there a minimum between the point before and this one?
    over = rises | ((s.count > 1) & (new.f >= s.a.f))
    holds = ~over & flat
    brackets = over | (~flat & (new.slope >= 0))
    first = pick(last, start, s.a)
    wider = minimizer(s.a, new, new.t + 0.01 * (new.t - s.a.t), new.t * 10)
    # Zooming: the new point takes the place of an end.
    low, high = pick(s.low_is_b, s.b, s.a), pick(s.low_is_b, s.a, s.b)
    worse = rises | (new.f >= low.f)
    turns = ~flat & (new.slope * (high.t - low.t) >= 0)
    high = pick(worse, new, pick(turns, low, high))
    low = pick(worse, low, new)
    a = pick(s.zooms, pick(s.low_is_b, high, low), first)
    b = pick(s.zooms, pick(s.low_is_b, low, high), new)
    lower = ~(a.f <= b.f)
    low_is_b = pick(s.zooms, pick(worse, lower, s.low_is_b), lower | (~last & holds))
    # What ends the search, and else the next length to try.
    zooms = s.zooms | brackets
    narrow = zooms & (abs(b.t - a.t) * width < least)
    met = pick(s.zooms, ~worse & flat, holds)
    bends = s.bends | ((new.slope >= _CURVATURE * start.slope) & new.f.isfinite())
    left, right = pick(a.t < b.t, a.t, b.t), pick(a.t < b.t, b.t, a.t)
    t, edge = minimizer(a, b, left, right), 0.1 * (right - left)
    close = (right - t < edge) | (t - left < edge)
    inside = pick(abs(t - right) < abs(t - left), right - edge, left + edge)
    outside = s.stalled | (t >= right) | (t <= left)
    t = pick(zooms, pick(close & outside, inside, t), wider)
    stalled = zooms & close & ~outside
    best, a = pick(low_is_b, b, a), pick(zooms, a, new)
    after = Search(t, a, b, low_is_b, zooms, stalled, bends, s.count + 1)
    return after, last | narrow | met, met, best


@serializable
class History(NamedTuple):
    """The last moves s and changes y of the gradient: row count % m is written next.

    With R the products s_i * y_j for y_j not older than s_i, and else 0, the inverse
    Hessian is (Byrd, Nocedal & Schnabel 1994)

        [S  scale Y] [R^-T (D + scale Y'Y) R^-1   -R^-T] [S  scale Y]' + scale
                     [            -R^-1               0]
    """

    pairs: Tensor  # (m, 2, n): s and y a row, or 0
    slopes: Tensor  # (m, 2): their products with the gradient that is the newest
    curvatures: Tensor  # (m,): D, the products s_i * y_i
    squares: Tensor  # (m, m): Y'Y
    inverse: Tensor  # (m, m): R^-1; without its oldest row it is that of the others
    count: Any  # the pairs so far
    scale: Tensor  # of the inverse Hessian before these moves


def remember(h: History, s: Tensor, y: Tensor, g: Tensor, at_g: Tensor) -> History:
    """Return the history at g, with one more pair if the curvature along s is positive.

    Without `at_g` it stays as it is. The products of earlier pairs with y are differences
    of those with gradients, so that it reads them once.
    """
    ys, yy, m = y.dot(s), y.dot(y), h.pairs.shape[0]
    takes = (ys > _LEAST_PRODUCT) & at_g
    row = (torch.arange(m, dtype=torch.int64, device=y.device) == h.count % m) & takes
    pairs = torch.where(row[:, None, None], torch.stack([s, y]), h.pairs)
    slopes = (pairs.flatten(0, 1) @ g).unflatten(0, (m, 2))
    with_s, with_y = (slopes - h.slopes).unbind(1)
    with_y = torch.where(row, yy, with_y)
    squares = torch.where(row, with_y[:, None], h.squares)
    squares = torch.where(row[:, None], with_y, squares)
    inverse = torch.where(row[:, None], 0.0, h.inverse)
    column = (row.to(y.dtype) - inverse @ with_s) / ys
    inverse = torch.where(row, column[:, None], inverse)
    curvatures = torch.where(row, ys, h.curvatures)
    slopes = torch.where(at_g, slopes, h.slopes)
    count, scale = pick(takes, (h.count + 1, ys / yy), (h.count, h.scale))
    return History(pairs, slopes, curvatures, squares, inverse, count, scale)


def direction(h: History, g: Tensor) -> Tensor:
    """Return minus the inverse Hessian times g, the gradient that the history is at."""
    sg, yg = h.slopes.unbind(1)
    a = h.inverse @ sg
    b = h.curvatures * a + h.scale * (h.squares @ a - yg)
    shares = torch.stack([-(h.inverse.mT @ b), h.scale * a], 1)
    return torch.addmv(-h.scale * g, h.pairs.flatten(0, 1).mT, shares.flatten())


def tensors_of(tree: PyTree) -> tuple[list[Tensor], Callable[..., PyTree]]:
    """Return the tensors of a tree, and a function that makes the tree of others."""

    def rebuilt(tensors: Iterable[Tensor]) -> PyTree:
        others = iter(tensors)
        return pytree.tree_map_only(Tensor, lambda _: next(others), tree)

    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)], rebuilt


def flat(leaves: list[Tensor]) -> Tensor:
    """Return the elements of all tensors in a new one, complex ones as pairs.

    It is in float64 where the device has it: the product of two gradients would overflow
    in float32, and a difference of gradients has no digits left in bfloat16.
    """
    dense = [x.to_dense() if x.is_sparse else x.resolve_conj() for x in leaves]
    dtype = scalar_dtype(dense[0].device)
    return torch.cat([as_real(x).flatten().to(dtype) for x in dense])


def parts(x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return parts of a flat tensor in the shapes and dtypes of the leaves."""
    shapes = [(*p.shape, 2) if p.is_complex() else p.shape for p in leaves]
    pieces = map(Tensor.view, x.split(list(map(math.prod, shapes))), shapes)
    return [as_complex(y, p).to(p.dtype) for y, p in zip(pieces, leaves)]
