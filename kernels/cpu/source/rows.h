// Norms and the activation.
#pragma once

#include <cmath>

#include "vectors.h"

namespace kvsplice {

// Rows of `size` numbers side by side: row (i, j) starts at i * outer_stride + j * inner_stride.
struct Rows {
    i64 outer, inner, outer_stride, inner_stride, size;
};

// weight * round(x / rms(x)); sums in float. With a residual, x + residual comes first, rounded, and goes to `total`.
template <class T>
static void rms_norm(const T* x, const T* residual, const T* weight, T* total, T* out, const Rows& rows, float eps,
                     int threads) {
    const i64 size = rows.size, count = rows.outer * rows.inner;
#pragma omp parallel for num_threads(threads_for(count * size, threads)) schedule(static)
    for (i64 row = 0; row < count; ++row) {
        const T* from = x + row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
        v16 squares = {};
        T* sum = residual ? total + row * size : nullptr;
        for (i64 i = 0; i < size; i += 16) {
            v16 value = load_some(from + i, size - i);
            if (residual) {
                value = rounded<T>(value + load_some(residual + row * size + i, size - i));
                store_some(value, sum + i, size - i);
            }
            squares += value * value;
        }
        const float factor = 1.0f / std::sqrt(sum_of(squares) / float(size) + eps);
        if (residual) from = sum;
        for (i64 i = 0; i < size; i += 16) {
            const v16 normed = rounded<T>(load_some(from + i, size - i) * factor);
            store_some(normed * load_some(weight + i, size - i), out + row * size + i, size - i);
        }
    }
}

static inline v16 silu(v16 x) {
    const v16 power = larger(splat(-126.0f), smaller(splat(127.0f), x * -kLog2E));
    return x / (exp2_of<6>(power) + 1.0f);
}

// out[t] = silu(gate_up[t, :size]) * gate_up[t, size:], in float, rounded once.
template <class T>
static void silu_mul(const T* gate_up, T* out, i64 tokens, i64 size, int threads) {
#pragma omp parallel for num_threads(threads_for(tokens * size, threads)) schedule(static)
    for (i64 token = 0; token < tokens; ++token) {
        const T* gate = gate_up + token * 2 * size;
        T* to = out + token * size;
        for (i64 i = 0; i < size; i += 16) {
            const v16 up = load_some(gate + size + i, size - i);
            store_some(silu(load_some(gate + i, size - i)) * up, to + i, size - i);
        }
    }
}

}  // namespace kvsplice
