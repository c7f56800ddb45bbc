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

template <int M, bool Add>
inline void micro(int64_t depth, const float* a, int64_t row_step, int64_t depth_step, const float* panel, float* c,
                  int64_t c_stride) {
    Vec sums[M];
    for (int i = 0; i < M; i++) sums[i] = Add ? load(c + i * c_stride) : splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec b = load(panel + k * kLanes);
        for (int i = 0; i < M; i++) sums[i] = fma(splat(a[i * row_step + k * depth_step]), b, sums[i]);
    }
    for (int i = 0; i < M; i++) store(c + i * c_stride, sums[i]);
}

template <bool Add>
inline void micro_rest(int64_t rows, int64_t depth, const float* a, int64_t row_step, int64_t depth_step,
                       const float* panel, float* c, int64_t c_stride) {
    switch (rows) {
        case 1: return micro<1, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 2: return micro<2, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 3: return micro<3, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 4: return micro<4, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 5: return micro<5, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 6: return micro<6, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
    }
}

// C (rows × width) = or += A (rows × depth) · B (depth × width). A is read as a[i * row_step + k * depth_step]; B is
// panels with room for `b_rows` rows; C is row after row with room for padded(width) columns.
template <bool Add>
inline void multiply(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t row_step, int64_t depth_step,
                     const float* b, int64_t b_rows, float* c, int64_t c_stride, Prefetch* prefetch = nullptr) {
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* panel = b + j * b_rows;
        int64_t i = 0;
        for (; i + kMicro <= rows; i += kMicro) {
            if (prefetch) prefetch->some();
            micro<kMicro, Add>(depth, a + i * row_step, row_step, depth_step, panel, c + i * c_stride + j, c_stride);
        }
        for (; i < rows; i += 6)
            micro_rest<Add>(std::min<int64_t>(6, rows - i), depth, a + i * row_step, row_step, depth_step, panel,
                            c + i * c_stride + j, c_stride);
    }
}

// C (rows × width) = scale · A · B, where the rows of A are anywhere in memory.
template <int M>
inline void micro_rows(int64_t depth, const float* const* a, float scale, const float* panel, float* c, int64_t c_stride) {
    Vec sums[M];
    for (int i = 0; i < M; i++) sums[i] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec b = load(panel + k * kLanes);
        for (int i = 0; i < M; i++) sums[i] = fma(splat(a[i][k]), b, sums[i]);
    }
    for (int i = 0; i < M; i++) store(c + i * c_stride, sums[i] * splat(scale));
}

inline void multiply_rows(int64_t rows, int64_t width, int64_t depth, const float* const* a, float scale, const float* b,
                          int64_t b_rows, float* c, int64_t c_stride, Prefetch* prefetch = nullptr) {
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* panel = b + j * b_rows;
        int64_t i = 0;
        for (; i + 6 <= rows; i += 6) {
            if (prefetch) prefetch->some();
            micro_rows<6>(depth, a + i, scale, panel, c + i * c_stride + j, c_stride);
        }
        float* to = c + i * c_stride + j;
        switch (rows - i) {
            case 1: micro_rows<1>(depth, a + i, scale, panel, to, c_stride); break;
            case 2: micro_rows<2>(depth, a + i, scale, panel, to, c_stride); break;
            case 3: micro_rows<3>(depth, a + i, scale, panel, to, c_stride); break;
            case 4: micro_rows<4>(depth, a + i, scale, panel, to, c_stride); break;
            case 5: micro_rows<5>(depth, a + i, scale, panel, to, c_stride); break;
        }
    }
}

}  // namespace coterie::COTERIE_ISA
