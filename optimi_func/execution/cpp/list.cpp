// The loop of list kernels: it cuts rows of tensors into pieces, which threads take one
// after the other. PIECE, MOST, SLOTS and SLOT come from cpp.py.

// Inductor turns the compiler's own vectorization off, and the codecs need it. This has to
// precede all headers, because their functions are not inlined otherwise.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize")
#endif
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "codecs.cpp"

// Elements of a piece, if no means are taken: at least, of a kernel that decodes (what is
// decoded stays in the L1 cache), and at most. GRAIN elements are worth a thread.
constexpr int64_t SHORTEST = 1 << 12, DECODED = 1 << 10, LONGEST = 1 << 20;
constexpr int64_t GRAIN = 1 << 15;

// A kernel takes pointers and, last, the number of elements that they point to.
typedef void (*Apply)(void* kernel, void** pointers, int64_t length);

template <size_t... I>
static void spread(void* kernel, void** p, int64_t length, std::index_sequence<I...>) {
    typedef void (*Kernel)(decltype((void)I, (void*)nullptr)..., int64_t);
    reinterpret_cast<Kernel>(kernel)(p[I]..., length);
}
template <size_t N>
static void apply(void* kernel, void** pointers, int64_t length) {
    spread(kernel, pointers, length, std::make_index_sequence<N>());
}
template <size_t... N>
static Apply chosen(size_t count, std::index_sequence<N...>) {
    static const Apply all[] = {apply<N>...};
    return all[count];
}

// codecs.Argument: the columns of the table that hold an argument of the caller.
struct Argument {
    int64_t codec, first, second, written;
};

struct Kernel {
    void* code;
    int64_t count;          // of the machine code's arguments
    const int64_t* roles;   // of each: index of our argument, -1 scalars, -2 - i slot i
    const int64_t* widths;  // of each: bytes of an element
    const Argument* ours;   // null if every argument is one column
    int64_t given;          // length of `ours`
};

// Args:
//     table: Columns of `rows` pointers.
//     scalars: The kernel's first argument.
//     per_row, per_piece: Bytes from the scalars of one row or piece to the next.
//     dither: Rounds second moments in 8 bits.
// Returns 1 if there is no room for what is decoded, before the first write, or 0.
extern "C" int run_list(const Kernel* kernel, int64_t rows, const int64_t* lengths,
    const int64_t* table, char* scalars, int64_t per_row, int64_t per_piece, float dither,
    int64_t threads) {
    const int64_t count = kernel->count;
    const int64_t* roles = kernel->roles;
    const Argument* ours = kernel->ours;
    const int64_t given = ours ? kernel->given : 0;
    const Apply call = chosen(count, std::make_index_sequence<MOST>());
    int64_t total = 0;
    for (int64_t i = 0; i < rows; ++i) total += lengths[i];
    // Fewer elements are done before another thread has woken up.
    if (threads > total / GRAIN) threads = total / GRAIN + 1;
    // Long pieces read memory faster, as long as every thread gets its share. Means are
    // sums over pieces, so the length of these must not depend on the threads.
    int64_t size = per_piece ? PIECE : ours ? DECODED : SHORTEST;
    const bool fixed = per_piece != 0 || ours;
    while (!fixed && size < LONGEST && size * threads * 16 < total) size *= 2;
    static thread_local std::vector<float> rooms;
    try {
        if (given) rooms.resize(threads * given * size);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    float* const all = rooms.data();
    std::atomic<int64_t> next{0}, thread{0};
    // A thread takes up to 64 pieces in a row, as long as every thread gets its share of
    // these runs. When threads took single pieces of a kernel that decodes, which are
    // shorter than a page, its steps took twice as long in some processes as in others.
    const int64_t share = total / size / (threads * 16);
    const int64_t run = share < 1 ? 1 : share > 64 ? 64 : share;
    auto work = [&]() {
        void* pointers[MOST];
        alignas(SLOT) char scratch[SLOTS][SLOT];
        int64_t row = 0, before = 0;
        float* decoded = given ? all + thread.fetch_add(1) * given * size : nullptr;
        for (int64_t piece = 0, end = 0;; ++piece) {
            if (piece == end) {
                piece = next.fetch_add(run, std::memory_order_relaxed);
                end = piece + run;
            }
            while (row < rows && piece >= before + (lengths[row] + size - 1) / size) {
                before += (lengths[row] + size - 1) / size;
                ++row;
            }
            if (row == rows) return;
            const int64_t start = (piece - before) * size;
            const int64_t left = lengths[row] - start;
            const int64_t length = left < size ? left : size;
            auto part = [&](int64_t column, int64_t bytes, int64_t group) {
                return reinterpret_cast<char*>(table[column * rows + row]) +
                       start / group * bytes;
            };
            for (int64_t i = 0; i < given; ++i) {
                const Codec& codec = CODECS[ours[i].codec];
                if (codec.decode)
                    codec.decode(part(ours[i].first, codec.first, 1),
                        part(ours[i].second, codec.second, codec.group), decoded + i * size,
                        length);
            }
            for (int64_t i = 0; i < count; ++i) {
                if (roles[i] >= 0 && given && ours[roles[i]].codec) {
                    pointers[i] = decoded + roles[i] * size;
                } else if (roles[i] >= 0 && given) {
                    pointers[i] = part(ours[roles[i]].first, kernel->widths[i], 1);
                } else if (roles[i] >= 0) {
                    pointers[i] = part(roles[i], kernel->widths[i], 1);
                } else if (roles[i] == -1) {
                    pointers[i] = scalars + row * per_row + piece * per_piece;
                } else {
                    pointers[i] = scratch[-2 - roles[i]];
                }
            }
            call(kernel->code, pointers, length);
            for (int64_t i = 0; i < given; ++i) {
                const Codec& codec = CODECS[ours[i].codec];
                if (codec.encode && ours[i].written)
                    codec.encode(decoded + i * size, part(ours[i].first, codec.first, 1),
                        part(ours[i].second, codec.second, codec.group), length, dither);
            }
        }
    };
#pragma omp parallel num_threads(threads)
    work();
    return 0;
}

// Call a kernel of whole tensors for rows of its `count` arguments: addresses and sizes.
// Those that are `inside` are offsets in a thread's room of so many bytes. Returns 1 if
// there is none, before the first write, or 0.
extern "C" int run_shaped(void* code, int64_t count, int64_t rows, const int64_t* arguments,
    const int64_t* inside, int64_t room, int64_t threads) {
    const Apply call = chosen(count - 1, std::make_index_sequence<MOST>());
    const std::unique_ptr<char[]> rooms(new (std::nothrow) char[threads * room]);
    if (!rooms) return 1;
    std::atomic<int64_t> next{0}, thread{0};
    auto work = [&]() {
        int64_t row;
        char* const own = rooms.get() + thread.fetch_add(1) * room;
        while ((row = next.fetch_add(1, std::memory_order_relaxed)) < rows) {
            const int64_t* given = arguments + row * count;
            void* pointers[MOST];
            for (int64_t i = 0; i < count; ++i)
                pointers[i] = reinterpret_cast<void*>(
                    given[i] + (inside[i] ? reinterpret_cast<int64_t>(own) : 0));
            call(code, pointers, given[count - 1]);
        }
    };
#pragma omp parallel num_threads(threads)
    work();
    return 0;
}

// Draw 16 random bits for each of n elements, as core/philox.py does.
extern "C" void draw_bits(int32_t* bits, int64_t n, uint64_t seed, uint64_t step,
    uint32_t place, int64_t threads) {
#pragma omp parallel for num_threads(n > GRAIN ? threads : 1)
    for (int64_t i = 0; i < (n + 7) / 8; ++i) {
        uint32_t a = i, b = place, c = step, d = (step >> 32) + (1u << 31);
        uint32_t k0 = seed, k1 = seed >> 32;
        for (int round = 0; round < 10; ++round) {
            const uint64_t x = a * (uint64_t)0xD2511F53, y = c * (uint64_t)0xCD9E8D57;
            a = (y >> 32) ^ b ^ k0, b = y, c = (x >> 32) ^ d ^ k1, d = x;
            k0 += 0x9E3779B9, k1 += 0xBB67AE85;
        }
        const uint32_t words[] = {a, b, c, d};
        for (int64_t j = 0; j < 8 && 8 * i + j < n; ++j)
            bits[8 * i + j] = words[j / 2] >> (j % 2 * 16) & 0xffff;
    }
}

// Return 1 if the 0-d tensors, `floats` float32 step counts and then float64 scalars of
// the state, are as expected.
extern "C" int64_t counts_hold(
    void* const* counts, const double* expected, int64_t floats, int64_t n) {
    for (int64_t i = 0; i < floats; ++i)
        if (*static_cast<float*>(counts[i]) != expected[i]) return 0;
    for (int64_t i = floats; i < n; ++i)
        if (*static_cast<double*>(counts[i]) != expected[i]) return 0;
    return 1;
}

// Add 1 to the step counts and write what is expected of the others.
extern "C" void counts_advance(
    void* const* counts, double* expected, int64_t floats, int64_t n) {
    for (int64_t i = 0; i < floats; ++i)
        expected[i] = *static_cast<float*>(counts[i]) += 1.0f;
    for (int64_t i = floats; i < n; ++i) *static_cast<double*>(counts[i]) = expected[i];
}
