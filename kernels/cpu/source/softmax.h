// The running softmax of some lines of attention (a line: one query and one of its heads).
//
//   peak     the greatest score so far
//   sum      of exp((score - peak) * scale) so far
//   output   the values weighted with the same, not divided by the sum yet; [lines, width]
#pragma once

#include <algorithm>

#include "attention.h"
#include "memory.h"

namespace kvsplice {

constexpr float kUnseen = -1e30f;  // below any score, and finite: kUnseen - kUnseen is 0

// Partial results: for each line its sum, its peak and its output.
struct Partials {
    float* memory;
    i64 lines, width;

    float* sums(i64 index) const { return memory + index * lines * (width + 2); }
    float* peaks(i64 index) const { return sums(index) + lines; }
    float* output(i64 index) const { return peaks(index) + lines; }
};

template <class T>
struct Softmax {
    using X = Operand<T>;
    static constexpr int kDegree = std::is_same_v<X, bf16> ? 4 : 6;  // weights are rounded to 8 bits, or to 24

    Softmax(const Problem<T>& p, i64 lines) : width(p.width()), to_log2(p.scale * kLog2E) {
        output = thread_memory<float>(4, lines * width);
        peaks = thread_memory<float>(5, 2 * lines);
        sums = peaks + lines;
    }

    void clear(i64 lines) {
        std::fill(output, output + lines * width, 0.0f);
        std::fill(peaks, peaks + lines, kUnseen);
        std::fill(sums, sums + lines, 0.0f);
    }

    template <bool WHOLE>
    static v16 masked(v16 value, int first, int from, int to, float otherwise) {
        return WHOLE ? value : within(value, first, from, to, otherwise);
    }

    // Scores [start, stop) of a line to weights, those outside of [from, to) to 0. Returns what the line's output so
    // far must be multiplied by.
    template <bool WHOLE>
    float soften_some(const float* scores, X* weights, int from, int to, int start, int stop, i64 line) {
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

    float soften(const float* scores, X* weights, int from, int to, int start, int stop, i64 line) {
        return from == start && to == stop ? soften_some<true>(scores, weights, from, to, start, stop, line)
                                           : soften_some<false>(scores, weights, from, to, start, stop, line);
    }

    void store_final(i64 line, T* to, i64 head_dim) const {
        const float factor = 1.0f / sums[line];
        const float* from = output + line * width;
        for (i64 i = 0; i < head_dim; i += 16) store_some(load(from + i) * factor, to + i, head_dim - i);
    }

    void store_partial(const Partials& partials, i64 index, i64 lines) const {
        std::copy(sums, sums + lines, partials.sums(index));
        std::copy(peaks, peaks + lines, partials.peaks(index));
        std::copy(output, output + lines * width, partials.output(index));
    }

    const i64 width;
    const float to_log2;  // softmax in powers of two
    float *output, *peaks, *sums;
};

}  // namespace kvsplice
