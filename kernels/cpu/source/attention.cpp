// Attention of ragged rows of queries over a paged pool, one tile of tokens at a time with a running softmax
// (FlashAttention-2, Dao 2023, arXiv:2307.08691; the split over tokens is Flash-Decoding, Dao et al. 2023).
//
//   item     some queries of one row, for one KV head or, if it is a single query, for all of them
//
// Tiles and segments lie at fixed places of the context, so a row's bits do not depend on its batch or on the threads.
#include "attention.h"

#include "attention_rows.h"
#include "attention_tiles.h"

namespace kvsplice {

template <class T>
static void merge(const Problem<T>& p, const Merge& merge, const Partials& partials) {
    const i64 width = p.width();
    for (i64 line = 0; line < p.heads; ++line) {  // of a single query: its heads, in order
        float peak = kUnseen, sum = 0.0f;
        for (i64 i = merge.first; i < merge.first + merge.count; ++i) peak = std::max(peak, partials.peaks(i)[line]);
        float* total = partials.output(merge.first) + line * width;
        for (i64 i = merge.first; i < merge.first + merge.count; ++i) {
            const float factor = exp2_of((partials.peaks(i)[line] - peak) * p.scale * kLog2E);
            const float* part = partials.output(i) + line * width;
            sum += partials.sums(i)[line] * factor;
            for (i64 j = 0; j < width; j += 16) {
                store(load(part + j) * factor + (i == merge.first ? v16{} : load(total + j)), total + j);
            }
        }
        const i64 token = p.query_start[merge.row];
        T* to = p.out + (token * p.heads + line) * p.head_dim;
        for (i64 j = 0; j < p.head_dim; j += 16) store_some(load(total + j) * (1.0f / sum), to + j, p.head_dim - j);
    }
}

// In numbers read, the measure of threads_for.
template <class T>
static i64 work_of(const Problem<T>& p, const Plan& plan) {
    i64 work = 0;
    for (const Item& item : plan.items) {
        work += (item.end - item.begin) * item.kv_heads * p.head_dim * (1 + item.num_queries / 8);
    }
    return work;
}

template <class T>
void attention(const Problem<T>& p) {
    const i64 step = queries_per_item(p), lines = std::max(step * p.group(), p.heads);
    const Plan plan = make_plan(p, step);
    Partials partials{nullptr, p.heads, p.width()};
    partials.memory = thread_memory<float>(7, plan.partials * p.heads * (p.width() + 2));
    const i64 items = i64(plan.items.size()), merges = i64(plan.merges.size());
    const int threads = int(std::min<i64>(threads_for(work_of(p, plan), p.threads), items));
#pragma omp parallel num_threads(threads)
    {
        TileWorker<T> tiles(p, lines, partials);
        RowWorker<T> rows(p, partials);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < items; ++i) {
            const Item& item = plan.items[i];
            if (RowWorker<T>::takes(p, item)) {
                rows.run(item, i + threads < items ? &plan.items[i + threads] : nullptr);
            } else {
                tiles.run(item);
            }
        }
#pragma omp for schedule(static)
        for (i64 i = 0; i < merges; ++i) merge(p, plan.merges[i], partials);
    }
}

template void attention(const Problem<bf16>&);
template void attention(const Problem<float>&);

}  // namespace kvsplice

using namespace kvsplice;

#define KVSPLICE_ATTENTION(T, suffix)                                                                                 \
    extern "C" void kvsplice_attention_##suffix(                                                                      \
        const T* query, const T* k_pool, const T* v_pool, T* out, const std::int32_t* tables, i64 table_stride,       \
        const std::int32_t* query_start, const std::int32_t* context_lens, i64 rows, i64 heads, i64 kv_heads,         \
        i64 head_dim, i64 block_size, float scale, i64 window, int threads) {                                         \
        attention(Problem<T>{query, k_pool, v_pool, out, tables, query_start, context_lens, table_stride, rows,       \
                             heads, kv_heads, head_dim, block_size, scale, window, threads});                         \
    }

KVSPLICE_ATTENTION(bf16, bf16)
KVSPLICE_ATTENTION(float, f32)
