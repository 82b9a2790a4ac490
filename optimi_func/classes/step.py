"""The step of a class: its groups' updates, each by a plan that is found or made.

Everything is checked and compiled before anything is written.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, product
from operator import attrgetter, is_, itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from optimi_func.classes.copies import Work
from optimi_func.classes.extras import Given, with_given
from optimi_func.classes.groups import (
    UNSCHEDULED,
    Group,
    aligned,
    as_scalar,
    check_capture,
    check_modes,
    executor_of,
    path_of,
)
from optimi_func.classes.rewriting import Rewriting, Write, write_all
from optimi_func.core.checks import check_grad, check_moves_state
from optimi_func.core.distributed import any_distributed, to_local
from optimi_func.core.leaf import init_leaf
from optimi_func.core.owners import Holders, agree
from optimi_func.core.rule import Leaf, Named, Rule, Scalar, Storage
from optimi_func.core.storage import group_storage, state_in
from optimi_func.core.torch_private import has_memory
from optimi_func.execution.kernels import kernel_context
from optimi_func.execution.plans import ClassPlan
from optimi_func.execution.scalars import pack, scalars_after
from optimi_func.execution.slots import Step
from optimi_func.execution.sums import Part, Unit, join, write_running
from optimi_func.execution.tensors import is_capturing, uncollected
from optimi_func.pure.casts import PLAIN
from optimi_func.pure.functional import FunctionalOptimizer
from optimi_func.state.convert import Entry, renamed
from optimi_func.state.entry import ensure_state, insert_made
from optimi_func.state.stored import begin, mask_like, rows_of

# Plans that are kept, besides one for each parameter. If lists of parameters never come
# again, as with experts, the oldest plans are dropped.
_LISTS = 32


class Steps(Rewriting, Given):
    """The methods of an optimizer that step. It keeps values of groups, and plans."""

    factory: ClassVar[Callable[..., FunctionalOptimizer]]
    optimizer_accumulation: bool
    releases: list[Any]
    skips_steps: bool  # with a gradient that is not finite

    def _clear_caches(self) -> None:
        """Make new caches, but for plans. They are not pickled."""
        self._bound: dict[int, tuple[Any, Any]] = {}
        self._plans: dict[object, ClassPlan] = self.__dict__.get("_plans", {})
        self._has_stepped, self._idle = False, 0
        self._layouts = {}
        self._grouped: list[tuple[int, int]] = []
        self._group_index: dict[Tensor, int] = {}

    def _factory_of(
        self, group: Group
    ) -> tuple[Callable[..., FunctionalOptimizer], tuple[str, ...]]:
        """Return the function that makes a group's value, and its keywords, lr first."""
        del group
        return type(self).factory, self.keywords

    def bound_of(
        self, group: Group, params: Sequence[Tensor] = (), capturable: bool = False
    ) -> FunctionalOptimizer:
        """Return the pure optimizer with a group's present hyperparameters.

        It is the same object as before if none has changed. Tensors go through `as_scalar`
        with params and capturable.
        """
        factory, keywords = self._factory_of(group)
        inputs = *map(group.__getitem__, keywords), factory
        last, bound = self._bound.get(id(group), (None, None))
        # Values that are the same objects as before were checked before.
        if last is not None and all(map(is_, inputs[1:], last[1:])):
            if inputs[0] is last[0]:
                return bound
            if type(inputs[0]) is float:
                bound = bound.with_lr(inputs[0])
                self._bound[id(group)] = inputs, bound
                return bound
        flat = [y for x in inputs[:-1] for y in (x if isinstance(x, tuple) else (x,))]
        plain, numbers = PLAIN.issuperset(map(type, flat)), inputs[:-1]
        if not plain and self._filled(group):
            return self.bound_of(group, params, capturable)
        if not plain:
            try:
                numbers = [as_scalar(x, params, capturable) for x in numbers]
            except RuntimeError:
                self._check_numbers(group)
                raise
        for name, x in () if plain else zip(keywords, numbers):
            if name in UNSCHEDULED and (callable(x) or isinstance(x, dict | tuple)):
                raise TypeError(
                    f"a group has {name}={x!r}: allowed are numbers and tensors of one "
                    "element; for a schedule use torch.optim.lr_scheduler"
                )
        make = getattr(factory, "kept", factory)
        bound = make(**renamed(dict(zip(keywords, numbers)), self._our_names))
        # Tensors and numpy's arrays have this.
        objects = () if plain else flat
        mutable = any([isinstance(x, list) or hasattr(x, "__array__") for x in objects])
        self._bound[id(group)] = None if mutable else inputs, bound
        return bound

    def _update(self, works: list[Work], write: bool, count: bool) -> dict[Tensor, Part]:
        """Check everything, compile everything, and then write.

        `works` are groups, some of their parameters, a gradient for each, and what each is
        to its step, or None if it is the whole of it. write=False moves the state alone,
        and count=False leaves the step counts, because the step goes on. Returns the parts
        of sums that `finish_step` joins.
        """
        # First gradients make state, which joins the optimizer once nothing can fail.
        # Written as literals: dict[Tensor, Entry]() takes a microsecond at every step.
        made: dict[Tensor, Entry] = {}
        rewritten: list[Write] = []
        parts: dict[Tensor, Part] = {}
        divided: dict[int, list[Holders]] = {}
        runs: list[Callable[[], dict[int, Part] | None]] = []
        on_host, where = True, None
        if self.rewriters:
            works, rewritten = self._rewritten(works, write, made)
        for work in works:
            run, host, holders = self._prepare(work, write, count, made)
            runs.append(run)
            on_host = on_host and host
            if holders:
                divided[id(work[0])] = holders
            if where is None and work[1]:
                where = work[1][0].device
        if write and divided:
            facts = self._facts(divided, works)
            agree([x for holders in divided.values() for x in holders], facts)
        self._has_stepped = True
        if write and count and "step" in self.__dict__:
            self._opt_called = True  # A scheduler asks, and release need not call `step`.
        on_host = on_host and not rewritten
        with nullcontext() if on_host or where is None else kernel_context(where):
            if made:
                insert_made(self.state, made)
            for (_, params, _, _), run in zip(works, runs):
                if sums := run():
                    parts.update({params[i]: part for i, part in sums.items()})
            if rewritten:
                write_all(rewritten)
        return parts

    def _prepare(
        self, work: Work, write: bool, count: bool, made: dict[Tensor, Entry]
    ) -> tuple[Callable[[], dict[int, Part] | None], bool, list[Holders]]:
        """Check and compile a group's update, and return the function that runs it.

        The second result is True if that calls no operation of torch, so that modes such as
        autocast do not matter. The third are the processes that divide it.
        """
        group, params, grads, microbatches = work
        if not params:  # other processes may have gradients, and are told
            idle = [self.holders_of(group, p) for p in group["params"]]
            return lambda: None, True, [x for x in idle if x is not None]
        if _is_cuda(params[0]) and is_capturing(params[0].device):
            check_capture(group, params, self.state, self._factory_of(group)[1])
        # A step that the device may skip is counted there.
        capturable, flagged = group["capturable"], False
        if microbatches is not None:
            flags = [m.finite for m in microbatches]
            capturable = capturable or any([flag is not None for flag in flags])
            flagged = capturable and len(set(map(id, flags))) > 1
        bound = self.bound_of(group, params, capturable)
        if group.get("differentiable"):
            check_modes(group)  # raises
        if not write:
            check_moves_state(bound.rule)
        ids = tuple(map(id, params))
        key = *_asked(group), capturable, flagged, *ids
        try:
            plan, tensors = self._plans.get(key), None
        except TypeError:
            if not (self._filled(group) or capturable != group["capturable"]):
                raise
            return self._prepare(work, write, count, made)
        if plan is not None and plan.rule is not bound.rule:
            plan = None
        if plan is not None:
            # A tensor's hash is a call of Python.
            alone = len(self.state) == len(ids) and tuple(map(id, self.state)) == ids
            entries = self.state.values() if alone else map(self.state.get, params)
            tensors = plan.current(params, list(entries))
        if plan is None or tensors is None:
            if not all(map(has_memory, params)):
                return self._by_leaf(work, write, count, made), False, []
            with uncollected(), kernel_context(params[0].device):
                plan = self._plan(group, bound, capturable, flagged, params, made, plan)
                tensors, plan.made = plan.made, []
                self._keep(key, plan)
        if plan.viewed:
            grads = to_local(aligned(group, params, grads))
        counts = plan.counts.now(tensors)
        if bound.rule.join is not None:
            new = [p for p in params if p in made and "step" not in self.state.get(p, {})]
            where = params[0].device if capturable else None
            running = self._running(bound, group, [made[p] for p in new], where)
            counts = [(step, running) for step, _ in counts]
        scalars, after = scalars_after(bound, counts, plan.coded)
        at, executor = plan.counts.at, executor_of(group)
        if bound.rule.given:
            scalars, at = with_given(self, bound, params, scalars, counts, at)
        packed, at = pack(bound.rule, scalars, at, microbatches, write)
        step = Step(plan.columns(tensors, grads), packed, at, write)

        def check() -> None:
            if any_distributed(grads):
                aligned(group, params, grads)  # raises, because their parameters are none
            for p, part, g in zip(params, step.columns.own[0], grads):
                check_grad(path_of(group, p), part, g)

        launches, host = plan.launches(executor, step, check)
        host = host and plan.counts.native is not None and all(map(_on_host, packed))
        # Autograd has not seen that the local shards of these were written.
        moved = params if write and plan.viewed else []
        run = partial(plan.run, launches, tensors, step, after, moved, count)
        return run, host, plan.holders

    def _plan(
        self,
        group: Group,
        bound: FunctionalOptimizer,
        capturable: bool,
        flagged: bool,
        params: list[Tensor],
        made: dict[Tensor, Entry],
        old: ClassPlan | None,
    ) -> ClassPlan:
        """Return a plan, if possible of an old one. New entries are put in `made`."""
        if old is not None and self.state and not (made or capturable):
            # Entries that differ from checked ones in addresses: only counts are checked.
            plan = old.moved(params, [self.state.get(p, {}) for p in params])
            if plan and all([step >= 0.0 for step, _ in plan.counts.now(plan.made)]):
                return plan
        how = bound.starting_rule, group_storage(group), capturable
        named = [(path_of(group, p), p) for p in params]
        entries = [ensure_state(self.state, made, *pair, *how) for pair in named]
        if old is not None and (plan := old.moved(params, entries)) is not None:
            return plan
        holders = [self.holders_of(group, p, path) for path, p in named]
        return ClassPlan(bound.rule, capturable, flagged, params, entries, holders)

    @torch.no_grad()
    def reset(
        self, params: Tensor | Iterable[Tensor] | None = None, rows: object = None
    ) -> None:
        """Set the state of parameters to its first values, as after writing to them.

        Moments, step counts, running scalars and compensations begin anew, in the tensors
        that are there and in every storage. No parameter is written to, and values that
        other code keeps in `state[p]` stay. Running scalars that several parameters have in
        common, as Prodigy's d, begin anew if all of these are given.

        Args:
            params: A parameter, or several. None: all.
            rows: Indices along the first dimension of each of `params`, or a bool for each.
                Only the state of these rows begins anew, and counts go on. None: all.

        Raises:
            ValueError: A parameter that is not the optimizer's; rows without params, out of
                range, or of state that is not divided by rows; an open accumulation cycle.
            TypeError: Something that is no parameter.
            RuntimeError: In eval mode (Schedule-Free). Nothing is written if it raises.

        >>> from optimi_func import SGD
        >>> w = torch.nn.Parameter(torch.zeros(3))
        >>> w.grad, optimizer = torch.ones(3), SGD([w], lr=1.0, momentum=0.9)
        >>> optimizer.step()
        >>> optimizer.reset(w, rows=[0])
        >>> optimizer.state[w]["momentum_buffer"]
        tensor([0., 1., 1.])
        """
        self.check_train_mode("reset()")
        if self.in_cycle():
            raise ValueError("reset() inside an accumulation cycle: end the cycle first")
        if rows is not None and params is None:
            raise ValueError("reset(rows=...) without params: say of which parameters")
        every = [p for group in self.param_groups for p in group["params"]]
        some = [params] if isinstance(params, Tensor) else params
        targets = every if some is None else list(some)
        works: list[tuple[Rule, Named, Tensor, Storage, Tensor | None, bool]] = []
        made = dict[Tensor, Entry]()
        for p in targets:
            if not isinstance(p, Tensor):
                raise TypeError(f"reset(params=...) got {p!r:.80}: allowed are parameters")
            group = self.group_of(p)
            capturable = group["capturable"]
            bound, where = self.bound_of(group, [p], capturable), path_of(group, p)
            rule, storage = bound.starting_rule, group_storage(group)
            anew = None if rows is None else rows_of(rule, where, p, rows)
            if rows is not None and (names := self._kept_of(p)):
                raise ValueError(f"reset(rows=...) with {names[0]!r} of a transform")
            if "step" in self.state.get(p, {}):
                ensure_state(self.state, made, where, p, rule, storage, capturable)
                coeffs, _ = bound.advance(1.0, rule.running())
                units = [] if rule.join is None else self._unit_of(group)
                together = {q for x in units for q in x["params"]} <= {*targets}
                works.append((rule, coeffs, p, storage, anew, together))
        insert_made(self.state, made)
        for rule, coeffs, p, storage, anew, together in works:
            entry, mask = self.state[p], None if anew is None else mask_like(p, anew)
            begin(rule, coeffs, p, storage, entry, mask, anew)
            if mask is None:
                for name in self._kept_of(p):
                    del entry[name]
                entry["step"].zero_()
                for name, x in rule.running()._asdict().items() if together else ():
                    entry[name].fill_(x)
        if params is None:
            self.param_groups[0].pop("transforms", None)
        self._join_loaded()

    def in_cycle(self) -> bool:
        """Return True if a step has taken only a part of its gradients."""
        return self.optimizer_accumulation or any(x.accumulating for x in self.releases)

    def _unit_of(self, group: Group) -> list[Group]:
        """Return the groups that have the same running scalars, if their rule joins."""
        return [group]

    def lead_of(self, group: Group) -> Entry | None:
        """Return the entry whose running scalars are those of a group, if one has any."""
        params = chain.from_iterable([x["params"] for x in self._unit_of(group)])
        return next((x for x in map(self.state.get, params) if x and "step" in x), None)

    def _running(
        self,
        bound: FunctionalOptimizer,
        group: Group,
        fresh: list[Entry],
        device: torch.device | None,
    ) -> tuple[Scalar, ...]:
        """Return a group's running scalars (None: as numbers), which `fresh` take over."""
        names = bound.rule.running._fields
        lead, host = self.lead_of(group) or fresh[0], device is None
        for name, entry in product(names, fresh):
            entry[name].copy_(lead[name])
        values = tuple([lead[x].item() if host else lead[x].to(device) for x in names])
        value = group.get(names[0], shown := lead[names[0]])
        # The host would wait for a tensor on a device.
        if value is not shown and (host or not isinstance(value, Tensor)):
            _, start = bound.advance(1.0, bound.rule.running())
            if value != (kept := shown.item() or float(start[0])):
                raise ValueError(
                    f"a group's {names[0]}={value!r} is computed by each step, which would "
                    f"go on from {kept}: allowed is to read it. reset() begins anew, also "
                    "after state.clear()"
                )
        return values

    def finish_step(self, parts: dict[Tensor, Part], count: bool = True) -> None:
        """End a step: join what follows from sums over parameters (see `Rule.join`).

        `parts` are what `update` has returned for all parameters that stepped.
        """
        if not (parts and count):
            return
        homes = {id(self.group_of(p)) for p in parts}
        # In the order of the groups, because all processes send the same message.
        every = [self._unit_of(x) for x in self.param_groups if id(x) in homes]
        units = {id(groups[0]): groups for groups in every}.values()
        with kernel_context(next(iter(parts)).device):
            pairs = [self._unit(groups, parts) for groups in units]
            for (_, entries), new in zip(pairs, join([unit for unit, _ in pairs])):
                write_running(entries, new)
            for group in chain.from_iterable(units):
                self._publish_running(group)

    def _unit(
        self, groups: list[Group], parts: dict[Tensor, Part]
    ) -> tuple[Unit, list[Entry]]:
        """Return the sums of groups, and the entries to keep what is made of them."""
        first, lead, entries = groups[0], self.lead_of(groups[0]) or {}, list[Entry]()
        bound = self.bound_of(first, first["params"], first["capturable"])
        rule, values = bound.rule, [lead[name] for name in bound.rule.running._fields]
        if not (first["capturable"] or any(map(_is_cuda, values))):
            values = [x.item() for x in values]
        unit = Unit(rule, *bound.advance(1.0, rule.running(*values)), [], [])
        for p in chain.from_iterable([group["params"] for group in groups]):
            if "step" in (entry := self.state.get(p, {})):
                entries.append(entry)
                leaf = partial(lambda p, entry: Leaf(p, *state_in(rule, entry)), p, entry)
            elif p.requires_grad:  # it has had no gradient yet
                leaf = partial(init_leaf, bound.starting_rule, p, group_storage(first))
            else:
                continue
            unit.add(p, leaf, parts.get(p))
        return unit, entries

    def _publish_running(self, group: Group) -> None:
        """Put the first of the joined running scalars into a group, under its name."""
        bound = self.bound_of(group, group["params"], group["capturable"])
        if bound.rule.join is not None:
            name, lead = bound.rule.running._fields[0], self.lead_of(group)
            _, first = bound.advance(1.0, bound.rule.running())
            group[name] = float(first[0])
            if lead is not None and (group["capturable"] or lead[name].is_cuda):
                group[name] = lead[name]
            elif lead is not None:
                group[name] = lead[name].item() or group[name]

    def _join_loaded(self) -> None:
        for group in self.param_groups:
            self._publish_running(group)

    def _keep(self, key: object, plan: ClassPlan) -> None:
        """Keep a plan, in the place of the oldest if there are too many."""
        most = _LISTS + sum([len(group["params"]) for group in self.param_groups])
        while len(self._plans) >= most:
            self._plans.pop(next(iter(self._plans)), None)
        self._plans[key] = plan


_asked = itemgetter("storage", "kahan_sum", "state_dtype")
_on_host, _is_cuda = attrgetter("on_host"), attrgetter("is_cuda")
