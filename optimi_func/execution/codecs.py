"""Codes in C++: list kernels on what is kept in codes, a piece decoded at a time.

Inductor's loops over codes are slow: no vectors of int16, no fused reduction and rounding.
So the kernel here is the one for float32 tensors. Around it each thread decodes a piece of
what is kept in codes into its cache, calls the kernel on that, and encodes the results.
The formulas are those of `_storage`; a trial compares the results with theirs, bit for bit.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimi_func._codes import moment_codes, narrow, second_moment_codes, widen
from optimi_func._storage import decode, encode
from optimi_func.execution.slots import Slot

SOURCE = """
#include <cmath>
#include <cstring>

static inline float of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// The largest magnitude; NaN where there is one, as its bits are the largest.
static inline float largest(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return of_bits(most);
}
// What follows is written so that compilers make vectors of the loops around it: without a
// branch, without bounds in floats, without a floor whose result becomes an integer.
static inline float inverse(float scale) {
    const uint32_t keep = scale < 1e-37f ? 0 : 0xffffffff;
    return of_bits(bits_of(1.0f / scale) & keep);
}
// The integer part, between two; 0 for NaN.
static inline int32_t code(float x, int32_t low, int32_t high) {
    const int32_t q = (int32_t)x;
    const int32_t above = q < low ? low : q;
    return (above > high ? high : above) & -(int32_t)(x == x);
}

// Groups of 64, and a rest. A length that is known leaves nothing beside vectors.
template <typename Q, void (*group)(const Q*, const float*, float*, int64_t)>
static void decode_groups(const void* codes, const void* more, float* x, int64_t n) {
    const Q* q = static_cast<const Q*>(codes);
    const float* scale = static_cast<const float*>(more);
    for (; n >= 64; n -= 64, q += 64, x += 64) group(q, scale++, x, 64);
    if (n) group(q, scale, x, n);
}
template <typename Q, void (*group)(const float*, Q*, float*, int64_t, float)>
static void encode_groups(
    const float* x, void* codes, void* more, int64_t n, float dither) {
    Q* q = static_cast<Q*>(codes);
    float* scale = static_cast<float*>(more);
    for (; n >= 64; n -= 64, q += 64, x += 64) group(x, q, scale++, 64, dither);
    if (n) group(x, q, scale, n, dither);
}

static inline void decode_moment(
    const int8_t* __restrict q, const float* scale, float* __restrict x, int64_t n) {
    const float c = *scale * (float)(1.0 / 16129);
    for (int64_t i = 0; i < n; ++i) {
        const float f = q[i];
        x[i] = (f * std::fabs(f)) * c;
    }
}
static inline void encode_moment(
    const float* __restrict x, int8_t* __restrict q, float* scale, int64_t n, float) {
    const float s = largest(x, n), inv = inverse(s);
    *scale = s;
    for (int64_t i = 0; i < n; ++i) {
        const float z = std::rint(std::sqrt(std::fabs(x[i]) * inv) * 127.0f);
        q[i] = (int8_t)(int32_t)std::copysign(z, x[i]);
    }
}

static inline void decode_square(
    const uint8_t* __restrict q, const float* scale, float* __restrict x, int64_t n) {
    const float c = *scale * (float)(1.0 / 65025);
    for (int64_t i = 0; i < n; ++i) {
        const float f = q[i];
        const float r = (f * f) * c;
        x[i] = r * r;
    }
}
static inline void encode_square(
    const float* __restrict x, uint8_t* __restrict q, float* scale, int64_t n,
    float dither) {
    // The root of the largest is the largest of the roots.
    const float most = std::sqrt(largest(x, n));
    const float s = most + (most - most), inv = inverse(s);  // of inf a NaN
    *scale = s;
    for (int64_t i = 0; i < n; ++i) {
        const float z = std::sqrt(std::sqrt(x[i]) * inv) * 255.0f + dither;
        q[i] = (uint8_t)code(z, 1, 255);
    }
}

static inline float unit(float p) {
    return std::fabs(p) * (float)(0.0078125 / 2.0 / 127.0);
}
static void decode_kahan8(const void* params, const void* more, float* x, int64_t n) {
    const uint16_t* p = static_cast<const uint16_t*>(params);
    const int8_t* __restrict rest = static_cast<const int8_t*>(more);
    for (int64_t i = 0; i < n; ++i) {
        const float wide = of_bits((uint32_t)p[i] << 16);
        x[i] = wide + (float)rest[i] * unit(wide);
    }
}
static void encode_kahan8(const float* x, void* params, void* more, int64_t n, float) {
    uint16_t* p = static_cast<uint16_t*>(params);
    int8_t* __restrict rest = static_cast<int8_t*>(more);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]);
        const uint32_t even = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
        const uint32_t nan = -(uint32_t)(x[i] != x[i]);
        const float rounded = of_bits((even & ~nan) | (0x7fc00000 & nan));
        const float c = std::rint((x[i] - rounded) * inverse(unit(rounded)));
        p[i] = (uint16_t)(bits_of(rounded) >> 16);
        rest[i] = (int8_t)code(c, -127, 127);
    }
}

static void decode_exact(const void* params, const void* more, float* x, int64_t n) {
    const int16_t* p = static_cast<const int16_t*>(params);
    const int16_t* rest = static_cast<const int16_t*>(more);
    for (int64_t i = 0; i < n; ++i)
        x[i] = of_bits(((uint32_t)(int32_t)p[i] << 16) + (uint32_t)(int32_t)rest[i]);
}
static void encode_exact(const float* x, void* params, void* more, int64_t n, float) {
    int16_t* p = static_cast<int16_t*>(params);
    int16_t* rest = static_cast<int16_t*>(more);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]);
        const int32_t low = (int16_t)(bits & 0xffff);
        const uint32_t high = (bits - (uint32_t)low) >> 16;
        const bool nan = x[i] != x[i];
        p[i] = (int16_t)(nan ? 0x7fc0 : high);
        rest[i] = (int16_t)(nan ? 0 : low);
    }
}

static void decode_bfloat16(const void* halves, const void*, float* x, int64_t n) {
    const uint16_t* p = static_cast<const uint16_t*>(halves);
    for (int64_t i = 0; i < n; ++i) x[i] = of_bits((uint32_t)p[i] << 16);
}

// Of each codec the bytes of an element in its first tensor; those of the second, for so
// many elements; and how to read and write a piece of whole groups.
struct Codec {
    int64_t first, second, group;
    void (*decode)(const void*, const void*, float*, int64_t);
    void (*encode)(const float*, void*, void*, int64_t, float);
};
static const Codec CODECS[] = {
    {0, 0, 1, nullptr, nullptr},
    {1, 4, 64, decode_groups<int8_t, decode_moment>, encode_groups<int8_t, encode_moment>},
    {1, 4, 64, decode_groups<uint8_t, decode_square>,
     encode_groups<uint8_t, encode_square>},
    {2, 1, 1, decode_kahan8, encode_kahan8},
    {2, 2, 1, decode_exact, encode_exact},
    {2, 0, 1, decode_bfloat16, nullptr},
};
extern "C" void decode(int64_t codec, void* first, void* second, float* x, int64_t n) {
    CODECS[codec].decode(first, second, x, n);
}
extern "C" void encode(
    int64_t codec, const float* x, void* first, void* second, int64_t n, float dither) {
    CODECS[codec].encode(x, first, second, n, dither);
}
"""


class Argument(NamedTuple):
    """An argument of a kernel, and in which columns of a launch's table it is kept."""

    codec: int  # in CODECS; 0: as it is
    first: int
    second: int
    written: bool


# In CODECS the codec of a moment, by the dtype of its codes; and of a parameter, by that
# of what is kept beside it.
_MOMENTS = {torch.int8: 1, torch.uint8: 2}
_PARAMS = {torch.int8: 3, torch.int16: 4}
_BFLOAT16 = 5


def can_run(slot: Slot) -> bool:
    """Whether the codecs here are those of a slot, and agree with `_storage`."""
    rest = slot.dtypes[-1]
    params = rest.is_floating_point or slot.dtypes[0] == torch.bfloat16
    return params and _agree()


def widens_gradients(slot: Slot, g: Tensor) -> bool:
    """Whether the kernel has to be that of float32 gradients.

    Another one adds up in another order, and 'exact' is float32 bit for bit.
    """
    return slot.dtypes[-1] == torch.int16 and g.dtype == torch.bfloat16


def arguments_of(slot: Slot, write: bool, moves: bool, widens: bool) -> list[Argument]:
    """Where a launch has what a kernel takes of a slot.

    Args:
        slot: One of the launch's. Its columns are the parameters', the gradients', those
            of the tensors of the state, and those of what is kept beside parameters.
        write: Whether parameters move.
        moves: Whether anything does, or means are measured.
        widens: Whether gradients, of bfloat16, are handed on in float32.
    """
    _, *rest = slot.dtypes
    last = len(slot.dtypes)
    gradient = Argument(_BFLOAT16 if widens else 0, 1, 1, False)
    found = [Argument(0, 0, 0, False), gradient]
    if slot.compensated and not rest[-1].is_floating_point:
        found[0] = Argument(_PARAMS[rest[-1]], 0, last, write and moves)
    column = 2
    for coded in slot.codes:
        if coded:
            found.append(Argument(_MOMENTS[rest[column - 2]], column, column + 1, moves))
        else:
            found.append(Argument(0, column, column, False))
        column += 1 + coded
    if slot.compensated and rest[-1].is_floating_point:
        found.append(Argument(0, column, column, False))
    return found


@cache
def _agree() -> bool:
    """Whether every codec gives bit for bit what `_storage` gives, on a trial."""
    from optimi_func.execution.list_kernel import native

    functions = native()
    if functions is None:
        return False
    own = torch.Generator().manual_seed(0)
    x = torch.randn(1003, generator=own, device="cpu").mul(1e-3)
    x[::97] = 0.0
    p, rest = torch.zeros(1003, dtype=torch.bfloat16), torch.zeros(1003, dtype=torch.int16)
    kept: list[tuple[int, Any, Tensor]] = [
        (1, moment_codes(x), x),
        (2, second_moment_codes(x), x.square()),
        (3, (p, rest.to(torch.int8)), x),
        (4, (p, rest), x),
    ]
    for codec, zeros, x in kept:
        first, second = [y.clone() for y in zeros]
        back = torch.empty_like(x)
        places = first.data_ptr(), second.data_ptr()
        functions.encode(codec, x.data_ptr(), *places, len(x), 0.3)
        functions.decode(codec, *places, back.data_ptr(), len(x))
        if codec in _MOMENTS.values():
            coded = encode(x, zeros, 0.3)
            expected = decode(coded, torch.float32)
        else:
            coded = narrow(x, *zeros)
            expected = widen(*coded, torch.float32)[1]
        same = first.equal(coded[0]) and second.equal(coded[1].view(second.shape))
        if not (same and back.equal(expected)):
            return False
    return True
