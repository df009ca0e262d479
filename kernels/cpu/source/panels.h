// Register-blocked products with panels: a few rows of x times one panel of 32 columns.
//
//   x      [rows, K]                       row-major
//   panel  [K / kPair<X>, 32, kPair<X>]    columns side by side, pairs of K together (bf16), 64-byte aligned
//   acc    [rows, 32] float
//
// The accumulators live in registers: 12 rows x 2 vectors of AVX-512, beside one pair of panel vectors. The layout of
// pairs is that of VDPBF16PS (Intel SDM vol. 2), the blocking that of Goto & van de Geijn 2008 (ACM TOMS 34:3).
#pragma once

#include <type_traits>

#include "vectors.h"

namespace kvsplice {

constexpr int kPanel = 32;
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 2;
#endif

#if defined(KVSPLICE_DOT_BF16)
constexpr bool kDotBf16 = true;
#else
constexpr bool kDotBf16 = false;
#endif

// What products over numbers stored as T compute with: bf16 itself where the CPU multiplies it, else float.
template <class T>
using Operand = std::conditional_t<kDotBf16, T, float>;

template <class X>
constexpr int kPair = std::is_same_v<X, bf16> ? 2 : 1;

template <int ROWS>
using Accumulators = v16[ROWS][2];

struct AskForNothing {
    void operator()(i64) const {}
};

// acc += x[:, :steps * kPair] @ panel. Calls ask(step) on the way, which may have the CPU fetch what is needed next: it
// comes from memory while the registers are busy. (A burst of prefetches in one place is mostly dropped.)
template <int ROWS, class Ask = AskForNothing>
static inline void multiply(Accumulators<ROWS>& acc, const float* x, i64 stride, const float* panel, i64 steps,
                            Ask ask = {}) {
    for (i64 step = 0; step < steps; ++step, panel += kPanel) {
        ask(step);
        v16 left, right;
        std::memcpy(&left, panel, sizeof(v16));
        std::memcpy(&right, panel + 16, sizeof(v16));
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const float factor = x[row * stride + step];
            acc[row][0] += left * factor;
            acc[row][1] += right * factor;
        }
    }
}

#if defined(KVSPLICE_DOT_BF16)
template <int ROWS, class Ask = AskForNothing>
static inline void multiply(Accumulators<ROWS>& acc, const bf16* x, i64 stride, const bf16* panel, i64 steps,
                            Ask ask = {}) {
    for (i64 step = 0; step < steps; ++step, panel += 2 * kPanel) {
        ask(step);
        const __m512bh left = (__m512bh)_mm512_load_si512(panel);
        const __m512bh right = (__m512bh)_mm512_load_si512(panel + kPanel);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            std::int32_t pair;
            std::memcpy(&pair, x + row * stride + 2 * step, sizeof(pair));
            const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
            acc[row][0] = (v16)_mm512_dpbf16_ps((__m512)acc[row][0], left, factor);
            acc[row][1] = (v16)_mm512_dpbf16_ps((__m512)acc[row][1], right, factor);
        }
    }
}
#endif

// Calls f(integral_constant<int, rows>) for 1 <= rows <= MAX.
template <int MAX = kMaxRows, class F>
static inline void with_rows(int rows, F&& f) {
    if (rows == MAX) {
        f(std::integral_constant<int, MAX>{});
    } else if constexpr (MAX > 1) {
        with_rows<MAX - 1>(rows, f);
    }
}

template <int MAX = kMaxRows>
static inline i64 blocks_of(i64 rows) {
    return (rows + MAX - 1) / MAX;
}

// Calls f(first row, integral_constant<int, rows>) for blocks of nearly equal height: 16 rows are 8 + 8, not 12 + 4.
template <int MAX = kMaxRows, class F>
static inline void each_block(i64 rows, F&& f) {
    const i64 blocks = blocks_of<MAX>(rows);
    for (i64 block = 0; block < blocks; ++block) {
        const i64 first = rows * block / blocks;
        const int height = int(rows * (block + 1) / blocks - first);
        with_rows<MAX>(height, [&](auto constant) { f(first, constant); });
    }
}

}  // namespace kvsplice
