// Smyrf's hashes: asymmetric transforms, random projections, and the order of their values.
#pragma once

#include <vector>

#include "philox.h"
#include "sorting.h"

namespace coterie::COTERIE_ISA {

// F(q)·a or G(k)·a from x·a, ‖x‖² and the largest squared norms; `more` is the rest of a.
inline double extend(int transform, int side, double hash, double norm, const double* longest, const double* more) {
    auto missing = [&](double total) { return std::sqrt(std::max(0.0, total - norm)); };
    switch (transform) {
        case 0: return hash + missing(longest[0] + longest[1]) * more[side ? 0 : 1];
        case 2: {  // l2-alsh, m = 3
            if (!side) return hash + 0.5 * (more[0] + more[1] + more[2]);
            double shrink = 0.83 / std::max(std::sqrt(longest[1]), DBL_MIN), power = shrink * shrink * norm;
            hash *= shrink;
            for (int m = 0; m < 3; m++, power *= power) hash += power * more[m];
            return hash;
        }
        case 3: return side ? hash + missing(longest[1]) * more[0] : hash;
        case 4:
            return side ? hash + missing(longest[1]) * more[0]
                        : hash * (std::sqrt(longest[1]) / std::max(std::sqrt(norm), DBL_MIN));
        default: return hash;
    }
}

// E2LSH: ⌊h / width + shift⌋ with a width such that the hashes of a round span as many buckets as there are groups.
inline void to_buckets(const HashCall& call, int64_t h, int64_t r, int64_t b, const uint8_t* const* masks,
                       std::vector<double>* dots) {
    double low = INFINITY, high = -INFINITY;
    int64_t sizes[] = {call.q.rows, call.k.rows};
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < sizes[side]; i++)
            if (masks[side][i]) {
                low = std::min(low, dots[side][r * sizes[side] + i]);
                high = std::max(high, dots[side][r * sizes[side] + i]);
            }
    double width = std::max((high - low) / double(call.groups[b]), double(FLT_MIN));
    double shift = uniform(kOffset, 0, h, r, call.seed, call.layer);
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < sizes[side]; i++) {
            double& hash = dots[side][r * sizes[side] + i];
            hash = std::floor(hash / width + shift);
        }
}

inline void smyrf_orders(const HashCall& call, int32_t* query_order, int32_t* key_order) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        thread_local Sorter sorter;
        int64_t b = bh / call.heads, h = bh % call.heads, hk = h / (call.heads / call.key_heads);
        int64_t dim = call.q.dim, extra = call.transform == 0   ? 2
                                          : call.transform == 2 ? 3
                                          : call.transform >= 3 ? 1
                                                                : 0;
        std::vector<double> directions(call.rounds * (dim + extra));
        for (int64_t r = 0; r < call.rounds; r++) {
            breathe();
            for (int64_t d = 0; d < dim + extra; d++)
                directions[r * (dim + extra) + d] = normal(kProjection, h, r, d, call.seed, call.layer);
        }
        const Rows* sides[] = {&call.q, &call.k};
        const uint8_t* masks[] = {call.query_mask + b * call.q.rows, call.key_mask + b * call.k.rows};
        std::vector<double> dots[2], norms[2];
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        double longest[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            const Rows& rows = *sides[side];
            dots[side].resize(call.rounds * rows.rows);
            norms[side].resize(rows.rows);
            for (int64_t i = 0; i < rows.rows; i++) {
                if (i % 64 == 0) breathe();
                if (!masks[side][i]) continue;
                read_double(rows, b, side ? hk : h, i, scratch.data(), row.data());
                norms[side][i] = dot(row.data(), row.data(), dim);
                longest[side] = std::max(longest[side], norms[side][i]);
                for (int64_t r = 0; r < call.rounds; r++)
                    dots[side][r * rows.rows + i] = dot(row.data(), directions.data() + r * (dim + extra), dim);
            }
        }
        for (int side = 0; side < 2; side++)
            for (int64_t r = 0; r < call.rounds; r++) {
                const double* more = directions.data() + r * (dim + extra) + dim;
                double* hashes = dots[side].data() + r * sides[side]->rows;
                for (int64_t i = 0; i < sides[side]->rows; i++)
                    if (masks[side][i])
                        hashes[i] = extend(call.transform, side, hashes[i], norms[side][i], longest, more);
            }
        for (int64_t r = 0; r < call.rounds; r++) {
            breathe();
            if (call.buckets) to_buckets(call, h, r, b, masks, dots);
            for (int side = 0; side < 2; side++) {
                int64_t n = sides[side]->rows;
                sorter.resize(n);
                for (int64_t i = 0; i < n; i++)
                    sorter.keys[i] = masks[side][i] ? sortable(rounded(dots[side][r * n + i])) : kLast;
                sorter.sort(n, (side ? key_order : query_order) + (bh * call.rounds + r) * n);
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
