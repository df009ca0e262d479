// Attention over packed tiles of tokens: for rows with several queries, and for any row where attention_rows.h is not
// the better way. Packing a tile pays if many lines use it.
//
//   lines    the queries x the query heads of one KV head, [queries * group, head_dim]
//   tile     128 tokens of a KV head, packed once and used by all its lines
//   block    up to 12 lines, 32 on the tile unit: scores = lines @ K tile, softmax,
//            output = output * alpha + weights @ V tile
#pragma once

#include "softmax.h"
#include "tile_unit.h"

namespace kvsplice {

template <class T>
class TileWorker {
    using X = Operand<T>;
#if defined(KVSPLICE_TILE_UNIT)
    static constexpr int kBlockLines = std::max(kMaxRows, kUnitRows);
#else
    static constexpr int kBlockLines = kMaxRows;
#endif

   public:
    TileWorker(const Problem<T>& problem, i64 lines, const Partials& partials)
        : p(problem), softmax(problem, lines), partials(partials) {
        keys = thread_memory<X>(0, kTile * p.head_dim);
        values = thread_memory<X>(1, kTile * softmax.width);
        query = thread_memory<X>(2, lines * p.head_dim);
        weights = thread_memory<X>(3, kBlockLines * kTile);
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
                attend_all(head * lines, begin, end);
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

    void attend_all(i64 base, i64 begin, i64 end) {
#if defined(KVSPLICE_TILE_UNIT)
        if constexpr (std::is_same_v<X, bf16>) {
            if (p.head_dim % kTileK == 0 && has_tile_unit()) {
                for (i64 line = 0; line < lines; line += kUnitRows) {
                    OnUnit block{*this, int(std::min<i64>(kUnitRows, lines - line))};
                    attend(block, block.height, base, line, begin, end);
                }
                return;
            }
        }
#endif
        each_block(lines, [&](i64 line, auto height) {
            InRegisters<height> block{*this};
            attend(block, height, base, line, begin, end);
        });
    }

    // `block` multiplies `height` lines.
    template <class Block>
    void attend(Block& block, int height, i64 base, i64 line, i64 begin, i64 end) {
        int from, to, ignored;
        seen(line, begin, end, from, ignored);
        seen(line + height - 1, begin, end, ignored, to);
        if (from >= to) return;
        const int first_panel = from / kPanel, end_panel = (to + kPanel - 1) / kPanel;
        const int start = first_panel * kPanel, stop = end_panel * kPanel;
        alignas(64) float scores[kBlockLines][kTile];
        float alphas[kBlockLines];
        for (int panel = first_panel; panel < end_panel; ++panel) block.score(base + line, panel, scores[0]);
        for (int i = 0; i < height; ++i) {
            seen(line + i, begin, end, from, to);
            alphas[i] = softmax.soften(scores[i], weights + i * kTile, from, to, start, stop, base + line + i);
        }
        for (i64 column = 0; column < softmax.width; column += kPanel) {
            block.accumulate(base + line, column, start, stop, alphas);
        }
    }

    const X* query_of(i64 line) const { return query + line * p.head_dim; }
    const X* key_panel(int panel) const { return keys + panel * kPanel * p.head_dim; }
    const X* value_panel(i64 column, int start) const { return values + column * kTile + start * kPanel; }
    float* output_of(i64 line, i64 column) const { return softmax.output + line * softmax.width + column; }

    template <int HEIGHT>
    struct InRegisters {
        TileWorker& w;

        void score(i64 line, int panel, float* scores) {
            Accumulators<HEIGHT> acc = {};
            multiply<HEIGHT>(acc, w.query_of(line), w.p.head_dim, w.key_panel(panel), w.p.head_dim / kPair<X>);
            for (int i = 0; i < HEIGHT; ++i) std::memcpy(scores + i * kTile + panel * kPanel, acc[i], sizeof(acc[i]));
        }

        void accumulate(i64 line, i64 column, int start, int stop, const float* alphas) {
            Accumulators<HEIGHT> acc;
            float* target = w.output_of(line, column);
            const i64 stride = w.softmax.width;
            for (int i = 0; i < HEIGHT; ++i) {
                std::memcpy(acc[i], target + i * stride, sizeof(acc[i]));
                acc[i][0] *= alphas[i];
                acc[i][1] *= alphas[i];
            }
            const X* panel = w.value_panel(column, start);
            multiply<HEIGHT>(acc, w.weights + start, kTile, panel, (stop - start) / kPair<X>);
            for (int i = 0; i < HEIGHT; ++i) std::memcpy(target + i * stride, acc[i], sizeof(acc[i]));
        }
    };

#if defined(KVSPLICE_TILE_UNIT)
    struct OnUnit {
        TileWorker& w;
        int height;

        void score(i64 line, int panel, float* scores) {
            w.unit.multiply(height, w.query_of(line), w.p.head_dim, w.key_panel(panel), w.p.head_dim,
                            scores + panel * kPanel, kTile);
        }

        void accumulate(i64 line, i64 column, int start, int stop, const float* alphas) {
            float* target = w.output_of(line, column);
            const i64 stride = w.softmax.width;
            for (int i = 0; i < height; ++i) {
                for (int j = 0; j < kPanel; j += 16) {
                    store(load(target + i * stride + j) * alphas[i], target + i * stride + j);
                }
            }
            w.unit.template multiply<true>(height, w.weights + start, kTile, w.value_panel(column, start),
                                           stop - start, target, stride);
        }
    };
#endif

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
#if defined(KVSPLICE_TILE_UNIT)
    TileUnit unit;
#endif
    Item item{};
    i64 lines = 0, position = 0;  // lines of each head; place of the item's first query in its context
};

}  // namespace kvsplice
