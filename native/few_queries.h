// What a few queries ask of rows that lie anywhere in memory: each row is read once for all of them.
#pragma once

#include <vector>

#include "rows.h"

namespace coterie::COTERIE_ISA {

// Queries at a time: as many as have room in the registers.
constexpr int kFewQueries = 4;

// to[r · stride + j] = scale · queries[r · padded(dim)] · rows[j] for R queries. A query is followed by 0 up to a
// multiple of kLanes.
template <int R, class Ahead>
inline void few_dots(const float* queries, const float* const* rows, int64_t count, int64_t dim, float scale, float* to,
                     int64_t stride, Ahead& prefetch) {
    const int64_t step = padded(dim);
    for (int64_t first = 0; first < count; first += kSums) {
        int64_t here = std::min<int64_t>(kSums, count - first);
        prefetch.some();
        Vec sums[R][kSums];
        float rest[R][kSums] = {};
        for (int64_t j = 0; j < kSums; j++) {
            const float* row = rows[first + std::min(j, here - 1)];
            Vec own[R];
            COTERIE_UNROLL
            for (int r = 0; r < R; r++) own[r] = splat(0);
            int64_t d = 0;
            for (; d + kLanes <= dim; d += kLanes) {
                Vec key = load(row + d);
                COTERIE_UNROLL
                for (int r = 0; r < R; r++) own[r] = fma(load(queries + r * step + d), key, own[r]);
            }
            for (; d < dim; d++)
                for (int r = 0; r < R; r++) rest[r][j] += queries[r * step + d] * row[d];
            COTERIE_UNROLL
            for (int r = 0; r < R; r++) sums[r][j] = own[r];
        }
        for (int r = 0; r < R; r++) {
            float each[kSums];
            sum_each(sums[r], 1, each);
            for (int64_t j = 0; j < here; j++) to[r * stride + first + j] = (each[j] + rest[r][j]) * scale;
        }
    }
}

// Sums of a few columns for R queries: out[r · step + d] += Σ_j weights[r · stride + j] · rows[j][d].
template <int R, int Columns, class Ahead>
inline void few_columns(const float* weights, int64_t stride, const float* const* rows, int64_t count, int64_t d,
                        float* out, int64_t step, Ahead& prefetch) {
    Vec sums[R][Columns];
    COTERIE_UNROLL
    for (int r = 0; r < R; r++) COTERIE_UNROLL
    for (int c = 0; c < Columns; c++) sums[r][c] = load(out + r * step + d + c * kLanes);
    for (int64_t j = 0; j < count; j++) {
        if (j % 4 == 0) prefetch.some();
        COTERIE_UNROLL
        for (int c = 0; c < Columns; c++) {
            Vec row = load(rows[j] + d + c * kLanes);
            COTERIE_UNROLL
            for (int r = 0; r < R; r++) sums[r][c] = fma(splat(weights[r * stride + j]), row, sums[r][c]);
        }
    }
    COTERIE_UNROLL
    for (int r = 0; r < R; r++) COTERIE_UNROLL
    for (int c = 0; c < Columns; c++) store(out + r * step + d + c * kLanes, sums[r][c]);
}

// The same for all columns.
template <int R, class Ahead>
inline void few_sums(const float* weights, int64_t stride, const float* const* rows, int64_t count, int64_t dim,
                     float* out, int64_t step, Ahead& prefetch) {
    constexpr int columns = few_columns_of(R);
    int64_t d = 0;
    for (; d + columns * kLanes <= dim; d += columns * kLanes)
        few_columns<R, columns>(weights, stride, rows, count, d, out, step, prefetch);
    for (; d + kLanes <= dim; d += kLanes) few_columns<R, 1>(weights, stride, rows, count, d, out, step, prefetch);
    if (d == dim) return;
    for (int64_t j = 0; j < count; j++)
        for (int r = 0; r < R; r++)
            for (int64_t e = d; e < dim; e++) out[r * step + e] += weights[r * stride + j] * rows[j][e];
}

}  // namespace coterie::COTERIE_ISA
