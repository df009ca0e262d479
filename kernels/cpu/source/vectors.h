// Sixteen floats as one value: AVX-512 registers, or whatever the compiler makes of them elsewhere.
#pragma once

#include "common.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define KVSPLICE_DOT_BF16 1
#endif

namespace kvsplice {

typedef float v16 __attribute__((vector_size(64)));
typedef std::int32_t i16 __attribute__((vector_size(64)));

static inline v16 load(const float* from) {
    v16 value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

static inline void store(v16 value, float* to) { std::memcpy(to, &value, sizeof(value)); }

static inline v16 load(const bf16* from) {
#if defined(__AVX512F__)
    return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
    typedef std::uint16_t u16x16 __attribute__((vector_size(32)));
    typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
    u16x16 bits;
    std::memcpy(&bits, from, sizeof(bits));
    return (v16)(__builtin_convertvector(bits, u32x16) << 16);
#endif
}

static inline void store(v16 value, bf16* to) {
#if defined(KVSPLICE_DOT_BF16)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, sizeof(rounded));
#else
    float lanes[16];
    bf16 rounded[16];
    store(value, lanes);
    for (int i = 0; i < 16; ++i) rounded[i] = narrow<bf16>(lanes[i]);
    std::memcpy(to, rounded, sizeof(rounded));
#endif
}

static inline v16 splat(float value) { return v16{} + value; }

// Where b is NaN, so is the result.
static inline v16 larger(v16 a, v16 b) {
#if defined(__AVX512F__)
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

static inline v16 smaller(v16 a, v16 b) { return -larger(-a, -b); }

static inline float sum_of(v16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float lanes[16];
    store(value, lanes);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
#endif
}

static inline float largest_of(v16 value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float lanes[16];
    store(value, lanes);
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    }
    return lanes[0];
#endif
}

// Up to 16 numbers, as many as are left; lanes without one are 0.
template <class T>
static inline v16 load_some(const T* from, i64 left) {
    if (left >= 16) return load(from);
    T lanes[16] = {};
    std::memcpy(lanes, from, left * sizeof(T));
    return load(lanes);
}

template <class T>
static inline void store_some(v16 value, T* to, i64 left) {
    if (left >= 16) return store(value, to);
    T lanes[16];
    store(value, lanes);
    std::memcpy(to, lanes, left * sizeof(T));
}

// What is left of a value once it has been stored as a T.
template <class T>
static inline v16 rounded(v16 value) {
    T lanes[16];
    store(value, lanes);
    return load(lanes);
}

// Lane i of `value` where first + i is in [from, to), else `otherwise`.
static inline v16 within(v16 value, int first, int from, int to, float otherwise) {
    const i16 lane = i16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
#if defined(__AVX512F__)
    const __mmask16 inside = _mm512_cmpge_epi32_mask((__m512i)lane, _mm512_set1_epi32(from)) &
                             _mm512_cmplt_epi32_mask((__m512i)lane, _mm512_set1_epi32(to));
    return (v16)_mm512_mask_blend_ps(inside, _mm512_set1_ps(otherwise), (__m512)value);
#else
    return (lane >= from) & (lane < to) ? value : splat(otherwise);
#endif
}

// Taylor polynomial of 2**r for |r| <= 1/2; relative error 3e-7 in degree 6, 5e-5 in degree 4.
template <int DEGREE>
static inline v16 exp2_fraction(v16 r) {
    v16 p;
    if constexpr (DEGREE == 6) {
        p = r * 1.5403530e-4f + 1.3333558e-3f;
        p = p * r + 9.6181291e-3f;
    } else {
        static_assert(DEGREE == 4, "4 or 6");
        p = splat(9.6181291e-3f);
    }
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    return p * r + 1.0f;
}

// 2 ** x for x up to 127; below -126 it is 0 or 2**-126. NaN stays NaN.
template <int DEGREE>
static inline v16 exp2_of(v16 x) {
#if defined(__AVX512F__)
    const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (v16)_mm512_scalef_ps((__m512)exp2_fraction<DEGREE>(x - (v16)whole), whole);
#else
    constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer in the low bits
    x = x < -126.0f ? splat(-126.0f) : x;
    const v16 shifted = x + kRound;
    const v16 p = exp2_fraction<DEGREE>(x - (shifted - kRound));
    return (v16)((i16)p + ((i16)shifted << 23));
#endif
}

}  // namespace kvsplice
