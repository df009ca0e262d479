// What the sampler does with rows of logits. All of it gives the bits of its twin in kernels/sampling.py.
#include <cmath>
#include <limits>

#include "vectors.h"

namespace kvsplice {

constexpr i64 kChunk = 1024;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

struct Peak {
    float value;
    bool nan;  // one of the numbers is
};

static Peak peak_of(const float* from, i64 count) {
    v16 tops = splat(kLowest);
    i16 odd = {};
    i64 i = 0;
    for (; i + 16 <= count; i += 16) {
        const v16 some = load(from + i);
        tops = some > tops ? some : tops;
        odd |= (i16)(some != some);
    }
    Peak peak{largest_of(tops), false};
    for (int lane = 0; lane < 16; ++lane) peak.nan |= odd[lane] != 0;
    for (; i < count; ++i) {
        peak.value = from[i] > peak.value ? from[i] : peak.value;
        peak.nan |= from[i] != from[i];
    }
    return peak;
}

// Where the greatest number is, the first of equals; a NaN counts as the greatest.
static i64 place_of_greatest(const float* row, i64 count) {
    float best = kLowest;
    i64 chunk = 0;
    for (i64 first = 0; first < count; first += kChunk) {
        const Peak peak = peak_of(row + first, count - first < kChunk ? count - first : kChunk);
        if (peak.nan) {
            while (row[first] == row[first]) ++first;
            return first;
        }
        if (peak.value > best) best = peak.value, chunk = first;
    }
    while (row[chunk] != best) ++chunk;
    return chunk;
}

typedef double d8 __attribute__((vector_size(64)));
typedef std::int64_t l8 __attribute__((vector_size(64)));
typedef std::uint64_t u8 __attribute__((vector_size(64)));
typedef float f8 __attribute__((vector_size(32)));

constexpr double kOne = double(i64(1) << 40);
constexpr double kLeast = -28.0;    // below it weights are 0: 2**40 * exp(-27.73) is 1
constexpr double kDoubt = 4e-15;    // relative: several times the error of exp8, and that of any good library's exp

// e ** x for -28 <= x <= 0. x = n * ln 2 + r with |r| <= ln(2) / 2; 2**n goes into the exponent's bits, e**r is its
// Taylor polynomial of degree 13. Relative error below 1e-15.
static inline d8 exp8(d8 x) {
    constexpr double kRound = 6755399441055744.0;  // 1.5 * 2**52: adding it rounds to an integer in the low bits
    constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;
    const d8 shifted = x * 1.4426950408889634 + kRound, n = shifted - kRound;
    const d8 r = (x - n * kLn2High) - n * kLn2Low;
    d8 p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    constexpr double kFactorials[] = {39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1};
#pragma GCC unroll 12
    for (double factorial : kFactorials) p = p * r + 1.0 / factorial;
    return (d8)((l8)p + ((l8)shifted << 52));
}

struct Doubts {
    i64* places;
    i64 room, count;

    void add(i64 place) {
        if (count < room) places[count] = place;
        ++count;
    }
};

// weights[0:8]; places whose weight is so near to an integer that another exp might cut it to the one below are noted.
static inline __attribute__((always_inline)) void weigh8(d8 x, i64* weights, i64 place, int wanted, Doubts& doubts) {
    const d8 exact = exp8(x < kLeast ? d8{} + kLeast : x) * kOne;
    l8 whole = __builtin_convertvector(exact, l8);
    const d8 rest = exact - __builtin_convertvector(whole, d8), doubt = exact * kDoubt;
    l8 doubtful = (rest < doubt) | (rest > 1.0 - doubt);
    doubtful &= (l8)(x != 0.0);  // 2**40, exactly
    whole = (l8)(x < kLeast) ? l8{} : whole;
    alignas(64) i64 lanes[8], flags[8];
    std::memcpy(lanes, &whole, sizeof(lanes));
    std::memcpy(flags, &doubtful, sizeof(flags));
    i64 any = 0;
    for (int i = 0; i < 8; ++i) any |= flags[i];
    for (int i = 0; i < wanted; ++i) weights[i] = lanes[i];
    if (!any) return;
    for (int i = 0; i < wanted; ++i) {
        if (flags[i]) doubts.add(place + i);
    }
}

static void weigh(const float* logits, double peak, double temperature, i64 vocab, i64* weights,
                  Doubts& doubts) {
    f8 some = {};
    i64 i = 0;
    for (; i + 8 <= vocab; i += 8) {
        std::memcpy(&some, logits + i, sizeof(some));
        weigh8((__builtin_convertvector(some, d8) - peak) / temperature, weights + i, i, 8, doubts);
    }
    for (i64 lane = 0; i + lane < vocab; ++lane) some[lane] = logits[i + lane];
    if (i < vocab) {
        weigh8((__builtin_convertvector(some, d8) - peak) / temperature, weights + i, i, int(vocab - i), doubts);
    }
}

constexpr double kNearTie = 1e-12;  // relative: many times the error of this log1p and of the twin's
constexpr i64 kDoubtful = -1;

// The numbers first .. first + 7 of SplitMix64 started at `key`, in (0, 1), as the twin's token_noise has them.
static inline d8 noise8(std::uint64_t key, i64 first) {
    constexpr std::uint64_t kGoldenGamma = 0x9E3779B97F4A7C15;
    constexpr u8 kSteps = {1, 2, 3, 4, 5, 6, 7, 8};
    u8 bits = (key + std::uint64_t(first) * kGoldenGamma) + kSteps * kGoldenGamma;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
    bits ^= bits >> 31;
    return (__builtin_convertvector((l8)(bits >> 12), d8) + 0.5) * 0x1p-52;
}

struct Race {
    i64 winner;
    double soonest = std::numeric_limits<double>::infinity();
    bool doubtful = false;

    // Who arrives up to then may be the winner, or make it doubtful who is.
    double horizon() const { return soonest * (1.0 + kNearTie); }

    void arrive(i64 place, double at) {
        if (at < soonest) {
            doubtful = soonest <= at * (1.0 + kNearTie);
            soonest = at, winner = place;
        } else if (at <= horizon()) {
            doubtful = true;
        }
    }
};

// -log1p(-u) is at least u: whose u is not below weight * horizon arrives behind it, and almost nobody needs a log.
static inline __attribute__((always_inline)) void race8(std::uint64_t key, const i64* weights, i64 first, int wanted,
                                                         Race& race) {
    l8 whole = {};
    std::memcpy(&whole, weights + first, std::size_t(wanted) * sizeof(i64));
    const d8 weight = __builtin_convertvector(whole, d8), noise = noise8(key, first);
    const l8 near = (l8)(noise < weight * race.horizon());
    alignas(64) i64 flags[8];
    std::memcpy(flags, &near, sizeof(flags));
    i64 any = 0;
    for (int i = 0; i < 8; ++i) any |= flags[i];
    if (!any) return;
    for (int i = 0; i < wanted; ++i) {
        if (flags[i]) race.arrive(first + i, -std::log1p(-noise[i]) / weight[i]);
    }
}

static i64 first_to_arrive(const i64* weights, i64 vocab, std::uint64_t key, i64 otherwise) {
    Race race{otherwise};
    i64 i = 0;
    for (; i + 8 <= vocab; i += 8) race8(key, weights, i, 8, race);
    if (i < vocab) race8(key, weights, i, int(vocab - i), race);
    return race.doubtful ? kDoubtful : race.winner;
}

}  // namespace kvsplice

using namespace kvsplice;

extern "C" void kvsplice_greatest(const float* logits, i64 rows, i64 vocab, float* values, i64* ids, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * vocab, threads)) schedule(static)
    for (i64 row = 0; row < rows; ++row) {
        ids[row] = place_of_greatest(logits + row * vocab, vocab);
        values[row] = logits[row * vocab + ids[row]];
    }
}

// `doubts`: for each row a count, then room for `room` places in that row whose weights are to be computed anew.
extern "C" void kvsplice_token_weights(const float* logits, i64 rows, i64 vocab, const double* peaks,
                                       const double* temperatures, i64* weights, i64* doubts, i64 room, int threads) {
#pragma omp parallel for num_threads(threads_for(rows * vocab, threads)) schedule(static)
    for (i64 row = 0; row < rows; ++row) {
        i64* own = doubts + row * (room + 1);
        Doubts found{own + 1, room, 0};
        weigh(logits + row * vocab, peaks[row], temperatures[row], vocab, weights + row * vocab, found);
        own[0] = found.count;
    }
}

// `ids`: kDoubtful where the first two of a row arrive too close together to tell.
extern "C" void kvsplice_race(const i64* weights, i64 rows, i64 vocab, const i64* keys, const i64* otherwise, i64* ids,
                              int threads) {
#pragma omp parallel for num_threads(threads_for(rows * vocab, threads)) schedule(static)
    for (i64 row = 0; row < rows; ++row) {
        ids[row] = first_to_arrive(weights + row * vocab, vocab, std::uint64_t(keys[row]), otherwise[row]);
    }
}
