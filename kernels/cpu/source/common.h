// What all sources share: number formats, an exponential that vectorises, and loops over threads.
//
// Loops over plain arrays are left to the compiler's vectoriser, so that one text serves every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvsplice {

using i64 = std::int64_t;

// bfloat16 in memory; arithmetic is in float.
struct bf16 {
    std::uint16_t bits;
};

template <class To, class From>
static inline To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

static inline float widen(float value) { return value; }
static inline float widen(bf16 value) { return bits_as<float>(std::uint32_t(value.bits) << 16); }

template <class T>
static inline T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
inline bf16 narrow<bf16>(float value) {
    const std::uint32_t bits = bits_as<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return bf16{std::uint16_t(value != value ? 0x7fc0u : rounded)};
}

// 2 ** x. Arguments are clamped to [-126, 127]; relative error below 3e-7; NaN stays NaN.
// x = n + r with |r| <= 1/2: 2**n goes into the exponent's bits, 2**r is its Taylor polynomial of degree 6.
static inline float exp2_of(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer in the low bits
    x = x < -126.0f ? -126.0f : x;
    x = x > 127.0f ? 127.0f : x;
    const float shifted = x + kRound;
    const std::uint32_t n = bits_as<std::uint32_t>(shifted) - bits_as<std::uint32_t>(kRound);
    const float r = x - (shifted - kRound);
    float p = 1.5403530e-4f;
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    return bits_as<float>(bits_as<std::uint32_t>(p) + (n << 23));
}

constexpr float kLog2E = 1.44269504f;

// Threads worth waking for a loop over `elements` numbers: a wake-up costs about as much as 32 k of them.
static inline int threads_for(i64 elements, int threads) { return elements < 32768 ? 1 : threads; }

}  // namespace kvsplice
