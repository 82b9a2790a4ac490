"""Codecs: moments in 8 bits, and what a parameter's dtype cannot hold beside it.

Elementwise but for the scales of groups; nothing here knows an optimizer.
"""

from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from optimi_func._distributed import cuts_evenly, from_local, to_local, zeros_divided_like
from optimi_func._rule import ParamStorage, Scalar

# Elements that share a scale, and the fewest of a tensor that is kept in codes.
GROUP = 64
LEAST = 1 << 13
# Multiples of the golden ratio: no sequence in [0, 1) is spread more evenly.
_STEP = 0.6180339887498949


def to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X in a dtype; the same object where nothing changes."""
    return x if x.dtype == dtype else x.to(dtype)


# Moments in 8 bits


class Moment8(NamedTuple):
    """A first moment m in groups of 64, s = max|m| of each.

    q = sign(m) * round(127 * sqrt(|m| / s)), read as q * |q| * s / 127^2.
    """

    q: Tensor  # int8, shaped and laid out like the parameter
    scale: Tensor  # float32

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The moment in a floating dtype."""
        q = _rows(self.q, self.q).to(torch.float32)
        x = (q * q.abs()) * (self.scale.reshape(-1, 1) * (1.0 / 127**2))
        return _like(x, self.q).to(dtype)

    def encode(self, x: Tensor, dither: Scalar) -> "Moment8":
        """X in codes, each the nearest."""
        del dither
        rows = _rows(x.to(torch.float32), self.q)
        scale = rows.abs().amax(1, keepdim=True)
        q = torch.round((rows.abs() * _inverse(scale)).sqrt() * 127.0) * rows.sign()
        q = _like(q, self.q).to(torch.int8)
        return Moment8(q, scale.reshape(self.scale.shape))


class SecondMoment8(NamedTuple):
    """A mean of squares v in groups of 64, s = sqrt(max v) of each.

    q = max(1, floor(255 * sqrt(sqrt(v) / s) + dither)), read as (q^2 * s / 255^2)^2. A
    code of 0 would divide by eps. The dither, in [0, 1), differs from step to step: v
    moves by less than a code in most of them, and would stand if rounded to the nearest.
    It is one number for all elements, so that nothing depends on how a tensor is cut.
    """

    q: Tensor  # uint8, shaped and laid out like the parameter
    scale: Tensor  # float32

    def decode(self, dtype: torch.dtype) -> Tensor:
        """The mean of squares in a floating dtype."""
        q = _rows(self.q, self.q).to(torch.float32)
        x = (q * q) * (self.scale.reshape(-1, 1) * (1.0 / 255**2))
        return _like(x * x, self.q).to(dtype)

    def encode(self, x: Tensor, dither: Scalar) -> "SecondMoment8":
        """X in codes; with a dither of 0.5 each the nearest."""
        rows = _rows(x.to(torch.float32), self.q).sqrt()
        scale = rows.amax(1, keepdim=True)
        # Of inf a NaN: else the others of the group would come back as inf.
        scale = scale + (scale - scale)
        q = torch.floor((rows * _inverse(scale)).sqrt() * 255.0 + dither)
        q = _like(q.clamp(1.0, 255.0), self.q).to(torch.uint8)
        return SecondMoment8(q, scale.reshape(self.scale.shape))


Codes: TypeAlias = Moment8 | SecondMoment8
# What rounds to the nearest.
NEAREST = 0.5


def dither_at(t: Scalar) -> Scalar:
    """What a step's codes are rounded by: over steps, evenly spread over [0, 1)."""
    return t * _STEP % 1.0


def _inverse(scale: Tensor) -> Tensor:
    # Below, a scale has no inverse in float32: all of its codes are 0. No name at module
    # level: Dynamo would take the number for an input, and compile once more.
    return torch.where(scale < 1e-37, 0.0, 1.0 / scale)


def _rows(x: Tensor, like: Tensor) -> Tensor:
    """The elements of x in the order that another has in memory, 64 a row."""
    if not like.is_contiguous():
        x = x.permute(_order(like))
    flat = x.reshape(-1)
    missing = -flat.numel() % GROUP
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, GROUP)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """What `_rows` made of a tensor laid out like x, as such a tensor again."""
    flat = rows.reshape(-1)[: x.numel()]
    if x.is_contiguous():
        return flat.view(x.shape)
    order = _order(x)
    back = [order.index(i) for i in range(x.dim())]
    return flat.view([x.shape[i] for i in order]).permute(back)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of a shape have their elements in one order in memory."""
    return a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous())


def _order(x: Tensor) -> list[int]:
    return sorted(range(x.dim()), key=lambda i: -x.stride(i))


def has_groups(p: Tensor) -> bool:
    """Whether p is large and dense, and what lies behind its first index whole groups."""
    if p.numel() < LEAST or not _is_dense(p):
        return False
    if p.dim() > 1 and p.numel() // p.shape[0] % GROUP != 0:
        return False
    return True


def is_eligible(p: Tensor) -> bool:
    """Whether p's moments can be kept in codes, by what is true of all of p.

    Never by what of it lies in one process: the same everywhere, and however it is cut.
    """
    return has_groups(p) and cuts_evenly(p, _scale_dims(p), GROUP)


def cuts_groups(p: Tensor) -> bool:
    """Whether p is in no codes only because of how processes divide it."""
    return has_groups(p) and not is_eligible(p)


def _is_dense(p: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _scale_dims(p: Tensor) -> int:
    """How many of p's dimensions its scales have too; the last of them, in groups.

    0 where its memory has another order than its indices: so they cut nothing alike.
    """
    if not p.is_contiguous():
        return 0
    return p.dim() if p.shape[-1] % GROUP == 0 else 1


def moment_codes(p: Tensor) -> Moment8:
    """A first moment of zeros."""
    return Moment8(torch.zeros_like(p, dtype=torch.int8), _zero_scale(p))


def second_moment_codes(p: Tensor) -> SecondMoment8:
    """A mean of squares of zeros: codes of 1, and scales of 0."""
    return SecondMoment8(torch.ones_like(p, dtype=torch.uint8), _zero_scale(p))


def _zero_scale(p: Tensor) -> Tensor:
    """A scale for each group of p, divided among processes as p is."""
    return zeros_divided_like(p, scale_shape(p))


def scale_shape(p: Tensor) -> list[int]:
    """The shape of the scales of p's groups."""
    *front, last = p.shape
    if p.dim() == 1:
        return [-(-last // GROUP)]
    dims, rest = _scale_dims(p), prod(p.shape[1:]) // GROUP
    if dims == p.dim():
        return [*front, last // GROUP]
    if dims == 1:
        return [p.shape[0], rest]
    # As no other: codes tell of which order of memory they are, where a file does not.
    return [p.shape[0], *[1] * (p.dim() - 1), rest]


def in_own_order(codes: "Codes", p: Tensor) -> "Codes":
    """Codes whose strides a file may have lost, in the order that their groups are of.

    Args:
        codes: Saved ones.
        p: Their parameter.

    Raises:
        ValueError: The order of a memory that p does not have.
    """
    q, scale = codes
    permuted = scale.dim() > q.dim()
    if not permuted:
        return type(codes)(q.contiguous(), scale)
    if not q.is_contiguous():
        return codes
    if p.is_contiguous():
        raise ValueError(
            f"codes of shape {tuple(q.shape)} were made of a tensor whose memory was not "
            "contiguous, and have lost its order: load them into such a parameter (as "
            "model.to(memory_format=torch.channels_last)), or save their strides too"
        )
    return type(codes)(torch.empty_like(p, dtype=q.dtype).copy_(q), scale)


# Parameters with what their dtype cannot hold


def is_low(p: Tensor) -> bool:
    """Whether p is of a dtype that compensated summation is for."""
    return p.dtype in (torch.float16, torch.bfloat16)


def remainder_dtype(p: Tensor, param: ParamStorage | None) -> torch.dtype | None:
    """What is kept beside a parameter; None where it is as it is."""
    if not is_low(p) or param == "plain":
        return None
    if param == "kahan8":
        return torch.int8
    if param == "exact":
        return torch.int16 if p.dtype == torch.bfloat16 else p.dtype
    return p.dtype


def widen(p: Tensor, rest: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """P alone, and p as it is meant: with what is kept beside it."""
    p32 = to(p, wide)
    if rest is None:
        return p32, p32
    if rest.dtype == torch.int8:
        return p32, p32 + to(rest, wide) * _unit(p32, p.dtype)
    if rest.dtype == torch.int16:
        return p32, to(_join(p, rest), wide)
    return p32, p32 + to(rest, wide)


def narrow(x: Tensor, p: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """X as p and what is kept beside it are.

    Args:
        x: The parameter as it is meant.
        p: The one before, for its dtype.
        rest: Likewise.
    """
    if rest.dtype == torch.int16:
        # Bits lead back to nothing: without an error, the derivative would be 0.
        high, low = _split(x)
        return refuse_derivatives(x, high), low
    x = refuse_derivatives(x, x)
    rounded = round_to(x, p.dtype)
    code = (x - rounded) * _inverse(_unit(rounded, p.dtype))
    return to(rounded, p.dtype), torch.round(code).clamp(-127.0, 127.0).to(torch.int8)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """X at the precision of a narrower dtype, still in its own (Veltkamp 1968).

    Arithmetic, because compilers fold `x.to(bfloat16).to(float32)` into x, and with it
    the compensation into 0. Its derivative is 1.
    """
    info, bits = torch.finfo(dtype), torch.finfo(dtype).eps / torch.finfo(x.dtype).eps
    # Down by as much first: the largest finite numbers would overflow.
    small = x * (0.5 / bits)
    # Not x * (bits + 1): compilers (Triton's, by default) round a product and the sum that
    # it goes into only once, and scaled - x would no longer lose any bits. All products
    # here are by powers of two and so exact: one rounding or two, the result is the same.
    scaled = small * bits + small
    rounded = (scaled - (scaled - small)) * (2.0 * bits)
    if dtype != torch.float16:
        return rounded
    # Below 6e-5, where weights do come, float16's steps get no smaller; a sum with so much
    # has steps of that size.
    much = 1.5 * info.tiny * bits
    return torch.where(x.abs() < info.tiny, (x + much) - much, rounded)


def _unit(p: Tensor, dtype: torch.dtype) -> Tensor:
    """What 1 of a compensation in 8 bits stands for; 127 of them are half a bit of p."""
    info, size = torch.finfo(dtype), p.abs()
    if dtype == torch.float16:
        size = size.clamp_min(info.tiny)  # below, bits get no smaller
    return size * (info.eps / 2.0 / 127.0)


def remainder(x: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept beside p, as it is, of a parameter that is meant to be x.

    Args:
        x: In float32.
        p: The parameter.
        dtype: Of what is kept: `remainder_dtype`.
    """
    wide = p.to(torch.float32)
    if dtype == torch.int16:
        low = _bits(x) - _up(p.view(torch.int16).to(torch.int32))
        return low.clamp(-(1 << 15), (1 << 15) - 1).to(dtype)
    if dtype == torch.int8:
        code = (x - wide) * _inverse(_unit(wide, p.dtype))
        return torch.round(code).clamp(-127.0, 127.0).to(dtype)
    return (x - wide).to(dtype)


def alike(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether what these dtypes keep beside a parameter differs at most in width."""
    return a == b or (a.is_floating_point and b.is_floating_point)


def recast_remainder(p: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept beside p in another form."""
    part, here = to_local([p, rest])
    x = widen(part, here, torch.float32)[1]
    return from_local(remainder(x, part, dtype), p)


def _bits(x: Tensor) -> Tensor:
    return to(x, torch.float32).view(torch.int32)


# DTensor's << and >> by a number do nothing, without an error (torch 2.13).


def _up(bits: Tensor) -> Tensor:
    return torch.bitwise_left_shift(bits, 16)


def _down(bits: Tensor) -> Tensor:
    return torch.bitwise_right_shift(bits, 16)


def _join(p: Tensor, low: Tensor) -> Tensor:
    """The float32 whose bits these are."""
    high = _up(p.view(torch.int16).to(torch.int32))
    return (high + low.to(torch.int32)).view(torch.float32)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 as the nearest bfloat16 and, signed, the bits that it lacks."""
    bits = _bits(x)
    low = _down(_up(bits))
    high = _down(bits - low)
    # A NaN whose high bits carry over would be -0.
    is_nan = x != x
    high = torch.where(is_nan, 0x7FC0, high).to(torch.int16)
    low = torch.where(is_nan, 0, low).to(torch.int16)
    return high.view(torch.bfloat16), low


class _NotDifferentiable(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, result: Tensor) -> Tensor:
        del x
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ValueError(_NO_DERIVATIVE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise ValueError(_NO_DERIVATIVE)


_NO_DERIVATIVE = (
    "a step whose parameters or moments are kept in codes (storage='8bit', 'kahan8', "
    "'exact') has no derivative: differentiate one with storage=None or dtypes"
)


def refuse_derivatives(x: Tensor, result: Tensor) -> Tensor:
    """What was made of x; an error where anybody differentiates it: codes would give 0."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return result
    return _NotDifferentiable.apply(x, result)  # pyright: ignore[reportReturnType]
