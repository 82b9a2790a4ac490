"""L-BFGS: the step over pytrees, which vmaps, and the class of torch.optim's arguments.

Both take the steps of torch.optim.LBFGS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.core.checks import check_number, check_whole
from optimi_func.core.math import scalar_dtype
from optimi_func.core.quasi_newton import (
    History,
    Point,
    Search,
    begun,
    direction,
    empty_history,
    pick,
    remembered,
    rows_of,
    searched,
    with_room,
)
from optimi_func.core.rule import PyTree, Scalar
from optimi_func.pure.implicit import implicit_root

__all__ = ["LBFGS", "lbfgs"]

T = TypeVar("T")


class LBFGSState(NamedTuple):
    """The state of `lbfgs` for one problem; a batch of them has another axis in front."""

    done: Tensor  # True if params no longer change
    n_iter: Tensor  # accepted moves
    func_evals: Tensor  # evaluations
    f: Tensor  # the loss at params
    g: Tensor  # the gradient at params, flat
    d: Tensor  # the direction of the search
    slope: Tensor  # the product of g and d
    search: Search
    history: History


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
        """Raise for numbers out of their ranges."""
        _check(self)
        check_whole("max_ls", self.max_ls, 1)

    def init(self, params: PyTree) -> LBFGSState:
        """Return fresh state for `params`: no history, and no evaluation yet."""
        x = _flat(pytree.tree_leaves(params))
        wide = scalar_dtype(x.device)
        zero = torch.zeros((), dtype=wide, device=x.device)
        no, count = zero.bool(), zero.long()
        point = Point(zero, zero, zero, x.new_zeros(x.shape))
        search = begun(zero, point, no, count)
        one = torch.ones((), dtype=x.dtype, device=x.device)
        # One tensor for each field, because in-place users of a state may not share them.
        return pytree.tree_map(
            torch.clone,
            LBFGSState(
                *(no, count, count, zero, point.g, point.g, zero),
                *(search, empty_history(self.history_size, x, count, one)),
            ),
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
        x = _flat(leaves).detach()
        at = x + s.search.t.to(x.dtype) * s.d
        value, grads = value_and_grad(pytree.tree_unflatten(_parts(at, leaves), spec))
        g = _flat(pytree.tree_leaves(grads)).detach()
        f = value.detach().to(s.f.dtype)
        fresh, none = s.func_evals == 0, self.line_search_fn is None
        start = Point(torch.zeros_like(s.f), s.f, s.slope, s.g)
        new = Point(s.search.t, f, g.dot(s.d).to(f.dtype), g)
        width = s.d.abs().amax().to(f.dtype)
        search, ended, best = searched(
            s.search, new, start, width, self.max_ls, self.tolerance_change
        )
        moves = (fresh | ended | none) & ~s.done
        best = pick(fresh | none, new, best)
        move = best.t.to(x.dtype) * s.d
        history = remembered(s.history, move, best.g - s.g, moves & ~fresh)
        d = direction(history, best.g)
        slope = best.g.dot(d).to(f.dtype)
        still = (move.abs().amax() <= self.tolerance_change) | (
            (best.f - s.f).abs() < self.tolerance_change
        )
        done = (best.g.abs().amax() <= self.tolerance_grad) | (~fresh & still)
        done = done | ~best.f.isfinite() | (slope > -self.tolerance_change)
        first = (1.0 / best.g.abs().sum()).clamp_max(1.0).to(f.dtype)
        t = torch.where(fresh, first, 1.0) * self.lr
        again = Point(start.t, best.f, slope, best.g)
        again = begun(t, again, torch.zeros_like(s.done), torch.zeros_like(s.n_iter))
        counts = s.n_iter + (moves & ~fresh), s.func_evals + ~s.done
        here = pick(moves, (best.f, best.g, d, slope), (s.f, s.g, s.d, s.slope))
        search = pick(moves, again, pick(s.done, s.search, search))
        after = LBFGSState._make([s.done | (moves & done), *counts, *here, search, history])
        x = torch.where(moves, x + move, x)
        return pytree.tree_unflatten(_parts(x, leaves), spec), after

    def solve(
        self,
        loss: Callable[..., Tensor],
        params: T,
        *args: PyTree,
        max_steps: int = 1000,
        in_dims: tuple[Any, ...] | None = None,
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
        """
        check_whole("max_steps", max_steps, 1)
        gradient = torch.func.grad(loss)

        def one(p: Any, s: LBFGSState, *given: Any) -> Any:
            def value_and_grad(q: Any) -> tuple[Tensor, Any]:
                found, value = torch.func.grad_and_value(loss)(q, *given)
                return value, found

            return self.step(p, s, value_and_grad)

        def solved(p: Any, *given: Any) -> Any:
            return implicit_root(gradient, p, *given)

        step: Any = one
        dims = (None,) * (1 + len(args)) if in_dims is None else in_dims
        if len(dims) != 1 + len(args) or not all(
            [x is None or type(x) is int for x in dims]
        ):
            raise ValueError(
                f"in_dims={in_dims!r}: allowed are None, and an axis or None for params "
                f"and for each of the {len(args)} args"
            )
        with torch.no_grad():
            given: Any = [
                pytree.tree_map(partial(_front, dim=dim), tree)
                for tree, dim in zip((params, *args), dims)
            ]
            if in_dims is None:
                state = self.init(given[0])
            else:
                own = [0 if x is not None else None for x in dims]
                step = torch.func.vmap(one, in_dims=(own[0], 0, *own[1:]))
                solved = torch.func.vmap(solved, in_dims=(0, *dims[1:]))
                state = torch.func.vmap(self.init)(given[0])
            start = given[0], state
            found, state = _solved(step, start, given[1:], dims[1:], max_steps)
        return solved(found, *args), state


def _front(x: Any, dim: int | None) -> Any:
    """Return a tensor without its history, and with an axis in front."""
    if not isinstance(x, Tensor):
        return x
    return x.detach() if dim is None else x.detach().movedim(dim, 0)


def _rows(tree: Any, at: Tensor) -> Any:
    """Return some members of a batch."""
    return pytree.tree_map(lambda x: x[at], tree)


def _solved(
    step: Callable[..., Any], now: Any, args: list[Any], dims: tuple[Any, ...], most: int
) -> Any:
    """Step `(params, state)` until all problems are done, or `most` times.

    When half of a batch are done, the others go on without them.
    """
    results, members = now, None

    def joined() -> Any:
        if members is None:
            return now
        return pytree.tree_map(lambda x, y: x.index_copy(0, members, y), results, now)

    for _ in range(most):
        now = step(*now, *args)
        done = now[1].done
        left = int(done.numel() - done.sum())
        if left == 0:
            break
        if left <= done.numel() // 2:
            results, at = joined(), (~done).nonzero()[:, 0]
            members = at if members is None else members[at]
            now = _rows(now, at)
            args = [x if dim is None else _rows(x, at) for x, dim in zip(args, dims)]
    return joined()


def _check(given: Any) -> None:
    """Raise for hyperparameters out of their ranges."""
    check_number("learning rate", "lr", given.lr)
    for name in ("tolerance_grad", "tolerance_change"):
        check_number(name.replace("_", " "), name, getattr(given, name))
    check_whole("history_size", given.history_size, 1)
    if given.line_search_fn not in (None, "strong_wolfe"):
        raise ValueError(
            f"line_search_fn={given.line_search_fn!r}: allowed are 'strong_wolfe' and None"
        )


def _flat(leaves: list[Tensor]) -> Tensor:
    """Return the elements of all tensors in a new one, complex ones as pairs."""
    real = [torch.view_as_real(x) if x.is_complex() else x for x in leaves]
    return torch.cat([x.reshape(-1) for x in real])


def _parts(flat: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return parts of a flat tensor with the shapes and dtypes of the leaves."""
    sizes = [x.numel() * (1 + x.is_complex()) for x in leaves]
    found: list[Tensor] = []
    for x, like in zip(flat.split(sizes), leaves):
        if like.is_complex():
            found.append(torch.view_as_complex(x.reshape(*like.shape, 2)).to(like.dtype))
        else:
            found.append(x.reshape(like.shape).to(like.dtype))
    return found


class LBFGS(torch.optim.Optimizer):
    """L-BFGS with the arguments, steps and state dicts of torch.optim.LBFGS.

    One step calls the closure several times, up to max_eval: the iterations of `lbfgs`. Its
    history is one tensor, so that an iteration takes two products with it in place of
    four operations for each pair. It takes one param group. Use float64 or float32: its
    differences of gradients have few digits in bfloat16.

    Args:
        params: Parameters; all on one device.
        lr: The step length that each line search tries first; without one, all lengths.
        max_iter: The largest number of iterations in a step.
        max_eval: The largest number of evaluations in a step; None: 1.25 max_iter.
        tolerance_grad: A step ends if no element of the gradient is larger.
        tolerance_change: A step ends if neither parameters nor loss change by more.
        history_size: The number of moves that the inverse Hessian is made of.
        line_search_fn: "strong_wolfe", or None for steps of length lr.

    Raises:
        ValueError: Several param groups, or a number out of its range.

    References:
        Liu & Nocedal, "On the limited memory BFGS method for large scale optimization",
        Mathematical Programming 45, 1989.

    >>> w = torch.zeros(2, requires_grad=True)
    >>> optimizer = LBFGS([w], line_search_fn="strong_wolfe")
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = ((w - torch.tensor([1.0, 2.0])) ** 2).sum()
    ...     loss.backward()
    ...     return loss
    >>> loss = optimizer.step(closure)
    >>> w.detach().round(decimals=3)
    tensor([1., 2.])
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
    ) -> None:
        check_whole("max_iter", max_iter, 1)
        check_whole("max_eval", max_eval, 1, none=True)
        defaults = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "history_size": history_size,
            "line_search_fn": line_search_fn,
        }
        _check(SimpleNamespace(**defaults))
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(
                f"LBFGS got {len(self.param_groups)} param groups: allowed is one, because "
                "all parameters have one line search"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take up to max_iter iterations, and return the first loss.

        Args:
            closure: Clears the gradients, computes the loss, calls backward on it and
                returns it. It is called up to max_eval times.
        """
        (group,) = self.param_groups
        evaluate = torch.enable_grad()(closure)
        params: list[Tensor] = group["params"]
        state: dict[str, Any] = self.state[params[0]]
        searches, least = group["line_search_fn"] is not None, group["tolerance_change"]
        first = evaluate()
        f, g, evals = float(first), _grads(params), 1
        state.setdefault("n_iter", 0)
        state["func_evals"] = state.get("func_evals", 0) + 1
        if float(g.abs().max()) <= group["tolerance_grad"]:
            return first
        for n in range(1, group["max_iter"] + 1):
            state["n_iter"] += 1
            if state["n_iter"] == 1:
                state["history"], d = empty_history(1, g, 0, 1.0), g.neg()
            else:
                h = with_room(state["history"], group["history_size"])
                move, y = state["d"] * state["t"], g - state["prev_flat_grad"]
                h = state["history"] = remembered(h, move, y, None)
                d = direction(h, g)
            t = float(group["lr"])
            if state["n_iter"] == 1:
                t = min(1.0, 1.0 / float(g.abs().sum())) * t
            slope, before = float(g.dot(d)), f
            state.update(d=d, t=t, prev_flat_grad=g, prev_loss=f)
            if slope > -least:
                break
            count = 0
            if searches:
                start, x = Point(0.0, f, slope, g), [p.clone() for p in params]
                search, ended, best = begun(t, start, False, 0), False, start
                width, most = float(d.abs().max()), group["max_eval"] - evals
                while not ended:
                    t = search.t
                    _move(params, x, t, d)
                    f, g, count = float(evaluate()), _grads(params), count + 1
                    new = Point(t, f, float(g.dot(d)), g)
                    search, ended, best = searched(search, new, start, width, most, least)
                if best.t != t:
                    _move(params, x, best.t, d)
                t, f, _, g = best
            else:
                _move(params, params, t, d)
                if n < group["max_iter"]:  # the next step evaluates here
                    f, g, count = float(evaluate()), _grads(params), 1
            state["t"], evals = t, evals + count
            state["func_evals"] += count
            if (
                evals >= group["max_eval"]
                or float(g.abs().max()) <= group["tolerance_grad"]
            ):
                break
            if float((d * t).abs().max()) <= least or abs(f - before) < least:
                break
        return first

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.LBFGS names it, which can load it."""
        found = super().state_dict()
        for key, entry in found["state"].items():
            entry = found["state"][key] = dict(entry)
            if (h := entry.pop("history", None)) is not None:
                rows = rows_of(h)
                entry["old_dirs"] = [h.pairs[1, i].clone() for i in rows]
                entry["old_stps"] = [h.pairs[0, i].clone() for i in rows]
                entry["ro"] = [1.0 / h.products[0, i, i] for i in rows]
                entry["H_diag"] = h.scale
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch.optim.LBFGS."""
        super().load_state_dict(state_dict)
        for entry in self.state.values():
            if "old_dirs" in entry:
                moves, changes = entry.pop("old_stps"), entry.pop("old_dirs")
                h = empty_history(1, entry["d"], len(moves), entry.pop("H_diag"))
                if moves:
                    pairs = torch.stack([torch.stack(moves), torch.stack(changes)])
                    h = h._replace(pairs=pairs, products=pairs @ pairs[1].mT)
                entry["history"] = h
                for name in {"ro", "al"} & entry.keys():
                    del entry[name]


def _grads(params: list[Tensor]) -> Tensor:
    """Return all gradients in one flat tensor; 0 for a parameter that has none."""
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return _flat([x.to_dense() if x.is_sparse else x for x in found])


def _move(params: list[Tensor], x: list[Tensor], t: Any, d: Tensor) -> None:
    """Set the parameters to x + t * d."""
    if params is not x:
        torch._foreach_copy_(params, x)
    # Not of the parameters' shapes alone: complex parameters have two elements of d each.
    torch._foreach_add_(params, _parts(d, params), alpha=t)
