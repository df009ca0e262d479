// Tiles of a paged KV pool in the layout of panels.h: tokens of a row's blocks, copied and, for K, transposed.
//
//   K tile   [tokens / 32] panels of 32 tokens;    K-dimension: head_dim
//   V tile   [head_dim / 32] panels of 32 columns; K-dimension: tokens
//
// Tokens outside of the wanted range are zeros, never what the pool holds there: 0 x NaN would be NaN.
#pragma once

#include "panels.h"

namespace kvsplice {

constexpr int kTile = 128;  // tokens

// Where the tokens [begin, end) of a row lie, within their tile; all others of the tile are at `nothing`, a token of
// zeros. Offsets are 64-bit: a pool may hold more than 2**31 numbers.
template <class T>
struct TokenPointers {
    const T* at[kTile];
    int from, to;  // the tokens wanted, counted from the first of the tile
    int count;     // `to`, rounded up to whole panels

    void find(const T* pool, const std::int32_t* table, i64 block_size, i64 token_size, i64 begin, i64 end,
              const T* nothing) {
        const i64 first = begin / kTile * kTile;
        limit(int(begin - first), int(end - first), nothing);
        i64 block = begin / block_size, offset = begin % block_size;
        for (i64 token = begin; token < end; ++block, offset = 0) {
            const i64 stop = token + block_size - offset < end ? token + block_size - offset : end;
            const T* place = pool + (i64(table[block]) * block_size + offset) * token_size;
            for (; token < stop; ++token, place += token_size) at[token - first] = place;
        }
    }

    // The same tokens in another pool or at another head: `distance` numbers further on.
    void shift(const TokenPointers& other, i64 distance, const T* nothing) {
        limit(other.from, other.to, nothing);
        for (int i = from; i < to; ++i) at[i] = other.at[i] + distance;
    }

   private:
    void limit(int first, int last, const T* nothing) {
        from = first, to = last, count = (last + kPanel - 1) / kPanel * kPanel;
        for (int i = 0; i < from; ++i) at[i] = nothing;
        for (int i = to; i < count; ++i) at[i] = nothing;
    }
};

#if defined(__AVX512F__)

// 16 x 16 transpose of 32-bit units: source[t] + unit  ->  target[unit * kPanel + t], `units` of 16 stored.
static inline void transpose_16(const std::int32_t* const* source, i64 first, int units, std::int32_t* target) {
    const __mmask16 wanted = __mmask16((1u << units) - 1u);
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_maskz_loadu_epi32(wanted, source[i] + first);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0x88);
            b[i + j + 4] = _mm512_shuffle_i32x4(a[i + j], a[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; ++j) {
        a[j] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0x88);
        a[j + 8] = _mm512_shuffle_i32x4(b[j], b[j + 8], 0xdd);
    }
    if (units == 16) {
        for (int unit = 0; unit < 16; ++unit) _mm512_store_si512(target + unit * kPanel, a[unit]);
    } else {
        for (int unit = 0; unit < 16; ++unit) {
            if (unit < units) _mm512_store_si512(target + unit * kPanel, a[unit]);
        }
    }
}

template <class T>
static inline void pack_keys_32bit(const TokenPointers<T>& tokens, int units, std::int32_t* target) {
    for (int token = 0; token < tokens.count; token += 16) {
        std::int32_t* column = target + token / kPanel * units * kPanel + token % kPanel;
        for (int unit = 0; unit < units; unit += 16) {
            const int width = units - unit < 16 ? units - unit : 16;
            transpose_16((const std::int32_t* const*)(tokens.at + token), unit, width, column + unit * kPanel);
        }
    }
}

#endif

template <class T, class X>
static void pack_keys(const TokenPointers<T>& tokens, i64 head_dim, X* target) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, X>) {
        pack_keys_32bit(tokens, int(head_dim / kPair<X>), (std::int32_t*)target);
        return;
    }
#endif
    constexpr int pair = kPair<X>;
    for (int token = 0; token < tokens.count; ++token) {
        X* column = target + token / kPanel * head_dim * kPanel + token % kPanel * pair;
        for (i64 i = 0; i < head_dim; ++i) {
            column[i / pair * kPanel * pair + i % pair] = narrow<X>(widen(tokens.at[token][i]));
        }
    }
}

// Columns past head_dim are zeros too; `target` has room for round_up(head_dim, 32) of them.
template <class T, class X>
static void pack_values_generic(const TokenPointers<T>& tokens, i64 head_dim, X* target) {
    constexpr int pair = kPair<X>;
    for (i64 first = 0; first < head_dim; first += kPanel) {
        X* panel = target + first * kTile;
        for (int token = 0; token < tokens.count; ++token) {
            X* line = panel + token / pair * kPanel * pair + token % pair;
            for (int i = 0; i < kPanel; ++i) {
                line[i * pair] = narrow<X>(first + i < head_dim ? widen(tokens.at[token][first + i]) : 0.0f);
            }
        }
    }
}

template <class T, class X>
static void pack_values(const TokenPointers<T>& tokens, i64 head_dim, X* target) {
    pack_values_generic(tokens, head_dim, target);
}

#if defined(KVSPLICE_DOT_BF16)

// Interleaves 32 columns of two tokens: (even[0], odd[0], even[1], ...), the first 16 columns and the other 16.
struct PairsOfTokens {
    __m512i first, second;

    PairsOfTokens() {
        alignas(64) static constexpr std::uint16_t kFront[32] = {
            0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
            8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        first = _mm512_load_si512(kFront);
        second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    }

    __m512i front(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, first, odd); }
    __m512i back(__m512i even, __m512i odd) const { return _mm512_permutex2var_epi16(even, second, odd); }
};

template <>
void pack_values(const TokenPointers<bf16>& tokens, i64 head_dim, bf16* target) {
    const PairsOfTokens pairs;
    for (i64 first = 0; first < head_dim; first += kPanel) {
        const i64 width = head_dim - first < kPanel ? head_dim - first : kPanel;
        const __mmask32 wanted = __mmask32((std::uint64_t(1) << width) - 1);
        bf16* line = target + first * kTile;
        for (int token = 0; token < tokens.count; token += 2, line += 2 * kPanel) {
            const __m512i even = _mm512_maskz_loadu_epi16(wanted, tokens.at[token] + first);
            const __m512i odd = _mm512_maskz_loadu_epi16(wanted, tokens.at[token + 1] + first);
            _mm512_store_si512(line, pairs.front(even, odd));
            _mm512_store_si512(line + kPanel, pairs.back(even, odd));
        }
    }
}

#endif

}  // namespace kvsplice
