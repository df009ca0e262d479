// Products of attention over K and V as they lie in the pool, for up to four query heads ("lines") of a KV head at once:
// each register's worth of a token is loaded once and used by all of them.
//
//   scores   four tokens x lines, in lanes of the head; sums of 16 tokens are then transposed into one vector
//   values   up to 64 columns x lines in registers, two tokens at a time
#pragma once

#include "tiles.h"

namespace kvsplice {

#if defined(__AVX512F__)

constexpr int kLines = 4;  // at most: 4 x 4 sums and what they are made of fill the registers

// Four vectors, of which only the sums over all lanes matter. Members, not an array: they are to stay in registers.
struct Four {
    v16 a{}, b{}, c{}, d{};

    // In each quarter of the result, lane i is what the quarter adds to the sum of vector i.
    v16 halfway() const {
        const __m512 ab = pairs(a, b), cd = pairs(c, d);
        return (v16)_mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                                  (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    }

   private:
    static __m512 pairs(v16 x, v16 y) {
        return _mm512_add_ps(_mm512_unpacklo_ps((__m512)x, (__m512)y), _mm512_unpackhi_ps((__m512)x, (__m512)y));
    }
};

static inline v16 quarters(v16 x, v16 y) {
    return (v16)_mm512_add_ps(_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88),
                              _mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xdd));
}

// Sums of 16 vectors, from four times `halfway`.
static inline v16 sums_of(v16 a, v16 b, v16 c, v16 d) { return quarters(quarters(a, b), quarters(c, d)); }

// A register's worth of a head: numbers [i, head_dim) of it, as many as there is room for, and zeros.
template <class T>
struct Piece;

template <>
struct Piece<float> {
    static constexpr i64 kSize = 16;
    const __mmask16 wanted;

    Piece(i64 left) : wanted(left < 16 ? __mmask16((1u << left) - 1u) : __mmask16(0xffff)) {}
    v16 load(const float* from) const { return (v16)_mm512_maskz_loadu_ps(wanted, from); }
    static void add_product(v16& sum, v16 x, v16 y) { sum += x * y; }
};

#if defined(KVSPLICE_DOT_BF16)
template <>
struct Piece<bf16> {
    static constexpr i64 kSize = 32;
    const __mmask32 wanted;

    Piece(i64 left) : wanted(left < 32 ? (__mmask32(1) << left) - 1 : ~__mmask32(0)) {}
    __m512bh load(const bf16* from) const { return (__m512bh)_mm512_maskz_loadu_epi16(wanted, from); }
    static void add_product(v16& sum, __m512bh x, __m512bh y) { sum = (v16)_mm512_dpbf16_ps((__m512)sum, x, y); }
};
#endif

// Products of four tokens with all lines of a KV head: halfway[line].
template <int LINES, class T>
static inline __attribute__((always_inline)) void score_four(const T* const* tokens, i64 offset, const T* query,
                                                             i64 head_dim, v16* halfway) {
    Four sums[LINES];
    const T *a = tokens[0] + offset, *b = tokens[1] + offset, *c = tokens[2] + offset, *d = tokens[3] + offset;
    for (i64 i = 0; i < head_dim; i += Piece<T>::kSize) {
        const Piece<T> piece(head_dim - i);
        const auto first = piece.load(a + i), second = piece.load(b + i), third = piece.load(c + i),
                   fourth = piece.load(d + i);
#pragma GCC unroll 4
        for (int line = 0; line < LINES; ++line) {
            const auto factor = piece.load(query + line * head_dim + i);
            piece.add_product(sums[line].a, first, factor);
            piece.add_product(sums[line].b, second, factor);
            piece.add_product(sums[line].c, third, factor);
            piece.add_product(sums[line].d, fourth, factor);
        }
    }
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line) halfway[line] = sums[line].halfway();
}

// scores[line][0:16] = products of 16 tokens with all lines of a KV head, which begins at number `offset` of a token.
template <int LINES, class T, class Ask>
static inline void score_sixteen(const T* const* tokens, i64 offset, const T* query, i64 head_dim, float* scores,
                                 Ask ask) {
    v16 a[LINES], b[LINES], c[LINES], d[LINES];
    ask();
    score_four<LINES>(tokens, offset, query, head_dim, a);
    ask();
    score_four<LINES>(tokens + 4, offset, query, head_dim, b);
    ask();
    score_four<LINES>(tokens + 8, offset, query, head_dim, c);
    ask();
    score_four<LINES>(tokens + 12, offset, query, head_dim, d);
#pragma GCC unroll 4
    for (int line = 0; line < LINES; ++line) {
        store(sums_of(a[line], b[line], c[line], d[line]), scores + line * kTile);
    }
}

// Sums of weighted values: some columns of all lines of a KV head. Panels: 32 columns.
template <int LINES, int PANELS>
struct Columns {
    v16 sums[LINES][PANELS * 2];

    void load_scaled(const float* from, i64 width, const float* factors) {
        for (int line = 0; line < LINES; ++line) {
            for (int i = 0; i < PANELS * 2; ++i) sums[line][i] = load(from + line * width + i * 16) * factors[line];
        }
    }

    void store_to(float* to, i64 width) const {
        for (int line = 0; line < LINES; ++line) {
            for (int i = 0; i < PANELS * 2; ++i) store(sums[line][i], to + line * width + i * 16);
        }
    }

    // Two tokens, of whose columns there are `left`. weights[line * kTile], and the one behind it.
    inline __attribute__((always_inline)) void add_two(const float* even, const float* odd, i64 left,
                                                       const float* weights) {
#pragma GCC unroll 4
        for (int i = 0; i < PANELS * 2; ++i) {
            const Piece<float> piece(left > i * 16 ? left - i * 16 : 0);
            const v16 x = piece.load(even + i * 16), y = piece.load(odd + i * 16);
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                sums[line][i] += x * weights[line * kTile];
                sums[line][i] += y * weights[line * kTile + 1];
            }
        }
    }

#if defined(KVSPLICE_DOT_BF16)
    inline __attribute__((always_inline)) void add_two(const bf16* even, const bf16* odd, i64 left,
                                                       const bf16* weights) {
        const PairsOfTokens pairs;
#pragma GCC unroll 2
        for (int panel = 0; panel < PANELS; ++panel) {
            const Piece<bf16> piece(left - panel * kPanel);
            const __m512i x = (__m512i)piece.load(even + panel * kPanel), y = (__m512i)piece.load(odd + panel * kPanel);
            const __m512bh front = (__m512bh)pairs.front(x, y), back = (__m512bh)pairs.back(x, y);
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                std::int32_t both;
                std::memcpy(&both, weights + line * kTile, sizeof(both));
                const __m512bh weight = (__m512bh)_mm512_set1_epi32(both);
                piece.add_product(sums[line][panel * 2], front, weight);
                piece.add_product(sums[line][panel * 2 + 1], back, weight);
            }
        }
    }
#endif
};

#endif

}  // namespace kvsplice
