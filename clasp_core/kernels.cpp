// A decoder's layers over few rows, on a CPU: each reads its weights once, whatever the number of rows.
//
// One call is one layer, or one of its two sub-layers, in one parallel region: norm, projections, rotary embedding,
// attention over the cache, residual; norm, gated MLP, residual. Every sum runs in an order that depends on neither the
// number of rows nor the number of threads, so a row's result has the same bits alone (decoding) and among others that
// follow it (verification). Behind masked rows (a tree's second branch) its scores sit in other places of the softmax's
// sum, and its last bits may differ.
//
// Shapes as in Python: T rows, d width, Hq and H query and key-value heads of width D. Matrices are row-major,
// weights `out in`. Arithmetic is float32; weights, states and the cache are float32 or bfloat16.
//
// What products leave of a row behind whole vectors is summed by `std::fma`: a plain `a * b + c` is rounded once or twice as the
// compiler likes, and it likes different things for different numbers of rows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include <omp.h>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, QUERIES = 6;
#else
constexpr int LANES = 8, QUERIES = 3;
#endif

// Rows of a matrix are dealt to the threads in groups of as many.
constexpr int GROUP = 4;

// A thread reads a matrix in about this many places at once, far from one another: memory gives a third more than to
// one reader of one row after the other, as long as the processor's prefetchers can follow so many.
constexpr int PLACES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

constexpr float NOT_SEEN = -std::numeric_limits<float>::infinity();

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) {
    Floats out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

inline Floats load(const BFloat16* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Ints) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void store(BFloat16* to, Floats value) {  // round to nearest, ties to even; not-a-number stays one
    const Ints bits = (Ints)value;
    const Ints rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const Halves halves = __builtin_convertvector(value == value ? rounded : Ints{} + 0x7fc0, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline float get(float value) { return value; }

inline float get(BFloat16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline void put(float* to, float value) { *to = value; }

inline void put(BFloat16* to, float value) {  // round to nearest, ties to even; not-a-number stays one
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    to->bits = value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The lower half of a vector plus its upper half, the longest first, down to one number.
inline float sum(Floats v) {
#ifdef __AVX512F__
    typedef float Eight __attribute__((vector_size(32)));
    Eight halves[2];
    std::memcpy(halves, &v, sizeof halves);
    const Eight eight = halves[0] + halves[1];
#else
    const Floats eight = v;
#endif
    typedef float Four __attribute__((vector_size(16)));
    Four quarters[2];
    std::memcpy(quarters, &eight, sizeof quarters);
    const Four four = quarters[0] + quarters[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

#ifdef __AVX512F__
// Places `I` of `a` followed by `b`.
template <int... I>
inline Floats pick(Floats a, Floats b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, I...);
#else
    return __builtin_shuffle(a, b, Ints{I...});
#endif
}
#endif

// The sums of as many vectors as a vector has lanes, each with the bits of `sum`.
inline Floats sum_all(const Floats* v) {
#ifdef __AVX512F__
    Floats halves[8], quarters[4], pairs[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        halves[i] = pick<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(v[2 * i], v[2 * i + 1]) +
                    pick<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        quarters[i] =
            pick<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(halves[2 * i], halves[2 * i + 1]) +
            pick<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(halves[2 * i], halves[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        pairs[i] =
            pick<0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29>(quarters[2 * i], quarters[2 * i + 1]) +
            pick<2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31>(quarters[2 * i], quarters[2 * i + 1]);
    return pick<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(pairs[0], pairs[1]) +
           pick<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(pairs[0], pairs[1]);
#else
    Floats out;
    for (int lane = 0; lane < LANES; lane++) out[lane] = sum(v[lane]);
    return out;
#endif
}

// The sums of N vectors, each with the bits of `sum`; `totals` has room for whole vectors.
template <int N>
inline void sum_each(const Floats* vectors, float* totals) {
#pragma GCC unroll 4
    for (int first = 0; first < N; first += LANES) {
        Floats some[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) some[i] = first + i < N ? vectors[first + i] : Floats{};
        store(totals + first, sum_all(some));
    }
}

// e^x to about 2e-7: 2^n times a polynomial for the rest, which lies within half a ln 2; 0 below -87.
inline Floats exponential(Floats x) {
    const Floats bounded = x > 88.0f ? Floats{} + 88.0f : (x < -87.0f ? Floats{} - 87.0f : x);
    const Floats shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23 rounds to an integer
    const Floats n = shifted - 12582912.0f;
    const Floats r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = Floats{} + 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Ints exponent = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return x < -87.0f ? Floats{} : p * (Floats)exponent;
}

// `call` with `num`, which is one of LEAST .. MOST, as a constant of its type.
template <int LEAST, int MOST, typename Call>
inline void with_constant(int num, const Call& call) {
    if (num == MOST) return call(std::integral_constant<int, MOST>{});
    if constexpr (MOST > LEAST) with_constant<LEAST, MOST - 1>(num, call);
}

// How far ahead of its arithmetic a tile asks for each of its rows, and what memory gives at once.
constexpr int64_t BYTES_NEAR = 512, BYTES_LINE = 64;

// What of the first cache is for states.
constexpr int64_t BYTES_STATES = 32768;

template <typename Weight>
constexpr int64_t NEAR = BYTES_NEAR / int64_t(sizeof(Weight));

template <typename Weight>
constexpr int64_t LINE = BYTES_LINE / int64_t(sizeof(Weight));

// So many runs of rows, NW of which are read beside one another.
template <int NW>
constexpr int RUNS = (PLACES + NW / 2) / NW * NW;

// Products of NW rows of a matrix, `pitch` apart, with NS rows of states, all `size` long: `totals`, NS NW and room up to
// whole vectors. With NA it asks for other weights meanwhile: of each of the RUNS rows from `ahead` on one line after the
// other, NA at a time.
template <int NW, int NS, int NA, typename Weight>
__attribute__((noinline)) void tile(const Weight* matrix, int64_t pitch, const float* states, int64_t size,
                                    const Weight* ahead, float* totals) {
    Floats sums[NS * NW];
#pragma GCC unroll 32
    for (int i = 0; i < NS * NW; i++) sums[i] = Floats{};
    const int64_t whole = size - size % LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats weights[NW];
#pragma GCC unroll 16
        for (int i = 0; i < NW; i++) {
            weights[i] = load(matrix + i * pitch + k);
            __builtin_prefetch(matrix + i * pitch + k + NEAR<Weight>, 0, 3);
        }
        if constexpr (NA > 0) {
            constexpr int64_t TURN = LANES * RUNS<NW> / NA;  // of k, in which each of the rows had its turn
            const Weight* const line = ahead + k / TURN * LINE<Weight> + k % TURN / LANES * NA * pitch;
            for (int i = 0; i < NA; i++) __builtin_prefetch(line + i * pitch, 0, 2);
        }
#pragma GCC unroll 16
        for (int j = 0; j < NS; j++) {
            const Floats x = load(states + j * size + k);
#pragma GCC unroll 16
            for (int i = 0; i < NW; i++) sums[j * NW + i] += weights[i] * x;
        }
    }
    sum_each<NS * NW>(sums, totals);
    for (int64_t k = whole; k < size; k++)
        for (int j = 0; j < NS; j++)
            for (int i = 0; i < NW; i++)
                totals[j * NW + i] = std::fma(get(matrix[i * pitch + k]), states[j * size + k], totals[j * NW + i]);
}

// The rows of a matrix that a thread multiplies, each `size` long.
template <typename Weight>
struct Stretch {
    const Weight* matrix;
    int64_t size, first, last;
};

// Products of NW rows of a matrix, `pitch` apart, with `num` rows of states, of which there are LEAST .. MOST;
// `emit(which of the rows, state, product)`. NA and `ahead`: as in `tile`.
template <int NW, int LEAST, int MOST, int NA, typename Weight, typename Emit>
inline void strip(const Weight* matrix, int64_t pitch, int64_t size, const Weight* ahead, const float* states, int num,
                  const Emit& emit) {
    alignas(BYTES_LINE) float totals[(MOST * NW + LANES - 1) / LANES * LANES];
    with_constant<LEAST, MOST>(num, [&](auto rows) {
        tile<NW, decltype(rows)::value, NA>(matrix, pitch, states, size, ahead, totals);
    });
    for (int state = 0; state < num; state++)
        for (int i = 0; i < NW; i++) emit(i, state, totals[state * NW + i]);
}

// All products of a stretch's rows with `num` rows of states; `emit(matrix row, state, product)`. The rows are read as
// RUNS runs beside one another, NW rows at a time with LEAST .. MOST states in each of several passes; then those that
// are left. With NA the passes share in asking for the next row of every run.
template <int NW, int LEAST, int MOST, int NA, typename Weight, typename Emit>
inline void products_of(const Stretch<Weight>& stretch, const float* states, int num, const Emit& emit) {
    const int64_t size = stretch.size, per = (stretch.last - stretch.first) / RUNS<NW>, pitch = per * size;
    const int passes = (num + MOST - 1) / MOST, most = passes ? (num + passes - 1) / passes : 0;
    for (int64_t row = 0; row < per; row++) {
        const Weight* const first = stretch.matrix + (stretch.first + row) * size;
        const Weight* ahead = row + 1 < per ? first + size : first;
        for (int run = 0; run < RUNS<NW>; run += NW)
            for (int j = 0; j < num; j += most) {
                strip<NW, LEAST, MOST, NA>(first + run * pitch, pitch, size, ahead, states + j * size,
                                           std::min(most, num - j), [&](int i, int state, float product) {
                                               emit(stretch.first + (run + i) * per + row, j + state, product);
                                           });
                ahead += size / LANES * NA / RUNS<NW> * LINE<Weight>;
            }
    }
    const auto rest = [&](auto rows, int64_t row) {
        const Weight* const first = stretch.matrix + row * size;
        for (int j = 0; j < num; j += most)
            strip<decltype(rows)::value, LEAST, MOST, 0>(
                first, size, size, first, states + j * size, std::min(most, num - j),
                [&](int i, int state, float product) { emit(row + i, j + state, product); });
    };
    int64_t row = stretch.first + per * RUNS<NW>;
    for (; row + NW <= stretch.last; row += NW) rest(std::integral_constant<int, NW>{}, row);
    for (; row < stretch.last; row++) rest(std::integral_constant<int, 1>{}, row);
}

// As many rows of the matrix at once as the registers hold beside the sums for all states, up to those of one pass; asking
// ahead pays where it leaves the states in the first cache.
template <typename Weight, typename Emit>
inline void products(const Stretch<Weight>& stretch, const float* states, int num, const Emit& emit) {
#ifdef __AVX512F__
    const bool near = num * stretch.size * int64_t(sizeof(float)) <= BYTES_STATES;
    if (num <= 2) products_of<16, 1, 2, 0>(stretch, states, num, emit);
    else if (num <= 3) products_of<8, 3, 3, 0>(stretch, states, num, emit);
    else if (num <= 4) products_of<6, 4, 4, 0>(stretch, states, num, emit);
    else if (num <= 5) products_of<5, 5, 5, 0>(stretch, states, num, emit);
    else if (num <= 9 && near) products_of<3, 6, 9, 3>(stretch, states, num, emit);
    else if (num <= 7) products_of<4, 1, 7, 0>(stretch, states, num, emit);
    else if (num <= 9) products_of<3, 6, 9, 0>(stretch, states, num, emit);
    else if (near) products_of<4, 1, 7, 2>(stretch, states, num, emit);
    else products_of<4, 1, 7, 0>(stretch, states, num, emit);
#else
    if (num <= 1) products_of<8, 1, 1, 0>(stretch, states, num, emit);
    else if (num <= 3) products_of<4, 2, 3, 0>(stretch, states, num, emit);
    else products_of<2, 1, 6, 0>(stretch, states, num, emit);
#endif
}

template <typename Value>
struct OnLines {  // allocates where a line of the cache begins: a vector that lies across two of them is read twice
    using value_type = Value;
    template <typename Other>
    struct rebind {
        using other = OnLines<Other>;
    };
    Value* allocate(std::size_t num) {
        return static_cast<Value*>(::operator new(num * sizeof(Value), std::align_val_t(BYTES_LINE)));
    }
    void deallocate(Value* at, std::size_t) { ::operator delete(at, std::align_val_t(BYTES_LINE)); }
    bool operator==(const OnLines&) const { return true; }
    bool operator!=(const OnLines&) const { return false; }
};

template <typename Value>
using Room = std::vector<Value, OnLines<Value>>;

struct Range {
    int64_t first, last;
};

// This thread's part of `total` things, in whole groups. Known inside a parallel region only.
inline Range part(int64_t total, int64_t group) {
    const int64_t groups = (total + group - 1) / group, thread = omp_get_thread_num(), num = omp_get_num_threads();
    return {std::min(total, groups * thread / num * group), std::min(total, groups * (thread + 1) / num * group)};
}

// RMS norm of T rows `d`, by every thread for itself: that is cheaper than to wait for one another.
template <typename Value>
Room<float>& normalised(const Value* hidden, const Value* weight, float eps, int rows, int64_t d) {
    static thread_local Room<float> out;
    out.resize(rows * d);
    const int64_t whole = d - d % LANES;
    for (int t = 0; t < rows; t++) {
        const Value* x = hidden + t * d;
        float* y = out.data() + t * d;
        Floats squares{};
        for (int64_t k = 0; k < whole; k += LANES) squares += load(x + k) * load(x + k);
        float total = sum(squares);
        for (int64_t k = whole; k < d; k++) total = std::fma(get(x[k]), get(x[k]), total);
        const float inverse = 1.0f / std::sqrt(total / float(d) + eps);
        for (int64_t k = 0; k < whole; k += LANES) store(y + k, load(x + k) * inverse * load(weight + k));
        for (int64_t k = whole; k < d; k++) y[k] = get(x[k]) * inverse * get(weight[k]);
    }
    return out;
}

// Scores `n` long (padded to whole vectors) to weights that sum to 1; what is not seen gets exactly 0.
inline void soften(float* scores, int64_t padded) {
    Floats most = load(scores);
    for (int64_t p = LANES; p < padded; p += LANES) {
        const Floats next = load(scores + p);
        most = next > most ? next : most;
    }
    float top = most[0];
    for (int lane = 1; lane < LANES; lane++) top = std::max(top, most[lane]);
    Floats sums{};
    for (int64_t p = 0; p < padded; p += LANES) {
        const Floats weight = exponential(load(scores + p) - top);
        sums += weight;
        store(scores + p, weight);
    }
    const float inverse = 1.0f / sum(sums);
    for (int64_t p = 0; p < padded; p += LANES) store(scores + p, load(scores + p) * inverse);
}

template <typename Value>
struct Block {  // `num D`
    const Value* rows;
    int64_t num;
};

// Scores of `num` queries `D` for as many keys as a vector has lanes, `KEYS` beside one another and then the next ones.
template <int KEYS, typename Value>
inline void score_some(const Value* keys, int64_t width, const float* queries, int num, float* scores, int64_t pitch) {
    const int64_t whole = width - width % LANES;
    for (int j = 0; j < num; j++) {
        const float* const query = queries + j * width;
        Floats sums[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) sums[i] = Floats{};
        const Value* four[(KEYS + 3) / 4];
#pragma GCC unroll 4
        for (int i = 0; i < KEYS; i += 4) four[i / 4] = keys + i * width;
        for (int64_t k = 0; k < whole; k += LANES) {
            const Floats x = load(query + k);
#pragma GCC unroll 16
            for (int i = 0; i < KEYS; i++) sums[i] += load(four[i / 4] + i % 4 * width + k) * x;
        }
        alignas(BYTES_LINE) float totals[LANES];
        store(totals, sum_all(sums));
        for (int i = 0; i < KEYS; i++)
            for (int64_t k = whole; k < width; k++)
                totals[i] = std::fma(get(keys[i * width + k]), query[k], totals[i]);
        std::copy(totals, totals + KEYS, scores + j * pitch);
    }
}

// Scores of `num` queries `D` for the keys of a block; those of a query are `pitch` apart.
template <typename Value>
inline void score(Block<Value> keys, int64_t width, const float* queries, int num, float* scores, int64_t pitch) {
    int64_t p = 0;
    for (; p + LANES <= keys.num; p += LANES) {
        const Value* const rows = keys.rows + p * width;
        const int64_t next = std::min<int64_t>(LANES, keys.num - p - LANES) * width;
        for (int64_t k = 0; k < next; k += LINE<Value>) __builtin_prefetch(rows + LANES * width + k, 0, 3);
        score_some<LANES>(rows, width, queries, num, scores + p, pitch);
    }
    for (; p + 4 <= keys.num; p += 4) score_some<4>(keys.rows + p * width, width, queries, num, scores + p, pitch);
    for (; p < keys.num; p++) score_some<1>(keys.rows + p * width, width, queries, num, scores + p, pitch);
}

// Weighted sums of NK vectors of the value rows `D`, those of the cache and then the ones beside, for NS rows of weights
// (`pitch` apart).
template <int NS, int NK, typename Value>
inline void mix_part(Block<Value> seen, Block<Value> beside, int64_t width, int64_t k, const float* weights,
                     int64_t pitch, float* out) {
    Floats sums[NS * NK];
#pragma GCC unroll 32
    for (int i = 0; i < NS * NK; i++) sums[i] = Floats{};
    const auto add = [&](const Block<Value>& values, const float* weight) {
        for (int64_t p = 0; p < values.num; p++) {
            Floats value[NK];
#pragma GCC unroll 4
            for (int i = 0; i < NK; i++) value[i] = load(values.rows + p * width + k + i * LANES);
#pragma GCC unroll 8
            for (int j = 0; j < NS; j++) {
                const Floats share = Floats{} + weight[j * pitch + p];
#pragma GCC unroll 4
                for (int i = 0; i < NK; i++) sums[j * NK + i] += share * value[i];
            }
        }
    };
    add(seen, weights);
    add(beside, weights + seen.num);
#pragma GCC unroll 8
    for (int j = 0; j < NS; j++)
#pragma GCC unroll 4
        for (int i = 0; i < NK; i++) store(out + j * width + k + i * LANES, sums[j * NK + i]);
}

// All of the value rows.
template <int NS, typename Value>
inline void mix(Block<Value> seen, Block<Value> beside, int64_t width, const float* weights, int64_t pitch, float* out) {
    int64_t k = 0;
    for (; k + 4 * LANES <= width; k += 4 * LANES) mix_part<NS, 4>(seen, beside, width, k, weights, pitch, out);
    for (; k + LANES <= width; k += LANES) mix_part<NS, 1>(seen, beside, width, k, weights, pitch, out);
    for (; k < width; k++)
        for (int j = 0; j < NS; j++) {
            float total = 0;
            for (int64_t p = 0; p < seen.num; p++)
                total = std::fma(weights[j * pitch + p], get(seen.rows[p * width + k]), total);
            for (int64_t p = 0; p < beside.num; p++)
                total = std::fma(weights[j * pitch + seen.num + p], get(beside.rows[p * width + k]), total);
            out[j * width + k] = total;
        }
}

// A head `D` of one row, turned by its position where there are angles, times `scale`.
template <typename Value, typename Result>
inline void turn(const float* x, const Value* cos, const Value* sin, int64_t width, float scale, Result* to) {
    const int64_t half = width / 2;
    int64_t k = 0;
    if (!cos) {
        for (; k + LANES <= width; k += LANES) store(to + k, load(x + k) * scale);
        for (; k < width; k++) put(to + k, x[k] * scale);
        return;
    }
    for (; k + LANES <= half; k += LANES) {
        const Floats low = load(x + k), high = load(x + half + k);
        store(to + k, (low * load(cos + k) + high * load(sin + k)) * scale);
        store(to + half + k, (high * load(cos + half + k) + low * load(sin + half + k)) * scale);
    }
    for (; k < half; k++) {
        put(to + k, std::fma(x[k], get(cos[k]), x[half + k] * get(sin[k])) * scale);
        put(to + half + k, std::fma(x[half + k], get(cos[half + k]), x[k] * get(sin[half + k])) * scale);
    }
}

}  // namespace

extern "C" {

// One layer's weights, once for all calls. A bias may be null.
struct Attention {
    const void *norm, *qkv, *qkv_bias, *out, *out_bias;
    int64_t d, num_queries, num_keys, width;
    float eps, scale;
};

struct FeedForward {
    const void *norm, *gate_up, *gate_up_bias, *down, *down_bias;
    int64_t d, inner;
    float eps;
};

// Where the rows sit: all see the slots before `start`, and of one another what `visible` (`T T`) says; null means
// causal order, and `alone` that each sees only itself. They take the slots from `start` on if `write` is set.
// `cos`, `sin` (the first half negative): a row `D` for each position, null without rotary embedding.
struct Rows {
    const int64_t* positions;
    const uint8_t* visible;
    const void *cos, *sin;
    int64_t num, start, write, alone;
};
}

namespace {

inline bool sees(const Rows& rows, int64_t row, int64_t other) {
    if (rows.alone) return other == row;
    return rows.visible ? rows.visible[row * rows.num + other] : other <= row;
}

// This thread's rows of a layer's matrices, as they are read one after the other.
template <typename Value>
Stretch<Value> out_rows(const Attention& layer) {
    const Range mine = part(layer.d, GROUP);
    return {static_cast<const Value*>(layer.out), layer.num_queries * layer.width, mine.first, mine.last};
}

template <typename Value>
Stretch<Value> qkv_rows(const Attention& layer) {
    const Range mine = part((layer.num_queries + 2 * layer.num_keys) * layer.width, GROUP);
    return {static_cast<const Value*>(layer.qkv), layer.d, mine.first, mine.last};
}

template <typename Value>
Stretch<Value> down_rows(const FeedForward& layer) {
    const Range mine = part(layer.d, GROUP);
    return {static_cast<const Value*>(layer.down), layer.inner, mine.first, mine.last};
}

template <typename Value>
Stretch<Value> up_rows(const FeedForward& layer) {
    const Range mine = part(layer.inner, LANES);
    const auto* matrix = static_cast<const Value*>(layer.gate_up) + layer.inner * layer.d;
    return {matrix, layer.d, mine.first, mine.last};
}

template <typename Value>
Stretch<Value> gate_rows(const FeedForward& layer) {
    const Range mine = part(layer.inner, LANES);
    return {static_cast<const Value*>(layer.gate_up), layer.d, mine.first, mine.last};
}

// The attention sub-layer as work that every thread of a parallel region does. `result` may
// be `hidden`.
template <typename Value>
auto attention(const Attention& layer, const Rows& rows, Value* keys, Value* values,
               int64_t capacity, const Value* hidden, Value* result) {
    const int T = int(rows.num);
    const int64_t D = layer.width, num_heads = layer.num_queries + 2 * layer.num_keys;
    const int64_t group = layer.num_queries / layer.num_keys, per_key = group * T;
    const int64_t num_scores = rows.start + T, pitch = (num_scores + LANES - 1) / LANES * LANES;
    const auto* bias = static_cast<const Value*>(layer.qkv_bias);
    const auto* out_bias = static_cast<const Value*>(layer.out_bias);
    const auto* cos = static_cast<const Value*>(rows.cos);
    const auto* sin = static_cast<const Value*>(rows.sin);

    static thread_local Room<float> projected_room, queries_room, attended_room;
    static thread_local Room<Value> own_room;
    projected_room.resize(T * num_heads * D);
    queries_room.resize(layer.num_queries * T * D);
    own_room.resize(2 * layer.num_keys * T * D);
    attended_room.resize(T * layer.num_queries * D);
    float* const projected = projected_room.data();
    float* const queries = queries_room.data();           // H G T D
    Value* const own_keys = own_room.data();              // H T D, rounded as in the cache
    Value* const own_values = own_keys + layer.num_keys * T * D;
    float* const attended = attended_room.data();         // T Hq D

    return [=] {
        const auto& normed = normalised(hidden, static_cast<const Value*>(layer.norm), layer.eps, T, layer.d);
        products(qkv_rows<Value>(layer), normed.data(), T, [&](int64_t n, int t, float total) {
            projected[t * num_heads * D + n] = total + (bias ? get(bias[n]) : 0.0f);
        });
#pragma omp barrier

        const Range places = part(T * num_heads, 1);
        for (int64_t place = places.first; place < places.last; place++) {
            const int64_t t = place / num_heads, head = place % num_heads;
            const bool is_query = head < layer.num_queries, is_value = head >= layer.num_queries + layer.num_keys;
            const int64_t key_head = (head - layer.num_queries) % layer.num_keys;
            const float* const x = projected + place * D;
            const int64_t angle = cos ? rows.positions[t] * D : 0;
            if (is_query) {
                turn(x, cos ? cos + angle : cos, sin + angle, D, layer.scale, queries + (head * T + t) * D);
                continue;
            }
            Value* const to = (is_value ? own_values : own_keys) + (key_head * T + t) * D;
            turn(x, cos && !is_value ? cos + angle : nullptr, sin + angle, D, 1.0f, to);
            if (rows.write)
                std::copy(to, to + D, (is_value ? values : keys) + (key_head * capacity + rows.start + t) * D);
        }
#pragma omp barrier

        static thread_local Room<float> scores_room, mixed_room;
        scores_room.resize(QUERIES * pitch);
        mixed_room.resize(QUERIES * D);
        float* const scores = scores_room.data();
        float* const mixed = mixed_room.data();
        const Range heads = part(layer.num_queries * T, 1);
        for (int64_t first = heads.first; first < heads.last;) {
            const int64_t key_head = first / per_key;
            const int num = int(std::min({heads.last - first, (key_head + 1) * per_key - first, int64_t(QUERIES)}));
            const Value* seen_keys = keys + key_head * capacity * D;
            const Value* seen_values = values + key_head * capacity * D;
            const Value* beside_keys = own_keys + key_head * T * D;
            const Value* beside_values = own_values + key_head * T * D;
            score(Block<Value>{seen_keys, rows.start}, D, queries + first * D, num, scores, pitch);
            score(Block<Value>{beside_keys, T}, D, queries + first * D, num, scores + rows.start, pitch);
            for (int j = 0; j < num; j++) {
                float* const row = scores + j * pitch;
                for (int64_t other = 0; other < T; other++)
                    if (!sees(rows, (first + j) % T, other)) row[rows.start + other] = NOT_SEEN;
                std::fill(row + num_scores, row + pitch, NOT_SEEN);
                soften(row, pitch);
            }
            const Block<Value> seen{seen_values, rows.start}, beside{beside_values, T};
            with_constant<1, QUERIES>(num, [&](auto count) {
                mix<decltype(count)::value>(seen, beside, D, scores, pitch, mixed);
            });
            for (int j = 0; j < num; j++) {
                const int64_t t = (first + j) % T, head = (first + j) / T;
                std::copy(mixed + j * D, mixed + (j + 1) * D, attended + (t * layer.num_queries + head) * D);
            }
            first += num;
        }
#pragma omp barrier

        products(out_rows<Value>(layer), attended, T, [&](int64_t n, int t, float total) {
            const int64_t at = t * layer.d + n;
            put(result + at, get(hidden[at]) + (total + (out_bias ? get(out_bias[n]) : 0.0f)));
        });
    };
}

// The MLP sub-layer, likewise.
template <typename Value>
auto feed_forward(const FeedForward& layer, const Value* hidden, Value* result, int64_t num) {
    const int T = int(num);
    const int64_t inner = layer.inner;
    const auto* bias = static_cast<const Value*>(layer.gate_up_bias);
    const auto* down_bias = static_cast<const Value*>(layer.down_bias);
    static thread_local Room<float> gates_room, gated_room;
    gates_room.resize(T * inner);
    gated_room.resize(T * inner);
    float* const gates = gates_room.data();
    float* const gated = gated_room.data();

    return [=] {
        const auto& normed = normalised(hidden, static_cast<const Value*>(layer.norm), layer.eps, T, layer.d);
        const auto mine = up_rows<Value>(layer);
        products(gate_rows<Value>(layer), normed.data(), T, [&](int64_t n, int t, float total) {
            gates[t * inner + n] = total + (bias ? get(bias[n]) : 0.0f);
        });
        products(mine, normed.data(), T, [&](int64_t n, int t, float total) {
            gated[t * inner + n] = total + (bias ? get(bias[inner + n]) : 0.0f);
        });
        for (int t = 0; t < T; t++) {
            const float* gate = gates + t * inner;
            float* up = gated + t * inner;
            int64_t n = mine.first;
            for (; n + LANES <= mine.last; n += LANES)  // silu(gate) * up
                store(up + n, load(gate + n) / (1.0f + exponential(-load(gate + n))) * load(up + n));
            for (; n < mine.last; n++) up[n] *= gate[n] / (1.0f + std::exp(-gate[n]));
        }
#pragma omp barrier

        products(down_rows<Value>(layer), gated, T, [&](int64_t n, int t, float total) {
            const int64_t at = t * layer.d + n;
            put(result + at, get(hidden[at]) + (total + (down_bias ? get(down_bias[n]) : 0.0f)));
        });
    };
}

// A layer, or the one of its sub-layers that is not null.
template <typename Value>
void layer(const Attention* attn, const FeedForward* mlp, const Rows& rows, Value* keys, Value* values,
           int64_t capacity, const Value* hidden, Value* result, int num_threads) {
    const auto region = [num_threads](const auto& work) {
#pragma omp parallel num_threads(num_threads)
        work();
    };
    if (!mlp) return region(attention(*attn, rows, keys, values, capacity, hidden, result));
    if (!attn) return region(feed_forward(*mlp, hidden, result, rows.num));
    const auto first = attention(*attn, rows, keys, values, capacity, hidden, result);
    const auto second = feed_forward<Value>(*mlp, result, result, rows.num);
    region([&] {
        first();
#pragma omp barrier
        second();
    });
}

template <typename Value>
void linear(const Value* states, const Value* weight, const Value* bias, Value* result, int64_t num, int64_t size,
            int64_t num_out, int num_threads) {
    const int T = int(num);
    static thread_local Room<float> rows_room;
    rows_room.resize(T * size);
    float* const rows = rows_room.data();
    for (int64_t k = 0; k < T * size; k++) rows[k] = get(states[k]);
#pragma omp parallel num_threads(num_threads)
    {
        const Range mine = part(num_out, GROUP);
        const Stretch<Value> stretch{weight, size, mine.first, mine.last};
        products(stretch, rows, T, [&](int64_t n, int t, float total) {
            put(result + t * num_out + n, total + (bias ? get(bias[n]) : 0.0f));
        });
    }
}

}  // namespace

// `keys` and `values` are `H capacity D`, states `T d`. Nothing is checked here; the caller has.
#define FOR_DTYPE(NAME, VALUE)                                                                                       \
    extern "C" void layer_##NAME(const Attention* attn, const FeedForward* mlp, const Rows* rows, void* keys,       \
                                 void* values, int64_t capacity, const void* hidden, void* result,                   \
                                 int num_threads) {                                                                  \
        layer(attn, mlp, *rows, static_cast<VALUE*>(keys), static_cast<VALUE*>(values), capacity,                    \
              static_cast<const VALUE*>(hidden), static_cast<VALUE*>(result), num_threads);                          \
    }                                                                                                                \
    extern "C" void linear_##NAME(const void* states, const void* weight, const void* bias, void* result,           \
                                  int64_t num, int64_t size, int64_t num_out, int num_threads) {                     \
        linear(static_cast<const VALUE*>(states), static_cast<const VALUE*>(weight),                                 \
               static_cast<const VALUE*>(bias), static_cast<VALUE*>(result), num, size, num_out, num_threads);       \
    }

FOR_DTYPE(float32, float)
FOR_DTYPE(bfloat16, BFloat16)
