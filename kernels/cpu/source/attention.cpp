// Attention of ragged rows of queries over a paged pool, one tile of tokens at a time with a running softmax
// (FlashAttention-2, Dao 2023, arXiv:2307.08691; the split over tokens is Flash-Decoding, Dao et al. 2023).
//
//   item     some queries of one row, for one KV head or, if it is a single query, for all of them
//   lines    the queries x the query heads of one KV head, [queries * group, head_dim]
//   tile     128 tokens of a KV head, packed once and used by all its lines
//   block    up to 12 lines: scores = lines @ K tile, softmax, output = output * alpha + weights @ V tile
//
// Tiles and segments lie at fixed places of the context, so a row's bits do not depend on its batch or on the threads.
#include <algorithm>
#include <vector>

#include "memory.h"
#include "tiles.h"

namespace kvsplice {

constexpr i64 kSegment = 512;      // tokens that a row with one query hands to one thread
constexpr i64 kItemLines = 192;    // at most, unless one query has more: enough to pay for packing a tile
constexpr i64 kFewestLines = 24;   // down to which items shrink to keep all threads busy
constexpr float kUnseen = -1e30f;  // below any score, and finite: kUnseen - kUnseen is 0

template <class T>
struct Problem {
    const T *query, *k_pool, *v_pool;
    T* out;
    const std::int32_t *tables, *query_start, *context_lens;
    i64 table_stride, rows, heads, kv_heads, head_dim, block_size;
    float scale;
    i64 window;  // 0: none
    int threads;

    i64 group() const { return heads / kv_heads; }
    i64 width() const { return (head_dim + kPanel - 1) / kPanel * kPanel; }
    i64 queries(i64 row) const { return query_start[row + 1] - query_start[row]; }
};

// Queries [first_query, first_query + num_queries) of a row and KV heads [kv_head, kv_head + kv_heads) over the tokens
// [begin, end). `partial`: which partial result it writes, -1 for the final one.
struct Item {
    i64 row, kv_head, kv_heads, first_query, num_queries, begin, end, partial;

    i64 first_of_next_tile(i64 token) const { return std::min((token / kTile + 1) * kTile, end); }
};

// A partial result: for each line its sum, its peak and its output before the division by the sum.
struct Partials {
    float* memory;
    i64 lines, width;

    float* sums(i64 index) const { return memory + index * lines * (width + 2); }
    float* peaks(i64 index) const { return sums(index) + lines; }
    float* output(i64 index) const { return peaks(index) + lines; }
};

template <class T>
class Worker {
    using X = Operand<T>;
    static constexpr int kDegree = std::is_same_v<X, bf16> ? 4 : 6;  // weights are rounded to 8 bits, or to 24

   public:
    Worker(const Problem<T>& problem, i64 lines, const Partials& partials)
        : p(problem), width(problem.width()), to_log2(problem.scale * kLog2E), partials(partials) {
        keys = thread_memory<X>(0, kTile * p.head_dim);
        values = thread_memory<X>(1, kTile * width);
        query = thread_memory<X>(2, lines * p.head_dim);
        weights = thread_memory<X>(3, kMaxRows * kTile);
        output = thread_memory<float>(4, lines * width);
        peaks = thread_memory<float>(5, 2 * lines);
        sums = peaks + lines;
        nothing = thread_memory<T>(6, p.head_dim);
        wishes.lines = thread_memory<const char*>(8, 2 * kTile * (p.kv_heads * p.head_dim * i64(sizeof(T)) / 64 + 1));
        std::memset((void*)nothing, 0, p.head_dim * sizeof(T));
    }

    // `after`: what this thread will probably do next, or null.
    void run(const Item& work, const Item* after) {
        item = work;
        lines = item.num_queries * p.group();
        position = p.context_lens[item.row] - p.queries(item.row) + item.first_query;
        load_queries();
        for (i64 begin = item.begin, end; begin < item.end; begin = end) {
            end = item.first_of_next_tile(begin);
            find(tile, item, begin, end);
            end < item.end ? wish_for(item, end) : after ? wish_for(*after, after->begin) : void(wishes.count = 0);
            for (i64 head = 0; head < item.kv_heads; ++head) {
                pack(head);
                each_block(lines, [&](i64 line, auto height) { attend<height>(head * lines, line, begin, end); });
            }
        }
        item.partial < 0 ? store_final() : store_partial();
    }

   private:
    i64 all_lines() const { return item.kv_heads * lines; }

    const T* source(i64 line) const {
        const i64 kv_head = item.kv_head + line / lines, local = line % lines;
        const i64 token = p.query_start[item.row] + item.first_query + local / p.group();
        return p.query + (token * p.heads + kv_head * p.group() + local % p.group()) * p.head_dim;
    }

    void load_queries() {
        for (i64 line = 0; line < all_lines(); ++line) {
            const T* from = source(line);
            for (i64 i = 0; i < p.head_dim; i += 16) {
                store_some(load_some(from + i, p.head_dim - i), query + line * p.head_dim + i, p.head_dim - i);
            }
        }
        std::fill(output, output + all_lines() * width, 0.0f);
        std::fill(peaks, peaks + all_lines(), kUnseen);
        std::fill(sums, sums + all_lines(), 0.0f);
    }

    void find(TokenPointers<T>& found, const Item& of, i64 begin, i64 end) const {
        const std::int32_t* table = p.tables + of.row * p.table_stride;
        const T* pool = p.k_pool + of.kv_head * p.head_dim;
        found.find(pool, table, p.block_size, p.kv_heads * p.head_dim, begin, end, nothing);
    }

    void pack(i64 head) {
        TokenPointers<T> tokens;
        tokens.shift(tile, head * p.head_dim, nothing);
        pack_keys(tokens, p.head_dim, keys, wishes);
        tokens.shift(tile, head * p.head_dim + (p.v_pool - p.k_pool), nothing);
        pack_values(tokens, p.head_dim, values, wishes);
    }

    // Lists the cache lines of the tile that begins at token `begin`, all heads of a token together, so that memory is
    // read in order. Only for single queries: with several, products take longer than memory does.
    void wish_for(const Item& of, i64 begin) {
        wishes.next = wishes.count = 0;
        if (of.num_queries > 1) return;
        const i64 bytes = of.kv_heads * p.head_dim * i64(sizeof(T)), values = (p.v_pool - p.k_pool) * i64(sizeof(T));
        TokenPointers<T> wanted;
        find(wanted, of, begin, of.first_of_next_tile(begin));
        for (int token = wanted.from; token < wanted.to; ++token) {
            const char* place = (const char*)wanted.at[token];
            for (i64 byte = 0; byte < bytes; byte += 64) {
                wishes.lines[wishes.count++] = place + byte;
                wishes.lines[wishes.count++] = place + byte + values;
            }
        }
    }

    // A product that asks for one line a step. Its steps are half as many as a head's share of the lines; packing asks
    // for the other half.
    template <int HEIGHT>
    void multiply_wishing(Accumulators<HEIGHT>& acc, const X* x, i64 stride, const X* panel, i64 steps) {
        const char* const* lines = wishes.take(steps);
        if (!lines) return multiply<HEIGHT>(acc, x, stride, panel, steps);
        multiply<HEIGHT>(acc, x, stride, panel, steps, [lines](i64 step) { __builtin_prefetch(lines[step]); });
    }

    // Tokens that a line of a head sees, counted from the first of the tile and cut to [begin, end).
    void seen(i64 line, i64 begin, i64 end, int& from, int& to) const {
        const i64 first = begin / kTile * kTile;
        const i64 place = position + line / p.group();
        const i64 oldest = p.window ? std::max(begin, place - p.window + 1) : begin;
        from = int(oldest - first);
        to = int(std::min(end, place + 1) - first);
    }

    template <int HEIGHT>
    void attend(i64 base, i64 line, i64 begin, i64 end) {
        int from, to, ignored;
        seen(line, begin, end, from, ignored);
        seen(line + HEIGHT - 1, begin, end, ignored, to);
        if (from >= to) return;
        const int first_panel = from / kPanel, end_panel = (to + kPanel - 1) / kPanel;
        alignas(64) float scores[HEIGHT][kTile];
        float alphas[HEIGHT];
        for (int panel = first_panel; panel < end_panel; ++panel) score<HEIGHT>(base + line, panel, scores);
        for (int i = 0; i < HEIGHT; ++i) {
            seen(line + i, begin, end, from, to);
            const int start = first_panel * kPanel, stop = end_panel * kPanel;
            X* target = weights + i * kTile;
            alphas[i] = from == start && to == stop
                            ? soften<true>(scores[i], target, from, to, start, stop, base + line + i)
                            : soften<false>(scores[i], target, from, to, start, stop, base + line + i);
        }
        for (i64 column = 0; column < width; column += kPanel) {
            accumulate<HEIGHT>(base + line, column, first_panel * kPanel, end_panel * kPanel, alphas);
        }
    }

    template <bool WHOLE>
    static v16 masked(v16 value, int first, int from, int to, float otherwise) {
        return WHOLE ? value : within(value, first, from, to, otherwise);
    }

    template <int HEIGHT>
    void score(i64 line, int panel, float (&scores)[HEIGHT][kTile]) {
        Accumulators<HEIGHT> acc = {};
        multiply_wishing<HEIGHT>(acc, query + line * p.head_dim, p.head_dim, keys + panel * kPanel * p.head_dim,
                                 p.head_dim / kPair<X>);
        for (int i = 0; i < HEIGHT; ++i) std::memcpy(scores[i] + panel * kPanel, acc[i], sizeof(acc[i]));
    }

    // Scores [start, stop) of a line to weights, those outside of [from, to) to 0. Returns what the line's output so
    // far must be multiplied by.
    template <bool WHOLE>
    float soften(float* scores, X* weights, int from, int to, int start, int stop, i64 line) {
        v16 tops = splat(peaks[line]), total = {};
        for (int i = start; i < stop; i += 16) {
            tops = larger(masked<WHOLE>(load(scores + i), i, from, to, kUnseen), tops);
        }
        const float top = largest_of(tops), shift = -top * to_log2;
        for (int i = start; i < stop; i += 16) {
            v16 weight = exp2_of<kDegree>(load(scores + i) * to_log2 + shift);
            weight = masked<WHOLE>(weight, i, from, to, 0.0f);
            total += weight;
            store(weight, weights + i);
        }
        const float alpha = exp2_of((peaks[line] - top) * to_log2);
        peaks[line] = top;
        sums[line] = sums[line] * alpha + sum_of(total);
        return alpha;
    }

    template <int HEIGHT>
    void accumulate(i64 line, i64 column, int start, int stop, const float* alphas) {
        Accumulators<HEIGHT> acc;
        float* target = output + line * width + column;
        for (int i = 0; i < HEIGHT; ++i) {
            std::memcpy(acc[i], target + i * width, sizeof(acc[i]));
            acc[i][0] *= alphas[i];
            acc[i][1] *= alphas[i];
        }
        const X* panel = values + column * kTile + start * kPanel;
        multiply_wishing<HEIGHT>(acc, weights + start, kTile, panel, (stop - start) / kPair<X>);
        for (int i = 0; i < HEIGHT; ++i) std::memcpy(target + i * width, acc[i], sizeof(acc[i]));
    }

    void store_final() {
        for (i64 line = 0; line < all_lines(); ++line) {
            T* to = p.out + (source(line) - p.query);
            const float factor = 1.0f / sums[line];
            const float* from = output + line * width;
            for (i64 i = 0; i < p.head_dim; i += 16) store_some(load(from + i) * factor, to + i, p.head_dim - i);
        }
    }

    void store_partial() {
        std::copy(sums, sums + all_lines(), partials.sums(item.partial));
        std::copy(peaks, peaks + all_lines(), partials.peaks(item.partial));
        std::copy(output, output + all_lines() * width, partials.output(item.partial));
    }

    const Problem<T>& p;
    const i64 width;
    const float to_log2;  // softmax in powers of two
    const Partials& partials;
    X *keys, *values, *query, *weights;
    float *output, *peaks, *sums;
    T* nothing;
    TokenPointers<T> tile;
    Wishes wishes;
    Item item{};
    i64 lines = 0, position = 0;  // lines of each head; place of the item's first query in its context
};

// A row with one query whose context is cut into segments: their partial results are [first, first + count).
struct Merge {
    i64 row, first, count;
};

struct Plan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    i64 partials = 0;
};

template <class T>
static void plan_single(const Problem<T>& p, i64 row, Plan& plan) {
    const i64 context = p.context_lens[row];
    const i64 begin = p.window ? std::max<i64>(0, context - p.window) : 0;
    const i64 first = begin / kSegment, count = (context + kSegment - 1) / kSegment - first;
    if (count > 1) plan.merges.push_back({row, plan.partials, count});
    for (i64 segment = first; segment < first + count; ++segment) {
        const i64 from = std::max(begin, segment * kSegment), to = std::min(context, (segment + 1) * kSegment);
        plan.items.push_back({row, 0, p.kv_heads, 0, 1, from, to, count > 1 ? plan.partials++ : -1});
    }
}

template <class T>
static void plan_several(const Problem<T>& p, i64 row, i64 step, Plan& plan) {
    const i64 queries = p.queries(row), position = p.context_lens[row] - queries;
    for (i64 kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
        for (i64 first = 0; first < queries; first += step) {
            const i64 count = std::min(step, queries - first);
            const i64 begin = p.window ? std::max<i64>(0, position + first - p.window + 1) : 0;
            plan.items.push_back({row, kv_head, 1, first, count, begin, position + first + count, -1});
        }
    }
}

// Queries an item: as many as pay for packing, fewer if threads would have nothing to do.
template <class T>
static i64 queries_per_item(const Problem<T>& p) {
    const i64 all = p.query_start[p.rows] * p.heads;
    i64 lines = kItemLines;
    while (lines > kFewestLines && all / lines < 4 * p.threads) lines /= 2;
    return std::max<i64>(1, lines / p.group());
}

template <class T>
static Plan make_plan(const Problem<T>& p, i64 step) {
    Plan plan;
    for (i64 row = 0; row < p.rows; ++row) {
        p.queries(row) == 1 ? plan_single(p, row, plan) : plan_several(p, row, step, plan);
    }
    // The longest first, so that no thread starts one when the others are done.
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const Item& a, const Item& b) {
        return (a.end - a.begin) * a.num_queries > (b.end - b.begin) * b.num_queries;
    });
    return plan;
}

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

template <class T>
static void attention(const Problem<T>& p) {
    const i64 step = queries_per_item(p), lines = std::max(step * p.group(), p.heads);
    const Plan plan = make_plan(p, step);
    Partials partials{nullptr, p.heads, p.width()};
    partials.memory = thread_memory<float>(7, plan.partials * p.heads * (p.width() + 2));
    const i64 items = i64(plan.items.size()), merges = i64(plan.merges.size());
    i64 work = 0;  // in numbers read, the measure of threads_for
    for (const Item& item : plan.items) work += (item.end - item.begin) * item.kv_heads * p.head_dim * (1 + item.num_queries / 8);
    const int threads = int(std::min<i64>(threads_for(work, p.threads), items));
#pragma omp parallel num_threads(threads)
    {
        Worker<T> worker(p, lines, partials);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < items; ++i) {
            worker.run(plan.items[i], i + threads < items ? &plan.items[i + threads] : nullptr);
        }
#pragma omp for schedule(static)
        for (i64 i = 0; i < merges; ++i) merge(p, plan.merges[i], partials);
    }
}

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
