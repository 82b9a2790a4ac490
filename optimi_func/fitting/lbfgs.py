"""L-BFGS as a value: a step over pytrees that vmaps, and `solve`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number, check_whole, scalar_loss, shown
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import PyTree, Scalar
from optimi_func.core.torch_private import has_vmap, serializable
from optimi_func.fitting import quasi_newton as qn
from optimi_func.fitting.implicit import implicit_root
from optimi_func.pure.tree import flatten_params, path_of

T = TypeVar("T")

# Of `LBFGSState.reason`.
GOES_ON, GRADIENT, CHANGE, SEARCH, NOT_FINITE = range(5)


@serializable
class LBFGSState(NamedTuple):
    """The state of `lbfgs` for one problem; a batch of them has another axis in front.

    `reason` is 0 while steps go on. They ended because of 1, a gradient within
    tolerance_grad; 2, a change within tolerance_change, or within the rounding of the loss;
    3, a line search that found no lower point; or 4, a loss or gradient that is not finite,
    at the first point or without a line search.
    """

    reason: Tensor
    n_iter: Tensor  # accepted moves
    func_evals: Tensor  # evaluations
    f: Tensor  # the loss at params
    g: Tensor  # the gradient at params, flat
    d: Tensor  # the direction of the search
    slope: Tensor  # the product of g and d
    search: qn.Search
    history: qn.History

    @property
    def done(self) -> Tensor:
        """True if params no longer change."""
        return self.reason != GOES_ON

    @property
    def converged(self) -> Tensor:
        """True if params are a solution within the tolerances."""
        return (self.reason == GRADIENT) | (self.reason == CHANGE)


@dataclass(frozen=True, kw_only=True)
class lbfgs:
    """L-BFGS as a value, for functions of a tree of parameters: one evaluation a step.

        p <- p - t * H g

    H is an approximation of the inverse Hessian from the last moves and changes of the
    gradient, and t satisfies the strong Wolfe conditions. Each step evaluates the function
    once, at a point that the line search wants, so that a batch of problems takes steps
    together under `torch.func.vmap`, each in a line search of its own. Finished ones do not
    change. `state.done` says which those are.

    Args:
        lr: The step length that each line search tries first.
        tolerance_grad: A problem is done if no element of its gradient is larger.
        tolerance_change: It is done if neither parameters nor loss change by more.
        history_size: The number of moves that H is made of.
        line_search_fn: "strong_wolfe", or None for steps of length lr.
        max_ls: The largest number of evaluations in one line search.

    Raises:
        ValueError: A number out of its range, or another line search.

    References:
        Liu & Nocedal, "On the limited memory BFGS method for large scale optimization",
        Mathematical Programming 45, 1989; Nocedal & Wright, "Numerical Optimization", 2006.

    >>> fit = lbfgs()
    >>> bowl = lambda p, at: ((p["x"] - at) ** 2).sum()
    >>> at = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> params, state = fit.solve(bowl, {"x": torch.zeros(2)}, at)
    >>> params["x"].detach().round(decimals=3), state.done
    (tensor([1., 2.]), tensor(True))
    >>> torch.autograd.grad(params["x"].sum(), at)
    (tensor([1., 1.]),)
    """

    lr: Scalar = 1.0
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    history_size: int = 10
    line_search_fn: str | None = "strong_wolfe"
    max_ls: int = 25

    def __post_init__(self) -> None:
        """Raise for hyperparameters out of their ranges."""
        lr = self.lr
        check_number("learning rate", "lr", lr)
        if not (lr.numel() == 1 if isinstance(lr, Tensor) else not callable(lr)):
            raise ValueError(f"lr={shown(lr)}: allowed are numbers and 0-d tensors")
        for name in ("tolerance_grad", "tolerance_change"):
            label, number = name.replace("_", " "), getattr(self, name)
            check_number(label, name, number, least=-math.inf, most=math.inf)
        check_whole("history_size", self.history_size, 1)
        check_whole("max_ls", self.max_ls, 1)
        if self.line_search_fn not in (None, "strong_wolfe"):
            raise ValueError(
                f"line_search_fn={self.line_search_fn!r}: allowed are 'strong_wolfe' and "
                "None"
            )

    def init(self, params: PyTree) -> LBFGSState:
        """Return fresh state for `params`: no history, and no evaluation yet."""
        leaves, _ = flatten_params(params)
        places = {str(p.device): str(path_of(params, i)) for i, p in enumerate(leaves)}
        if len(places) > 1:
            raise ValueError(
                f"params are on several devices, {places}: allowed is one, because they "
                "share a history"
            )
        if not sum([p.numel() for p in leaves]):
            raise ValueError("params have no elements: allowed is a tensor that has some")
        x = qn.flat(leaves)
        zero = torch.zeros((), dtype=scalar_dtype(x.device), device=x.device)
        no, count = zero.bool(), zero.long()
        point = qn.Point(zero, zero, zero, x.new_zeros(x.shape))
        search = qn.Search(zero, point, point, no, no, no, no, count)
        m, zeros = self.history_size, x.new_zeros
        rows = zeros(m, 2, x.numel()), zeros(m, 2), zeros(m), zeros(m, m), zeros(m, m)
        history = qn.History(*rows, count, x.new_ones(()))
        # One tensor for each field, because in-place users of a state may not share them.
        return pytree.tree_map(
            torch.clone,
            LBFGSState(count, count, count, zero, point.g, point.g, zero, search, history),
        )

    def step(
        self,
        params: T,
        state: LBFGSState,
        value_and_grad: Callable[[T], tuple[Tensor, PyTree]],
    ) -> tuple[T, LBFGSState]:
        """Return the parameters and the state after one evaluation.

        The parameters change if it ends a line search. Under torch.compile it is one graph.

        Args:
            params: Parameter tree.
            state: From `init` or the step before.
            value_and_grad: `params -> (loss, gradients)`; it is evaluated once, mostly at
                another point than params.
        """
        leaves, params_of = qn.tensors_of(params)
        s: Any = state
        x = qn.flat(leaves).detach()
        at = qn.parts(x + s.search.t * s.d, leaves)
        value, grads = value_and_grad(params_of(at))
        g = qn.flat(qn.tensors_of(grads)[0]).detach()
        f, done = value.detach().to(s.f.dtype), s.done
        good = f.isfinite() & g.isfinite().all()
        fresh, none = s.func_evals == 0, self.line_search_fn is None
        start = qn.Point(torch.zeros_like(s.f), s.f, s.slope, s.g)
        new = qn.Point(s.search.t, torch.where(good, f, math.inf), g.dot(s.d), g)
        search, ended, fits, best = qn.advance(
            s.search, new, start, s.d.abs().amax(), self.max_ls, self.tolerance_change
        )
        # Rounding of the loss may hide a lower point, which the slopes have told of.
        digits = 10 * torch.finfo(value.dtype).eps
        fits = fits | (search.bends & (-s.slope <= digits * s.f.abs()))
        moves, bad = (fresh | ended | good & none) & ~done, ~good & (fresh | none)
        best = qn.pick(fresh | none, new._replace(f=f), best)
        move = best.t * s.d
        history = qn.remember(s.history, move, best.g - s.g, best.g, moves & ~fresh)
        d = qn.direction(history, best.g)
        slope = best.g.dot(d)
        still = (move.abs().amax() <= self.tolerance_change) | (
            (best.f - s.f).abs() < self.tolerance_change
        )
        still = (~fresh & still) | (slope > -self.tolerance_change)
        small = best.g.abs().amax() <= self.tolerance_grad
        settled = (fits | fresh | none) & (slope <= 0)
        reason = torch.where(still, torch.where(settled, CHANGE, SEARCH), GOES_ON)
        reason = torch.where(bad, NOT_FINITE, torch.where(small, GRADIENT, reason))
        first = (1.0 / best.g.abs().sum()).clamp_max(1.0)
        lr = self.lr.reshape(()) if isinstance(self.lr, Tensor) else self.lr
        t = torch.where(fresh, first, 1.0) * lr
        restart = qn.Point(start.t, best.f, slope, best.g)
        no, count = torch.zeros_like(done), torch.zeros_like(s.n_iter)
        restart = qn.Search(t, restart, restart, no, no, no, no, count)
        counts = s.n_iter + (moves & ~fresh), s.func_evals + ~done
        here = qn.pick(moves, (best.f, best.g, d, slope), (s.f, s.g, s.d, s.slope))
        search = qn.pick(moves, restart, qn.pick(done, s.search, search))
        reason = torch.where((moves | bad) & ~done, reason, s.reason)
        x = torch.where(moves, x + move, x)
        after = LBFGSState._make([reason, *counts, *here, search, history])
        return params_of(qn.parts(x, leaves)), after

    def solve(
        self,
        loss: Callable[..., Tensor],
        params: T,
        *args: PyTree,
        max_steps: int = 1000,
        in_dims: int | tuple[int | None, ...] | None = None,
        state: LBFGSState | None = None,
    ) -> tuple[T, LBFGSState]:
        """Return the parameters that minimize loss(params, *args), and the last state.

        The parameters have derivatives by args, by the implicit function theorem: see
        `implicit_root`. Without them nothing of the steps is kept.

        Args:
            loss: `(params, *args) -> 0-d loss`, of operations that torch.func takes.
            params: Where to begin.
            args: Trees of tensors: data, and numbers that the solution depends on.
            max_steps: The largest number of evaluations.
            in_dims: For a batch of problems, the axis of params and of each of args that
                counts them, as in torch.func.vmap: `(0, 0, None)`, or 0 for all.
            state: The last state, to go on from these params with the same loss and args.

        Raises:
            ValueError: in_dims that do not fit params and args, numbers of problems that
                differ, or a state of other params or options.
            RuntimeError: loss takes a tensor from elsewhere that needs a derivative.
        """
        check_whole("max_steps", max_steps, 1)
        flatten_params(params)  # which checks them
        (leaves, params_of), (tensors, args_of) = map(qn.tensors_of, (params, args))
        axes, count = _axes(in_dims, params, args), len(leaves)

        def only(p: list[Tensor], *xs: Tensor) -> Tensor:
            return scalar_loss(loss(params_of(p), *args_of(xs)), False)

        def one(p: list[Tensor], s: LBFGSState, *xs: Tensor) -> PyTree:
            reverse: Any = torch.func.grad_and_value(only)
            return self.step(p, s, lambda q: reverse(q, *xs)[::-1])

        def solved(p: list[Tensor], *xs: Tensor) -> list[Tensor]:
            return implicit_root(torch.func.grad(only), p, *xs)

        init: Callable[..., LBFGSState] = self.init
        step: Callable[..., PyTree] = one
        with torch.no_grad():
            every = zip((*leaves, *tensors), axes)
            fixed = [x.detach().movedim(dim or 0, 0) for x, dim in every]
            sizes = [len(x) for x, dim in zip(fixed, axes) if dim is not None]
            if len({*sizes}) > 1:
                raise ValueError(
                    f"in_dims={in_dims!r}: the tensors of params and args have {sizes} "
                    "problems along these axes: allowed is one number for all"
                )
            if in_dims is not None:
                moved = [None if dim is None else 0 for dim in axes[count:]]
                init, step = vmap(self.init), vmap(one, in_dims=(0, 0, *moved))
                solved = vmap(solved, in_dims=(0, *axes[count:]))
            fresh = init(fixed[:count])
            last = fresh if state is None else state
            sides = [tuple(x.history.pairs.shape) for x in (last, fresh)]
            if sides[0] != sides[1]:
                raise ValueError(f"state= has pairs of {sides[0]}: allowed is {sides[1]}")
            now = fixed[:count], last
            solution, last = _solved(step, now, fixed[count:], axes[count:], max_steps)
        found: Any = params_of(solved(solution, *tensors))
        return found, last


def _axes(in_dims: object, params: PyTree, args: tuple[PyTree, ...]) -> list[int | None]:
    """Return the axes of the tensors of params and args that count problems, or raise."""
    dims: Any = in_dims
    if in_dims is None or type(in_dims) is int:
        dims = (in_dims,) * (1 + len(args))
    fits = type(dims) is tuple and len(dims) == 1 + len(args)
    fits = fits and all([x is None or type(x) is int for x in dims])
    if not fits or (in_dims is not None and dims[0] is None):
        raise ValueError(
            f"in_dims={in_dims!r}: allowed are None, an axis, and a tuple of an axis for "
            f"params and an axis or None for each of the {len(args)} args"
        )
    trees = zip((params, *args), dims)
    return [dim for tree, dim in trees for _ in qn.tensors_of(tree)[0]]


def _solved(
    step: Callable[..., PyTree],
    now: PyTree,
    args: Sequence[Tensor],
    axes: Sequence[int | None],
    most: int,
) -> PyTree:
    """Step `(params, state)` until all problems are done, or `most` times.

    When half of a batch are done, the others go on without them.
    """
    results, members = now, None

    def joined() -> object:
        if members is None:
            return now
        return pytree.tree_map(lambda x, y: x.index_copy(0, members, y), results, now)

    for _ in range(most):
        # Of all problems, also of those of a vmap around this call.
        done = torch.func.debug_unwrap(now[1].done, recurse=True)
        unsolved = int(done.numel() - done.sum())
        if unsolved == 0:
            break
        if unsolved <= done.numel() // 2 and not has_vmap():
            results, at = joined(), (~done).nonzero()[:, 0]
            members = at if members is None else members[at]
            now = pytree.tree_map(lambda x, at=at: x[at], now)
            args = [x if dim is None else x[at] for x, dim in zip(args, axes)]
        now = step(*now, *args)
    return joined()
