// Operators on single tokens: norms, the activation, rotary embedding, and moving K and V in and out of a pool.
#include "rows.h"

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

using namespace kvsplice;

#define KVSPLICE_ROWS(T, suffix)                                                                                      \
    extern "C" void kvsplice_rms_norm_##suffix(const T* x, const T* residual, const T* weight, T* total, T* out,      \
                                               i64 outer, i64 inner, i64 outer_stride, i64 inner_stride, i64 size,    \
                                               float eps, int threads) {                                              \
        const Rows rows{outer, inner, outer_stride, inner_stride, size};                                              \
        rms_norm(x, residual, weight, total, out, rows, eps, threads);                                                \
    }                                                                                                                 \
    extern "C" void kvsplice_silu_mul_##suffix(const T* gate_up, T* out, i64 tokens, i64 size, int threads) {         \
        silu_mul(gate_up, out, tokens, size, threads);                                                                \
    }                                                                                                                 \
    extern "C" void kvsplice_rope_store_##suffix(                                                                     \
        const T* query, const T* key, const T* value, const float* cos, const float* sin, T* rotated, T* k_pool,      \
        T* v_pool, const i64* slots, i64 tokens, i64 heads, i64 kv_heads, i64 head_dim, i64 query_stride,             \
        i64 key_stride, i64 value_stride, int threads) {                                                              \
        const Rope rope{tokens, heads, kv_heads, head_dim, query_stride, key_stride, value_stride};                   \
        rope_store(query, key, value, cos, sin, rotated, k_pool, v_pool, slots, rope, threads);                       \
    }

KVSPLICE_ROWS(bf16, bf16)
KVSPLICE_ROWS(float, f32)

// Tokens are opaque bytes here. No threads: these run beside a step, on the thread that moves KV, and leave the cores
// to it.
extern "C" void kvsplice_gather(const char* pool, const i64* slots, char* out, i64 count, i64 token_bytes) {
    for (i64 i = 0; i < count; ++i) std::memcpy(out + i * token_bytes, pool + slots[i] * token_bytes, token_bytes);
}

extern "C" void kvsplice_splice(char* pool, const i64* slots, const char* source, i64 count, i64 token_bytes,
                                i64 first_byte, i64 num_bytes) {
    for (i64 i = 0; i < count; ++i) {
        std::memcpy(pool + slots[i] * token_bytes + first_byte, source + i * num_bytes, num_bytes);
    }
}
