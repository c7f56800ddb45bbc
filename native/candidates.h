// A few vectors that many are compared with: in float32 first, and again in float64 where that is too close to call.
#pragma once

#include <vector>

#include "matrix.h"
#include "sorting.h"

namespace coterie::COTERIE_ISA {

// A small matrix (count × dim, float64) ready for both the float32 search and the float64 verdict.
struct Candidates {
    int64_t count, dim;
    std::vector<double> exact;
    Buffer panels;
    double longest = 0;

    Candidates(int64_t count, int64_t dim)
        : count(count), dim(dim), exact(count * dim), panels(std::max<int64_t>(1, padded(count) * dim)) {}

    // After `exact` has been written.
    void prepare() {
        std::vector<float> rough(exact.begin(), exact.end());
        std::vector<const float*> rows(count);
        longest = 0;
        for (int64_t c = 0; c < count; c++) {
            rows[c] = rough.data() + c * dim;
            longest = std::max(longest, std::sqrt(dot(exact.data() + c * dim, exact.data() + c * dim, dim)));
        }
        transpose_to_panels(rows.data(), count, dim, panels);
    }
};

// A bound on the error of a float32 product of vectors of these lengths.
inline float doubt(double a, double b, int64_t dim) { return static_cast<float>(4e-7 * (8 + std::sqrt(double(dim))) * a * b + 1e-30); }

// The length of a vector, a little more rather than less.
inline double length(const float* x, int64_t dim) {
    Vec squares = splat(0);
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) squares = fma(load(x + d), load(x + d), squares);
    double total = sum(squares);
    for (; d < dim; d++) total += double(x[d]) * x[d];
    return std::sqrt(total) * 1.001;
}

inline void assign_nearest(const double* x, int64_t rows, Candidates& centroids, const std::vector<double>& half_norms,
                           int64_t* labels) {
    int64_t dim = centroids.dim, count = centroids.count, stride = padded(count);
    Buffer block(kRowBlock * dim), scores(kRowBlock * stride);
    std::vector<float> half(half_norms.begin(), half_norms.end());
    half.resize(stride, INFINITY);
    for (int64_t first = 0; first < rows; first += kRowBlock) {
        int64_t here = std::min(kRowBlock, rows - first);
        for (int64_t i = 0; i < here * dim; i++) block[i] = static_cast<float>(x[first * dim + i]);
        multiply<false>(here, count, dim, block, dim, 1, centroids.panels, dim, scores, stride);
        for (int64_t i = 0; i < here; i++) {
            const double* row = x + (first + i) * dim;
            float* s = scores + i * stride;
            float best = INFINITY;
            for (int64_t c = 0; c < count; c++) {
                s[c] = half[c] - s[c];
                best = std::min(best, s[c]);
            }
            float limit = best + 2 * doubt(length(block + i * dim, dim) + centroids.longest, centroids.longest, dim);
            int64_t label = -1, close = 0;
            for (int64_t c = 0; c < count; c++)
                if (!(s[c] > limit)) {
                    close++;
                    if (label < 0) label = c;
                }
            if (close > 1) {
                float nearest = INFINITY;
                for (int64_t c = label; c < count; c++)
                    if (!(s[c] > limit)) {
                        float verdict = static_cast<float>(half_norms[c] - dot(row, centroids.exact.data() + c * dim, dim));
                        if (verdict < nearest) {
                            nearest = verdict;
                            label = c;
                        }
                    }
            }
            labels[first + i] = std::max<int64_t>(label, 0);
        }
    }
}

}  // namespace coterie::COTERIE_ISA
