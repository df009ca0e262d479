// Linear layers, and blocks of the model around them in one call. See linear.h for the product.
#include "linear.h"

#include "memory.h"
#include "rows.h"

using namespace kvsplice;

extern "C" int kvsplice_has_linear() { return kDotBf16; }

#if defined(KVSPLICE_DOT_BF16)

extern "C" void kvsplice_pack(const bf16* weight, i64 n, i64 k, bf16* packed, int threads) {
    const i64 panels = (n + kPanel - 1) / kPanel;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 panel = 0; panel < panels; ++panel) {
        std::uint32_t* target = (std::uint32_t*)(packed + panel * k * kPanel);
        for (int column = 0; column < kPanel; ++column) {
            const i64 row = panel * kPanel + column;
            const std::uint32_t* source = (const std::uint32_t*)(weight + row * k);
            for (i64 pair = 0; pair < k / 2; ++pair) target[pair * kPanel + column] = row < n ? source[pair] : 0u;
        }
    }
}

extern "C" void kvsplice_linear(const Weights* weights, const bf16* x, i64 rows, i64 x_stride, void* out, int wide,
                                int threads) {
    const Linear linear{*weights, x, x_stride, weights->packed};
    if (wide) {
        run(linear, rows, (float*)out, threads);
    } else {
        run(linear, rows, (bf16*)out, threads);
    }
}

// normed (scratch) = rms_norm(x + residual), with the sum in `total`.
static const bf16* norm_into_scratch(const bf16* norm, float eps, const bf16* x, const bf16* residual, bf16* total,
                                     i64 rows, i64 size, int threads) {
    bf16* normed = thread_memory<bf16>(0, rows * size);
    rms_norm(x, residual, norm, total, normed, Rows{rows, 1, size, size, size}, eps, threads);
    return normed;
}

// out = linear(rms_norm(x + residual))
extern "C" void kvsplice_norm_linear(const Weights* weights, const bf16* norm, float eps, const bf16* x,
                                     const bf16* residual, bf16* total, bf16* out, i64 rows, int threads) {
    const bf16* normed = norm_into_scratch(norm, eps, x, residual, total, rows, weights->k, threads);
    run(Linear{*weights, normed, weights->k, weights->packed}, rows, out, threads);
}

// out = down(silu_mul(gate_up(rms_norm(x + residual))))
extern "C" void kvsplice_norm_mlp(const Weights* gate_up, const Weights* down, const bf16* norm, float eps,
                                  const bf16* x, const bf16* residual, bf16* total, bf16* out, i64 rows, int threads) {
    const bf16* normed = norm_into_scratch(norm, eps, x, residual, total, rows, gate_up->k, threads);
    bf16* both = thread_memory<bf16>(1, rows * gate_up->n);
    bf16* activated = thread_memory<bf16>(2, rows * down->k);
    run(Linear{*gate_up, normed, gate_up->k, down->packed}, rows, both, threads);
    silu_mul(both, activated, rows, down->k, threads);
    run(Linear{*down, activated, down->k, down->packed}, rows, out, threads);
}

#endif
