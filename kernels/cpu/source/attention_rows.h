// Attention of single queries over K and V as they lie in the pool: nothing is packed, so that a tile costs little more
// than reading it. For few query heads a KV head; with many, packing pays (attention_tiles.h).
//
// While the keys of a tile are used, its values are asked for, and the keys of the next tile while its values are used,
// each token with all of its heads at once: so memory is read in order and all the time.
#pragma once

#include "row_products.h"
#include "softmax.h"

namespace kvsplice {

#if defined(__AVX512F__)

constexpr i64 kMostLines = 8;  // query heads a KV head: with more, packing a tile pays

// Tokens that will be needed, asked for a few at a time while something else is computed: they come from memory
// meanwhile, where a burst of prefetches would mostly be dropped.
template <class T>
class Wishes {
   public:
    // The tokens that were found, all of `token_size` numbers each, in `asks` calls.
    Wishes(const TokenPointers<T>& found, i64 token_size, i64 asks)
        : tokens(found.at + found.from), left(found.to - found.from), bytes(token_size * i64(sizeof(T))) {
        lines_an_ask = (left * ((bytes + 63) / 64) + asks - 1) / asks;
    }

    inline __attribute__((always_inline)) void ask() {  // inlined: GCC drops calls that only prefetch
        for (i64 i = 0; i < lines_an_ask && left > 0; ++i) {
            __builtin_prefetch((const char*)*tokens + byte);
            byte += 64;
            if (byte >= bytes) byte = 0, ++tokens, --left;
        }
    }

   private:
    const T* const* tokens;
    i64 left, bytes, lines_an_ask, byte = 0;
};

template <class T>
class NativeRowWorker {
   public:
    NativeRowWorker(const Problem<T>& problem, const Partials& partials)
        : p(problem), group(int(problem.group())), token_size(problem.kv_heads * problem.head_dim),
          softmax(problem, problem.heads), partials(partials) {
        scores = thread_memory<float>(8, p.heads * (kTile + 1));
        alphas = scores + p.heads * kTile;
        weights = thread_memory<T>(9, p.heads * kTile);
        nothing = thread_memory<T>(10, token_size);
        std::memset((void*)nothing, 0, token_size * sizeof(T));
    }

    static bool takes(const Problem<T>& p, const Item& item) {
        return p.queries(item.row) == 1 && p.group() <= kMostLines;
    }

    // `after`: what this thread will probably do next, or null.
    void run(const Item& item, const Item* after) {
        softmax.clear(p.heads);
        query = p.query + p.query_start[item.row] * p.heads * p.head_dim;
        for (i64 begin = item.begin, end; begin < item.end; begin = end) {
            end = item.first_of_next_tile(begin);
            find_tokens(keys, p, item, begin, end, nothing);
            values.shift(keys, p.v_pool - p.k_pool, nothing);
            start = keys.from / 16 * 16, stop = keys.count;
            score_all();
            for (int line = 0; line < p.heads; ++line) soften(line);
            find_next(item, end, after);
            accumulate_all();
        }
        finish(item);
    }

   private:
    void score_all() {
        Wishes<T> wishes(values, token_size, (stop - start) / 4 * p.kv_heads * blocks_of<kLines>(group));
        for (int token = start; token < stop; token += 16) {
            for (i64 head = 0; head < p.kv_heads; ++head) {
                each_block<kLines>(group, [&](i64 first, auto lines) {
                    const i64 line = head * group + first;
                    score_sixteen<lines>(keys.at + token, head * p.head_dim, query + line * p.head_dim, p.head_dim,
                                         scores + line * kTile + token, [&] { wishes.ask(); });
                });
            }
        }
    }

    void soften(int line) {
        const i64 first = line * kTile;
        alphas[line] = softmax.soften(scores + first, weights + first, keys.from, keys.to, start, stop, line);
    }

    // The next tile, of this item or the one after it: none if nobody knows.
    void find_next(const Item& item, i64 end, const Item* after) {
        if (end < item.end) {
            find_tokens(next, p, item, end, item.first_of_next_tile(end), nothing);
        } else if (after && takes(p, *after)) {
            find_tokens(next, p, *after, after->begin, after->first_of_next_tile(after->begin), nothing);
        } else {
            next.from = next.to = 0;
        }
    }

    void accumulate_all() {
        const i64 passes = p.kv_heads * blocks_of<kLines>(group) * blocks_of<2 * kPanel>(p.head_dim);
        Wishes<T> wishes(next, token_size, (stop - start) / 2 * passes);
        for (i64 head = 0; head < p.kv_heads; ++head) {
            for (i64 column = 0; column < p.head_dim; column += 2 * kPanel) {
                each_block<kLines>(group, [&](i64 first, auto lines) {
                    if (p.head_dim - column > kPanel) {
                        accumulate<lines, 2>(head, head * group + first, column, wishes);
                    } else {
                        accumulate<lines, 1>(head, head * group + first, column, wishes);
                    }
                });
            }
        }
    }

    template <int LINES, int PANELS>
    void accumulate(i64 head, i64 line, i64 column, Wishes<T>& wishes) {
        const i64 offset = head * p.head_dim + column, left = p.head_dim - column;
        float* target = softmax.output + line * softmax.width + column;
        const T* weight = weights + line * kTile;
        Columns<LINES, PANELS> columns;
        columns.load_scaled(target, softmax.width, alphas + line);
        for (int token = start; token < stop; token += 2) {
            wishes.ask();
            columns.add_two(values.at[token] + offset, values.at[token + 1] + offset, left, weight + token);
        }
        columns.store_to(target, softmax.width);
    }

    void finish(const Item& item) {
        if (item.partial >= 0) return softmax.store_partial(partials, item.partial, p.heads);
        T* to = p.out + (query - p.query);
        for (i64 line = 0; line < p.heads; ++line) softmax.store_final(line, to + line * p.head_dim, p.head_dim);
    }

    const Problem<T>& p;
    const int group;
    const i64 token_size;
    Softmax<T> softmax;
    const Partials& partials;
    float *scores, *alphas;
    T *weights, *nothing;
    const T* query = nullptr;
    TokenPointers<T> keys, values, next;
    int start = 0, stop = 0;  // tokens of the tile, in whole vectors
};

#endif

// Where the CPU does not multiply numbers of T as they are, or has no vectors of 16 floats, tiles serve all rows.
template <class T>
struct NoRowWorker {
    NoRowWorker(const Problem<T>&, const Partials&) {}
    static bool takes(const Problem<T>&, const Item&) { return false; }
    void run(const Item&, const Item*) {}
};

#if defined(__AVX512F__)
template <class T>
using RowWorker = std::conditional_t<std::is_same_v<Operand<T>, T>, NativeRowWorker<T>, NoRowWorker<T>>;
#else
template <class T>
using RowWorker = NoRowWorker<T>;
#endif

}  // namespace kvsplice
