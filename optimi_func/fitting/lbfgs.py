"""A pure L-BFGS: a step over pytrees that can be vmapped, and `solve`."""

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
from optimi_func.core.tree import flatten_params, path_of
from optimi_func.fitting import quasi_newton as qn
from optimi_func.fitting.implicit import implicit_root

T = TypeVar("T")

# Of `LBFGSState.reason`.
GOES_ON, GRADIENT, CHANGE, SEARCH, NOT_FINITE = range(5)


@serializable
class LBFGSState(NamedTuple):
    """The state of `lbfgs` for one problem, or for a batch of problems along a first axis.

    `reason` is 0 while the problem is not done. Otherwise it says why the steps ended. 1:
    The gradient is within tolerance_grad. 2: A change is within tolerance_change, or within
    the rounding error of the loss. 3: A line search found no lower point. 4: The loss or
    the gradient is not finite, at the first point or in a step without line search.
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
    """L-BFGS as a pure optimizer, which evaluates the loss once per step.

        p <- p - t * H g

    H approximates the inverse Hessian. H is computed from the last moves of the parameters
    and the changes of the gradient along these moves. t satisfies the strong Wolfe
    conditions. Each step evaluates the loss once, at the point that the line search tries
    next. Under `torch.func.vmap`, a batch of problems can therefore take steps together,
    although each problem has its own line search. `state.done` is True for problems that
    are done, and further steps do not change them.

    Args:
        lr: The step length that each line search tries first.
        tolerance_grad: A problem is done if no element of its gradient has an absolute
            value above this number.
        tolerance_change: A problem is also done if a move changes no element of the
            parameters by more than this number, or changes the loss by less than this
            number.
        history_size: The number of moves from which H is computed.
        line_search_fn: "strong_wolfe", or None for steps of length lr.
        max_ls: The largest number of evaluations in one line search.

    Raises:
        ValueError: A number is out of its range, or line_search_fn has another value.

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
        """Raise an error if a hyperparameter is out of its range."""
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
        """Return the initial state for `params`, without history and evaluations."""
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

        The parameters change only if the evaluation ends a line search. torch.compile
        compiles this method into one graph.

        Args:
            params: The parameter tree.
            state: The state that `init` or the previous step returned.
            value_and_grad: A function `params -> (loss, gradients)`. It is called once, in
                most steps not with `params`, but with the point that the line search tries.
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

        You can differentiate these parameters with respect to args. The derivatives are
        computed by the implicit function theorem (see `implicit_root`), so the tensors of
        the steps are not stored.

        Args:
            loss: A function `(params, *args) -> loss` that returns a 0-d tensor, and whose
                operations torch.func supports.
            params: The parameters at which to start.
            args: Trees of tensors: data, and numbers on which the solution depends.
            max_steps: The largest number of evaluations.
            in_dims: For a batch of problems, the axis of params and the axis of each of
                args along which the problems are batched, as in torch.func.vmap: `(0, 0,
                None)`, or 0 for all of them.
            state: The last state of an earlier call. Pass it together with the parameters,
                loss and args of that call to continue from there.

        Raises:
            ValueError: in_dims does not fit params and args, the tensors contain different
                numbers of problems, or state belongs to other params or options.
            RuntimeError: loss uses a tensor that requires a derivative but is not in params
                or args.
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
    """Return the batch axes of the tensors in params and args, or raise an error."""
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

    If half of a batch is done, the loop continues with the other problems only.
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
