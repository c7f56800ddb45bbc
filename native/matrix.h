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

// The same two products for a few rows, with the right factor's rows wherever they lie: where each is used by a few
// rows only, bringing them into panels would cost more than the arithmetic. Dimensions must be multiples of kLanes.
// `kFewRows` is where both ways take the same time.
#if defined(__AVX512F__)
constexpr int64_t kFewRows = 16;
constexpr bool kThreeAsFour = true;  // in less time than as two and one
#else
constexpr int64_t kFewRows = 8;
constexpr bool kThreeAsFour = false;
#endif
constexpr int kCombinedRows = 6;  // at a time

// M rows of the product below.
template <int M>
inline void dots(int64_t count, int64_t depth, const float* const* a, const float* const* b, float* c, int64_t c_stride,
                 float scale, Prefetch& prefetch) {
    constexpr int width = kSums / M;
    for (int64_t j = 0; j < count; j += width) {
        prefetch.some();
        Vec sums[kSums];
        for (int s = 0; s < kSums; s++) sums[s] = splat(0);
        for (int64_t k = 0; k < depth; k += kLanes) {
            Vec right[width];
            for (int s = 0; s < width; s++) right[s] = load(b[j + s] + k);
            for (int i = 0; i < M; i++) {
                Vec left = load(a[i] + k);
                for (int s = 0; s < width; s++) sums[i * width + s] = fma(left, right[s], sums[i * width + s]);
            }
        }
        float found[kSums];
        sum_each(sums, scale, found);
        for (int i = 0; i < M; i++) std::memcpy(c + i * c_stride + j, found + i * width, width * sizeof(float));
    }
}

// C (rows × count) = scale · A (rows × depth) · Bᵀ. There must be padded(count) rows of B, and room for a row of C
// more.
inline void multiply_few(int64_t rows, int64_t count, int64_t depth, const float* const* a, const float* const* b,
                         float* c, int64_t c_stride, float scale, Prefetch& prefetch) {
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4) dots<4>(count, depth, a + i, b, c + i * c_stride, c_stride, scale, prefetch);
    if (kThreeAsFour && i + 3 == rows) {
        const float* four[] = {a[i], a[i + 1], a[i + 2], a[i + 2]};
        return dots<4>(count, depth, four, b, c + i * c_stride, c_stride, scale, prefetch);
    }
    for (; i + 2 <= rows; i += 2) dots<2>(count, depth, a + i, b, c + i * c_stride, c_stride, scale, prefetch);
    if (i < rows) dots<1>(count, depth, a + i, b, c + i * c_stride, c_stride, scale, prefetch);
}

template <int M, int C>
inline void combine(int64_t depth, const float* a, int64_t a_stride, const float* const* b, int64_t column, float* c,
                    int64_t c_stride, Prefetch& prefetch) {
    Vec sums[M][C];
    COTERIE_UNROLL
    for (int i = 0; i < M; i++) COTERIE_UNROLL
    for (int j = 0; j < C; j++) sums[i][j] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        if (k % 4 == 0) prefetch.some();
        Vec right[C];
        COTERIE_UNROLL
        for (int j = 0; j < C; j++) right[j] = load(b[k] + column + j * kLanes);
        COTERIE_UNROLL
        for (int i = 0; i < M; i++) {
            Vec left = splat(a[i * a_stride + k]);
            COTERIE_UNROLL
            for (int j = 0; j < C; j++) sums[i][j] = fma(left, right[j], sums[i][j]);
        }
    }
    COTERIE_UNROLL
    for (int i = 0; i < M; i++) COTERIE_UNROLL
    for (int j = 0; j < C; j++) store(c + i * c_stride + column + j * kLanes, sums[i][j]);
}

template <int M>
inline void combine_of(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t a_stride,
                       const float* const* b, float* c, int64_t c_stride, Prefetch& prefetch) {
    if (rows < M) {
        if constexpr (M > 1) combine_of<M - 1>(rows, width, depth, a, a_stride, b, c, c_stride, prefetch);
        return;
    }
    constexpr int columns = few_columns_of(M);
    int64_t column = 0;
    for (; column + columns * kLanes <= width; column += columns * kLanes)
        combine<M, columns>(depth, a, a_stride, b, column, c, c_stride, prefetch);
    for (; column < width; column += kLanes) combine<M, 1>(depth, a, a_stride, b, column, c, c_stride, prefetch);
}

// C (rows × width) = A (rows × depth) · B.
inline void combine_few(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t a_stride,
                        const float* const* b, float* c, int64_t c_stride, Prefetch& prefetch) {
    int64_t blocks = (rows + kCombinedRows - 1) / kCombinedRows;
    for (int64_t i = 0, here; i < rows; i += here, blocks--) {
        here = (rows - i + blocks - 1) / blocks;
        combine_of<kCombinedRows>(here, width, depth, a + i * a_stride, a_stride, b, c + i * c_stride, c_stride,
                                  prefetch);
    }
}

}  // namespace coterie::COTERIE_ISA
