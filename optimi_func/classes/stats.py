"""Norms of gradients, moves and parameters of a class's steps: `track()` and `stats()`."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from optimi_func.classes.divided import Divided
from optimi_func.classes.groups import Group, aligned
from optimi_func.core.checks import check_flag
from optimi_func.core.distributed import all_reduce_sum, shards_of, to_local
from optimi_func.core.leaf import compute_dtype
from optimi_func.core.math import scalar_dtype
from optimi_func.core.rule import WHOLE_BATCH, Scalar
from optimi_func.core.torch_private import has_memory, norms_of
from optimi_func.execution.tensors import is_capturing
from optimi_func.state.convert import without_wrappers
from optimi_func.state.stored import weight_of


class Tracked:
    """Measures of an optimizer's steps, for `stats`."""

    def __init__(self, skipped: dict[Tensor, Scalar]) -> None:
        # Of each parameter's last update the norms of the local shards of the gradient, the
        # move and the parameter, and lr.
        self.last: dict[Tensor, tuple[list[Tensor], Scalar]] = {}
        # Updates, and those that clipped.
        self.counts: dict[Tensor, tuple[Scalar, Scalar]] = {}
        self.skipped = skipped  # the number of skipped updates before

    def begin(self, works: list[Any], write: bool) -> None:
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

    def run(self, optimizer: Any, work: Any, run: Callable[[], Any]) -> Any:
        """Run the update of some parameters of a group, and measure it."""
        group, params, grads, batches = work
        if not params or not all(map(has_memory, params)):
            return run()
        batches = batches or [WHOLE_BATCH] * len(params)
        entries = [optimizer.state.get(p, {}) for p in params]
        with torch.no_grad():
            mine = optimizer.parts_of(params)
            found = norms_of(to_local(aligned(group, mine, grads)))
            parts = to_local([p.detach() for p in mine])
            comps: list[Any] = [entry.get("kahan_comp") for entry in entries]
            comps = to_local(comps)
            old = [p.clone() for p in parts], [x if x is None else x.clone() for x in comps]
        lr = group["lr"] * group.get("d", 1.0)
        result = run()
        with torch.no_grad():
            moves = list(map(_move, *old, parts, comps))
            norms = zip(params, batches, found, moves, norms_of(parts))
        for p, m, g, *rest in norms:
            self.last[p] = [g * m.grad_scale, *rest], lr
            taken = m.finite.double() if isinstance(m.finite, Tensor) else 1.0
            updates, clipped = self.counts.get(p, (0.0, 0.0))
            self.counts[p] = updates + taken, clipped + taken * (m.grad_scale < 1.0)
        return result


def _move(old: Tensor, old_comp: Any, new: Tensor, comp: Any) -> Tensor:
    """Return the norm of a parameter's move, and perhaps write it to `old`."""
    wide = compute_dtype(new.dtype)
    move = weight_of(old, old_comp, wide).sub_(weight_of(new, comp, wide))
    return norms_of([move])[0]


def names_of(i: int, group: Group) -> list[str]:
    """Return the names of the parameters of group i, or their places if they have none."""
    places = [f"{i}.{k}" for k in range(len(group["params"]))]
    return list(map(without_wrappers, group.get("param_names", places)))


class Stats(Divided):
    """The methods of an optimizer that measure its steps."""

    releases: list[Any]
    skipped_steps: int | Tensor
    _tracked: Tracked | None = None

    def track(self, on: bool = True) -> None:
        """Measure the steps from now on, for `stats`, or stop measuring.

        A measured step reads gradients once and parameters four times more, and copies the
        parameters of one param group at a time, under gradient release those of one update.
        Nothing waits for a device. Measure only steps that you log:
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
        found: dict[Tensor, Scalar] = dict.fromkeys(params, steps)
        for release in self.releases:
            for name, count in release.skipped.items():
                found[release.params[name]] += count
        return found

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
        self._tell("stats()")
        keys, skips = self._keys(by), self._skips()
        last = {p: tracked.last[p] for p in keys if p in tracked.last}
        with torch.no_grad():
            norms = [x.to(scalar_dtype(x.device)) for row, _ in last.values() for x in row]
            shards = [shards_of(p) for p in last for _ in range(3)]
            squares = iter(all_reduce_sum([x.square() for x in norms], shards))
        rows: list[list[Scalar]] = []
        for p in keys:
            tells = self.speaks_for(p)  # of a cut one, whose norms are of all processes
            skipped = skips[p] - tracked.skipped.get(p, 0) if tells else 0.0
            own: list[Scalar] = [
                0.0
            ] * 5  # with lr, and the number of processes that have it
            if p in last:
                own = [next(squares) for _ in range(3)]
                own += [last[p][1], 1.0] if tells else [0.0, 0.0]
            counts = tracked.counts.get(p, (0.0, 0.0)) if tells else (0.0, 0.0)
            rows.append([*own[:3], *counts, skipped, *own[3:]])
        read = self._of_owners(_read([x for row in rows for x in row]))
        totals, lrs = dict[str, list[float]](), dict[str, set[float]]()
        for i, key in enumerate(keys.values()):
            *row, lr, known = read[8 * i : 8 * i + 8]
            for name in (key, "all"):
                total = totals.get(name, [0.0] * 6)
                totals[name] = [x + y for x, y in zip(total, row)]
                lrs.setdefault(name, set()).update([lr] if known else ())
        clips = [x.options.clipping for x in self.releases]
        clips = any([x not in (None, "clip_value") for x in clips])
        order = sorted(totals, key="all".__eq__)  # "all" is the last
        return {name: _shown(totals[name], lrs[name], clips) for name in order}

    def _keys(self, by: str | Sequence[str]) -> dict[Tensor, str]:
        """Return the key of each parameter."""
        patterns = [] if isinstance(by, str) else list(by)
        if isinstance(by, str) and by not in ("group", "parameter"):
            raise ValueError(f"by={by!r}: allowed are 'group', 'parameter' and patterns")
        found, unused = dict[Tensor, str](), {*patterns}
        for i, group in enumerate(self.param_groups):
            if patterns and "param_names" not in group:
                raise ValueError(f"by={by!r}: the parameters of group {i} have no names")
            rule = f" {group['rule']}" if "rule" in group else ""
            for p, name in zip(group["params"], names_of(i, group)):
                hits = [x for x in patterns if fnmatchcase(name, x)]
                unused.difference_update(hits)
                found[p] = name if by == "parameter" else f"{i}{rule}"
                if patterns:
                    found[p] = hits[0] if hits else "rest"
        if unused:
            raise ValueError(f"by={by!r}: {sorted(unused)} match no parameter")
        return found


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
    found = {name: x**0.5 for name, x in norms}
    found |= {"lr": next(iter(lrs))} if len(lrs) == 1 else {}
    found |= {"clipped": clipped / max(updates, 1.0)} if clips else {}
    return {**found, "skipped": skipped / max(updates + skipped, 1.0)}
