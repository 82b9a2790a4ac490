// 8-bit state and compensations, decoded to float32 and encoded again. The formulas are
// those of core/codes.py, and codecs.py compares the results with theirs bit for bit.
#include <cmath>
#include <cstdint>
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

// Compilers make no vectors of loops with a branch, a float bound or a floor, so the loops
// below have none.

// Return the largest magnitude, or NaN if there is one, because its bits are the largest.
static inline float largest(const float* x, int64_t n) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t bits = bits_of(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return of_bits(most);
}

// Return 1 / scale, or 0 if that would be infinite.
static inline float inverse(float scale) {
    const uint32_t keep = scale < 1e-37f ? 0 : 0xffffffff;
    return of_bits(bits_of(1.0f / scale) & keep);
}

// Return the integer part of x, clamped, or 0 if x is NaN.
static inline int32_t code(float x, int32_t low, int32_t high) {
    const int32_t q = (int32_t)x;
    const int32_t above = q < low ? low : q;
    return (above > high ? high : above) & -(int32_t)(x == x);
}

// Call `group` for groups of 64 elements and for the rest. A constant length lets
// compilers drop the scalar loop that would follow the vectors.
template <typename Q, void (*group)(const Q*, const float*, float*, int64_t)>
static void decode_groups(const void* codes, const void* scales, float* x, int64_t n) {
    const Q* q = static_cast<const Q*>(codes);
    const float* scale = static_cast<const float*>(scales);
    for (; n >= 64; n -= 64, q += 64, x += 64) group(q, scale++, x, 64);
    if (n) group(q, scale, x, n);
}
template <typename Q, void (*group)(const float*, Q*, float*, int64_t, float)>
static void encode_groups(
    const float* x, void* codes, void* scales, int64_t n, float dither) {
    Q* q = static_cast<Q*>(codes);
    float* scale = static_cast<float*>(scales);
    for (; n >= 64; n -= 64, q += 64, x += 64) group(x, q, scale++, 64, dither);
    if (n) group(x, q, scale, n, dither);
}

// Moment8
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

// SecondMoment8
static inline void decode_square(
    const uint8_t* __restrict q, const float* scale, float* __restrict x, int64_t n) {
    const float c = *scale * (float)(1.0 / 65025);
    for (int64_t i = 0; i < n; ++i) {
        const float f = q[i];
        const float r = (f * f) * c;
        x[i] = r * r;
    }
}
static inline void encode_square(const float* __restrict x, uint8_t* __restrict q,
    float* scale, int64_t n, float dither) {
    // The root of the largest is the largest root.
    const float most = std::sqrt(largest(x, n));
    const float s = most + (most - most), inv = inverse(s);  // turns inf into NaN
    *scale = s;
    for (int64_t i = 0; i < n; ++i) {
        const float z = std::sqrt(std::sqrt(x[i]) * inv) * 255.0f + dither;
        q[i] = (uint8_t)code(z, 1, 255);
    }
}

// Kahan compensation of a bfloat16 parameter in 8 bits
static inline float unit(float p) {
    return std::fabs(p) * (float)(0.0078125 / 2.0 / 127.0);
}
static void decode_kahan8(const void* params, const void* comp, float* x, int64_t n) {
    const uint16_t* p = static_cast<const uint16_t*>(params);
    const int8_t* __restrict rest = static_cast<const int8_t*>(comp);
    for (int64_t i = 0; i < n; ++i) {
        const float wide = of_bits((uint32_t)p[i] << 16);
        x[i] = wide + (float)rest[i] * unit(wide);
    }
}
static void encode_kahan8(const float* x, void* params, void* comp, int64_t n, float) {
    uint16_t* p = static_cast<uint16_t*>(params);
    int8_t* __restrict rest = static_cast<int8_t*>(comp);
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

// "exact": the two halves of a float32 parameter
static void decode_exact(const void* params, const void* comp, float* x, int64_t n) {
    const int16_t* p = static_cast<const int16_t*>(params);
    const int16_t* rest = static_cast<const int16_t*>(comp);
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t high = (uint32_t)(int32_t)p[i] << 16;
        const uint32_t bits = high + (uint32_t)(int32_t)rest[i];
        const float wide = of_bits(bits);
        const uint32_t nan = -(uint32_t)(wide != wide);  // bits of an overwritten weight
        x[i] = of_bits((bits & ~nan) | (high & nan));
    }
}
static void encode_exact(const float* x, void* params, void* comp, int64_t n, float) {
    int16_t* p = static_cast<int16_t*>(params);
    int16_t* rest = static_cast<int16_t*>(comp);
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

static void copy_16_bits(const float* x, void* halves, void*, int64_t n, float) {
    std::memcpy(halves, x, 2 * n);
}

// A codec has two tensors: `first` bytes for each element, and `second` bytes for each
// `group` elements. A null function means that nothing is decoded or encoded.
struct Codec {
    int64_t first, second, group;
    void (*decode)(const void*, const void*, float*, int64_t);
    void (*encode)(const float*, void*, void*, int64_t, float);
};
// codecs.py names them by their index: first the formats of moments, then those of
// parameters, in the order in which core/codes.py lists them.
static const Codec CODECS[] = {
    {0, 0, 1, nullptr, nullptr},
    {2, 0, 1, decode_bfloat16, nullptr},
    {2, 0, 1, nullptr, copy_16_bits},
    {1, 4, 64, decode_groups<int8_t, decode_moment>, encode_groups<int8_t, encode_moment>},
    {1, 4, 64, decode_groups<uint8_t, decode_square>,
        encode_groups<uint8_t, encode_square>},
    {2, 1, 1, decode_kahan8, encode_kahan8},
    {2, 2, 1, decode_exact, encode_exact},
};
extern "C" void decode(int64_t codec, void* first, void* second, float* x, int64_t n) {
    CODECS[codec].decode(first, second, x, n);
}
extern "C" void encode(
    int64_t codec, const float* x, void* first, void* second, int64_t n, float dither) {
    CODECS[codec].encode(x, first, second, n, dither);
}
