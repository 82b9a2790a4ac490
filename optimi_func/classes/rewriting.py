"""Transforms of a class: gradients are rewritten before a step.

What a transform keeps for a parameter is in `state[p]`, and what it keeps for all is in the
first param group, so that state dicts have both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from optimi_func.classes.copies import Copies, Work
from optimi_func.classes.extras import with_given
from optimi_func.classes.groups import Group, names_of, path_of
from optimi_func.core.checks import check_grad, check_process_group, warn_user
from optimi_func.core.leaf import held_dtype, leaf_step, microbatch_scalars, whole_means
from optimi_func.core.rule import WHOLE_BATCH, Leaf, Scalar
from optimi_func.core.storage import group_storage, state_in
from optimi_func.core.torch_private import has_memory
from optimi_func.execution.counts import write_scalar
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.scalars import scalars_after
from optimi_func.execution.tensors import flat_leaf
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, Match
from optimi_func.state.entry import ensure_state
from optimi_func.transforms._trees import keys_of
from optimi_func.transforms.gradients import GradientTransform

Write = tuple[Tensor, Scalar, Tensor | None]  # a target, its value, and if it is written
KEY = "transforms"
_WHOLE = WHOLE_BATCH.grad_scale
_ZERO = torch.zeros((), device="cpu")


@dataclass(slots=True)
class Row:
    """A parameter in a step: its gradient, and the flag that says if it is written."""

    g: Tensor | None
    flag: Tensor | None


class Rewriting(Copies):
    """The methods of an optimizer whose gradients are rewritten."""

    rewriters: tuple[GradientTransform, ...] = ()
    bound_of: Callable[..., FunctionalOptimizer]
    _told: dict[str, object]  # the extras of a step that transforms take
    # Names and structure of what a transform keeps.
    _layouts: dict[tuple[int, Tensor | None], tuple[list[str], pytree.TreeSpec]]

    def _take_options(self, options: Group) -> None:
        """Take process_group and transforms out of the options, and check them."""
        self.process_group = check_process_group(options.pop("process_group", None))
        given, self._told = options.pop(KEY, ()), {}
        items = [*given] if isinstance(given, Iterable) else [given]
        for x in items:
            if x is ...:
                raise TypeError(
                    "transforms got ...: allowed are transforms of gradients. Updates are "
                    "rewritten in the pure API: chain(a, optimizer, b)"
                )
            if not isinstance(x, GradientTransform):
                raise TypeError(
                    f"transforms got {x!r}: allowed are gradient transforms such as "
                    "clip_param_norm(1.0). EMA(optimizer, decay) averages parameters"
                )
        self.rewriters = tuple(items)
        for i, x in enumerate(self.rewriters) if options.get("gradient_release") else ():
            needed = [name for name, is_needed in _extras_of(x).items() if is_needed]
            if needed or not x.by_parameter:
                why = f"takes {needed[0]!r} of step()" if needed else "is not by_parameter"
                name = self._name_of(i)
                raise ValueError(
                    f"gradient_release=True with {name}, which {why}: omit one"
                )

    def _name_of(self, i: int) -> str:
        fn = self.rewriters[i].rewrite
        return f"{KEY}[{i}], {getattr(fn, '__qualname__', fn)}"

    def _check_whole(self, whole: bool) -> None:
        if self.rewriters and not whole:
            raise RuntimeError(
                "transforms= with accumulation='states' or optimizer_accumulation=True: "
                "they need a step's whole gradient. Allowed is accumulation='buffer'"
            )

    def refuse_transforms(self, what: str) -> None:
        """Raise if there are transforms, which a result would lose."""
        if self.rewriters:
            raise ValueError(f"{what} with transforms=, which it would lose: omit one")

    def _tell_transforms(self, extras: dict[str, object]) -> dict[str, object]:
        """Keep the extras that transforms take, and return those of the rules."""
        names = {*chain.from_iterable(map(_extras_of, self.rewriters))}
        self._told = {k: x for k, x in extras.items() if k in names}
        of_rules = {*chain.from_iterable([rule.extras for rule in self.rules()])}
        return {k: x for k, x in extras.items() if k not in names or k in of_rules}

    # What transforms keep, by name, in `state[p]` or, for all, in the first group.

    def _fresh(self, p: Tensor | None, *only: int) -> dict[str, Tensor]:
        """Return what transforms of a parameter, or (None) of all, keep at first."""
        tensors: dict[str, Tensor] = {}
        groups = self.param_groups if p is None else ()
        every = [p.detach() for group in groups for p in group["params"]]
        for i, x in enumerate(self.rewriters):
            if x.by_parameter is (p is None) or i not in (only or (i,)):
                continue
            with torch.no_grad():
                tree = x.init(every if p is None else p.detach())
                rows, spec = pytree.tree_flatten_with_path(tree)
                first = [KEY, str(i)][p is None :]
                names = [".".join((*first, *keys_of(path))) for path, _ in rows]
                if odd := [y for _, y in rows if not isinstance(y, Tensor)]:
                    raise TypeError(f"init of {self._name_of(i)} returned {odd[0]!r}")
                # Parameters, and what is kept, are written in place.
                tensors |= {name: y.clone() for name, (_, y) in zip(names, rows)}
            self._layouts[i, p] = names, spec
        return tensors

    def _layout(self, i: int, p: Tensor | None) -> tuple[list[str], pytree.TreeSpec]:
        if (i, p) not in self._layouts:
            self._fresh(p)
        return self._layouts[i, p]

    def _ensure(self, group: Group, p: Tensor, made: dict[Tensor, Entry]) -> None:
        """Make what transforms keep of a parameter, with its state, if it is missing."""
        known = self.state.get(p, {})
        places = [i for i, x in enumerate(self.rewriters) if x.by_parameter]
        lack = [i for i in places if not known.keys() >= {*self._layout(i, p)[0]}]
        if lack:
            how = self.rule_of(group), group_storage(group), group["capturable"]
            entry = ensure_state(self.state, made, path_of(group, p), p, *how)
            made[p] = {**entry, **self._fresh(p, *lack)}

    def _common(self) -> dict[str, Tensor]:
        """Return what transforms of all parameters keep, made if it is missing."""
        group = self.param_groups[0]
        if all([x.by_parameter for x in self.rewriters]):
            return {}
        if KEY not in group:
            home = self._first_param().device if group["capturable"] else "cpu"
            group[KEY] = {"step": torch.zeros((), device=home), **self._fresh(None)}
        return group[KEY]

    def _kept_of(self, p: Tensor) -> list[str]:
        """Return the names of what transforms keep of a parameter."""
        return [k for k in self.state.get(p, {}) if str(k).startswith(f"{KEY}.")]

    # A step.

    def _rewritten(
        self, works: list[Work], write: bool, made: dict[Tensor, Entry]
    ) -> tuple[list[Work], list[Write]]:
        """Return a step with rewritten gradients, and what is written besides."""
        rows, writes = dict[Tensor, Row](), list[Write]()
        for group, params, grads, batches in works:
            for p, g, m in zip(params, grads, batches or [WHOLE_BATCH] * len(params)):
                self._check_whole(write and not m.accumulate)
                check_grad(path_of(group, p), p, g)
                g = g if m.grad_scale is _WHOLE else g * m.grad_scale
                rows[p] = Row(g.to(held_dtype(p.dtype, g.dtype)).resolve_conj(), m.finite)
                self._ensure(group, p, made)
        if rows:
            self._run(rows, made, writes)
            if (step := self._common().get("step")) is not None:
                writes.append((step, step + 1.0, next(iter(rows.values())).flag))
        rewritten: list[Work] = []
        for group, params, _, batches in works:
            at = [i for i, p in enumerate(params) if rows[p].g is not None]
            its = batches and [batches[i]._replace(grad_scale=_WHOLE) for i in at]
            present = [params[i] for i in at]
            grads = [g for p in present if (g := rows[p].g) is not None]
            rewritten.append((group, present, grads, its))
        return rewritten, writes

    def _run(
        self, rows: dict[Tensor, Row], made: dict[Tensor, Entry], writes: list[Write]
    ) -> None:
        """Rewrite the gradients of rows."""
        paths = names_of(self.param_groups)
        absent = Row(None, next(iter(rows.values())).flag)

        def rewrite(
            i: int, ps: list[Tensor], entry: Entry, of: Tensor | None, step: Tensor
        ) -> None:
            transform, (names, spec) = self.rewriters[i], self._layout(i, of)
            picked, xs = [rows.get(p, absent) for p in ps], [p.detach() for p in ps]
            if "params" in transform.takes:
                xs = [x.to(held_dtype(x.dtype)) for x in xs]
            extras = {**self._told, "params": xs, "paths": [paths[p] for p in ps]}
            state = pytree.tree_unflatten([entry[name] for name in names], spec)
            inputs = [row.g for row in picked], state, step, extras
            new, after = transform.run(i, *inputs)
            for row, g in zip(picked, new):
                row.g = None if row is absent else g
            fields = zip(names, pytree.tree_leaves(after))
            writes.extend([(entry[name], x, picked[0].flag) for name, x in fields])

        with kernel_context(next(iter(rows)).device):
            for i, transform in enumerate(self.rewriters):
                if not transform.by_parameter:
                    common = self._common()
                    rewrite(i, [*paths], common, None, common["step"])
                    continue
                turns: dict[object, tuple[list[Tensor], Entry, Tensor]] = {}
                for p in [p for p, row in rows.items() if row.g is not None]:
                    entry: Entry = made.get(p) or self.state.get(p, {})
                    step = entry.get("step", _ZERO)
                    # One call for all that keep nothing and have taken as many steps.
                    alone = self._layout(i, p)[0] or step.device.type != "cpu"
                    key = p if alone else float(step)
                    turns.setdefault(key, ([], entry, step))[0].append(p)
                for ps, entry, step in turns.values():
                    rewrite(i, ps, entry, ps[0], step)

    def _by_leaf(
        self, work: Work, write: bool, count: bool, made: dict[Tensor, Entry]
    ) -> Callable[[], None]:
        """Compute an update of meta or fake tensors, and return what writes it."""
        group, params, grads, batches = work
        bound, writes = self.bound_of(group, params, group["capturable"]), list[Write]()
        rule, names = bound.rule, ("step", *bound.rule.running._fields)
        how = bound.starting_rule, group_storage(group), group["capturable"]
        batches = batches or [WHOLE_BATCH] * len(params)
        paths = [path_of(group, p) for p in params]
        for path, p, g in zip(paths, params, grads):
            check_grad(path, p, g)
        entries = [
            ensure_state(self.state, made, path, p, *how) for path, p in zip(paths, params)
        ]
        tensors = [[entry[name] for name in names] for entry in entries]
        counts = [(x, y) for x, *y in [list(map(_number, some)) for some in tensors]]
        scalars, after = scalars_after(bound, counts, coded=True)
        if rule.given:
            every = [*range(len(params))]
            scalars, _ = with_given(self, bound, params, scalars, counts, every)
        for i, (p, m, entry) in enumerate(zip(params, batches, entries)):
            leaf = Leaf(p.detach(), *state_in(rule, entry))
            now = microbatch_scalars(rule, scalars[i], m, write)
            with kernel_context(p.device):
                new = leaf_step(rule, leaf, grads[i], now, write, whole_means)
            pairs = zip(flat_leaf(leaf), flat_leaf(new))
            writes += [(x, y, m.finite) for x, y in pairs if y is not x]
            last = zip(tensors[i], (tensors[i][0] + 1.0, *after[i])) if count else ()
            writes += [(x, y, m.finite) for x, y in last]
        return partial(write_all, writes)

    def _loaded(
        self, match: Match, keep_dtypes: bool
    ) -> tuple[list[Group], dict[Tensor, Entry]]:
        """Return groups and entries, with what transforms keep in the right places."""
        groups, entries = super()._loaded(match, keep_dtypes)
        for group in groups:
            group.pop(KEY, None)
        saved, common = match.groups[0].get(KEY, {}), self._common()
        common = common and {"step": common["step"], **self._fresh(None)}
        texts = _unlike(common, saved, "param_groups[0]['transforms']")
        if common and not texts:
            state = {k: saved[k].to(x.device, copy=True) for k, x in common.items()}
            groups[0][KEY] = state
        for p, entry in entries.items():
            state = {k: x for k, x in entry.items() if str(k).startswith(f"{KEY}.")}
            if state or self.rewriters:
                where = f"state{path_of(self.group_of(p), p)}"
                texts += _unlike(self._fresh(p), state, where)
        warn_user(texts[0]) if texts else None
        return groups, entries


def _number(x: Tensor) -> Scalar:
    # A count without memory is taken for 0.
    return x if x.is_cuda else x.item() if has_memory(x) else 0.0


def _extras_of(x: GradientTransform) -> dict[str, bool]:
    known = ("params", "paths", *x.numbers)
    return {name: needed for name, needed in x.takes.items() if name not in known}


def _unlike(want: dict[str, Tensor], saved: Mapping[str, Tensor], where: str) -> list[str]:
    """Return how a saved state differs. Raise for tensors of other shapes."""
    for name, x in want.items():
        y = saved.get(name, x)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(
                f"{where}[{name!r}] is {tuple(y.shape)} of {y.dtype}, its transform keeps "
                f"{tuple(x.shape)} of {x.dtype}"
            )
    lacking, unused = want.keys() - saved.keys(), saved.keys() - want.keys()
    texts = [f"the state lacks {where}[{x!r}]: a transform begins anew" for x in lacking]
    return texts + [f"{where}[{x!r}] is of a transform that is not here" for x in unused]


@torch.no_grad()
def write_all(writes: list[Write]) -> None:
    """Write values to their targets, unless a flag is false."""
    for x, new, flag in writes:
        write_scalar(x, new, flag)
