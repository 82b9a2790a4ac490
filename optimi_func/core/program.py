"""Programs: leaf steps without a compiler, whose operations write into few buffers.

The operations of a leaf step are recorded once, on an example. A program repeats them for
tensors of any shape. A result is written where the step leaves it as soon as what is there
has been read, else to a buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from optimi_func.core.codes import GROUP, is_dense
from optimi_func.core.leaf import (
    answering,
    compute_dtype,
    leaf_round,
    leaf_step,
    noting_sums,
    with_given,
)
from optimi_func.core.packed import fill
from optimi_func.core.rehearsal import device_type
from optimi_func.core.rule import Rule, Scalars
from optimi_func.core.runtime import runtime
from optimi_func.core.storage import (
    BITS,
    GRAD,
    PARAM,
    leaf_in,
    scales_in,
    tensors_of,
)

# Elements of a tensor that is joined with others, and of those together.
JOINED, TOGETHER = 1 << 13, 1 << 15
# The temporaries of a tensor have at most so many bytes, or so many for each element.
BYTES, EACH = 2_000_000, 2
# Elements of a slice: at least, and at most for each thread of the CPU. A call on another
# device costs as much as the last number.
LEAST, PER_THREAD, ELSEWHERE = 1 << 12, 1 << 17, 1 << 18
_EXAMPLE = (3, 2)  # the shape of the example's tensors
_COPIES = {"_to_copy", "clone"}
_SHOWN = {*_COPIES, "view"}  # elementwise too, as the bits of another dtype


class Kind(NamedTuple):
    """The choices that a program is recorded for."""

    rule: Rule
    statics: tuple[bool | str | None, ...]  # see `Packed`
    # Names and dtypes of g, p, the state, the compensation and what the rule is given
    # besides.
    tensors: tuple[tuple[str, torch.dtype], ...]
    device: torch.device
    write: bool
    in_place: bool  # the results replace what they are computed from
    # The requests of the step whose answers are given, and how many numbers each has.
    known: tuple[tuple[str, int], ...] = ()
    round: str | None = None  # a request of the step: return the tensors that it is about


class _Call(NamedTuple):
    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    more: dict[str, Any]
    result: Tensor

    @property
    def read(self) -> list[Tensor]:
        """Return the tensors that it reads."""
        every = chain(self.args, self.more.values())
        return [x for x in every if isinstance(x, Tensor)]


class _Recorder(TorchDispatchMode):
    """Records operations, but raises TypeError for one that is not elementwise.

    Means are, to a 0-d tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.same: dict[int, Tensor] = {}  # by the id of a result, what it is

    def record(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation, and note it."""
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        args, more = pytree.tree_map_only(Tensor, self.of, (tuple(args), kwargs or {}))
        whole = isinstance(result, Tensor) and result.shape == _EXAMPLE
        allowed = torch.Tag.pointwise in func.tags or name in _SHOWN
        if func._schema.is_mutable or not isinstance(result, Tensor):
            raise TypeError(f"{func} is not recorded")
        call = _Call(name, getattr(torch, name, func), args, more, result)
        inputs = [x for x in pytree.tree_leaves((args, more)) if isinstance(x, Tensor)]
        if func.is_view and _same(result, args[0]):
            self.same[id(result)] = args[0]
            call = call._replace(args=(), more={})  # it keeps the id
        elif not ((whole and allowed) or result.dim() == 0) or len(inputs) > len(call.read):
            raise TypeError(f"{func} is not recorded")
        self.calls.append(call)
        return result

    def of(self, x: Tensor) -> Tensor:
        """Return the tensor that x shows."""
        return self.same.get(id(x), x)


# Within the class torch would wrap it in a function that imports the compiler.
_Recorder.__torch_dispatch__ = _Recorder.record  # pyright: ignore[reportAttributeAccessIssue]


def _same(x: Tensor, y: object) -> bool:
    """Return True if x shows all of y."""
    if not isinstance(y, Tensor):
        return False
    return (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())


class Room:
    """The buffers of a step, which its programs use one after another.

    Fresh memory for each tensor would cost as much as the operations on it.
    """

    def __init__(self) -> None:
        # By device, because a step may have parameters on several.
        self._flat: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._made: dict[object, list[Tensor]] = {}

    def buffers(self, dtypes: tuple[torch.dtype, ...], like: Tensor) -> list[Tensor]:
        """Return buffers of these dtypes, in the shape of a tensor and its memory order."""
        key = dtypes, like.shape, like.stride(), like.device
        if key not in self._made:
            size, device = like.numel(), like.device
            places = [(i, dtype, device) for i, dtype in enumerate(dtypes)]
            for x in places:
                if x not in self._flat or len(self._flat[x]) < size:
                    self._made.clear()  # which hold a smaller one
                    self._flat.pop(x, None)
                    self._flat[x] = torch.empty(size, dtype=x[1], device=device)
            buffers = [self._flat[x][:size].view(like.shape) for x in places]
            if is_dense(like):
                buffers = [x.as_strided(like.shape, like.stride()) for x in buffers]
            self._made[key] = buffers
        return self._made[key]


class Program(NamedTuple):
    """The operations of a leaf step.

    Attributes:
        run: `(tensors, targets, buffers, values, known) -> sums`: computes from tensors in
            the order of `Kind.tensors`, into targets for the parameter, its state and
            compensation, which it does not look at if it is in place. `values` are the
            step's numbers, 0-d like those known. It returns the means for `Rule.sums`, if
            it takes them.
        buffers: The dtypes of its buffers, which are as large as the tensors.
        outputs: The dtypes of its targets, by name.
        written: The names of the targets that it writes.
        reduces: True if an operation reads whole tensors, so that they have to be whole.
    """

    run: Callable[..., list[Tensor]]
    buffers: tuple[torch.dtype, ...]
    outputs: dict[str, torch.dtype]
    written: list[str]
    reduces: bool

    def __call__(
        self,
        tensors: dict[str, Tensor],
        targets: dict[str, Tensor],
        values: Sequence[Tensor],
        room: Room,
        known: Sequence[Tensor] = (),
        size: int = 0,
    ) -> list[Tensor]:
        """Do what `run` does, in slices of a size if there is one."""
        sums: list[Tensor] = []
        for own, into in slices(tensors, targets, size):
            buffers = room.buffers(self.buffers, own[PARAM])
            results = [into[name] for name in self.outputs] if into else []
            sums = self.run([*own.values()], results, buffers, values, known)
        return sums


def slices(
    tensors: dict[str, Tensor], targets: dict[str, Tensor], size: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield slices of dense tensors and of what they are written to, or all if size=0."""
    if not size:
        yield tensors, targets
        return
    scales = scales_in(tensors)

    def cut(every: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        sizes = [size // GROUP if name in scales else size for name in every]
        parts = zip(*[flat(x).split(n) for x, n in zip(every.values(), sizes)])
        return (dict(zip(every, part)) for part in parts)

    yield from zip(cut(tensors), cut(targets))


def flat(x: Tensor) -> Tensor:
    """Return the memory of a dense tensor."""
    return x.as_strided((x.numel(),), (1,))


def slice_size(x: Tensor, wide: torch.dtype, temporaries: int) -> int:
    """Return the elements of a slice of x, if a step has so many temporaries, or 0."""
    on_cpu = device_type(x.device) in ("cpu", "meta")
    least = LEAST if on_cpu else ELSEWHERE
    most = max(least, PER_THREAD * torch.get_num_threads())
    room = max(BYTES, EACH * x.numel()) // (max(1, temporaries) * wide.itemsize)
    size = max(least, min(room, most)) // GROUP * GROUP
    return size if size < x.numel() else 0


def joined(
    made: Program,
    lists: dict[str, list[Tensor]],
    values: Sequence[Tensor],
    room: Room,
) -> dict[str, Tensor]:
    """Run a program in place on lists of dense tensors, each joined, and return these."""
    tensors = {name: torch.cat(list(map(flat, x))) for name, x in lists.items()}
    made(tensors, {}, values, room)
    return tensors


def program(kind: Kind, scalars: Scalars) -> Program | None:
    """Return the program of a kind, or None if its operations cannot be recorded.

    Only the structure of the scalars matters.
    """
    made, key = runtime.programs.setdefault(kind.rule, {}), kind[1:]
    if key not in made:
        try:
            with _disable_current_modes():
                made[key] = _record(kind, scalars)
        except Exception:
            made[key] = None
    return made[key]


def _record(kind: Kind, scalars: Scalars) -> Program:
    wide, rule = compute_dtype(*[dtype for _, dtype in kind.tensors]), kind.rule
    spec = pytree.tree_structure(scalars)
    sizes = kind.statics.count(None), *[size for _, size in kind.known]
    with torch.no_grad():
        like = torch.arange(1.0, 7.0, dtype=torch.float32, device=kind.device)
        like = like.reshape(_EXAMPLE)
        tensors = {name: like.to(dtype, copy=True) for name, dtype in kind.tensors}
        numbers = torch.full((sum(sizes),), 0.5, dtype=wide, device=kind.device)
    values, *answers = [list(x.unbind()) for x in numbers.split([*sizes])]
    known = {name: x for (name, _), x in zip(kind.known, answers)}
    stored, now = leaf_in(rule, tensors), fill(kind.statics, spec, values)
    given = {name: x for name, x in tensors.items() if name in (*rule.given, BITS)}
    leaf, now = with_given(stored, now, given)
    g, sums = tensors[GRAD], list[Tensor]()

    with torch.no_grad(), _Recorder() as recorder:
        if kind.round is not None:
            every = leaf_round(rule, leaf, g, now, known, kind.write).tensors
            results = dict(zip(map(str, range(len(every))), every))
        else:
            answer = answering(known, noting_sums(sums))
            results = tensors_of(leaf_step(rule, leaf, g, now, kind.write, answer))
    old = tensors_of(stored) if kind.in_place else dict.fromkeys(results)
    results = {name: recorder.of(x) for name, x in results.items()}
    for name, x in results.items():
        # The argument may have been written before.
        if x is not old[name] and any([x is y for y in tensors.values()]):
            results[name] = x.clone()
            recorder.calls.append(_Call("clone", torch.clone, (x,), {}, results[name]))
    sums = list(map(recorder.of, sums))
    pairs = [*results.values()], [old[name] for name in results]
    writer = _Writer(recorder, *pairs, sums)
    writer.name([*tensors.values()], "x")
    writer.name(values, "v")
    writer.name([x for some in answers for x in some], "k")
    run = writer.code()
    written = [name for name, x in results.items() if x is not old[name]]
    dtypes = {name: x.dtype for name, x in results.items()}
    return Program(run, (*writer.buffers,), dtypes, written, writer.reduces)


class _Writer:
    """Writes the operations down as a function, and chooses where each result goes."""

    def __init__(
        self,
        recorder: _Recorder,
        outputs: list[Tensor],
        old: Sequence[Tensor | None],
        taken: list[Tensor],
    ) -> None:
        needed, calls = {id(x) for x in (*outputs, *taken)}, list[_Call]()
        for call in reversed(recorder.calls):
            if id(call.result) in needed:
                needed |= set(map(id, call.read))
                calls.append(call)
        self._calls = calls[::-1]
        self._outputs, self._old, self._taken = outputs, old, taken
        self.buffers: list[torch.dtype] = []
        self.reduces = False  # an operation reads a whole tensor
        self._names: dict[int, str] = {}
        self._globals: dict[str, object] = {}
        self._last: dict[int, int] = {}  # by a tensor's id, the last call that reads it
        for i, call in enumerate(self._calls):
            self._last |= {id(x): i for x in call.read}
        self._last |= {id(x): len(self._calls) for x in (*outputs, *taken)}
        self._lines: list[str] = []

    def name(self, tensors: list[Tensor], letter: str) -> None:
        """Name the arguments of a list."""
        names = [f"{letter}{i}" for i in range(len(tensors))]
        self._names |= dict(zip(map(id, tensors), names))
        if names:
            self._lines.append(f"{', '.join(names)}, = {letter}")

    def _hints(self) -> dict[int, int]:
        """Return, by id, the target that a result is computed for."""
        hints: dict[int, int] = {}
        for j, x in enumerate(self._outputs):
            hints.setdefault(id(x), j)
        for i in reversed(range(len(self._calls))):
            j = hints.get(id(self._calls[i].result))
            if j is None:
                continue
            for x in self._calls[i].read:
                # It is read for the last time, and the result can take its place.
                alike = x.dtype == self._outputs[j].dtype and x.dim()
                if alike and self._last[id(x)] == i and id(x) not in hints:
                    hints[id(x)] = j
                    break
        return hints

    def code(self) -> Callable[..., list[Tensor]]:
        """Return the function."""
        hints, places = self._hints(), dict[str, int]()  # by name, the last call to read it
        targets: list[str] = []
        for j, old in enumerate(self._old):
            targets.append(f"t{j}" if old is None else self._names[id(old)])
            places[targets[j]] = -1 if old is None else self._last.get(id(old), -1)
        if None in self._old:
            self._lines.append(f"{', '.join(targets)}, = t")
        first = len(self._lines)
        for i, call in enumerate(self._calls):
            key = id(call.result)
            if call.result.dim() == 0:
                self.reduces |= any([x.dim() for x in call.read])
                self._names[key] = f"n{i}"
                self._lines.append(f"n{i} = {self._call(i, call, '')}")
                continue
            j = hints.get(key)
            dtype = call.result.dtype
            fits = j is not None and self._outputs[j].dtype == dtype
            if j is not None and fits and places[targets[j]] <= i:
                place = targets[j]
            else:
                place = self._buffer(dtype, places, i)
            self._names[key], places[place] = place, self._last[key]
            self._lines.append(self._call(i, call, place))
        for x, target in zip(self._outputs, targets):
            if self._names[id(x)] != target:
                self._lines.append(f"{target}.copy_({self._names[id(x)]})")
        if self.buffers:
            every = [f"b{i}" for i in range(len(self.buffers))]
            self._lines.insert(first, f"{', '.join(every)}, = b")
        self._lines.append(
            f"return [{', '.join([self._names[id(x)] for x in self._taken])}]"
        )
        source = "\n    ".join(["def run(x, t, b, v, k):", *self._lines])
        exec(source, self._globals)
        run: Any = self._globals["run"]
        return run

    def _buffer(self, dtype: torch.dtype, places: dict[str, int], i: int) -> str:
        for k, kind in enumerate(self.buffers):
            if kind == dtype and places[f"b{k}"] <= i:
                return f"b{k}"
        self.buffers.append(dtype)
        return f"b{len(self.buffers) - 1}"

    def _call(self, i: int, call: _Call, place: str) -> str:
        """Return one operation, which writes to `place` if that has a name."""
        name = f"f{i}"

        def text(x: Any, k: object) -> str:
            if isinstance(x, Tensor):
                return self._names[id(x)]
            self._globals[f"c{i}_{k}"] = x
            return f"c{i}_{k}"

        args = [text(x, k) for k, x in enumerate(call.args)]
        if place and call.name in _COPIES:
            return f"{place}.copy_({args[0]})"
        args += [f"{k}={text(x, k)}" for k, x in call.more.items()]
        function: Any = call.function
        self._globals[name] = function
        if not place:
            return f"{name}({', '.join(args)})"
        try:
            function(*call.args, **call.more, out=torch.empty_like(call.result))
        except (RuntimeError, TypeError):
            return f"{place}.copy_({name}({', '.join(args)}))"
        return f"{name}({', '.join(args)}, out={place})"
