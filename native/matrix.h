// Small matrix products, the one loop where the arithmetic happens.
#pragma once

#include <algorithm>

#include "rows.h"

namespace coterie::COTERIE_ISA {

#if defined(__AVX512F__)
constexpr int kMicro = 12;
#else
constexpr int kMicro = 6;
#endif

// The left factor of a product: rows at equal distances, or anywhere in memory.
struct Strided {
    const float* data;
    int64_t row_step, depth_step;
    Strided from(int64_t row) const { return {data + row * row_step, row_step, depth_step}; }
    float operator()(int64_t row, int64_t k) const { return data[row * row_step + k * depth_step]; }
};

struct Scattered {
    const float* const* rows;
    Scattered from(int64_t row) const { return {rows + row}; }
    float operator()(int64_t row, int64_t k) const { return rows[row][k]; }
};

template <int M, class Left>
inline void micro(int64_t depth, Left a, float scale, const float* panel, float* c, int64_t c_stride) {
    Vec sums[M];
    for (int i = 0; i < M; i++) sums[i] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec b = load(panel + k * kLanes);
        for (int i = 0; i < M; i++) sums[i] = fma(splat(a(i, k)), b, sums[i]);
    }
    for (int i = 0; i < M; i++) store(c + i * c_stride, sums[i] * splat(scale));
}

template <int M, class Left>
inline void micro_of(int64_t rows, int64_t depth, Left a, float scale, const float* panel, float* c, int64_t c_stride) {
    if (rows == M) return micro<M>(depth, a, scale, panel, c, c_stride);
    if constexpr (M > 1) micro_of<M - 1>(rows, depth, a, scale, panel, c, c_stride);
}

// C (rows × width) = scale · A (rows × depth) · B (depth × width). B is panels with room for `b_rows` rows; C is row
// after row with room for padded(width) columns. Rows are shared out evenly: 4 and 4 keep the arithmetic busier than 6
// and 2.
template <class Left>
inline void multiply(int64_t rows, int64_t width, int64_t depth, Left a, const float* b, int64_t b_rows, float* c,
                     int64_t c_stride, float scale = 1, Prefetch* prefetch = nullptr) {
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* panel = b + j * b_rows;
        int64_t blocks = (rows + kMicro - 1) / kMicro;
        for (int64_t i = 0, here; i < rows; i += here, blocks--) {
            here = (rows - i + blocks - 1) / blocks;
            if (prefetch) prefetch->some();
            micro_of<kMicro>(here, depth, a.from(i), scale, panel, c + i * c_stride + j, c_stride);
        }
    }
}

}  // namespace coterie::COTERIE_ISA
