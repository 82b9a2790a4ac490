"""State that is divided among the processes of a group: each steps what it owns.

An owner steps its parameters as it would alone, and sends them to the others. All processes
have the same param groups, so that schedules and changes by hand are as ever.
"""

from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed
from torch.utils import _pytree as pytree

from optimi_func.classes.groups import path_of
from optimi_func.core.checks import check_flag, check_grad, check_process_group, warn_user
from optimi_func.core.codes import GROUP, LEAST
from optimi_func.core.distributed import (
    any_distributed,
    comparable,
    is_distributed,
    to_local,
)
from optimi_func.core.lists import chunks
from optimi_func.core.math import scalar_dtype
from optimi_func.core.owners import (
    EVERY,
    Holders,
    agree,
    holders_of,
    map_cost,
    owners_of,
    rows_of,
)
from optimi_func.core.rule import Microbatch
from optimi_func.core.storage import entry_of, group_storage
from optimi_func.execution.plans import raise_versions
from optimi_func.state.checkpoints import Checkpoints
from optimi_func.state.convert import Entry, Group
from optimi_func.state.entry import ensure_state
from optimi_func.state.stored import fresh_like

# A group, some of its parameters, their gradients, and what each is to its step.
Work: TypeAlias = tuple[Group, list[Tensor], list[Tensor], list[Microbatch] | None]

BYTES = 1 << 22  # of a message, or one larger tensor
IN_FLIGHT = 2  # messages under way
_version = attrgetter("_version")


class Divided(Checkpoints):
    """The methods of an optimizer that several processes divide."""

    process_group: Any  # that holds copies of plain parameters, or None
    divides: bool  # the state, among the processes of this group
    _has_stepped: bool
    _idle: int  # steps before the first gradient
    _sent: deque[Callable[[], None]]  # messages under way

    def _take_group(self, options: Group) -> None:
        """Take process_group and divide_state out of the options."""
        group, divide = (
            options.pop("process_group", None),
            options.pop("divide_state", False),
        )
        self.process_group, self._sent = check_process_group(group), deque()
        self._owners, self._rows = dict[Tensor, int](), dict[Tensor, slice]()
        self._failed: Exception | None = None  # of an update that others wait for
        self._updates = False  # since `_end_together`
        check_flag("divide_state", divide)
        if divide and group is None:
            raise ValueError(
                "divide_state=True without process_group: allowed is the group of the "
                "processes that hold copies, such as torch.distributed.group.WORLD"
            )
        self.divides = divide and self.process_group is not None

    def _check_divided(self, first: int) -> None:
        """Raise if groups from `first` on, or a process_group, cannot be divided."""
        if self.divides:
            self.check_divides(first)
        elif self.process_group is not None:
            rules = self.rules()
            if rules and all(rule.whole is None for rule in rules):
                raise ValueError(
                    f"process_group= with {rules[0].name}, which maps no matrices that "
                    "could be divided: allowed is divide_state=True, or none"
                )

    def check_divides(self, first: int = 0) -> None:
        """Raise if the state of groups from `first` on cannot be divided."""
        for group, rule in list(zip(self.param_groups, self.rules()))[first:]:
            sharded = any(map(is_distributed, group["params"]))
            for refused, text in (
                (sharded, "a DTensor, whose state is divided as it is"),
                (rule.join is not None, f"{rule.name}, which joins sums of all parameters"),
            ):
                if refused:
                    raise ValueError(f"divide_state=True with {text}: omit one of them")

    def check_undivided(self, what: str) -> None:
        """Raise if this process has but a share of the state."""
        if self.divides:
            raise ValueError(
                f"{what} with divide_state=True: this process has but a share. "
                "Load state_dict(), called in all processes, into one without divide_state"
            )

    def _note_idle(self, works: list[Work]) -> None:
        """Warn at the second step of a distributed run if none has had a gradient yet."""
        params = [p for g in self.param_groups for p in g["params"] if p.requires_grad]
        alone = not (distributed.is_available() and distributed.is_initialized())
        if alone or any([ps for _, ps, _, _ in works]) or any_distributed(params):
            self._idle = 3  # from now on it is no mistake, as of an actor that waits
        elif params:
            self._idle += 1
        if self._idle == 2:
            warn_user(
                f"{type(self).__name__} has taken two steps, and none of its {len(params)} "
                f"trainable parameters ({path_of(self.group_of(params[0]), params[0])}, "
                "...) has had a gradient. fully_shard and parallelize_module replace a "
                "model's parameters: make the optimizer after them"
            )

    def __getstate__(self) -> dict[str, object]:
        self.check_undivided("a copy or pickle of an optimizer")
        return super().__getstate__()

    def owners(self, of: Iterable[Tensor] | None = None) -> dict[Tensor, int]:
        """Return the owner of each parameter that takes gradients, at least `of` these.

        Parameters get an owner together, when there are new ones. Owners stay. One that is
        larger than a share is cut, and its owner is EVERY: each process has some rows.
        """
        if of is not None and all([p in self._owners for p in of]):
            return self._owners
        groups = self.param_groups
        every = [(p not in self._owners, p, g) for g in groups for p in g["params"]]
        every = [
            x for x in every if not x[0] or x[1].requires_grad or x[1].grad is not None
        ]
        if any([new for new, _, _ in every]):
            every.sort(key=lambda x: x[0])
            rank, count = self.process_group.rank(), self.process_group.size()
            known = [self._owners[p] for new, p, _ in every if not new]
            self._owners = self.shared_by(count, [(g, p) for _, p, g in every], known)
            cut = [p for p, owner in self._owners.items() if owner == EVERY]
            self._rows = {p: rows_of(p, count)[rank] for p in cut}
        return self._owners

    def shared_by(
        self, count: int, every: list[tuple[Group, Tensor]], known: Sequence[int] = ()
    ) -> dict[Tensor, int]:
        """Return the owners of parameters in `count` processes; the first are `known`."""
        loads = [self._load_of(*x) for x in every]
        to_cut = [i for i, x in enumerate(every) if self._can_cut(*x, count)]
        owners = owners_of(loads, count, known, to_cut)
        return {p: owner for (_, p), owner in zip(every, owners)}

    def _load_of(self, group: Group, p: Tensor) -> tuple[int, ...]:
        """Return what is balanced: bytes of state and parameter, and the map's cost."""
        rule = self.rule_of(group)
        cost = map_cost((*p.shape,)) if rule.whole else 0
        fresh = fresh_like(rule, p, group_storage(group))
        state_bytes = sum([x.nbytes for x in entry_of(fresh.state, fresh.comp).values()])
        return state_bytes, p.nbytes, cost

    def owns(self, p: Tensor) -> bool:
        """Return True if this process has p's state and steps it."""
        if not self.divides:
            return True
        return self.owners([p]).get(p) in (self.process_group.rank(), EVERY)

    def speaks_for(self, p: Tensor) -> bool:
        """Return True in one of the processes that own p."""
        return self.owns(p) and (p not in self._rows or self.process_group.rank() == 0)

    def _can_cut(self, group: Group, p: Tensor, count: int) -> bool:
        """Return True if each of p's rows is stepped as if there were no others."""
        rule = self.rule_of(group)
        joins = (rule.whole, rule.means, rule.measure, *rule.given)
        alike = p.is_contiguous() and not (
            p.is_complex() or group["cautious"] or any(joins)
        )
        if not alike or p.dim() == 0 or p.numel() < LEAST * count:
            return False
        return min([p[rows].numel() for rows in rows_of(p, count)]) >= LEAST  # of codes

    def part_of(self, p: Tensor, x: Tensor | None = None) -> Tensor:
        """Return a view of the rows of p, or of x, of which this process has the state.

        Return p or x itself if p is not cut.
        """
        x = p if x is None else x
        return x.detach()[self._rows[p]] if self.divides and p in self._rows else x

    def parts_of(self, params: list[Tensor]) -> list[Tensor]:
        """Return `part_of` for each parameter."""
        return list(map(self.part_of, params)) if self.divides and self._rows else params

    def part_of_entry(self, p: Tensor, entry: Entry) -> Entry:
        """Return the part of an entry of all of p that belongs to `part_of` it."""
        cut = self.divides and p in self._rows
        return entry_in(p, entry, self._rows[p]) if cut else entry

    def ensured(
        self, made: dict[Tensor, Entry], path: object, p: Tensor, *how: Any
    ) -> Entry:
        """Return `ensure_state` of what this process has of p."""
        if (part := self.part_of(p)) is p:
            return ensure_state(self.state, made, path, p, *how)
        if p not in made:
            made[p] = ensure_state({part: self.state.get(p, {})}, {}, path, part, *how)
        return made[p]

    def _mine(self, works: list[Work]) -> list[Work]:
        """Return the part of a step that is this process's."""
        if not self.divides:
            return works
        owners = self.owners([p for _, params, _, _ in works for p in params])
        rank, parts = self.process_group.rank(), list[Work]()
        for group, params, grads, batches in works:
            at = [i for i, p in enumerate(params) if owners[p] in (rank, EVERY)]
            its, own = None if batches is None else [batches[i] for i in at], list[Tensor]()
            for p, g in [(params[i], grads[i]) for i in at]:
                if p in self._rows:
                    check_grad(path_of(group, p), p, g)
                own.append(self.part_of(p, g))
            parts.append((group, [params[i] for i in at], own, its))
        return parts

    def _tell(
        self, called: str, works: list[Work] | None = None, error: object = None
    ) -> None:
        """Raise, in all processes, if others call something else or step others."""
        if not self.divides:
            return
        failed = error and f"{type(error).__name__}: {error}"
        facts = {"the call": called, "an error": failed}
        if works is not None:
            owners = self.owners()
            stepped = {id(p) for _, params, _, _ in works for p in params}
            for i, group in enumerate(self.param_groups):
                params = group["params"]
                every = zip(group.get("param_names") or range(len(params)), params)
                lack = [x for x, p in every if p in owners and id(p) not in stepped]
                facts[f"parameters without a gradient in param group {i}"] = lack
            facts |= self.numbers(type) | self._weights()
            facts["the owners"] = list(owners.values())
        text = f"other processes do not do the same as this one, {called}"
        agree([Holders("", (), self._home(), self.process_group, None, 1)], facts, text)

    def _home(self) -> torch.device:
        """Return the device of the first parameter, on which messages are sent."""
        return next(p.device for group in self.param_groups for p in group["params"])

    def _spread(self, params: list[Tensor]) -> None:
        """Copy parameters from their owners to the other processes, if there are owners."""
        if self.divides:
            owners, group = self.owners(params), self.process_group
            owned: list[list[Tensor]] = [[] for _ in range(group.size())]
            for p in params:
                if p in self._rows:
                    for tensors, rows in zip(owned, rows_of(p, len(owned))):
                        tensors.append(p.detach()[rows])
                elif p in owners:
                    owned[owners[p]].append(p)
            broadcast(owned, group, self._sent)
            del owned[group.rank()]
            raise_versions(list(chain.from_iterable(owned)))

    def _arrive(self) -> None:
        """Wait for the messages that are under way."""
        while self.divides and self._sent:
            self._sent.popleft()()

    @contextmanager
    def _keep_error(self) -> Generator[None]:
        """Keep an error inside for `_end_together`, because others wait for messages."""
        try:
            yield
        except Exception as error:
            self._failed = self._failed or error

    def _send(self, works: list[Work], write: bool, last: bool) -> None:
        """Send what was stepped to the other processes, and end the step if it is all."""
        params = [p for _, params, _, _ in works for p in params]
        self._updates |= bool(params)
        if write:
            self._spread(params)
        if last:
            self._end_together()

    def _end_together(self) -> None:
        """Wait for messages, and raise in all processes if one has failed to update."""
        if not (self.divides and self._updates):
            return
        self._arrive()
        error, self._failed, self._updates = self._failed, None, False
        try:
            self._tell("the end of an update", error=error)
        except Exception as raised:
            raise raised from error
        if error is not None:
            raise error

    def _of_owners(self, measured: list[float]) -> list[float]:
        """Return numbers of all processes, of which each has 0 for what it does not own."""
        if not self.divides:
            return measured
        home = self._home()
        total = torch.tensor(measured, dtype=scalar_dtype(home), device=home)
        distributed.all_reduce(total, group=self.process_group)
        return total.tolist()

    def whole_state(self, state: dict[int, Entry]) -> dict[int, Entry]:
        """Return the state of all processes, on the host: those of others are copies."""
        if not self.divides:
            return state
        self._tell("state_dict()")
        group, whole = self.process_group, dict[int, Entry]()
        params = [p for group in self.param_groups for p in group["params"]]
        parts = {i: list[Entry]() for i, p in enumerate(params) if p in self._rows}
        state = pytree.tree_map_only(Tensor, lambda x: x.detach().cpu(), state)
        for owner in range(group.size()):  # one after the other, to bound the messages
            message = [state]
            distributed.broadcast_object_list(message, group=group, group_src=owner)
            for i in parts.keys() & message[0].keys():
                parts[i].append(message[0].pop(i))
            whole |= message[0]
        whole |= {i: x for i, x in state.items() if i not in parts}
        for i, entries in parts.items():
            for name in entries[0] if entries else ():
                of = [entry[name] for entry in entries]
                whole.setdefault(i, {})[name] = _joined(name, of, len(params[i]))
        return {
            i: whole[i] for i in dict.fromkeys([*range(len(params)), *whole]) if i in whole
        }

    def holders_of(self, group: Group, p: Tensor, name: object = "") -> Holders | None:
        """Return the processes that divide the map of p, or None if one maps it alone."""
        if self.rule_of(group).whole is None or self.divides:
            return None
        return holders_of(p, name, self.process_group)

    def numbers(
        self, of_device: Callable[[Tensor], object] = _version, only: Container[int] = ()
    ) -> dict[str, object]:
        """Return groups' hyperparameters, to compare; `only` are the ids of some groups."""
        return {
            f"{name} of param group {i}": comparable(group[name], of_device)
            for i, group in enumerate(self.param_groups)
            if not only or id(group) in only
            for name in self._factory_of(group)[1]
        }

    def _weights(self) -> dict[str, object]:
        """Return hashes of the copies in `process_group` before their first step."""
        if self.process_group is None or self._has_stepped:
            return {}
        params = [p.detach() for group in self.param_groups for p in group["params"]]
        plain = to_local([p for p in params if p.numel() and not is_distributed(p)])
        hashes = [str(torch.hash_tensor(p)) for p in plain]
        return {"hashes of parameters, which process_group= says are copies": hashes}


def entry_in(p: Tensor, entry: Entry, rows: slice) -> Entry:
    """Return copies of some rows of p's entry; what has no rows stays."""
    part = dict(entry)
    for name, x in entry.items():
        if name.endswith("_scale") and p.dim() == 1:
            part[name] = x[rows.start // GROUP : -(-rows.stop // GROUP)].clone()
        elif isinstance(x, Tensor) and x.dim() and len(x) == len(p):
            part[name] = x[rows].clone()
    return part


def _joined(name: str, parts: list[Any], rows: int) -> Any:
    """Return a value of the entry of what is cut, from those of its parts."""
    if not (isinstance(parts[0], Tensor) and parts[0].dim()):
        return parts[0]
    cut = name.endswith("_scale") or sum(map(len, parts)) == rows
    return torch.cat(parts) if cut else parts[0]


@torch.no_grad()
def broadcast(
    owned: list[list[Tensor]],
    group: "distributed.ProcessGroup | None",
    sent: deque[Callable[[], None]],
) -> None:
    """Copy each process's tensors to the others. The lists are in the order of processes.

    Messages from all processes in turn are put into `sent`, of which the last have to be
    called by the caller, to end them in this order.
    """
    for device in dict.fromkeys([x.device for x in chain.from_iterable(owned)]):
        # Not .detach(): a model may run twice before a backward that saved a buffer.
        data = [
            [x.data for x in tensors if x.device == device and x.numel()]
            for tensors in owned
        ]
        # Wide dtypes first, so that each part of a message is aligned for its own.
        data = [sorted(tensors, key=lambda x: -x.itemsize) for tensors in data]
        parts = [list(chunks(tensors, BYTES, lambda x: x.nbytes)) for tensors in data]
        for turn in zip_longest(*parts, fillvalue=[]):
            for owner, part in enumerate(turn):
                if part:
                    sent.append(_send(part, owner, group))
                if len(sent) > IN_FLIGHT:
                    sent.popleft()()


def _send(
    tensors: list[Tensor], owner: int, group: "distributed.ProcessGroup | None"
) -> Callable[[], None]:
    """Begin to send tensors from their owner, and return a function that ends it."""
    flat = [x.reshape(-1).view(torch.uint8) for x in tensors]
    alone = len(tensors) == 1 and tensors[0].is_contiguous()  # is its own message
    message = flat[0] if alone else torch.cat(flat)
    work = distributed.broadcast(message, group=group, group_src=owner, async_op=True)

    @torch.no_grad()
    def end() -> None:
        assert work is not None
        work.wait()
        if not (alone or distributed.get_rank(group) == owner):
            for x, data in zip(tensors, message.split([x.nbytes for x in tensors])):
                x.copy_(data.view(x.dtype).view(x.shape))

    return end
