"""PTX, run on CPU: a block at a time, all of its threads at once, as numpy arrays.

It shows what Triton's own interpreter cannot: which products and sums the compiler has
contracted into one rounding, and what each thread asks of memory. As much of the language
as Triton's elementwise kernels and reductions use; branches have to be the same for all
threads of a block. div.full, which may be off by 2 units of the last place, is exact here.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "f32": np.float32,
    "f64": np.float64,
    **{f"{kind}{bits}": f"u{bits // 8}" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
}
_COMPARE: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_EITHER: dict[str, Callable[..., Any]] = {  # of floats and of whole numbers
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "abs": np.abs,
}
_BITS: dict[str, Callable[..., Any]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "rem": np.fmod,
}
_WARP = 32
_HALVES = ["half of a", "half of b"]  # registers of this interpreter


class Memory:
    """Tensors where they are, and the bytes that were loaded and stored of each.

    Whatever lies outside of them, or is not aligned, is an error.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, Any] = {}  # by address
        self.loaded: Counter[int] = Counter()
        self.stored: Counter[int] = Counter()

    def add(self, x: Tensor) -> int:
        """Let kernels see a tensor; its address."""
        assert x.is_contiguous()
        start = x.data_ptr()
        found = self._bytes.get(start)
        if found is None or len(found) < x.nbytes:
            self._bytes[start] = x.detach().reshape(-1).view(torch.uint8).numpy()
        return start

    def load(self, addresses: Any, size: int) -> Any:
        """An unsigned number of `size` bytes from each address."""
        out = np.zeros(len(addresses), f"u{size}")
        for start, here in self._places(addresses, size):
            at = (addresses[here] - np.uint64(start)).astype(np.int64)
            out[here] = self._bytes[start][at[:, None] + np.arange(size)].view(f"u{size}")[
                :, 0
            ]
            self.loaded[start] += size * len(at)
        return out

    def store(self, addresses: Any, values: Any) -> None:
        """The number of each address."""
        size = values.dtype.itemsize
        for start, here in self._places(addresses, size):
            at = (addresses[here] - np.uint64(start)).astype(np.int64)
            raw = values[here].copy().view("u1").reshape(-1, size)
            self._bytes[start][at[:, None] + np.arange(size)] = raw
            self.stored[start] += size * len(at)

    def _places(self, addresses: Any, size: int) -> list[tuple[int, Any]]:
        starts = np.array(sorted(self._bytes), np.uint64)
        ends = np.array([s + len(self._bytes[int(s)]) for s in starts], np.uint64)
        which = np.searchsorted(starts, addresses, "right") - 1
        assert (which >= 0).all() and (addresses + np.uint64(size) <= ends[which]).all(), (
            "outside of every tensor"
        )
        return [(int(starts[i]), which == i) for i in np.unique(which)]


class _Instruction(NamedTuple):
    guard: tuple[str, bool] | None  # a predicate, and what it has to be
    op: list[str]
    operands: list[str]


class Program:
    """The one kernel of a PTX text."""

    def __init__(self, text: str) -> None:
        body = re.sub(r"//.*", "", text[text.index("$L__func_begin0:") :])
        body = re.sub(r"^\s*\.(loc|file)\b.*$", "", body, flags=re.M)
        self._code: list[_Instruction] = []
        self._labels: dict[str, int] = {}
        for statement in body[: body.index("$L__func_end0:")].split(";"):
            while found := re.match(r"\s*(\$\w+):", statement):
                self._labels[found[1]] = len(self._code)
                statement = statement[found.end() :]
            if statement := statement.strip():
                self._code.append(_parsed(statement))

    def run(
        self, arguments: Sequence[int], blocks: int, threads: int, memory: Memory
    ) -> None:
        """Launch it: `blocks` blocks of `threads` threads."""
        for block in range(blocks):
            _Block(arguments, block, threads, memory).run(self._code, self._labels)


def _parsed(statement: str) -> _Instruction:
    guard = None
    if found := re.match(r"@(!?)(%p\d+)\s+", statement):
        guard = found[2], not found[1]
        statement = statement[found.end() :]
    op, *rest = re.split(r"\s+", statement, maxsplit=1)
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest[0] if rest else "")
    return _Instruction(guard, op.split("."), [x.strip() for x in operands])


def _inner(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{}[] ").split(",")]


class _Block:
    """One block's registers and shared memory."""

    def __init__(
        self, arguments: Sequence[int], block: int, threads: int, memory: Memory
    ) -> None:
        self._arguments, self._threads, self._memory = arguments, threads, memory
        self._shared = np.zeros(1 << 16, np.uint8)
        lanes = np.arange(threads, dtype=np.uint32)
        self._registers: dict[str, Any] = {
            "%tid.x": lanes,
            "%ctaid.x": np.full(threads, block, np.uint32),
            "global_smem": np.zeros(threads, np.uint32),
        }

    def run(self, code: list[_Instruction], labels: dict[str, int]) -> None:
        place = 0
        while True:
            guard, op, operands = code[place]
            place += 1
            on = np.ones(self._threads, bool)
            if guard is not None:
                on = self._registers[guard[0]] == guard[1]
            if op[0] == "ret":
                assert guard is None
                return
            if op[0] == "bra":
                assert on.all() or not on.any(), "threads part"
                place = labels[operands[0]] if on.all() else place
            elif op[0] not in ("bar", "createpolicy"):
                handler = self._handler(op)
                # Of abs in an isinf, and of floor, what is smallest may become 0.
                flushed = "ftz" in op and op[0] != "abs" and "rmi" not in op
                if handler is None or flushed:
                    raise NotImplementedError(".".join(op))
                with np.errstate(all="ignore"):
                    handler(op, operands, on)

    def _handler(self, op: list[str]) -> Callable[..., None] | None:
        name = op[0]
        if name in _EITHER:
            kind = self._float if op[-1] == "f32" else self._whole
            return partial(kind, f=_EITHER[name])
        if name in _BITS:
            return partial(self._whole, f=_BITS[name])
        return getattr(self, f"_{name}", None)

    # Operands

    def _get(self, x: str, kind: str) -> Any:
        """An operand of all threads."""
        dtype = np.dtype(_DTYPES[kind])
        if x in self._registers:
            found = self._registers[x]
            own = found.dtype.itemsize
            if kind != "pred" and own > dtype.itemsize:
                # The low bits of a register that is wider.
                found = found.view(f"u{own}").astype(f"u{dtype.itemsize}")
            elif kind != "pred" and own < dtype.itemsize:
                found = found.astype(f"{found.dtype.kind}{dtype.itemsize}")
            return found if kind == "pred" else found.view(dtype)
        if x.startswith("0f"):
            return np.full(self._threads, int(x[2:], 16), np.uint32).view(dtype)
        raw = f"u{dtype.itemsize}"
        number = int(x.removesuffix("U"), 0) % (1 << 8 * dtype.itemsize)
        return np.full(self._threads, number, raw).view(dtype)

    def _put(self, x: str, value: Any, on: Any) -> None:
        if x not in self._registers or on.all():
            self._registers[x] = value
        else:
            old = self._registers[x]
            wide = max(old.dtype.itemsize, value.dtype.itemsize)
            kind = f"u{wide}"
            old, value = (
                y
                if y.dtype == bool
                else y.astype(f"{y.dtype.kind}{wide}").view(kind)
                if y.dtype.itemsize < wide and y.dtype.kind in "iu"
                else y.view(kind)
                for y in (old, value)
            )
            self._registers[x] = np.where(on, value, old)

    def _all(self, kind: str, operands: list[str]) -> list[Any]:
        if kind == "bf16":  # numpy has none; every one of them is a float32
            return [_from_bf16(self._get(x, "b16")) for x in operands]
        return [self._get(x, kind) for x in operands]

    def _float(self, op: list[str], xs: list[str], on: Any, f: Callable[..., Any]) -> None:
        assert op[-1] == "f32", op
        self._put(xs[0], f(*self._all("f32", xs[1:])).astype(np.float32), on)

    def _whole(self, op: list[str], xs: list[str], on: Any, f: Callable[..., Any]) -> None:
        kind = op[-1]
        if kind in ("s16x2", "u16x2"):
            two = np.int16 if kind[0] == "s" else np.uint16
            pairs = [x.copy().view(two) for x in self._all("b32", xs[1:])]
            self._put(xs[0], f(*pairs).view(np.uint32), on)
            return
        self._put(xs[0], f(*self._all(kind, xs[1:])).astype(_DTYPES[kind]), on)

    def _address(self, x: str) -> Any:
        base, _, offset = x.strip("[] ").partition("+")
        found = self._registers[base.strip()]  # of 64 bits, or 32 for shared memory
        return found.view(f"u{found.dtype.itemsize}").astype(np.uint64) + np.uint64(
            int(offset or 0)
        )

    # Memory

    def _ld(self, op: list[str], xs: list[str], on: Any) -> None:
        size = int(op[-1][1:]) // 8
        if op[1] == "param":
            index = int(re.findall(r"_param_(\d+)", xs[1])[0])
            number = self._arguments[index] % (1 << 8 * size)
            self._put(xs[0], np.full(self._threads, number, f"u{size}"), on)
            return
        address, outs = self._address(xs[1]), _inner(xs[0])
        assert not (address[on] % np.uint64(size * len(outs))).any(), "misaligned"
        for i, out in enumerate(outs):
            value = np.zeros(self._threads, f"u{size}")
            at = address[on] + np.uint64(i * size)
            if op[1] == "shared":
                near = at.astype(np.int64)[:, None] + np.arange(size)
                value[on] = self._shared[near].view(f"u{size}")[:, 0]
            else:
                assert op[1] == "global", op
                value[on] = self._memory.load(at, size) if len(at) else 0
            self._put(out, value, on)

    def _st(self, op: list[str], xs: list[str], on: Any) -> None:
        size = int(op[-1][1:]) // 8
        address, values = self._address(xs[0]), _inner(xs[1])
        assert not (address[on] % np.uint64(size * len(values))).any(), "misaligned"
        for i, x in enumerate(values):
            at = address[on] + np.uint64(i * size)
            value = self._get(x, f"b{8 * size}")[on]
            if op[1] == "shared":
                near = at.astype(np.int64)[:, None] + np.arange(size)
                self._shared[near] = value.copy().view("u1").reshape(-1, size)
            else:
                assert op[1] == "global", op
                if len(at):
                    self._memory.store(at, value)

    def _shfl(self, op: list[str], xs: list[str], on: Any) -> None:
        assert op[1:] == ["sync", "bfly", "b32"] and on.all()
        mask = int(xs[2])
        lanes = np.arange(self._threads)
        assert mask < _WARP
        self._put(xs[0], self._get(xs[1], "b32")[lanes ^ mask], on)

    def _mov(self, op: list[str], xs: list[str], on: Any) -> None:
        if xs[1].startswith("{"):
            low, high = (x.astype(np.uint32) for x in self._all("b16", _inner(xs[1])))
            self._put(xs[0], low | (high << np.uint32(16)), on)
        elif xs[0].startswith("{"):
            value = self._get(xs[1], "b32")
            low, high = _inner(xs[0])
            self._put(low, (value & np.uint32(0xFFFF)).astype(np.uint16), on)
            self._put(high, (value >> np.uint32(16)).astype(np.uint16), on)
        else:
            kind = "b" + op[-1][1:] if op[-1] != "pred" else "pred"
            self._put(xs[0], self._get(xs[1], kind).copy(), on)

    # Numbers

    def _mul(self, op: list[str], xs: list[str], on: Any) -> None:
        if op[1] == "wide":
            wide = f"{op[-1][0]}{2 * int(op[-1][1:])}"
            a, b = (x.astype(_DTYPES[wide]) for x in self._all(op[-1], xs[1:]))
            self._put(xs[0], a * b, on)
        elif op[1] == "lo":
            self._whole(op, xs, on, np.multiply)
        else:
            self._float(op, xs, on, np.multiply)

    def _mad(self, op: list[str], xs: list[str], on: Any) -> None:
        kind = op[-1]
        if op[1] == "wide":
            kind = f"{kind[0]}{2 * int(kind[1:])}"
        else:
            assert op[1] == "lo", op
        a, b = (x.astype(_DTYPES[kind]) for x in self._all(op[-1], xs[1:3]))
        self._put(xs[0], a * b + self._get(xs[3], kind), on)

    def _fma(self, op: list[str], xs: list[str], on: Any) -> None:
        def once(*numbers: Any) -> Any:
            a, b, c = (x.astype(np.longdouble) for x in numbers)
            return a * b + c

        self._float(op, xs, on, once)

    def _div(self, op: list[str], xs: list[str], on: Any) -> None:
        assert op[1] in ("full", "rn"), op
        self._float(op, xs, on, np.divide)

    def _sqrt(self, op: list[str], xs: list[str], on: Any) -> None:
        assert op[1] == "rn", op
        self._float(op, xs, on, np.sqrt)

    def _bfe(self, op: list[str], xs: list[str], on: Any) -> None:
        a, at, count = self._all("u32", xs[1:])
        a = a << (np.uint32(32) - at - count)
        if op[-1] == "s32":
            a = a.view(np.int32)
        self._put(xs[0], a >> (np.uint32(32) - count).astype(a.dtype), on)

    def _prmt(self, op: list[str], xs: list[str], on: Any) -> None:
        a, b, selector = self._all("b32", xs[1:])
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        found = np.zeros(self._threads, np.uint32)
        for i in range(4):
            choice = (selector >> np.uint32(4 * i)) & np.uint32(0xF)
            place = (choice & np.uint32(7)).astype(np.uint64)
            byte = (both >> (place * np.uint64(8))) & np.uint64(0xFF)
            sign = (byte >> np.uint64(7)) * np.uint64(0xFF)
            byte = np.where(choice >= 8, sign, byte)
            found |= byte.astype(np.uint32) << np.uint32(8 * i)
        self._put(xs[0], found, on)

    def _min(self, op: list[str], xs: list[str], on: Any) -> None:
        self._extreme(op, xs, on, np.minimum, np.fmin)

    def _max(self, op: list[str], xs: list[str], on: Any) -> None:
        self._extreme(op, xs, on, np.maximum, np.fmax)

    def _extreme(
        self, op: list[str], xs: list[str], on: Any, nan: Any, number: Any
    ) -> None:
        """Of two floats with a NaN that, or (without .NaN) the number."""
        if op[-1] != "f32":
            self._whole(op, xs, on, nan)
        else:
            self._float(op, xs, on, nan if "NaN" in op else number)

    def _shl(self, op: list[str], xs: list[str], on: Any) -> None:
        a, by = self._get(xs[1], op[-1]), self._get(xs[2], "b32")
        self._put(xs[0], a << by.astype(a.dtype), on)

    def _shr(self, op: list[str], xs: list[str], on: Any) -> None:
        a, by = self._get(xs[1], op[-1]), self._get(xs[2], "b32")
        self._put(xs[0], a >> by.astype(a.dtype), on)

    def _setp(self, op: list[str], xs: list[str], on: Any) -> None:
        if op[-1] == "bf16x2":  # a predicate for each half, the low one's first
            pairs = [x.copy().view(np.uint16) for x in self._all("b32", xs[1:3])]
            for half, target in enumerate(xs[0].split("|")):
                for name, pair in zip(_HALVES, pairs):
                    self._registers[name] = pair[half::2].copy()
                self._setp([*op[:-1], "bf16"], [target, *_HALVES], on)
            return
        a, b = self._all(op[-1], xs[1:3])
        if op[1] == "nan":
            self._put(xs[0], np.isnan(a) | np.isnan(b), on)
        elif op[1] == "num":
            self._put(xs[0], ~(np.isnan(a) | np.isnan(b)), on)
        elif op[1] == "neu":
            self._put(xs[0], ~(a == b), on)
        elif op[1] in ("ltu", "leu", "gtu", "geu", "equ"):
            either = np.isnan(a) | np.isnan(b)
            self._put(xs[0], _COMPARE[op[1][:-1]](a, b) | either, on)
        else:
            self._put(xs[0], _COMPARE[op[1]](a, b), on)

    def _selp(self, op: list[str], xs: list[str], on: Any) -> None:
        a, b = self._all("b" + op[-1][1:], xs[1:3])
        self._put(xs[0], np.where(self._registers[xs[3]], a, b), on)

    def _cvt(self, op: list[str], xs: list[str], on: Any) -> None:
        *how, target, source = [x for x in op[1:] if x != "ftz"]
        if source == "bf16":
            assert op[1:] == ["f32", "bf16"], op
            self._put(xs[0], *self._all("bf16", xs[1:]), on)
        elif target == "bf16":
            assert op[1:] == ["rn", "bf16", "f32"], op
            self._put(xs[0], _to_bf16(self._get(xs[1], "f32")), on)
        elif target == "bf16x2":
            assert op[1:] == ["rn", "bf16x2", "f32"], op
            high, low = (_to_bf16(x).astype(np.uint32) for x in self._all("f32", xs[1:]))
            self._put(xs[0], low | (high << np.uint32(16)), on)
        else:
            floating = target[0] == "f", source[0] == "f"
            value = self._get(xs[1], source)
            if floating[1] and how:
                value = {"rni": np.rint, "rmi": np.floor, "rzi": np.trunc}[how[0]](value)
            else:
                assert how == (["rn"] if floating == (True, False) else []), op
            self._put(xs[0], value.astype(_DTYPES[target]), on)


def _from_bf16(x: Any) -> Any:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(x: Any) -> Any:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
