"""Norms of gradients, moves and parameters of a class's steps: `Stats`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from optimi_func.classes.base import BaseOptimizer
from optimi_func.classes.groups import aligned, names_of
from optimi_func.core.checks import check_flag
from optimi_func.core.distributed import all_reduce_sum, shards_of, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.packed import is_capturing
from optimi_func.core.rule import Scalar
from optimi_func.core.torch_private import norms_of
from optimi_func.state.stored import weight_of


class Stats:
    """Norms of an optimizer's steps, and the share of skipped ones, to log.

    A measured step keeps a copy of all weights, in float32 or wider, and compares it with
    those after the step. Nothing waits for a device. Measure only steps that you log;
    others pay nothing. Where `SAM` or `Lookahead` holds an optimizer, measure the inner.

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
    >>> found = measured.stats(by="parameter")["w"]
    >>> found["grad_norm"], found["update_norm"], found["param_norm"]
    (5.0, 2.5, 2.5)
    >>> found["lr"], found["skipped"]
    (0.5, 0.0)
    """

    def __init__(self, optimizer: BaseOptimizer) -> None:
        if not isinstance(optimizer, BaseOptimizer):
            raise TypeError(
                f"Stats got {optimizer!r:.80}: allowed are this package's classes"
            )
        self.optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        # Of each parameter before a step: the weight, the step count and Prodigy's d.
        self._before: dict[Tensor, tuple[Tensor, Scalar, Scalar]] = {}
        # Of its last update: the squares of the norms, and lr.
        self._last: dict[Tensor, tuple[Tensor, Scalar]] = {}
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
        given = [*args[2:], kwargs.get("param")]  # after the optimizer and a closure
        if any(x is not None for x in given):
            raise RuntimeError(
                "track() with step(param=...), which is a part of a step: call track(False)"
            )
        if self.optimizer.optimizer_accumulation:
            raise RuntimeError(
                "track() with optimizer_accumulation=True: a step's whole gradient never "
                "exists. Allowed is accumulation='buffer'"
            )
        if not self.optimizer.releases:
            self._copy()

    def _weight(self, p: Tensor) -> Tensor:
        """Return the local shard of a parameter with its compensation."""
        comp = self.optimizer.state.get(p, {}).get("kahan_comp")
        part, comp = to_local([p.detach(), comp])
        return weight_of(part, comp, compute_dtype(part.dtype))

    @torch.no_grad()
    def _copy(self) -> None:
        self._before = {}
        for group in self.optimizer.param_groups:
            for p in [p for p in group["params"] if p.requires_grad]:
                if is_capturing(p.device):
                    raise RuntimeError(
                        "track() while a CUDA graph is being captured: call track(False), "
                        "and measure steps outside of the graph"
                    )
                # Counts and d are written in place.
                step = self.optimizer.state.get(p, {}).get("step", 0.0) + 0.0
                self._before[p] = self._weight(p).clone(), step, 1.0 * group.get("d", 1.0)

    @torch.no_grad()
    def _end(self, *_: object) -> None:
        """Measure the parameters that have moved since they were copied."""
        last: dict[Tensor, tuple[Tensor, Scalar]] = {}
        for group in self.optimizer.param_groups:
            for p in [p for p in group["params"] if p in self._before]:
                weight, step, d = self._before[p]
                taken = self.optimizer.state.get(p, {}).get("step", 0.0) > step
                if not (isinstance(taken, Tensor) and taken.is_cuda) and not taken:
                    continue
                self._updates[p] = self._updates.get(p, 0.0) + taken
                grads = [] if p.grad is None else aligned(group, [p], [p.grad])
                parts = to_local([p.detach(), *grads])
                norms = norms_of([weight.sub_(self._weight(p)), *parts])
                norms += [] if grads else [torch.zeros_like(norms[0])]  # freed by release
                row = torch.stack(norms)
                squares = row.to(scalar_dtype(row.device)).square()
                last[p] = squares, group["lr"] * d
        self._last, self._before = last or self._last, {}
        if self.optimizer.releases:
            self._copy()

    def _skips(self) -> dict[Tensor, Scalar]:
        """Return how many updates of each parameter were skipped so far."""
        steps = 0 + self.optimizer.skipped_steps  # which is written in place
        params = names_of(self.optimizer.param_groups)
        skips: dict[Tensor, Scalar] = dict.fromkeys(params, steps)
        for release in self.optimizer.releases:
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
        last = [p for p in keys if p in self._last]
        squares = [self._last[p][0] for p in last]
        sums = dict(zip(last, all_reduce_sum(squares, list(map(shards_of, last)))))
        numbers: list[Any] = []
        for p in keys:
            numbers += sums[p].unbind() if p in sums else [0.0] * 3
            numbers += self._updates.get(p, 0.0), skips[p] - self._skipped.get(p, 0)
            numbers.append(self._last[p][1] if p in sums else None)
        read = iter(_read(numbers))
        rows: dict[str, list[list[Any]]] = {}
        for key in keys.values():
            rows.setdefault(key, []).append(list(islice(read, 6)))
        rows["all"] = list(chain.from_iterable(rows.values()))
        return {name: self._shown(some) for name, some in rows.items()}

    def _shown(self, rows: list[list[Any]]) -> dict[str, float]:
        """Return what `stats` says of some parameters, given the numbers of each."""
        *columns, lrs = zip(*rows)
        update, param, grad, updates, skipped = map(sum, columns)
        values = {} if self.optimizer.releases else {"grad_norm": grad**0.5}
        values |= {"update_norm": update**0.5, "param_norm": param**0.5}
        rates = {lr for lr in lrs if lr is not None}
        values |= {"lr": rates.pop()} if len(rates) == 1 else {}
        return {**values, "skipped": skipped / max(updates + skipped, 1.0)}

    def _keys(self, by: str | Sequence[str]) -> dict[Tensor, str]:
        patterns = [] if isinstance(by, str) else list(by)
        if isinstance(by, str) and by not in ("group", "parameter"):
            raise ValueError(f"by={by!r}: allowed are 'group', 'parameter' and patterns")
        groups, unused = self.optimizer.param_groups, {*patterns}
        names = names_of(groups)
        keys = {**names}
        for i, group in enumerate(groups if by != "parameter" else ()):
            if patterns and "param_names" not in group:
                raise ValueError(f"by={by!r}: the parameters of group {i} have no names")
            rule = f" {group['rule']}" if "rule" in group else ""
            keys |= dict.fromkeys(group["params"], f"{i}{rule}")
        for p, name in names.items() if patterns else ():
            hits = [x for x in patterns if fnmatchcase(name, x)]
            unused.difference_update(hits)
            keys[p] = hits[0] if hits else "rest"
        if unused:
            raise ValueError(f"by={by!r}: {sorted(unused)} match no parameter")
        return keys


def _read(numbers: list[Any]) -> list[Any]:
    """Return numbers, or None, as Python's, with one wait for a device."""
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    home = tensors[0].device if tensors else torch.device("cpu")
    flat = [x.detach().reshape(()).to(home, scalar_dtype(home)) for x in tensors]
    read = iter(torch.stack(flat).tolist() if flat else ())
    return [next(read) if isinstance(x, Tensor) else x for x in numbers]
