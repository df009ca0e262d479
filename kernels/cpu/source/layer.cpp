// A whole decoder layer for rows of one token each, in one call: a step of few rows has no time for more.
//
//   hidden, residual  ->  norm -> qkv -> (norms of heads) -> rope, K and V into the pool -> attention -> out
//                     ->  norm -> gate_up -> silu_mul -> down  ->  hidden, residual
//
// Nothing is computed here that the single functions do not compute in the same way: the bits are equal.
#include "attention.h"
#include "linear.h"
#include "memory.h"
#include "rope.h"
#include "rows.h"

namespace kvsplice {

#if defined(KVSPLICE_DOT_BF16)

// Python makes these two (kernels/cpu/layers.py).
struct Layer {
    Weights qkv, out, gate_up, down;
    const bf16 *attention_norm, *mlp_norm;
    const bf16 *query_norm, *key_norm;  // or null
    const bf16* after;                  // weights that are read behind this layer's
    i64 heads, kv_heads, head_dim, window;
    float eps, scale;

    i64 q_size() const { return heads * head_dim; }
    i64 kv_size() const { return kv_heads * head_dim; }
};

struct Step {
    bf16 *hidden, *residual;  // [rows, hidden size]; overwritten by what the layer makes of them
    const float *cos, *sin;
    const i64* slots;
    const std::int32_t *tables, *query_start, *context_lens;
    i64 table_stride, rows, block_size;
    int threads;
};

// Numbers of a token's heads that lie `stride` apart from token to token.
struct Heads {
    const bf16* first;
    i64 stride;
};

static bf16* product(const Weights& weights, const bf16* x, const bf16* after, int scratch, const Step& step) {
    bf16* out = thread_memory<bf16>(scratch, step.rows * weights.n);
    run(Linear{weights, x, weights.k, after}, step.rows, out, step.threads);
    return out;
}

// residual += hidden; the norm of that.
static bf16* add_norm(const bf16* norm, const bf16* hidden, i64 size, float eps, const Step& step) {
    bf16* normed = thread_memory<bf16>(0, step.rows * size);
    rms_norm(hidden, step.residual, norm, step.residual, normed, Rows{step.rows, 1, size, size, size}, eps,
             step.threads);
    return normed;
}

static Heads norm_heads(const bf16* norm, Heads heads, i64 count, const Layer& layer, int scratch, const Step& step) {
    if (!norm) return heads;
    bf16* normed = thread_memory<bf16>(scratch, step.rows * count * layer.head_dim);
    const Rows rows{step.rows, count, heads.stride, layer.head_dim, layer.head_dim};
    rms_norm<bf16>(heads.first, nullptr, norm, nullptr, normed, rows, layer.eps, step.threads);
    return Heads{normed, count * layer.head_dim};
}

// [rows, q_size + 2 * kv_size] to [rows, q_size].
static bf16* attend(const bf16* qkv, const Layer& layer, const Step& step, bf16* k_pool, bf16* v_pool) {
    const Heads query = norm_heads(layer.query_norm, {qkv, layer.qkv.n}, layer.heads, layer, 2, step);
    const Heads key = norm_heads(layer.key_norm, {qkv + layer.q_size(), layer.qkv.n}, layer.kv_heads, layer, 3, step);
    bf16* rotated = thread_memory<bf16>(4, step.rows * layer.q_size());
    bf16* attended = thread_memory<bf16>(5, step.rows * layer.q_size());
    const Rope rope{step.rows, layer.heads, layer.kv_heads, layer.head_dim, query.stride, key.stride, layer.qkv.n};
    rope_store(query.first, key.first, qkv + layer.q_size() + layer.kv_size(), step.cos, step.sin, rotated, k_pool,
               v_pool, step.slots, rope, step.threads);
    attention(Problem<bf16>{rotated, k_pool, v_pool, attended, step.tables, step.query_start, step.context_lens,
                            step.table_stride, step.rows, layer.heads, layer.kv_heads, layer.head_dim,
                            step.block_size, layer.scale, layer.window, step.threads});
    return attended;
}

#endif

}  // namespace kvsplice

using namespace kvsplice;

#if defined(KVSPLICE_DOT_BF16)

extern "C" void kvsplice_decode_layer(const Layer* layer, const Step* step, bf16* k_pool, bf16* v_pool) {
    const i64 size = layer->qkv.k, rows = step->rows;
    const bf16* normed = add_norm(layer->attention_norm, step->hidden, size, layer->eps, *step);
    const bf16* qkv = product(layer->qkv, normed, layer->out.packed, 1, *step);
    const bf16* attended = attend(qkv, *layer, *step, k_pool, v_pool);
    const bf16* added = product(layer->out, attended, layer->gate_up.packed, 6, *step);
    normed = add_norm(layer->mlp_norm, added, size, layer->eps, *step);
    const bf16* both = product(layer->gate_up, normed, layer->down.packed, 7, *step);
    bf16* activated = thread_memory<bf16>(8, rows * layer->down.k);
    silu_mul(both, activated, rows, layer->down.k, step->threads);
    run(Linear{layer->down, activated, layer->down.k, layer->after}, rows, step->hidden, step->threads);
}

#endif
