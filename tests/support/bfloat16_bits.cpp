// Compares cpp/bfloat16.cpp, which is read before this file, with at::vec's own functions.
// Those of single vectors have no specialization there. Numbers are random bit patterns,
// of which many are NaNs, infinities, subnormal numbers, zeros or halfway between two
// bfloat16 numbers.
#include <torch/csrc/inductor/cpp_prefix.h>
using namespace at::vec;
typedef VectorizedN<float, 2> Floats;
typedef Vectorized<float> Half;
typedef Vectorized<at::BFloat16> Low;
constexpr int N = Floats::size();

static uint64_t state = 88172645463325252ull;
static uint32_t random_bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    const uint32_t bits = state >> 24, kind = state & 15;
    if (kind == 0) return bits | 0x7f800000;               // infinity or NaN
    if (kind == 1) return (bits & 0x80000000) | 0x7f800000;  // infinity
    if (kind == 2) return bits & 0x807fffff;               // subnormal
    if (kind == 3) return bits & 0x80000000;               // zero
    if (kind == 4) return (bits & 0xffff0000) | 0x8000;    // halfway
    if (kind == 5) return bits & 0x3f8fffff;               // small, and alike
    return bits;
}
// The numbers of a pair, in the order in which they are rounded to one vector.
static int place(int i) {
#if defined(OPTIMI_BFLOAT16_ONLY)
    return i % 2 * (N / 2) + i / 2;
#else
    return i;
#endif
}
template <typename Vector>
static int64_t differ(const Vector& a, const Vector& b) {
    char x[sizeof(a)], y[sizeof(b)];
    a.store(x), b.store(y);
    return std::memcmp(x, y, sizeof(x)) != 0;
}
// What a kernel stores: NaNs of other bits are equal if it stores bfloat16 alone.
static int64_t differ_stored(const Floats& a, const Floats& b) {
#if defined(OPTIMI_BFLOAT16_ONLY)
    return differ(VecConvert<at::BFloat16, 1, float, 2>::apply(a)[0],
        VecConvert<at::BFloat16, 1, float, 2>::apply(b)[0]);
#else
    return differ(a, b);
#endif
}
template <typename Function>
static Floats by_halves(const Floats& a, const Floats& b, Function function) {
    return Floats(function(a[0], b[0]), function(a[1], b[1]));
}
static Floats drawn() {
    uint32_t bits[N];
    for (uint32_t& x : bits) x = random_bits();
    return Floats::loadu(bits);
}

// Count for each function the vectors whose bits differ.
extern "C" void count_differences(int64_t rounds, int64_t* found) {
    for (int64_t round = 0; round < rounds; ++round) {
        int64_t* count = found;
        const Floats a = drawn(), b = round % 5 ? drawn() : a;
        // to bfloat16
        uint32_t bits[N], mixed[N];
        a.store(bits);
        for (int i = 0; i < N; ++i) mixed[i] = bits[place(i)];
        const Low own = VecConvert<at::BFloat16, 1, float, 2>::apply(Floats::loadu(mixed))[0];
        const Low low = convert<at::BFloat16, 1, float, 2>(a);
        *count++ += differ(low, own);
        // to float32
        const Floats wide = convert<float, 2, at::BFloat16, 1>(low);
        uint32_t got[N], expected[N];
        wide.store(got);
        VecConvert<float, 2, at::BFloat16, 1>::apply(low).store(expected);
        for (int i = 0; i < N; ++i) mixed[i] = got[place(i)];
        *count++ += std::memcmp(mixed, expected, sizeof(mixed)) != 0;
#define COMPARE(made, function)                                                          \
    *count++ += differ(made, by_halves(a, b, [](const Half& a, const Half& b) { return function; }))
        COMPARE(maximum(a, b), maximum(a, b));
        COMPARE(minimum(a, b), minimum(a, b));
        COMPARE((a == b), (a == b));
        COMPARE((a != b), (a != b));
        COMPARE((a < b), (a < b));
        COMPARE((a <= b), (a <= b));
        COMPARE((a > b), (a > b));
        COMPARE((a >= b), (a >= b));
#define BESIDE(constant, name)                                                           \
    *count++ += differ_stored(name(a, Floats(constant)), Floats(                         \
        name(a[0], Half(constant)), name(a[1], Half(constant))))
        BESIDE(0.0f, maximum);
        BESIDE(-0.0f, minimum);
        BESIDE(1.1754943508222875e-38f, maximum);
        BESIDE(1.0f, minimum);
        BESIDE(NAN, maximum);
        const Floats mask = a < b;
        *count++ += differ(Floats::blendv(a, b, mask), Floats(
            Half::blendv(a[0], b[0], mask[0]), Half::blendv(a[1], b[1], mask[1])));
    }
}
extern "C" const int functions = 16;
