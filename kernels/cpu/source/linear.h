// Linear layers over weights packed once: x @ weight.T + bias for bfloat16, sums in float.
//
//   weight  [n, k] row-major   ->   packed  [ceil(n / 32), k / 2, 32, 2], columns past n filled with zeros
//
// Every row of x is multiplied in the same order whatever rows are beside it, so a row's bits do not depend on its
// batch or on the number of threads. Where the CPU has a tile unit it multiplies all rows of a layer, or none.
#pragma once

#include <algorithm>

#include "panels.h"
#include "tile_unit.h"

namespace kvsplice {

constexpr i64 kChunk = 8 * kMaxRows;  // rows that share a panel while it is in the cache nearest to the core

constexpr i64 kUnitChunk = 256;       // the same for the tile unit: rows that stay in the second cache for all panels
constexpr i64 kAhead = 16384;         // bytes; asked for a whole panel ahead, weights came 15 % slower
constexpr i64 kUnitAhead = 4096;      // the same for the tile unit: 16384 were 7 % slower

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

// What becomes of a panel's sums: shifted by the bias, rounded, and stored at their columns.
template <class Out>
class PanelStore {
   public:
    PanelStore(const Linear& linear, i64 panel, Out* out)
        : to(out + panel * kPanel), stride(linear.n), width(int(std::min<i64>(kPanel, linear.n - panel * kPanel))) {
        if (!linear.bias) return;
        for (int i = 0; i < width; ++i) shift[i] = widen(linear.bias[panel * kPanel + i]);
    }

    void operator()(i64 row, v16 left, v16 right) const {
        Out rounded[kPanel];
        store(left + load(shift), rounded);
        store(right + load(shift + 16), rounded + 16);
        if (width == kPanel) {
            std::memcpy(to + row * stride, rounded, sizeof(rounded));
        } else {
            std::memcpy(to + row * stride, rounded, width * sizeof(Out));
        }
    }

   private:
    Out* to;
    i64 stride;
    int width;
    float shift[kPanel] = {};
};

// One panel for a few rows. Meanwhile weights further on are asked for: by the only block of rows, what is kAhead behind
// those in use; by the first two of several, one half each of the next panel, as the present one is in the cache once
// the first is through. With many rows the products take longer than memory does, and nothing is asked for.
template <class Out>
static void multiply_rows(const Linear& linear, i64 begin, i64 end, i64 panel, bool few, Out* out) {
    const i64 size = linear.k * kPanel;
    const bf16* weights = linear.packed + panel * size;
    const i64 blocks = few ? blocks_of(end - begin) : 0;
    const PanelStore<Out> store(linear, panel, out);
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
        for (int i = 0; i < height; ++i) store(row + i, acc[i][0], acc[i][1]);
        ++block;
    });
}

#if defined(KVSPLICE_TILE_UNIT)

// The same on the tile unit. It waits for memory even with tens of rows, so each block of few rows asks.
template <class Out>
static void multiply_rows(TileUnit& unit, const Linear& linear, i64 begin, i64 end, i64 panel, bool few, Out* out) {
    const i64 size = linear.k * kPanel;
    const bf16* weights = linear.packed + panel * size;
    const char* next = (const char*)((panel + 1) * kPanel < linear.n ? weights + size : linear.after);
    const char* ahead = next == (const char*)linear.after ? next : (const char*)weights + kUnitAhead;
    const PanelStore<Out> store(linear, panel, out);
    alignas(64) float sums[kUnitRows * kPanel];
    for (i64 row = begin; row < end; row += kUnitRows) {
        const int height = int(std::min<i64>(kUnitRows, end - row));
        const bf16* x = linear.x + row * linear.x_stride;
        if (few && row == begin) {
            unit.multiply(height, x, linear.x_stride, weights, linear.k, sums, kPanel, [ahead](i64 step) {
                __builtin_prefetch(ahead + step * 128, 0, 3);
                __builtin_prefetch(ahead + step * 128 + 64, 0, 3);
            });
        } else {
            unit.multiply(height, x, linear.x_stride, weights, linear.k, sums, kPanel);
        }
        for (int i = 0; i < height; ++i) store(row + i, load(sums + i * kPanel), load(sums + i * kPanel + 16));
    }
}

#endif

// Chunks of rows times panels, dealt out to all threads. `chunks_first`: a panel meets all chunks before the next one.
struct Cut {
    i64 rows, chunk, panels;
    bool chunks_first;

    i64 chunks() const { return (rows + chunk - 1) / chunk; }

    // Calls f(unit, begin, end, panel, whether there are few rows).
    template <class Unit, class F>
    void each(int threads, F f) const {
#pragma omp parallel num_threads(threads)
        {
            Unit unit;
#pragma omp for schedule(static)
            for (i64 item = 0; item < panels * chunks(); ++item) {
                const i64 panel = chunks_first ? item / chunks() : item % panels;
                const i64 begin = (chunks_first ? item % chunks() : item / panels) * chunk;
                f(unit, begin, std::min(begin + chunk, rows), panel, chunks() == 1);
            }
        }
    }
};

template <class Out>
static void run(const Linear& linear, i64 rows, Out* out, int threads) {
    const i64 panels = (linear.n + kPanel - 1) / kPanel;
#if defined(KVSPLICE_TILE_UNIT)
    if (linear.k % kTileK == 0 && has_tile_unit()) {
        return Cut{rows, kUnitChunk, panels, false}.each<TileUnit>(threads, [&](TileUnit& unit, auto... place) {
            multiply_rows(unit, linear, place..., out);
        });
    }
#endif
    struct Registers {};
    Cut{rows, kChunk, panels, true}.each<Registers>(
        threads, [&](Registers, auto... place) { multiply_rows(linear, place..., out); });
}

#endif

}  // namespace kvsplice
