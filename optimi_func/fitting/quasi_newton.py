"""Parts of L-BFGS: flat parameters, line search, history.

The class `LBFGS` computes with Python floats and branches on them. The pure step computes
with 0-d tensors, so that it vmaps and traces. Both call these functions.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.checks import check_number, check_param, check_whole, shown
from optimi_func.core.math import sqrt
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import serializable

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
        kind = getattr(type(yes), "_make", tuple)
        return kind([pick(condition, x, y) for x, y in zip(yes, no)])
    return torch.where(condition, yes, no)


def negate(condition: Truth) -> Truth:
    """Return the opposite of a condition."""
    return condition.logical_not() if isinstance(condition, Tensor) else not condition


def ratio(x: Scalar, y: Scalar) -> Scalar:
    """Return x / y; a division of numbers by 0 gives inf or nan, as that of tensors."""
    if isinstance(x, Tensor) or isinstance(y, Tensor) or y != 0:
        return x / y
    return math.copysign(math.inf, x) * math.copysign(1.0, y) if x else math.nan


@serializable
class Point(NamedTuple):
    """A point of a line search."""

    t: Scalar  # the step length
    f: Scalar  # the loss
    slope: Scalar  # the derivative of the loss along the direction
    g: Tensor  # the gradient, flat


@serializable
class Search(NamedTuple):
    """A line search for the strong Wolfe conditions, between two evaluations."""

    t: Scalar  # the step length to try next
    a: Point  # the point before; with `zooms` one end of the bracket
    b: Point  # with `zooms` the other end
    low_is_b: Truth  # True if b is the lower end
    zooms: Truth  # True once a minimum lies in the bracket
    stalled: Truth  # True if the last trial was close to an end of the bracket
    count: Any  # evaluations after the first


def begin(t: Scalar, start: Point, no: Truth, count: Scalar) -> Search:
    """Return a search that will try t first; `no` is False, and `count` 0."""
    return Search(t, start, start, no, no, no, count)


def minimizer(p: Point, q: Point, low: Scalar, high: Scalar) -> Scalar:
    """Return the minimizer in [low, high] of a cubic through p and q, or the middle."""
    d1 = p.slope + q.slope - 3 * ratio(p.f - q.f, p.t - q.t)
    square = d1 * d1 - p.slope * q.slope
    d2 = sqrt(pick(square >= 0, square, 0.0))
    near, far = pick(p.t <= q.t, p[:3], q[:3]), pick(p.t <= q.t, q[:3], p[:3])
    share = ratio(far[2] + d2 - d1, far[2] - near[2] + 2 * d2)
    t = far[0] - (far[0] - near[0]) * share
    t = pick(t < low, low, t)
    return pick(square >= 0, pick(t > high, high, t), (low + high) / 2.0)


def advance(
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
    holds = negate(over) & flat
    brackets = over | (negate(flat) & (new.slope >= 0))
    first = pick(last, start, s.a)
    wider = minimizer(s.a, new, new.t + 0.01 * (new.t - s.a.t), new.t * 10)
    # Zooming: the new point takes the place of an end.
    low, high = pick(s.low_is_b, s.b, s.a), pick(s.low_is_b, s.a, s.b)
    worse = rises | (new.f >= low.f)
    turns = negate(flat) & (new.slope * (high.t - low.t) >= 0)
    high = pick(worse, new, pick(turns, low, high))
    low = pick(worse, low, new)
    a = pick(s.zooms, pick(s.low_is_b, high, low), first)
    b = pick(s.zooms, pick(s.low_is_b, low, high), new)
    lower = negate(a.f <= b.f)
    low_is_b = pick(s.zooms, pick(worse, lower, s.low_is_b), lower | (negate(last) & holds))
    # What ends the search, and else the next length to try.
    zooms = s.zooms | brackets
    narrow = zooms & (abs(b.t - a.t) * width < least)
    ended = last | narrow | pick(s.zooms, negate(worse) & flat, holds)
    left, right = pick(a.t < b.t, a.t, b.t), pick(a.t < b.t, b.t, a.t)
    t, edge = minimizer(a, b, left, right), 0.1 * (right - left)
    close = (right - t < edge) | (t - left < edge)
    inside = pick(abs(t - right) < abs(t - left), right - edge, left + edge)
    outside = s.stalled | (t >= right) | (t <= left)
    t = pick(zooms, pick(close & outside, inside, t), wider)
    stalled = zooms & close & negate(outside)
    after = Search(t, pick(zooms, a, new), b, low_is_b, zooms, stalled, s.count + 1)
    return after, ended, pick(low_is_b, b, a)


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
    count: Any  # the pairs so far, an int in the class
    scale: Scalar  # of the inverse Hessian before these moves


def empty_history(m: int, g: Tensor, count: int | Tensor, scale: Scalar) -> History:
    """Return a history of m rows without moves."""
    zeros = g.new_zeros
    pairs = zeros(m, 2, g.numel())
    return History(*(pairs, zeros(m, 2), zeros(m), zeros(m, m), zeros(m, m), count, scale))


def loaded_history(
    moves: list[Tensor], changes: list[Tensor], g: Tensor, scale: Scalar
) -> History:
    """Return the history of these pairs, the oldest first, after the gradient g."""
    pairs = torch.stack([torch.stack(moves), torch.stack(changes)], 1)
    s, y = pairs.unbind(1)
    products, eye = (s @ y.mT).triu(), torch.eye(len(s), dtype=s.dtype, device=s.device)
    inverse = torch.linalg.solve_triangular(products, eye, upper=True)
    rest = products.diagonal().clone(), y @ y.mT, inverse, len(s), scale
    return History(pairs, pairs @ g, *rest)


def remember(h: History, s: Tensor, y: Tensor, g: Tensor) -> History:
    """Return the history at g, with one more pair if the curvature along s is positive.

    It is the class's, and writes to the tensors of the history. The products of earlier
    pairs with y are differences of those with gradients, so that it reads them once.
    """
    ys, yy, (m, _, n) = float(y.dot(s)), float(y.dot(y)), h.pairs.shape
    i, k, takes = h.count % m, min(h.count, m), ys > _LEAST_PRODUCT
    if takes:
        k = min(h.count + 1, m)
        h.pairs[i, 0], h.pairs[i, 1], h.curvatures[i] = s, y, ys
    slopes = (h.pairs[:k].view(-1, n) @ g).view(k, 2)
    if takes:
        with_s, with_y = (slopes - h.slopes[:k]).unbind(1)
        h.squares[:k, i] = h.squares[i, :k] = with_y
        h.squares[i, i] = yy
        h.inverse[i] = 0.0
        h.inverse[:k, i] = h.inverse[:k, :k] @ with_s / -ys
        h.inverse[i, i] = 1.0 / ys
        h = h._replace(count=h.count + 1, scale=ys / yy)
    h.slopes[:k] = slopes
    return h


def remembered(h: History, s: Tensor, y: Tensor, g: Tensor, at_g: Tensor) -> History:
    """Return `remember`'s history in new tensors, for the pure step, if it is `at_g`."""
    ys, yy, m = y.dot(s), y.dot(y), h.pairs.shape[0]
    takes = (ys > _LEAST_PRODUCT) & at_g
    row = (torch.arange(m, device=y.device) == h.count % m) & takes
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
    k = h.pairs.shape[0]
    if not isinstance(h.count, Tensor):
        k = min(h.count, k)
    pairs, inverse = h.pairs[:k].flatten(0, 1), h.inverse[:k, :k]
    sg, yg = h.slopes[:k].unbind(1)
    a = inverse @ sg
    b = h.curvatures[:k] * a + h.scale * (h.squares[:k, :k] @ a - yg)
    shares = torch.stack([-(inverse.mT @ b), h.scale * a], 1)
    return torch.addmv(-h.scale * g, pairs.mT, shares.flatten())


def rows_of(h: History) -> list[int]:
    """Return the rows that have a pair, the oldest first, of the class's history."""
    m = h.pairs.shape[0]
    first = h.count if h.count >= m else 0
    return [(i + first) % m for i in range(min(h.count, m))]


def with_room(h: History, most: int) -> History:
    """Return the history with room for one more pair: it doubles up to `most` rows."""
    rows = h.pairs.shape[0]
    if rows == most or h.count < rows < most:
        return h
    order = rows_of(h)[-most:]  # a loaded one, or a smaller history_size
    room, k = (
        empty_history(min(2 * rows, most), h.pairs[0, 0], len(order), h.scale),
        len(order),
    )
    room.pairs[:k], room.slopes[:k] = h.pairs[order], h.slopes[order]
    room.curvatures[:k] = h.curvatures[order]
    room.squares[:k, :k] = h.squares[order][:, order]
    room.inverse[:k, :k] = h.inverse[order][:, order]
    return room


def check_options(given: Any) -> None:
    """Raise for hyperparameters out of their ranges."""
    check_number("learning rate", "lr", given.lr)
    one = given.lr.numel() == 1 if isinstance(given.lr, Tensor) else not callable(given.lr)
    if not one:
        raise ValueError(f"lr={shown(given.lr)}: allowed are numbers and 0-d tensors")
    any_number = {"least": -math.inf, "most": math.inf}
    for name in ("tolerance_grad", "tolerance_change"):
        check_number(name.replace("_", " "), name, getattr(given, name), **any_number)
    check_whole("history_size", given.history_size, 1)
    if given.line_search_fn not in (None, "strong_wolfe"):
        raise ValueError(
            f"line_search_fn={given.line_search_fn!r}: allowed are 'strong_wolfe' and None"
        )


def check_leaves(named: list[tuple[str, Tensor]]) -> None:
    """Raise for parameters that are not dense and floating, or on several devices."""
    for path, p in named:
        if not (isinstance(p, Tensor) and p.dtype in (torch.complex64, torch.complex128)):
            check_param(path, p)
    places = {str(p.device): path for path, p in named}
    if len(places) > 1:
        raise ValueError(
            f"params are on several devices, {places}: allowed is one, because they share "
            "a history"
        )
    if not sum([p.numel() for _, p in named]):
        raise ValueError("params have no elements: allowed is a tensor that has some")


def flat(leaves: list[Tensor]) -> Tensor:
    """Return the elements of all tensors in a new one, complex ones as pairs.

    It has the widest of their dtypes, and at least float32: a difference of gradients has
    no digits left in bfloat16.
    """
    dense = [x.to_dense() if x.is_sparse else x.resolve_conj() for x in leaves]
    real = [torch.view_as_real(x) if x.is_complex() else x for x in dense]
    vector = torch.cat([x.reshape(-1) for x in real])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def parts(x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return parts of a flat tensor in the shapes of the leaves."""
    pieces = x.split([p.numel() * (1 + p.is_complex()) for p in leaves])
    return [
        (torch.view_as_complex(y.view(-1, 2)) if p.is_complex() else y).view(p.shape)
        for y, p in zip(pieces, leaves)
    ]


def cast_parts(x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return parts of a flat tensor in the shapes and dtypes of the leaves."""
    return [y.to(p.dtype) for y, p in zip(parts(x, leaves), leaves)]
