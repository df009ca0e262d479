// Linear layers over weights packed once: x @ weight.T + bias for bfloat16, sums in float.
//
//   weight  [n, k] row-major   ->   packed  [ceil(n / 32), k / 2, 32, 2], columns past n filled with zeros
//
// Every row of x is multiplied in the same order whatever rows are beside it, so a row's bits do not depend on its
// batch or on the number of threads.
#pragma once

#include "panels.h"

namespace kvsplice {

constexpr i64 kChunk = 8 * kMaxRows;  // rows that share a panel while it is in the cache nearest to the core

constexpr i64 kAhead = 16384;         // bytes; asked for a whole panel ahead, weights came 15 % slower

#if defined(KVSPLICE_DOT_BF16)

// Python makes these too (kernels/cpu/library.py).
struct Weights {
    const bf16* packed;
    const bf16* bias;  // or null
    i64 n, k;
};

struct Linear : Weights {
    const bf16* x;
    i64 x_stride;
    const bf16* after;  // what will be read behind the last panel
};

template <int ROWS, class Out>
static inline void store_block(const Accumulators<ROWS>& acc, const Linear& linear, i64 column, Out* out) {
    const int width = int(linear.n - column < kPanel ? linear.n - column : kPanel);
    float shift[kPanel] = {};
    if (linear.bias) {
        for (int i = 0; i < width; ++i) shift[i] = widen(linear.bias[column + i]);
    }
    for (int row = 0; row < ROWS; ++row) {
        Out rounded[kPanel];
        store(acc[row][0] + load(shift), rounded);
        store(acc[row][1] + load(shift + 16), rounded + 16);
        Out* to = out + row * linear.n + column;
        if (width == kPanel) {
            std::memcpy(to, rounded, sizeof(rounded));
        } else {
            std::memcpy(to, rounded, width * sizeof(Out));
        }
    }
}

// One panel for a few rows. Meanwhile weights further on are asked for: by the only block of rows, what is kAhead behind
// those in use; by the first two of several, one half each of the next panel, as the present one is in the cache once
// the first is through. With many rows the products take longer than memory does, and nothing is asked for.
template <class Out>
static void multiply_rows(const Linear& linear, i64 begin, i64 end, i64 panel, bool few, Out* out) {
    const i64 size = linear.k * kPanel;
    const bf16* weights = linear.packed + panel * size;
    const i64 blocks = few ? blocks_of(end - begin) : 0;
    i64 block = 0;
    each_block(end - begin, [&](i64 first, auto height) {
        Accumulators<height> acc = {};
        const i64 row = begin + first;
        const bf16* x = linear.x + row * linear.x_stride;
        const char* next = (const char*)((panel + 1) * kPanel < linear.n ? weights + size : linear.after);
        if (blocks == 1) {
            const char* ahead = next == (const char*)linear.after ? next : (const char*)weights + kAhead;
            multiply<height>(acc, x, linear.x_stride, weights, linear.k / 2, [ahead](i64 step) {
                __builtin_prefetch(ahead + step * 128, 0, 2);
                __builtin_prefetch(ahead + step * 128 + 64, 0, 2);
            });
        } else if (block < 2 && blocks > 1) {
            next += block * size;  // half of the panel's bytes
            multiply<height>(acc, x, linear.x_stride, weights, linear.k / 2,
                             [next](i64 step) { __builtin_prefetch(next + step * 64, 0, 2); });
        } else {
            multiply<height>(acc, x, linear.x_stride, weights, linear.k / 2);
        }
        store_block<height>(acc, linear, panel * kPanel, out + row * linear.n);
        ++block;
    });
}

template <class Out>
static void run(const Linear& linear, i64 rows, Out* out, int threads) {
    const i64 panels = (linear.n + kPanel - 1) / kPanel, chunks = (rows + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 item = 0; item < panels * chunks; ++item) {
        const i64 panel = item / chunks, chunk = item % chunks;
        const i64 begin = chunk * kChunk, end = begin + kChunk < rows ? begin + kChunk : rows;
        multiply_rows(linear, begin, end, panel, chunks == 1, out);
    }
}

#endif

}  // namespace kvsplice
