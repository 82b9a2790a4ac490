"""Codecs: moments in 8 bits, and the compensations of bfloat16 and float16 parameters.

All of it is elementwise, except that groups of 64 elements share a scale.
"""

from math import prod
from typing import NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from optimi_func.core.distributed import (
    cuts_evenly,
    from_local,
    to_local,
    zeros_divided_like,
)
from optimi_func.core.rule import MomentStorage, ParamStorage, Scalar
from optimi_func.core.torch_private import serializable

GROUP = 64  # elements that share a scale
LEAST = 1 << 13  # elements of the smallest tensor that is kept in codes
# The golden ratio: no sequence of multiples modulo 1 is spread more evenly.
_STEP = 0.6180339887498949


def to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to a dtype. Return x itself if it has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


# Moments in 8 bits


@serializable
class Moment8(NamedTuple):
    """A first moment m in 8 bits, in groups of 64 with a scale s = max|m|.

    q = sign(m) * round(127 * sqrt(|m| / s)), read as q * |q| * s / 127^2.
    """

    q: Tensor  # int8, of the parameter's shape and memory order
    scale: Tensor  # float32

    @classmethod
    def zeros(cls, p: Tensor) -> "Moment8":
        """Return zeros for p."""
        return cls(torch.zeros_like(p, dtype=torch.int8), _scales(p))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the moment in a floating dtype."""
        q = _rows(self.q, self.q).to(torch.float32)
        x = (q * q.abs()) * (self.scale.reshape(-1, 1) * (1.0 / 127**2))
        return _like(x, self.q).to(dtype)

    def encode(self, x: Tensor, dither: Scalar) -> "Moment8":
        """Return x in the nearest codes."""
        rows = _rows(x.to(torch.float32), self.q)
        scale = rows.abs().amax(1, keepdim=True)
        q = torch.round((rows.abs() * _inverse(scale)).sqrt() * 127.0) * rows.sign()
        q = _like(q, self.q).to(torch.int8)
        return Moment8(q, scale.reshape(self.scale.shape))


@serializable
class SecondMoment8(NamedTuple):
    """A mean of squares v in 8 bits, in groups of 64 with a scale s = sqrt(max v).

    q = max(1, floor(255 * sqrt(sqrt(v) / s) + dither)), read as (q^2 * s / 255^2)^2. A
    code of 0 would divide by eps. The dither, in [0, 1), differs from step to step. Most
    steps move v by less than a code, which rounding to the nearest would always undo. All
    elements share it, so that results do not depend on the sharding of a tensor.
    """

    q: Tensor  # uint8, of the parameter's shape and memory order
    scale: Tensor  # float32

    @classmethod
    def zeros(cls, p: Tensor) -> "SecondMoment8":
        """Return zeros for p, which are codes of 1 and scales of 0."""
        return cls(torch.ones_like(p, dtype=torch.uint8), _scales(p))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the mean of squares in a floating dtype."""
        q = _rows(self.q, self.q).to(torch.float32)
        x = (q * q) * (self.scale.reshape(-1, 1) * (1.0 / 255**2))
        return _like(x * x, self.q).to(dtype)

    def encode(self, x: Tensor, dither: Scalar) -> "SecondMoment8":
        """Return x in codes, which are the nearest ones with a dither of 0.5."""
        rows = _rows(x.to(torch.float32), self.q).sqrt()
        scale = rows.amax(1, keepdim=True)
        # Turn inf into NaN, or the whole group would decode as inf.
        scale = scale + (scale - scale)
        q = torch.floor((rows * _inverse(scale)).sqrt() * 255.0 + dither)
        q = _like(q.clamp(1.0, 255.0), self.q).to(torch.uint8)
        return SecondMoment8(q, scale.reshape(self.scale.shape))


Codes: TypeAlias = Moment8 | SecondMoment8
# The formats of moments: the codes of first moments, and those of means of squares.
MOMENTS: dict[MomentStorage, tuple[type[Codes], ...]] = {"8bit": (Moment8, SecondMoment8)}
# The same codes by the dtype of q, in the order of CODECS in codecs.cpp.
CODECS: dict[torch.dtype, type[Codes]] = {torch.int8: Moment8, torch.uint8: SecondMoment8}
NEAREST = 0.5  # the dither that rounds to the nearest code


def dither_at(t: Scalar) -> Scalar:
    """Return the dither of step t. Dithers are evenly spread over [0, 1)."""
    return t * _STEP % 1.0


def _inverse(scale: Tensor) -> Tensor:
    # Smaller scales have no inverse in float32, so all of their codes are 0. The number is
    # no module constant, because Dynamo would make it an input and compile once more.
    return torch.where(scale < 1e-37, 0.0, 1.0 / scale)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """Reshape x to rows of 64, in the memory order of `like`, padded with zeros."""
    if not like.is_contiguous():
        x = x.permute(_order(like))
    flat = x.reshape(-1)
    missing = -flat.numel() % GROUP
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, GROUP)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """Undo `_rows` for a tensor with the shape and memory order of x."""
    flat, size = rows.reshape(-1), x.numel()
    if flat.numel() != size and torch.compiler.is_compiling():
        # As `flat[:size]`, but written before it is read: Inductor's loop over both leaves
        # out the last group on a CPU (torch 2.13).
        flat = flat.as_strided((size,), (1,))
    else:
        flat = flat[:size]
    if x.is_contiguous():
        return flat.view(x.shape)
    order = _order(x)
    back = [order.index(i) for i in range(x.dim())]
    return flat.view([x.shape[i] for i in order]).permute(back)


def same_order(p: Tensor, x: Tensor) -> bool:
    """Return True if x has the memory order of p, which is dense and of the same shape."""
    # Strides of dimensions of size 1 may differ, because they mean nothing.
    return x.stride() == p.stride() or (x.is_contiguous() and p.is_contiguous())


def is_dense(x: Tensor) -> bool:
    """Return True if x covers a range of memory without gaps or overlap, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda i: -x.stride(i))


def has_groups(p: Tensor) -> bool:
    """Return True if p is large and dense, and each p[i] is a number of whole groups."""
    if p.numel() < LEAST or not is_dense(p):
        return False
    return p.dim() == 1 or p.numel() // p.shape[0] % GROUP == 0


def is_eligible(p: Tensor) -> bool:
    """Return True if p's moments can be kept in codes.

    Only the global shape matters, so the answer is the same on all processes.
    """
    return has_groups(p) and cuts_evenly(p, _scale_dims(p), GROUP)


def _scale_dims(p: Tensor) -> int:
    """Return how many leading dimensions p and its scales share, the last one in groups.

    0 if p is not contiguous, because a shard of it would not be a shard of its scales.
    """
    if not p.is_contiguous():
        return 0
    return p.dim() if p.shape[-1] % GROUP == 0 else 1


def _scales(p: Tensor) -> Tensor:
    *front, last = p.shape
    if p.dim() == 1:
        return zeros_divided_like(p, [-(-last // GROUP)])
    dims, groups = _scale_dims(p), prod(p.shape[1:]) // GROUP
    if dims == p.dim():
        return zeros_divided_like(p, [*front, last // GROUP])
    # One dimension more than p marks codes in another memory order, which files lose.
    ones = [] if dims == 1 else [1] * (p.dim() - 1)
    return zeros_divided_like(p, [p.shape[0], *ones, groups])


def in_own_order(codes: "Codes", p: Tensor) -> "Codes":
    """Restore the memory order in which saved codes were grouped, if a file has lost it.

    Raises ValueError if the order is unknown, because p has another memory order.
    """
    q, scale = codes
    if scale.dim() <= q.dim():
        return type(codes)(q.contiguous(), scale)
    if not q.is_contiguous():
        return codes
    if p.is_contiguous():
        raise ValueError(
            f"codes of shape {tuple(q.shape)} were made of a tensor that was not "
            "contiguous, and have lost its memory order: load them into such a parameter "
            "(as model.to(memory_format=torch.channels_last)), or save their strides too"
        )
    return type(codes)(torch.empty_like(p, dtype=q.dtype).copy_(q), scale)


# Compensations: the bits of a parameter that its dtype cannot hold

LOW = torch.bfloat16, torch.float16  # dtypes whose parameters can have a compensation


class ParamFormat(NamedTuple):
    """A format of parameters.

    Attributes:
        comps: The dtype of `kahan_comp` by the dtype of the parameter. A parameter whose
            dtype is missing has no `kahan_comp`.
        changes: The dtypes of parameters that the format is meant for. If no parameter has
            one of them, choosing the format is an error.
    """

    comps: dict[torch.dtype, torch.dtype]
    changes: tuple[torch.dtype, ...] = LOW


PARAMS: dict[ParamStorage, ParamFormat] = {
    "plain": ParamFormat({}, ()),
    "kahan": ParamFormat({x: x for x in LOW}),
    "kahan8": ParamFormat(dict.fromkeys(LOW, torch.int8)),
    "exact": ParamFormat({**{x: x for x in LOW}, torch.bfloat16: torch.int16}, LOW[:1]),
    "stochastic": ParamFormat({}),
}
_COMPS = [dtype for kind in PARAMS.values() for dtype in kind.comps.values()]
# The dtypes of compensations in codes, in the order of CODECS in codecs.cpp. Parameter and
# compensation are decoded to one float32 number.
COMP_CODES = dict.fromkeys([dtype for dtype in _COMPS if not dtype.is_floating_point])


def remainder_dtype(p: Tensor, param: ParamStorage | None) -> torch.dtype | None:
    """Return the dtype of a parameter's `kahan_comp`, or None if it has none."""
    return PARAMS[param or "kahan"].comps.get(p.dtype)


def widen(
    p: Tensor, rest: Tensor | None, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return p, its sum with the compensation, and that if it is no code, all wide.

    Somebody may have written another weight to p, which the compensation is not of. So one
    of more than a spacing of p is left out, and so are bits that would make p NaN.
    """
    p32 = to(p, wide)
    if rest is None or rest.dtype in (torch.int32, torch.int64):  # bits, or their seed
        return p32, p32, None
    if rest.dtype == torch.int8:
        return p32, p32 + to(rest, wide) * _unit(p32, p.dtype), None
    if rest.dtype == torch.int16:
        bits = _high_bits(p) + rest.to(torch.int32)
        x = to(bits.view(torch.float32), wide)
        return p32, torch.where(x != x, p32, x), None
    # Spacings of float16 get no smaller, and of bfloat16 too small for `round_to`.
    least = 2.0**-14 if p.dtype == torch.float16 else 2.0**-100
    fits = rest.abs() * (1.0 / torch.finfo(p.dtype).eps) <= p.abs().clamp_min(least)
    comp = to(torch.where(fits, rest, 0.0), wide)
    return p32, p32 + comp, comp


def narrow(x: Tensor, p: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to the dtypes of p and of its compensation, which is in codes.

    If these are random bits in its place, they are returned as they are.
    """
    if rest.dtype == torch.int32:
        return round_randomly(x, p.dtype, rest), rest
    if rest.dtype == torch.int16:
        # Without an error the derivative of a bit pattern would be 0.
        high, low = _split(x)
        return refuse_derivatives(x, high), low
    x = refuse_derivatives(x, x)
    rounded = round_to(x, p.dtype)
    code = (x - rounded) * _inverse(_unit(rounded, p.dtype))
    return to(rounded, p.dtype), torch.round(code).clamp(-127.0, 127.0).to(torch.int8)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to the precision of a narrower dtype, but keep its dtype (Veltkamp 1968).

    Done by arithmetic, because compilers fold `x.to(bfloat16).to(float32)` into x, which
    would make the compensation 0. The derivative is 1.
    """
    info, bits = torch.finfo(dtype), torch.finfo(dtype).eps / torch.finfo(x.dtype).eps
    # Scale down first, or the largest finite numbers would overflow.
    small = x * (0.5 / bits)
    # Not x * (bits + 1): compilers (Triton's, by default) fuse a product and a sum into one
    # rounding, and then scaled - x would lose no bits. All products here are by powers of
    # two and therefore exact, so that fusing them changes nothing.
    scaled = small * bits + small
    rounded = (scaled - (scaled - small)) * (2.0 * bits)
    if dtype != torch.float16:
        return rounded
    # Below 6e-5, which weights do reach, float16's steps get no smaller. Adding `much`
    # rounds to steps of that size.
    much = 1.5 * info.tiny * bits
    return torch.where(x.abs() < info.tiny, (x + much) - much, rounded)


def round_randomly(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round x to one of its two neighbours in float16 or bfloat16, so that the mean is x.

    `bits` are int32, each number from 0 to 2^16 - 1 being equally likely. They are added to
    what the dtype cannot hold, of which the carry is kept.
    """
    wide, info = to(x, torch.float32), torch.finfo(dtype)
    half = dtype == torch.float16
    added = torch.bitwise_right_shift(bits, 3) if half else bits
    kept = -(1 << (13 if half else 16))
    y = torch.bitwise_and(wide.view(torch.int32) + added, kept).view(torch.float32)
    if half:  # steps below 6e-5 get no smaller
        small = torch.floor(wide * 2.0**24 + to(bits, torch.float32) * 2.0**-16) * 2.0**-24
        y = torch.where(wide.abs() < info.tiny, small, y)
    # The carry could make an infinity of a number that is none, or a number of a NaN.
    fits = (y.abs() <= info.max) & (wide.abs() < float("inf"))
    return refuse_derivatives(x, to(torch.where(fits, y, wide), dtype))


def _unit(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unit of an 8-bit compensation: 127 units are half the spacing at p."""
    info, size = torch.finfo(dtype), p.abs()
    if dtype == torch.float16:
        size = size.clamp_min(info.tiny)  # bits of subnormal numbers get no smaller
    return size * (info.eps / 2.0 / 127.0)


def remainder(x: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the compensation, in a dtype, that added to p gives the float32 x."""
    wide = p.to(torch.float32)
    if dtype == torch.int16:
        low = _bits(x) - _high_bits(p)
        return low.clamp(-(1 << 15), (1 << 15) - 1).to(dtype)
    if dtype == torch.int8:
        code = (x - wide) * _inverse(_unit(wide, p.dtype))
        return torch.round(code).clamp(-127.0, 127.0).to(dtype)
    return (x - wide).to(dtype)


def alike(a: torch.dtype, b: torch.dtype) -> bool:
    """Return True if compensations of these dtypes differ only in width."""
    return a == b or (a.is_floating_point and b.is_floating_point)


def recast_remainder(p: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert the compensation of p to another dtype."""
    part, here = to_local([p, rest])
    _, x, _ = widen(part, here, torch.float32)
    return from_local(remainder(x, part, dtype), p)


def _bits(x: Tensor) -> Tensor:
    return to(x, torch.float32).view(torch.int32)


def _high_bits(p: Tensor) -> Tensor:
    """Return the bits of a bfloat16 as the high ones of an int32, and 0 as the low ones."""
    # << and >> of a DTensor by a number silently do nothing (torch 2.13).
    return torch.bitwise_left_shift(p.view(torch.int16).to(torch.int32), 16)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 into the nearest bfloat16 and the signed int16 that it lacks."""
    bits = _bits(x)
    low = torch.bitwise_right_shift(torch.bitwise_left_shift(bits, 16), 16)
    high = torch.bitwise_right_shift(bits - low, 16)
    # The carry into the high bits could turn a NaN into -0.
    is_nan = x != x
    high = torch.where(is_nan, 0x7FC0, high).to(torch.int16)
    low = torch.where(is_nan, 0, low).to(torch.int16)
    return high.view(torch.bfloat16), low


class _NotDifferentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, result: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None: ...

    @staticmethod
    def backward(ctx: object, *grads: object) -> NoReturn:
        raise ValueError(_NO_DERIVATIVE)

    jvp = backward


_NO_DERIVATIVE = (
    "a step whose parameters or moments are kept in codes (storage='exact' or 'compact', "
    "Storage(param='kahan8'), Storage(moments='8bit')) or rounded at random "
    "(Storage(param='stochastic')) has no derivative: differentiate one with storage=None"
)


def refuse_derivatives(x: Tensor, result: Tensor) -> Tensor:
    """Return `result`, computed from x. Raise if autograd differentiates it."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return result
    return _NotDifferentiable.apply(x, result)  # pyright: ignore[reportReturnType]
