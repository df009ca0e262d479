// Products with panels on the CPU's tile unit (AMX; Intel SDM vol. 1, chapter 18): up to 32 rows of x times one panel.
//
//   tiles 0 1   sums of rows 0..15, columns 0..15 and 16..31       tile 4   x, rows 0..15, 32 numbers of K
//   tiles 2 3   sums of rows 16..31, the same                      tile 5   x, rows 16..31
//                                                                  tiles 6 7   the panel's 16 pairs of K, its halves
//
// The layout of panels.h is what the unit wants: pairs of K together. A row's sums are made in the same order however
// many rows are beside it, but in another order than in panels.h, so a product takes one of the two ways for all rows.
#pragma once

#include "panels.h"

#if defined(KVSPLICE_DOT_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define KVSPLICE_TILE_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvsplice {

#if defined(KVSPLICE_TILE_UNIT)

constexpr int kTileRows = 16;
constexpr int kTileK = 32;  // numbers of K that a tile holds
constexpr int kUnitRows = 2 * kTileRows;

// Linux lends the unit's registers (8 KiB a thread) to processes that ask; not all kernels and sandboxes do.
static inline bool has_tile_unit() {
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, of arch_prctl(2)
    static const bool granted = syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
    return granted;
}

// The unit as one thread uses it; other users of the thread find it as if untouched.
class TileUnit {
   public:
    TileUnit() = default;
    TileUnit(const TileUnit&) = delete;
    TileUnit& operator=(const TileUnit&) = delete;
    ~TileUnit() {
        if (height) _tile_release();
    }

    // sums [rows, 32] (+)= x[:, :k] @ panel for 1 <= rows <= 32 and k a multiple of 32. Calls ask(pair) for each pair of
    // K on the way, like `multiply` of panels.h.
    template <bool ADD = false, class Ask = AskForNothing>
    void multiply(int rows, const bf16* x, i64 stride, const bf16* panel, i64 k, float* sums, i64 sums_stride,
                  Ask ask = {}) {
        shape(rows);
        if (rows > kTileRows) {
            product<true, ADD>(x, stride, panel, k, sums, sums_stride, ask);
        } else {
            product<false, ADD>(x, stride, panel, k, sums, sums_stride, ask);
        }
    }

   private:
    struct alignas(64) Shapes {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t bytes[16] = {};
        std::uint8_t rows[16] = {};
    };

    void shape(int rows) {
        if (rows == height) return;
        const int upper = rows < kTileRows ? rows : kTileRows, lower = rows - upper;
        const int heights[8] = {upper, upper, lower, lower, upper, lower, kTileRows, kTileRows};
        Shapes shapes;
        for (int tile = 0; tile < 8; ++tile) {
            shapes.rows[tile] = std::uint8_t(heights[tile]);
            shapes.bytes[tile] = heights[tile] ? 64 : 0;
        }
        _tile_loadconfig(&shapes);
        height = rows;
    }

    template <bool TALL, bool ADD, class Ask>
    static void product(const bf16* x, i64 stride, const bf16* panel, i64 k, float* sums, i64 sums_stride, Ask ask) {
        const i64 x_bytes = stride * i64(sizeof(bf16)), sums_bytes = sums_stride * i64(sizeof(float));
        float* lower = sums + kTileRows * sums_stride;
        if constexpr (ADD) {
            _tile_loadd(0, sums, sums_bytes);
            _tile_loadd(1, sums + 16, sums_bytes);
            if constexpr (TALL) {
                _tile_loadd(2, lower, sums_bytes);
                _tile_loadd(3, lower + 16, sums_bytes);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if constexpr (TALL) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (i64 i = 0; i < k; i += kTileK, panel += kTileK * kPanel) {
#pragma GCC unroll 16
            for (int pair = 0; pair < kTileK / 2; ++pair) ask(i / 2 + pair);
            _tile_loadd(6, panel, 4 * kPanel);
            _tile_loadd(4, x + i, x_bytes);
            _tile_loadd(7, panel + kPanel, 4 * kPanel);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (TALL) {
                _tile_loadd(5, x + kTileRows * stride + i, x_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, sums_bytes);
        _tile_stored(1, sums + 16, sums_bytes);
        if constexpr (TALL) {
            _tile_stored(2, lower, sums_bytes);
            _tile_stored(3, lower + 16, sums_bytes);
        }
    }

    int height = 0;  // rows that the tiles are shaped for; 0: not in use
};

#endif

}  // namespace kvsplice
