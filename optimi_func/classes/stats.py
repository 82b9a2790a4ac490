"""Norms of gradients, moves and parameters of a class's steps: `track()` and `stats()`."""

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from itertools import islice, repeat
from operator import add
from typing import Any

import torch
from torch import Tensor

from optimi_func.classes.copies import Copies, Work
from optimi_func.classes.groups import Group
from optimi_func.core.checks import check_flag
from optimi_func.core.distributed import all_reduce_sum, shards_of, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import WHOLE_BATCH, Microbatch, Scalar
from optimi_func.core.torch_private import norms_of
from optimi_func.execution.slots import Columns
from optimi_func.execution.tensors import is_capturing
from optimi_func.state.convert import without_wrappers
from optimi_func.state.stored import weight_of

SLICE = 1 << 18  # elements that are widened at once


class Tracked:
    """Measures of an optimizer's steps, for `stats`."""

    def __init__(self, skipped: dict[Tensor, Scalar]) -> None:
        # Of each parameter's last update the norms of the local shards of the gradient, the
        # move and the parameter, and lr.
        self.last: dict[Tensor, tuple[list[Tensor], Scalar]] = {}
        # Updates, and those that clipped.
        self.counts: dict[Tensor, tuple[Scalar, Scalar]] = {}
        self.skipped = skipped  # the number of skipped updates before

    def begin(self, works: list[Work], write: bool) -> None:
        """Raise if an update cannot be measured; forget the last step if this is a new one.

        A step is new if its gradients were in p.grad, or if a parameter moves once more.
        """
        parts = any([m.accumulate for work in works for m in work[3] or ()])
        if not write or parts:
            raise RuntimeError(
                "track() with accumulation='states' or optimizer_accumulation=True: a "
                "step's whole gradient never exists. Allowed are accumulation='buffer' and "
                "steps without accumulation"
            )
        for _, params, _, batches in works:
            if params and is_capturing(params[0].device):
                raise RuntimeError(
                    "track() while a CUDA graph is being captured: call track(False), and "
                    "measure steps outside of the graph"
                )
            if params and (batches is None or any(map(self.last.__contains__, params))):
                self.last = {}
        for group, params, _, batches in works:
            for i, part in enumerate(to_local([p.detach() for p in params])):
                if not part.numel():  # no launch has it
                    norms = list(part.new_zeros(3, dtype=torch.float32).unbind())
                    self._note(group, params, batches, i, norms)

    def watch(
        self, work: Work, columns: Columns
    ) -> Callable[[Sequence[int]], Callable[[], None]]:
        """Return a function that measures a launch's parameters, by their places."""
        group, params, _, batches = work
        parts, grads, *_, comps = columns

        def before(places: Sequence[int]) -> Callable[[], None]:
            own = [(parts[i], comps[i]) for i in places]
            old = [(p.clone(), None if x is None else x.clone()) for p, x in own]

            def after() -> None:
                moves, now = [_move(*x, *y) for x, y in zip(old, own)], [p for p, _ in own]
                norms = norms_of([grads[i] for i in places] + moves + now)
                for k, i in enumerate(places):
                    self._note(group, params, batches, i, norms[k :: len(places)])

            return after

        return before

    def _note(
        self,
        group: Group,
        params: list[Tensor],
        batches: list[Microbatch] | None,
        i: int,
        norms: list[Tensor],
    ) -> None:
        (g, *rest), m, p = norms, batches[i] if batches else WHOLE_BATCH, params[i]
        plain = m.grad_scale is WHOLE_BATCH.grad_scale
        rate = group["lr"] * group.get("d", 1.0)
        self.last[p] = [g if plain else g * m.grad_scale, *rest], rate
        counted = m.finite.double() if isinstance(m.finite, Tensor) else 1.0
        updates, clipped = self.counts.get(p, (0.0, 0.0))
        if not plain:
            clipped += counted * (m.grad_scale < 1.0)
        self.counts[p] = updates + counted, clipped


def _move(*moved: Any) -> Tensor:
    """Return a tensor with the norm of a parameter's move, perhaps in the first one.

    `moved` are the parameter and its compensation before the step, and after it.
    """
    p, _, now, comp = moved
    wide, parts = compute_dtype(p.dtype), [moved]
    if p.dtype == wide and comp is None:
        return p.sub_(now)
    if p.numel() > SLICE:
        dim = max(range(p.dim()), key=p.size)
        rows = max(1, SLICE * p.shape[dim] // p.numel())
        slices = [repeat(None) if x is None else x.split(rows, dim) for x in moved]
        parts = list(zip(*slices))
    moves: list[Tensor] = []
    for old, old_comp, new, comp in parts:
        move = weight_of(old, old_comp, wide).sub_(weight_of(new, comp, wide))
        moves.append(move if len(parts) == 1 else norms_of([move])[0])
    return moves[0] if len(parts) == 1 else torch.stack(moves)


def names_of(i: int, group: Group) -> list[str]:
    """Return the names of the parameters of group i, or their places if they have none."""
    places = [f"{i}.{k}" for k in range(len(group["params"]))]
    return list(map(without_wrappers, group.get("param_names", places)))


class Stats(Copies):
    """The methods of an optimizer that measure its steps."""

    releases: list[Any]
    skipped_steps: int | Tensor
    _tracked: Tracked | None = None

    def track(self, on: bool = True) -> None:
        """Measure the steps from now on, for `stats`, or stop measuring.

        A measured step reads gradients once and parameters four times more, and copies a
        few parameters at a time: at most 512 KB of them, 64 MB on a GPU, or a larger one.
        Matrices that Muon maps together, on a GPU or divided among processes, are copied
        together. Nothing waits for a device. Measure only steps that you log:
        `optimizer.track(step % 100 == 0)` before the step, under release before backward.

        Args:
            on: False stops, and forgets what was measured.
        """
        check_flag("on", on)
        self._tracked = Tracked(self._skips()) if on else None

    def _skips(self) -> dict[Tensor, Scalar]:
        """Return how many updates of each parameter were skipped so far."""
        steps = self.skipped_steps
        steps = steps.clone() if isinstance(steps, Tensor) else steps
        params = [p for group in self.param_groups for p in group["params"]]
        skips: dict[Tensor, Scalar] = dict.fromkeys(params, steps)
        for release in self.releases:
            for name, count in release.skipped.items():
                skips[release.params[name]] += count
        return skips

    def stats(self, by: str | Sequence[str] = "group") -> dict[str, dict[str, float]]:
        r"""Return norms of the last step, and the shares of clipped and skipped updates.

        For each key, and for all parameters as "all":

        - `grad_norm`: $\lVert g \rVert$ of the gradient that the step took, after clipping
        - `update_norm`: $\lVert p_t - p_{t-1} \rVert$, with decay and compensations
        - `param_norm`: $\lVert p_t \rVert$
        - `lr`: the learning rate of the step, Prodigy's times d; not if it has several
        - `clipped`: the share of updates since `track()` that a handle has clipped by a
          norm; not if none clips, because clip_grad_norm_ is not seen
        - `skipped`: the share of updates since `track()` that were skipped, as not finite

        Norms are of the last step that was taken. One message and one wait for the device.
        All processes that hold shards have to call this.

        Args:
            by: "group", "parameter", or patterns (`fnmatch`) of parameters' names, of which
                the first that matches counts; what matches none is "rest".

        Raises:
            RuntimeError: Nothing is tracked, see `track`.
            ValueError: Patterns for parameters without names, or one that matches nothing.

        >>> from optimi_func import SGD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> w.grad, optimizer = w.detach().clone(), SGD([("w", w)], lr=0.5)
        >>> optimizer.track()
        >>> optimizer.step()
        >>> optimizer.stats(by="parameter")["w"]
        {'grad_norm': 5.0, 'update_norm': 2.5, 'param_norm': 2.5, 'lr': 0.5, 'skipped': 0.0}
        """
        if (tracked := self._tracked) is None:
            raise RuntimeError("stats() of no step: call optimizer.track() before the step")
        keys, skips = self._keys(by), self._skips()
        last = {p: tracked.last[p] for p in keys if p in tracked.last}
        with torch.no_grad():
            norms = [x.to(scalar_dtype(x.device)) for row, _ in last.values() for x in row]
            shards = [shards_of(p) for p in last for _ in range(3)]
            squares = iter(all_reduce_sum([x.square() for x in norms], shards))
        rows: list[list[Scalar]] = []
        for p in keys:
            norms = [next(squares) for _ in range(3)] if p in last else [0.0] * 3
            lr = last[p][1] if p in last else math.nan
            skipped = skips[p] - tracked.skipped.get(p, 0)
            rows.append([*norms, *tracked.counts.get(p, (0.0, 0.0)), skipped, lr])
        read = iter(_read([x for row in rows for x in row]))
        totals, lrs = dict[str, list[float]](), dict[str, set[float]]()
        for p, key in keys.items():
            *row, lr = islice(read, 7)
            for name in (key, "all"):
                totals[name] = list(map(add, totals.get(name, [0.0] * 6), row))
                lrs.setdefault(name, set()).update([lr] if p in last else ())
        clips = [x.options.clipping for x in self.releases]
        clips = any([x not in (None, "clip_value") for x in clips])
        order = sorted(totals, key="all".__eq__)  # "all" is the last
        return {name: _shown(totals[name], lrs[name], clips) for name in order}

    def _keys(self, by: str | Sequence[str]) -> dict[Tensor, str]:
        """Return the key of each parameter."""
        patterns = [] if isinstance(by, str) else list(by)
        if isinstance(by, str) and by not in ("group", "parameter"):
            raise ValueError(f"by={by!r}: allowed are 'group', 'parameter' and patterns")
        keys, unused = dict[Tensor, str](), {*patterns}
        for i, group in enumerate(self.param_groups):
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


def _read(numbers: list[Scalar]) -> list[float]:
    """Return numbers as Python's, with one wait for a device."""
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    home = tensors[0].device if tensors else torch.device("cpu")
    wide = scalar_dtype(home)
    flat = [x.detach().reshape(()).to(home, wide) for x in tensors]
    read = iter(torch.stack(flat).tolist() if flat else ())
    return [next(read) if isinstance(x, Tensor) else x for x in numbers]


def _shown(total: list[float], lrs: set[float], clips: bool) -> dict[str, float]:
    updates, clipped, skipped = total[3:]
    norms = zip(("grad_norm", "update_norm", "param_norm"), total)
    values = {name: x**0.5 for name, x in norms}
    values |= {"lr": next(iter(lrs))} if len(lrs) == 1 else {}
    values |= {"clipped": clipped / max(updates, 1.0)} if clips else {}
    return {**values, "skipped": skipped / max(updates + skipped, 1.0)}
