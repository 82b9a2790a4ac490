"""L-BFGS as a value: a step over pytrees that vmaps, and `solve`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number, check_param, check_whole, shown
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import PyTree, Scalar
from optimi_func.core.torch_private import has_vmap, serializable
from optimi_func.fitting import quasi_newton as qn
from optimi_func.fitting.implicit import implicit_root
from optimi_func.pure.tree import paths_in

T = TypeVar("T")


@serializable
class LBFGSState(NamedTuple):
    """The state of `lbfgs` for one problem; a batch of them has another axis in front."""

    done: Tensor  # True if params no longer change
    n_iter: Tensor  # accepted moves
    func_evals: Tensor  # evaluations
    f: Tensor  # the loss at params
    g: Tensor  # the gradient at params, flat
    d: Tensor  # the direction of the search
    slope: Tensor  # the product of g and d
    search: qn.Search
    history: qn.History


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
        leaves = pytree.tree_leaves(params)
        places: dict[str, str] = {}
        for path, p in zip(paths_in(params), leaves):
            check_param(path, p)
            places[str(p.device)] = path
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
        search = qn.Search(zero, point, point, no, no, no, count)
        m, zeros = self.history_size, x.new_zeros
        rows = zeros(m, 2, x.numel()), zeros(m, 2), zeros(m), zeros(m, m), zeros(m, m)
        history = qn.History(*rows, count, x.new_ones(()))
        # One tensor for each field, because in-place users of a state may not share them.
        return pytree.tree_map(
            torch.clone,
            LBFGSState(no, count, count, zero, point.g, point.g, zero, search, history),
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
        leaves, spec = pytree.tree_flatten(params)
        s: Any = state
        x = qn.flat(leaves).detach()
        at = qn.parts(x + s.search.t.to(x.dtype) * s.d, leaves)
        value, grads = value_and_grad(pytree.tree_unflatten(at, spec))
        g = qn.flat(pytree.tree_leaves(grads)).detach().to(x.dtype)
        f = value.detach().to(s.f.dtype)
        fresh, none = s.func_evals == 0, self.line_search_fn is None
        start = qn.Point(torch.zeros_like(s.f), s.f, s.slope, s.g)
        new = qn.Point(s.search.t, f, g.dot(s.d).to(f.dtype), g)
        width = s.d.abs().amax().to(f.dtype)
        search, ended, best = qn.advance(
            s.search, new, start, width, self.max_ls, self.tolerance_change
        )
        moves = (fresh | ended | none) & ~s.done
        best = qn.pick(fresh | none, new, best)
        move = best.t.to(x.dtype) * s.d
        history = qn.remember(s.history, move, best.g - s.g, best.g, moves & ~fresh)
        d = qn.direction(history, best.g)
        slope = best.g.dot(d).to(f.dtype)
        still = (move.abs().amax() <= self.tolerance_change) | (
            (best.f - s.f).abs() < self.tolerance_change
        )
        done = (best.g.abs().amax() <= self.tolerance_grad) | (~fresh & still)
        done = done | ~best.f.isfinite() | (slope > -self.tolerance_change)
        first = (1.0 / best.g.abs().sum()).clamp_max(1.0).to(f.dtype)
        t = torch.where(fresh, first, 1.0) * self.lr
        restart = qn.Point(start.t, best.f, slope, best.g)
        no, count = torch.zeros_like(s.done), torch.zeros_like(s.n_iter)
        restart = qn.Search(t, restart, restart, no, no, no, count)
        counts = s.n_iter + (moves & ~fresh), s.func_evals + ~s.done
        here = qn.pick(moves, (best.f, best.g, d, slope), (s.f, s.g, s.d, s.slope))
        search = qn.pick(moves, restart, qn.pick(s.done, s.search, search))
        after = LBFGSState._make([s.done | (moves & done), *counts, *here, search, history])
        x = torch.where(moves, x + move, x)
        return pytree.tree_unflatten(qn.parts(x, leaves), spec), after

    def solve(
        self,
        loss: Callable[..., Tensor],
        params: T,
        *args: PyTree,
        max_steps: int = 1000,
        in_dims: tuple[int | None, ...] | None = None,
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
                counts them, as in torch.func.vmap: `(0, 0, None)`.

        Raises:
            ValueError: in_dims that do not fit params and args.
            RuntimeError: A call under torch.func.vmap: its loop ends by values.
        """
        check_whole("max_steps", max_steps, 1)
        if has_vmap():
            raise RuntimeError(
                "lbfgs.solve cannot run under torch.func.vmap, because its loop ends by "
                "values: pass in_dims to it, or vmap lbfgs.step"
            )

        def one(p: object, s: LBFGSState, *given: object) -> object:
            reverse: Any = torch.func.grad_and_value(loss)
            return self.step(p, s, lambda q: reverse(q, *given)[::-1])

        def solved(p: T, *given: PyTree) -> T:
            return implicit_root(torch.func.grad(loss), p, *given)

        step: Callable[..., PyTree] = one
        dims = (None,) * (1 + len(args)) if in_dims is None else in_dims
        fits = type(dims) is tuple and len(dims) == 1 + len(args)
        fits = fits and all([x is None or type(x) is int for x in dims])
        if not fits or (in_dims is not None and dims[0] is None):
            raise ValueError(
                f"in_dims={in_dims!r}: allowed are None, and a tuple of an axis for params "
                f"and an axis or None for each of the {len(args)} args"
            )
        with torch.no_grad():
            given = [_front(x, dim or 0) for x, dim in zip((params, *args), dims)]
            if in_dims is None:
                state = self.init(given[0])
            else:
                moved = [None if x is None else 0 for x in dims[1:]]
                step = torch.func.vmap(one, in_dims=(0, 0, *moved))
                solved = torch.func.vmap(solved, in_dims=(0, *dims[1:]))
                state = torch.func.vmap(self.init)(given[0])
            start = given[0], state
            solution, state = _solved(step, start, given[1:], dims[1:], max_steps)
        return solved(solution, *args), state


def _front(tree: PyTree, dim: int) -> PyTree:
    """Return the tensors without their history, and with an axis in front."""
    return pytree.tree_map_only(Tensor, lambda x: x.detach().movedim(dim, 0), tree)


def _rows(tree: PyTree, at: Tensor) -> PyTree:
    """Return some members of a batch."""
    return pytree.tree_map(lambda x: x[at], tree)


def _solved(
    step: Callable[..., PyTree],
    now: PyTree,
    args: Sequence[object],
    dims: tuple[object, ...],
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
        now = step(*now, *args)
        done = now[1].done
        unsolved = int(done.numel() - done.sum())
        if unsolved == 0:
            break
        if unsolved <= done.numel() // 2:
            results, at = joined(), (~done).nonzero()[:, 0]
            members = at if members is None else members[at]
            now = _rows(now, at)
            args = [x if dim is None else _rows(x, at) for x, dim in zip(args, dims)]
    return joined()
