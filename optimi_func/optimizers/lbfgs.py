"""L-BFGS: the class, with the arguments, steps and state dicts of torch.optim.LBFGS."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import StateDict
from torch.utils import _pytree as pytree

from optimi_func.classes.fields import Params
from optimi_func.core.checks import check_flag, check_no_module, check_whole, shown
from optimi_func.core.rule import Scalar
from optimi_func.fitting import quasi_newton as qn
from optimi_func.fitting.lbfgs import lbfgs
from optimi_func.state.convert import Entry, Group

__all__ = ["LBFGS", "lbfgs"]


class LBFGS(torch.optim.Optimizer):
    """L-BFGS with the arguments, steps and state dicts of torch.optim.LBFGS.

    One step calls the closure several times, up to max_eval: the iterations of `lbfgs`. Its
    history is one tensor, so that an iteration takes two products with it in place of
    four operations for each pair. Parameters may be complex, and their dtypes may differ.
    It computes in the widest of these, and in float32 for bfloat16 ones, whose losses are
    too coarse for tolerances below 1e-3.

    Args:
        params: Parameters, in one param group and on one device.
        lr: The step length that each line search tries first; without one, all lengths.
        max_iter: The largest number of iterations in a step.
        max_eval: The largest number of evaluations in a step; None: 1.25 max_iter.
        tolerance_grad: A step ends if no element of the gradient is larger.
        tolerance_change: A step ends if neither parameters nor loss change by more.
        history_size: The number of moves that the inverse Hessian is made of.
        line_search_fn: "strong_wolfe", or None for steps of length lr.
        maximize: Maximize the loss, as torch's class does from 2.15 on.

    Raises:
        ValueError: Several param groups, or a hyperparameter out of its range.
        TypeError: A parameter that is not dense, or neither floating nor complex.

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
        params: Params,
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        check_no_module(params)
        check_whole("max_iter", max_iter, 1)  # before a default is made of it
        defaults = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "history_size": history_size,
            "line_search_fn": line_search_fn,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: Group) -> None:
        """Add the one param group that there is.

        Raises:
            ValueError: A second group, or a hyperparameter out of its range.
            TypeError: A parameter that is not dense, or neither floating nor complex.
        """
        if self.param_groups:
            raise ValueError(
                "LBFGS was given several param groups: allowed is one, because all "
                "parameters have one line search"
            )
        super().add_param_group(param_group)
        try:
            (group,) = self.param_groups
            _check_group(group)
            qn.check_leaves([(f"[{i}]", p) for i, p in enumerate(group["params"])])
        except Exception:
            self.param_groups.clear()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Scalar] | None = None) -> Scalar:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take up to max_iter iterations, and return the first loss.

        If the closure raises, the parameters are those before the line search.

        Args:
            closure: Clears the gradients, computes the loss, calls backward on it and
                returns it. It is called up to max_eval times.

        Raises:
            TypeError: No closure.
        """
        if not callable(closure):
            raise TypeError(
                f"LBFGS.step: closure={shown(closure)}: allowed is a function that "
                "computes the loss and its gradients, which a step calls several times"
            )
        (group,) = self.param_groups
        _check_group(group)  # a user may have changed it
        evaluate = torch.enable_grad()(closure)
        sign = -1.0 if group.get("maximize") else 1.0  # torch's states before 2.15 lack it
        params: list[Tensor] = group["params"]
        state: Entry = self.state[params[0]]
        searches, least = group["line_search_fn"] is not None, group["tolerance_change"]
        first = evaluate()
        f, g, evals = sign * float(first), _grads(params, sign), 1
        state.setdefault("n_iter", 0)
        state["func_evals"] = state.get("func_evals", 0) + 1
        if float(g.abs().max()) <= group["tolerance_grad"]:
            return first
        for n in range(1, group["max_iter"] + 1):
            state["n_iter"] += 1
            if state["n_iter"] == 1:
                state["history"], d = qn.empty_history(1, g, 0, 1.0), g.neg()
            else:
                h = qn.with_room(state["history"], group["history_size"])
                move, y = state["d"] * state["t"], g - state["prev_flat_grad"]
                h = state["history"] = qn.remember(h, move, y, g)
                d = qn.direction(h, g)
            lr, t = group["lr"], float(group["lr"])
            if state["n_iter"] == 1:
                lr = t = t / max(1.0, float(g.abs().sum()))
            slope, before = float(g.dot(d)), f
            state.update(d=d, t=lr, prev_flat_grad=g, prev_loss=f)
            if slope > -least:
                break
            count, width = 0, float(d.abs().max())
            if searches:
                start, x = qn.Point(0.0, f, slope, g), [p.clone() for p in params]
                search, ended, best = qn.begin(t, start, False, 0), False, start
                most = group["max_eval"] - evals
                try:
                    while not ended:
                        t = search.t
                        _move(params, x, t, d)
                        f, g = sign * float(evaluate()), _grads(params, sign)
                        count += 1
                        new = qn.Point(t, f, float(g.dot(d)), g)
                        search, ended, best = qn.advance(
                            search, new, start, width, most, least
                        )
                except BaseException:
                    _move(params, x, 0.0, d)
                    raise
                if best.t != t:
                    _move(params, x, best.t, d)
                t, f, _, g = best
            else:
                _move(params, params, t, d)
                if n < group["max_iter"]:  # the next step evaluates here
                    f, g, count = sign * float(evaluate()), _grads(params, sign), 1
            # A scheduler that writes to the tensor of lr changes the last t, as in torch.
            state["t"], evals = lr if t == float(lr) else t, evals + count
            state["func_evals"] += count
            if (
                evals >= group["max_eval"]
                or float(g.abs().max()) <= group["tolerance_grad"]
            ):
                break
            if abs(t) * width <= least or abs(f - before) < least:
                break
        return first

    def state_dict(self) -> StateDict:
        """Return the state as torch.optim.LBFGS names it, which can load it."""
        state_dict = super().state_dict()
        for key, entry in state_dict["state"].items():
            if not isinstance(entry, dict):
                continue  # of a hook
            entry = state_dict["state"][key] = dict(entry)
            if (h := entry.pop("history", None)) is not None:
                rows = qn.rows_of(h)
                entry["old_dirs"] = [h.pairs[i, 1].clone() for i in rows]
                entry["old_stps"] = [h.pairs[i, 0].clone() for i in rows]
                entry["ro"] = [h.inverse[i, i].clone() for i in rows]
                entry["H_diag"] = h.scale
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this class or of torch.optim.LBFGS.

        Raises:
            ValueError: A state of another optimizer, or for other parameters.
        """
        (group,), entries = state_dict["param_groups"], [*state_dict["state"].values()]
        params: list[Tensor] = self.param_groups[0]["params"]
        like = qn.flat([x.detach() for x in params])
        if len(entries) > 1 or not {"max_iter", "history_size"} <= group.keys():
            raise ValueError("state_dict is that of another optimizer: allowed is LBFGS's")
        for d in [x["d"] for x in entries if "d" in x]:
            if d.shape != like.shape:
                raise ValueError(
                    f"state_dict is for {d.numel()} elements: the parameters have "
                    f"{like.numel()}, a complex one counted twice"
                )
        super().load_state_dict(state_dict)
        for entry in entries:
            # Torch rounded it to the first parameter's dtype.
            def widened(x: object) -> object:
                return x.to(like) if isinstance(x, Tensor) else x

            entry = self.state[params[0]] = pytree.tree_map(widened, dict(entry))
            if "old_dirs" in entry:
                moves, changes = entry.pop("old_stps"), entry.pop("old_dirs")
                scale = float(entry.pop("H_diag"))
                h = qn.empty_history(1, like, 0, scale)
                if moves:
                    h = qn.loaded_history(moves, changes, entry["prev_flat_grad"], scale)
                entry["history"] = h
                for name in {"ro", "al"} & entry.keys():
                    del entry[name]


def _check_group(group: Group) -> None:
    """Raise for options of a param group out of their ranges."""
    check_whole("max_iter", group["max_iter"], 1)
    check_whole("max_eval", group["max_eval"], 1)
    check_flag("maximize", group.get("maximize", False))
    qn.check_options(SimpleNamespace(**group))


def _grads(params: list[Tensor], sign: float) -> Tensor:
    """Return sign times all gradients, flat; 0 for a parameter that has none."""
    g = qn.flat([torch.zeros_like(p) if p.grad is None else p.grad for p in params])
    return g if sign > 0 else g.neg()


def _move(params: list[Tensor], x: list[Tensor], t: Any, d: Tensor) -> None:
    """Set the parameters to x + t * d."""
    for p, at, move in zip(params, x, qn.parts(d, params)):
        torch.add(at, move, alpha=t, out=p)
