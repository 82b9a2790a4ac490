"""Norms of gradients, moves and parameters of a class's steps: `Stats`."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import islice
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.groups import Group, aligned, names_of
from optimi_func.core.checks import check_flag
from optimi_func.core.distributed import all_reduce_sum, shards_of, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import norms_of
from optimi_func.execution.tensors import is_capturing
from optimi_func.state.stored import weight_of


class Before(NamedTuple):
    """Copies of a parameter before a step, of its compensation, step count and d."""

    weight: Tensor
    comp: Any
    step: Scalar
    d: Scalar


class Stats:
    """Norms of an optimizer's steps, and the share of skipped ones, to log.

    A measured step keeps a copy of all weights and compensations, which it compares with
    those after the step, and reads them three times more. Nothing waits for a device.
    Measure only steps that you log; others pay nothing.

    Args:
        optimizer: A class of this package.

    Raises:
        TypeError: Another optimizer.

    >>> from optimi_func import SGD
    >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> w.grad, optimizer = w.detach().clone(), SGD([("w", w)], lr=0.5)
    >>> measured = Stats(optimizer)
    >>> measured.track()
    >>> optimizer.step()
    >>> measured.stats(by="parameter")["w"]
    {'grad_norm': 5.0, 'update_norm': 2.5, 'param_norm': 2.5, 'lr': 0.5, 'skipped': 0.0}
    """

    def __init__(self, optimizer: BaseOptimizer) -> None:
        if not isinstance(optimizer, BaseOptimizer):
            raise TypeError(
                f"Stats got {optimizer!r:.80}: allowed are this package's classes, also "
                "those inside of a wrapper"
            )
        self.optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._before: dict[Tensor, Before] = {}
        # Of each parameter's last update the norms of the local shards of the gradient, the
        # move and the parameter, and lr.
        self._last: dict[Tensor, tuple[list[Tensor], Scalar]] = {}
        self._updates: dict[Tensor, Scalar] = {}
        self._skipped: dict[Tensor, Scalar] = {}  # before

    def track(self, on: bool = True) -> None:
        """Measure the steps from now on, for `stats`, or stop measuring.

        Call `measured.track(step % 100 == 0)` before the step, under gradient release
        before backward, and there end each step by `optimizer.step()`.

        Args:
            on: False stops, and forgets what was measured.
        """
        check_flag("on", on)
        while self._hooks:
            self._hooks.pop().remove()
        self._before, self._last, self._updates = {}, {}, {}
        if not on:
            return
        optimizer, self._skipped = self.optimizer, self._skips()
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        if optimizer.releases:  # parameters move in backward, before step()
            self._copy()

    def _begin(self, _: object, args: tuple[object, ...], kwargs: Any) -> None:
        """Copy what a step is compared with. Raise for one that cannot be measured."""
        for param in [*args[2:], kwargs.get("param")]:  # after the optimizer and a closure
            if param is not None:
                raise RuntimeError(
                    "track() with step(param=...), which is a part of a step: call "
                    "track(False)"
                )
        if self.optimizer.optimizer_accumulation:
            raise RuntimeError(
                "track() with optimizer_accumulation=True: a step's whole gradient never "
                "exists. Allowed are accumulation='buffer' and steps without accumulation"
            )
        if not self.optimizer.releases:
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        self._before = {}
        for group in self.optimizer.param_groups:
            d = group.get("d", 1.0)
            for p in group["params"]:
                if is_capturing(p.device):
                    raise RuntimeError(
                        "track() while a CUDA graph is being captured: call track(False), "
                        "and measure steps outside of the graph"
                    )
                if p.requires_grad:
                    entry = self.optimizer.state.get(p, {})
                    weight, comp = to_local([p.detach(), entry.get("kahan_comp")])
                    # Counts and d are written in place.
                    step = entry.get("step", 0.0) + 0.0
                    copies = weight.clone(), _clone(comp)
                    self._before[p] = Before(*copies, step, 1.0 * d)

    @torch.no_grad()
    def _end(self, *_: object) -> None:
        """Measure the parameters that have moved since they were copied."""
        last: dict[Tensor, tuple[list[Tensor], Scalar]] = {}
        for group in self.optimizer.param_groups:
            for p in [p for p in group["params"] if p in self._before]:
                before, entry = self._before[p], self.optimizer.state.get(p, {})
                taken = entry.get("step", 0.0) > before.step
                if not (isinstance(taken, Tensor) and taken.is_cuda) and not taken:
                    continue
                self._updates[p] = self._updates.get(p, 0.0) + taken
                last[p] = self._norms(group, p, before), group["lr"] * before.d
        self._last, self._before = last or self._last, {}
        if self.optimizer.releases:
            self._copy()

    def _norms(self, group: Group, p: Tensor, before: Before) -> list[Tensor]:
        """Return the norms of the gradient, or 0 for one that is freed, move and weight."""
        grads = [] if p.grad is None else to_local(aligned(group, [p], [p.grad]))
        comp = self.optimizer.state[p].get("kahan_comp")
        part, comp = to_local([p.detach(), comp])
        wide = compute_dtype(part.dtype)
        move = weight_of(before.weight, before.comp, wide)
        move = move.sub_(weight_of(part, comp, wide))
        norms = norms_of([*grads, move, part])
        return norms if grads else [torch.zeros_like(norms[0]), *norms]

    def _skips(self) -> dict[Tensor, Scalar]:
        """Return how many updates of each parameter were skipped so far."""
        optimizer = self.optimizer
        steps = optimizer.skipped_steps
        steps = steps.clone() if isinstance(steps, Tensor) else steps
        params = [p for group in optimizer.param_groups for p in group["params"]]
        skips: dict[Tensor, Scalar] = dict.fromkeys(params, steps)
        for release in optimizer.releases:
            for name, count in release.skipped.items():
                skips[release.params[name]] += count
        return skips

    def stats(self, by: str | Sequence[str] = "group") -> dict[str, dict[str, float]]:
        r"""Return norms of the last step, and the share of skipped updates.

        For each key, and for all parameters as "all":

        - `grad_norm`: $\lVert g \rVert$ of p.grad, after a clip_grad_norm_ and before
          `transforms=`; not under gradient release, which frees gradients in backward and
          reports their norm before clipping as `handle.grad_norm`
        - `update_norm`: $\lVert p_t - p_{t-1} \rVert$, with decay and compensations
        - `param_norm`: $\lVert p_t \rVert$
        - `lr`: the learning rate of the step, Prodigy's times d; not if it has several
        - `skipped`: the share of updates since `track()` that were skipped, as not finite

        Norms are of the last step that was taken. One message and one wait for the device.
        All processes that hold shards have to call this.

        Args:
            by: "group", "parameter", or patterns (`fnmatch`) of parameters' names, of which
                the first that matches counts; what matches none is "rest".

        Raises:
            RuntimeError: Nothing is tracked, see `track`.
            ValueError: Patterns for parameters without names, or one that matches nothing.
        """
        if not self._hooks:
            raise RuntimeError("stats() of no step: call track() before the step")
        keys, skips = self._keys(by), self._skips()
        last = {p: self._last[p] for p in keys if p in self._last}
        with torch.no_grad():
            norms = [x.to(scalar_dtype(x.device)) for row, _ in last.values() for x in row]
            shards = [shards_of(p) for p in last for _ in range(3)]
            squares = iter(all_reduce_sum([x.square() for x in norms], shards))
        rows: list[list[Scalar]] = []
        for p in keys:
            norms = [next(squares) for _ in range(3)] if p in last else [0.0] * 3
            lr = last[p][1] if p in last else math.nan
            skipped = skips[p] - self._skipped.get(p, 0)
            rows.append([*norms, self._updates.get(p, 0.0), skipped, lr])
        read = iter(_read([x for row in rows for x in row]))
        totals, lrs = dict[str, list[float]](), dict[str, set[float]]()
        for p, key in keys.items():
            *row, lr = islice(read, 6)
            for name in (key, "all"):
                totals[name] = list(map(add, totals.get(name, [0.0] * 5), row))
                lrs.setdefault(name, set()).update([lr] if p in last else ())
        names = ["update_norm", "param_norm"]
        names = names if self.optimizer.releases else ["grad_norm", *names]
        order = sorted(totals, key="all".__eq__)  # "all" is the last
        return {name: _shown(names, totals[name], lrs[name]) for name in order}

    def _keys(self, by: str | Sequence[str]) -> dict[Tensor, str]:
        """Return the key of each parameter."""
        patterns = [] if isinstance(by, str) else list(by)
        if isinstance(by, str) and by not in ("group", "parameter"):
            raise ValueError(f"by={by!r}: allowed are 'group', 'parameter' and patterns")
        keys, unused = dict[Tensor, str](), {*patterns}
        for i, group in enumerate(self.optimizer.param_groups):
            if patterns and "param_names" not in group:
                raise ValueError(f"by={by!r}: the parameters of group {i} have no names")
            rule = f" {group['rule']}" if "rule" in group else ""
            for p, name in zip(group["params"], names_of(i, group)):
                hits = [x for x in patterns if fnmatchcase(name, x)]
                unused.difference_update(hits)
                keys[p] = name if by == "parameter" else f"{i}{rule}"
                if patterns:
                    keys[p] = hits[0] if hits else "rest"
        if unused:
            raise ValueError(f"by={by!r}: {sorted(unused)} match no parameter")
        return keys


def _clone(x: Any) -> Any:
    return None if x is None else x.clone()


def _read(numbers: list[Scalar]) -> list[float]:
    """Return numbers as Python's, with one wait for a device."""
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    home = tensors[0].device if tensors else torch.device("cpu")
    wide = scalar_dtype(home)
    flat = [x.detach().reshape(()).to(home, wide) for x in tensors]
    read = iter(torch.stack(flat).tolist() if flat else ())
    return [next(read) if isinstance(x, Tensor) else x for x in numbers]


def _shown(names: list[str], total: list[float], lrs: set[float]) -> dict[str, float]:
    *squares, updates, skipped = total
    values = {name: x**0.5 for name, x in zip(names, squares[-len(names) :])}
    values |= {"lr": next(iter(lrs))} if len(lrs) == 1 else {}
    return {**values, "skipped": skipped / max(updates + skipped, 1.0)}
