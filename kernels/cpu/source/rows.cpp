// Operators on single tokens: norms, the activation, rotary embedding, and moving K and V in and out of a pool.
#include "rows.h"

#include "rope.h"

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
