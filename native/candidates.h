// A few vectors that many are compared with: in float32 first, and again in float64 where that is too close to call.
#pragma once

#include <vector>

#include "matrix.h"
#include "orders.h"

namespace coterie::COTERIE_ISA {

// A small matrix (count × dim, float64) ready for both the float32 search and the float64 verdict.
struct Candidates {
    int64_t count, dim;
    std::vector<double> exact;
    Buffer panels;
    double longest = 0;

    Candidates(int64_t count, int64_t dim)
        : count(count), dim(dim), exact(count * dim), panels(std::max<int64_t>(1, padded(count) * dim)) {}

    // Before float32 products: `panels`, and `longest`.
    void prepare() {
        measure();
        std::vector<float> rough(exact.begin(), exact.end());
        std::vector<const float*> rows(count);
        for (int64_t c = 0; c < count; c++) rows[c] = rough.data() + c * dim;
        transpose_to_panels(rows.data(), count, dim, panels);
    }

    // Whenever `exact` has been written.
    void measure() {
        longest = 0;
        for (int64_t c = 0; c < count; c++)
            longest = std::max(longest, std::sqrt(dot(exact.data() + c * dim, exact.data() + c * dim, dim)));
    }
};

// A bound on the error of a float32 product of vectors of these lengths; inf where it, or a part of it, may overflow.
class Doubt {
public:
    Doubt(double length, int64_t dim) : length_(length), unit_(4e-7 * (8 + std::sqrt(double(dim)))) {}
    float operator()(double other) const {
        double product = length_ * other;
        return product < 1e37 ? static_cast<float>(unit_ * product + 1e-30) : INFINITY;
    }

private:
    double length_, unit_;
};
inline float doubt(double a, double b, int64_t dim) { return Doubt(a, dim)(b); }

// Add some rows to `sum`, one after the other.
inline void add_up(const float* const* rows, int64_t count, int64_t dim, double* sum) {
    constexpr int kHalf = kLanes / 2, kVectors = 4;  // of sums that stay in registers
    int64_t d = 0;
    for (; d + kVectors * kHalf <= dim; d += kVectors * kHalf) {
        Wide total[kVectors];
        for (int c = 0; c < kVectors; c++) total[c] = load_wide(sum + d + c * kHalf);
        for (int64_t i = 0; i < count; i++)
            for (int c = 0; c < kVectors; c++) total[c] = total[c] + widen(rows[i] + d + c * kHalf);
        for (int c = 0; c < kVectors; c++) store(sum + d + c * kHalf, total[c]);
    }
    for (; d < dim; d++)
        for (int64_t i = 0; i < count; i++) sum[d] += rows[i][d];
}

// The length of a vector, a little more rather than less.
inline double length(const float* x, int64_t dim) {
    Vec squares = splat(0);
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) squares = fma(load(x + d), load(x + d), squares);
    double total = sum(squares);
    for (; d < dim; d++) total += double(x[d]) * x[d];
    return std::sqrt(total) * 1.001;
}

// Put 0 for what is not finite, and give the length of what is left.
inline double tame(float* x, int64_t dim) {
    double size = length(x, dim);
    if (std::isfinite(size) || all_finite(x, dim)) return size;
    zero_wild(x, dim);
    return length(x, dim);
}

inline void scale_to_unit(double* x, int64_t dim) {
    double size = std::max(std::sqrt(dot(x, x, dim)), DBL_MIN);
    for (int64_t d = 0; d < dim; d++) x[d] /= size;
}

}  // namespace coterie::COTERIE_ISA
