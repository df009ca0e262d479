// Attention over packed tiles of tokens: for rows with several queries, and for any row where attention_rows.h is not
// the better way. Packing a tile pays if many lines use it.
//
//   lines    the queries x the query heads of one KV head, [queries * group, head_dim]
//   tile     128 tokens of a KV head, packed once and used by all its lines
//   block    up to 12 lines: scores = lines @ K tile, softmax, output = output * alpha + weights @ V tile
#pragma once

#include "softmax.h"

namespace kvsplice {

template <class T>
class TileWorker {
    using X = Operand<T>;

   public:
    TileWorker(const Problem<T>& problem, i64 lines, const Partials& partials)
        : p(problem), softmax(problem, lines), partials(partials) {
        keys = thread_memory<X>(0, kTile * p.head_dim);
        values = thread_memory<X>(1, kTile * softmax.width);
        query = thread_memory<X>(2, lines * p.head_dim);
        weights = thread_memory<X>(3, kMaxRows * kTile);
        nothing = thread_memory<T>(6, p.head_dim);
        std::memset((void*)nothing, 0, p.head_dim * sizeof(T));
    }

    void run(const Item& work) {
        item = work;
        lines = item.num_queries * p.group();
        position = p.context_lens[item.row] - p.queries(item.row) + item.first_query;
        load_queries();
        for (i64 begin = item.begin, end; begin < item.end; begin = end) {
            end = item.first_of_next_tile(begin);
            find_tokens(tile, p, item, begin, end, nothing);
            for (i64 head = 0; head < item.kv_heads; ++head) {
                pack(head);
                each_block(lines, [&](i64 line, auto height) { attend<height>(head * lines, line, begin, end); });
            }
        }
        finish();
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
        softmax.clear(all_lines());
    }

    void pack(i64 head) {
        TokenPointers<T> tokens;
        tokens.shift(tile, head * p.head_dim, nothing);
        pack_keys(tokens, p.head_dim, keys);
        tokens.shift(tile, head * p.head_dim + (p.v_pool - p.k_pool), nothing);
        pack_values(tokens, p.head_dim, values);
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
        const int start = first_panel * kPanel, stop = end_panel * kPanel;
        alignas(64) float scores[HEIGHT][kTile];
        float alphas[HEIGHT];
        for (int panel = first_panel; panel < end_panel; ++panel) score<HEIGHT>(base + line, panel, scores);
        for (int i = 0; i < HEIGHT; ++i) {
            seen(line + i, begin, end, from, to);
            alphas[i] = softmax.soften(scores[i], weights + i * kTile, from, to, start, stop, base + line + i);
        }
        for (i64 column = 0; column < softmax.width; column += kPanel) {
            accumulate<HEIGHT>(base + line, column, start, stop, alphas);
        }
    }

    template <int HEIGHT>
    void score(i64 line, int panel, float (&scores)[HEIGHT][kTile]) {
        Accumulators<HEIGHT> acc = {};
        const X* packed = keys + panel * kPanel * p.head_dim;
        multiply<HEIGHT>(acc, query + line * p.head_dim, p.head_dim, packed, p.head_dim / kPair<X>);
        for (int i = 0; i < HEIGHT; ++i) std::memcpy(scores[i] + panel * kPanel, acc[i], sizeof(acc[i]));
    }

    template <int HEIGHT>
    void accumulate(i64 line, i64 column, int start, int stop, const float* alphas) {
        Accumulators<HEIGHT> acc;
        float* target = softmax.output + line * softmax.width + column;
        for (int i = 0; i < HEIGHT; ++i) {
            std::memcpy(acc[i], target + i * softmax.width, sizeof(acc[i]));
            acc[i][0] *= alphas[i];
            acc[i][1] *= alphas[i];
        }
        const X* panel = values + column * kTile + start * kPanel;
        multiply<HEIGHT>(acc, weights + start, kTile, panel, (stop - start) / kPair<X>);
        for (int i = 0; i < HEIGHT; ++i) std::memcpy(target + i * softmax.width, acc[i], sizeof(acc[i]));
    }

    void finish() {
        if (item.partial >= 0) return softmax.store_partial(partials, item.partial, all_lines());
        for (i64 line = 0; line < all_lines(); ++line) {
            softmax.store_final(line, p.out + (source(line) - p.query), p.head_dim);
        }
    }

    const Problem<T>& p;
    Softmax<T> softmax;
    const Partials& partials;
    X *keys, *values, *query, *weights;
    T* nothing;
    TokenPointers<T> tile;
    Item item{};
    i64 lines = 0, position = 0;  // lines of each head; place of the item's first query in its context
};

}  // namespace kvsplice
