// Faster versions of the functions of at::vec that Inductor's bfloat16 kernels spend most
// of their time in. They return the same bits. bfloat16.py makes the compiler read this
// file before the generated code. It contains full specializations of at::vec's function
// templates, so the generated code calls them without knowing of them. A processor or
// compiler for which this file has no code runs at::vec's own functions.
//
// A kernel computes in pairs of float32 vectors, one pair for each bfloat16 vector.
// OPTIMI_BFLOAT16_ONLY promises that every vector which the kernel loads or stores is
// bfloat16, and that it adds up no elements. Two things are then invisible from outside,
// and both save time: which element of a pair is where, and the bits of a NaN, because
// all NaNs have the same bits once they are rounded to bfloat16.
#pragma once
#include <torch/csrc/inductor/cpp_prefix.h>
#if defined(__GNUC__) && (defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2))
#include <immintrin.h>
// Shows from outside that a library was compiled with this file.
extern "C" __attribute__((visibility("default"), used)) const int optimi_bfloat16 = 1;

namespace at::vec {
inline namespace CPU_CAPABILITY {
#define INLINE inline __attribute__((always_inline))
typedef VectorizedN<float, 2> Pair;
namespace optimi {

#if defined(CPU_CAPABILITY_AVX512)
typedef __m512 Floats;
typedef __m512i Bits;
typedef int Ints __attribute__((vector_size(64)));
#define V(name) _mm512_##name
#define AND _mm512_and_si512
#else
typedef __m256 Floats;
typedef __m256i Bits;
#define V(name) _mm256_##name
#define AND _mm256_and_si256
#endif
static INLINE Bits all(uint32_t x) { return V(set1_epi32)((int)x); }

// Round each number to bfloat16, which is then the high half of its 32 bits. The low half
// is arbitrary, and NaN becomes all ones, as in at::vec.
static INLINE Bits rounded(Floats x) {
    const Bits bits = (Bits)x, odd = AND(V(srli_epi32)(bits, 16), all(1));
    const Bits sum = V(add_epi32)(V(add_epi32)(odd, all(0x7fff)), bits);
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_mask_mov_epi32(sum, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), all(-1));
#else
    return _mm256_or_si256(sum, (Bits)_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
#endif
}

// Round a pair by integer instructions.
static INLINE Bits pack(Floats a, Floats b) {
    const Bits low = V(srli_epi32)(rounded(a), 16), high = rounded(b);
#if defined(OPTIMI_BFLOAT16_ONLY) && defined(CPU_CAPABILITY_AVX512)
    return _mm512_mask_blend_epi16(0xaaaaaaaa, low, high);
#elif defined(OPTIMI_BFLOAT16_ONLY)
    return _mm256_blend_epi16(low, high, 0xaa);
#elif defined(CPU_CAPABILITY_AVX512)
    const Bits order = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    const Bits halves = _mm512_packus_epi32(low, _mm512_srli_epi32(high, 16));
    return _mm512_permutexvar_epi64(order, halves);
#else
    const Bits halves = _mm256_packus_epi32(low, _mm256_srli_epi32(high, 16));
    return _mm256_permute4x64_epi64(halves, 0xd8);
#endif
}

// Round a pair by the processor's own instruction, if it has one. at::vec never uses it,
// because it takes subnormal numbers for 0 and keeps some bits of a NaN. Vectors that
// contain one of these are rounded by `pack`.
static INLINE Bits to_bfloat16(Floats a, Floats b) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
    constexpr int QUIET_NAN = 0x01, SUBNORMAL = 0x20, SIGNALING_NAN = 0x80;
    constexpr int RARE = QUIET_NAN | SUBNORMAL | SIGNALING_NAN;
    const auto in_a = _mm512_fpclass_ps_mask(a, RARE),
               in_b = _mm512_fpclass_ps_mask(b, RARE);
    if (__builtin_expect(!_mm512_kortestz(in_a, in_b), 0)) return pack(a, b);
    const Bits halves = (Bits)_mm512_cvtne2ps_pbh(b, a);
#if defined(OPTIMI_BFLOAT16_ONLY)
    alignas(64) static const uint16_t order[] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
        6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
#else
    return halves;
#endif
#else
    return pack(a, b);
#endif
}

// Return the minimum or maximum, given that of the processor, which is its second argument
// if either is NaN. at::vec's is a NaN of all ones then.
static INLINE Floats or_nan(Floats extreme, Floats a, Floats b) {
#if defined(CPU_CAPABILITY_AVX512)
    const auto nan = _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    return (Floats)_mm512_mask_mov_epi32((Bits)extreme, nan, all(-1));
#else
    return _mm256_or_ps(extreme, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
#endif
}

// Return true if the compiler knows that a vector has one constant, which is neither NaN
// nor 0, whose sign would depend on the order of the arguments.
static INLINE bool is_constant(Floats x) {
#if defined(OPTIMI_BFLOAT16_ONLY)
    return __builtin_constant_p(x[0]) && (x[0] < 0 || x[0] > 0);
#else
    return false;
#endif
}
}  // namespace optimi

template <>
INLINE Vectorized<BFloat16> convert<BFloat16, 1, float, 2>(const Pair& x) {
    return optimi::to_bfloat16(x[0], x[1]);
}

#if defined(OPTIMI_BFLOAT16_ONLY)
// The first vector gets the elements at even places, and the second those at odd places.
// That takes a shift and a mask, where at::vec's two halves take permutations. `pack` and
// `to_bfloat16` put the elements back.
template <>
INLINE Pair convert<float, 2, BFloat16, 1>(const VectorizedN<BFloat16, 1>& x) {
    using namespace optimi;
    const Bits bits = x[0];
    Pair result;
    result[0] = (Floats)V(slli_epi32)(bits, 16);
    result[1] = (Floats)AND(bits, all(0xffff0000));
    return result;
}
#endif

#define EXTREME(name)                                                                   \
    template <>                                                                         \
    INLINE Pair name##imum<float, 2>(const Pair& a, const Pair& b) {                    \
        using namespace optimi;                                                         \
        Pair result;                                                                    \
        for (int i = 0; i < 2; ++i) {                                                   \
            const Floats x = a[i], y = b[i];                                            \
            /* In this order the result is x if x is NaN. */                            \
            result[i] =                                                                 \
                is_constant(y) ? V(name##_ps)(y, x) : or_nan(V(name##_ps)(x, y), x, y); \
        }                                                                               \
        return result;                                                                  \
    }
EXTREME(max)
EXTREME(min)
#undef EXTREME

#if defined(CPU_CAPABILITY_AVX512)
// Comparisons return vectors, of which AVX-512 makes masks again before it can select by
// them. In this form compilers see that the vector is not needed.
#define COMPARED(op)                                                           \
    template <>                                                                \
    INLINE Pair Pair::operator op(const Pair& other) const {                   \
        using namespace optimi;                                                \
        Pair result;                                                           \
        for (int i = 0; i < 2; ++i)                                            \
            result[i] = (Floats)(Ints)((Floats)values[i] op(Floats) other[i]); \
        return result;                                                         \
    }
COMPARED(==)
COMPARED(!=)
COMPARED(<)
COMPARED(<=)
COMPARED(>)
COMPARED(>=)
#undef COMPARED
template <>
INLINE Pair Pair::blendv(const Pair& a, const Pair& b, const Pair& mask) {
    using namespace optimi;
    Pair result;
    for (int i = 0; i < 2; ++i) {
        const Floats x = a[i], y = b[i], m = mask[i];
        result[i] = (Floats)((Ints)m == -1 ? (Ints)y : (Ints)x);
    }
    return result;
}
#endif
#undef V
#undef AND
#undef INLINE
}  // namespace CPU_CAPABILITY
}  // namespace at::vec
#endif
