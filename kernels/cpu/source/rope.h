// Rotary embedding, on the way to the pool.
#pragma once

#include "vectors.h"

namespace kvsplice {

// Heads of one token, each rotated by the token's angles: element i is paired with element i + half.
template <class T>
static inline void rotate(const T* x, T* out, i64 heads, i64 half, const float* cos, const float* sin) {
    for (i64 head = 0; head < heads; ++head, x += 2 * half, out += 2 * half) {
        for (i64 i = 0; i < half; i += 16) {
            const i64 left = half - i;
            const v16 front = load_some(x + i, left), back = load_some(x + half + i, left);
            const v16 c = load_some(cos + i, left), s = load_some(sin + i, left);
            store_some(front * c - back * s, out + i, left);
            store_some(back * c + front * s, out + half + i, left);
        }
    }
}

struct Rope {
    i64 tokens, heads, kv_heads, head_dim;
    i64 query_stride, key_stride, value_stride;  // from token to token; heads lie side by side
};

template <class T>
static void rope_store(const T* query, const T* key, const T* value, const float* cos, const float* sin, T* rotated,
                       T* k_pool, T* v_pool, const i64* slots, const Rope& rope, int threads) {
    const i64 half = rope.head_dim / 2, q_size = rope.heads * rope.head_dim, kv_size = rope.kv_heads * rope.head_dim;
#pragma omp parallel for num_threads(threads_for(rope.tokens * (q_size + kv_size), threads)) schedule(static)
    for (i64 token = 0; token < rope.tokens; ++token) {
        const float *c = cos + token * half, *s = sin + token * half;
        rotate(query + token * rope.query_stride, rotated + token * q_size, rope.heads, half, c, s);
        rotate(key + token * rope.key_stride, k_pool + slots[token] * kv_size, rope.kv_heads, half, c, s);
        std::memcpy(v_pool + slots[token] * kv_size, value + token * rope.value_stride, kv_size * sizeof(T));
    }
}

}  // namespace kvsplice

