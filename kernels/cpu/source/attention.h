// Attention of ragged rows of queries over a paged pool: the problem, and how it is cut into items of work.
#pragma once

#include <algorithm>
#include <vector>

#include "common.h"
#include "panels.h"
#include "tiles.h"

namespace kvsplice {

constexpr i64 kSegment = 512;     // tokens that a row with one query hands to one thread
constexpr i64 kItemLines = 192;   // at most, unless one query has more: enough to pay for packing a tile
constexpr i64 kFewestLines = 24;  // down to which items shrink to keep all threads busy

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

template <class T>
void attention(const Problem<T>& problem);

// Queries [first_query, first_query + num_queries) of a row and KV heads [kv_head, kv_head + kv_heads) over the tokens
// [begin, end). `partial`: which partial result it writes, -1 for the final one.
struct Item {
    i64 row, kv_head, kv_heads, first_query, num_queries, begin, end, partial;

    i64 first_of_next_tile(i64 token) const { return std::min((token / kTile + 1) * kTile, end); }
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

// The tokens of an item between two edges of tiles, and where they lie.
template <class T>
void find_tokens(TokenPointers<T>& found, const Problem<T>& p, const Item& item, i64 begin, i64 end, const T* nothing) {
    const std::int32_t* table = p.tables + item.row * p.table_stride;
    const T* pool = p.k_pool + item.kv_head * p.head_dim;
    found.find(pool, table, p.block_size, p.kv_heads * p.head_dim, begin, end, nothing);
}

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

}  // namespace kvsplice
