// Hashes: asymmetric transforms, random projections and the order of their values, and cross-polytope buckets.
#pragma once

#include <vector>

#include "candidates.h"
#include "draws.h"
#include "normals.h"
#include "orders.h"

namespace coterie::COTERIE_ISA {

// How many numbers a transform appends to a vector.
inline int64_t appended(int transform) {
    switch (transform) {
        case 0: return 2;
        case 2: return 3;
        case 3:
        case 4: return 1;
        default: return 0;
    }
}

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

// The queries or the keys of one head, and their hashes.
struct Side {
    const Rows& rows;
    int64_t batch, head;
    const uint8_t* mask;  // of this batch
    std::vector<double> hashes{};  // (rounds, rows)
    std::vector<double> norms{};  // squared
    double longest = 0;  // the largest of them

    // x·a for each of the rounds' directions a, which are `stride` numbers apart.
    void project(const std::vector<double>& directions, int64_t rounds, int64_t stride) {
        hashes.resize(rounds * rows.rows);
        norms.resize(rows.rows);
        std::vector<double> row(rows.dim);
        std::vector<float> scratch(rows.dim);
        for (int64_t i = 0; i < rows.rows; i++) {
            if (i % 64 == 0) breathe();
            if (!mask[i]) continue;
            read_double(rows, batch, head, i, scratch.data(), row.data());
            norms[i] = dot(row.data(), row.data(), rows.dim);
            longest = std::max(longest, norms[i]);
            for (int64_t r = 0; r < rounds; r++)
                hashes[r * rows.rows + i] = dot(row.data(), directions.data() + r * stride, rows.dim);
        }
    }

    void order(int64_t round, int32_t* to) const {
        thread_local Sorter sorter;
        sorter.resize(rows.rows);
        const double* hash = hashes.data() + round * rows.rows;
        for (int64_t i = 0; i < rows.rows; i++) sorter.keys[i] = mask[i] ? sortable(rounded(hash[i])) : kLast;
        sorter.sort(rows.rows, to);
    }
};

// E2LSH: ⌊h / width + shift⌋ with a width such that the hashes of a round span as many buckets as there are groups.
inline void to_buckets(Side* sides, int64_t round, int64_t groups, double shift) {
    double low = INFINITY, high = -INFINITY;
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; i < sides[s].rows.rows; i++)
            if (sides[s].mask[i]) {
                double hash = sides[s].hashes[round * sides[s].rows.rows + i];
                low = std::min(low, hash);
                high = std::max(high, hash);
            }
    double width = std::max((high - low) / double(groups), double(FLT_MIN));
    for (int s = 0; s < 2; s++)
        for (int64_t i = 0; i < sides[s].rows.rows; i++) {
            double& hash = sides[s].hashes[round * sides[s].rows.rows + i];
            hash = std::floor(hash / width + shift);
        }
}

inline void smyrf_orders(const HashCall& call, int32_t* query_order, int32_t* key_order) {
    int64_t width = call.q.dim + appended(call.transform);
    Normals drawn = kept_normals().of(call.draws, kProjection, call.q.heads, call.rounds, width);
    double numbers = 2 * (call.q.numbers() + call.k.numbers()) * double(call.rounds);
    parallel_for(call.q.batch * call.q.heads, threads_for(numbers, call.threads), [&](int64_t bh, int) {
        int64_t b = bh / call.q.heads, h = bh % call.q.heads, hk = h / (call.q.heads / call.k.heads);
        int64_t dim = call.q.dim, stride = width;
        const float* mine = drawn->data() + h * call.rounds * stride;
        std::vector<double> directions(mine, mine + call.rounds * stride);
        Side sides[] = {
            {.rows = call.q, .batch = b, .head = h, .mask = call.query_mask + b * call.q.rows},
            {.rows = call.k, .batch = b, .head = hk, .mask = call.key_mask + b * call.k.rows},
        };
        for (Side& side : sides) side.project(directions, call.rounds, stride);
        const double longest[] = {sides[0].longest, sides[1].longest};
        for (int s = 0; s < 2; s++)
            for (int64_t r = 0; r < call.rounds; r++) {
                const double* more = directions.data() + r * stride + dim;
                double* hashes = sides[s].hashes.data() + r * sides[s].rows.rows;
                for (int64_t i = 0; i < sides[s].rows.rows; i++)
                    if (sides[s].mask[i])
                        hashes[i] = extend(call.transform, s, hashes[i], sides[s].norms[i], longest, more);
            }
        for (int64_t r = 0; r < call.rounds; r++) {
            breathe();
            if (call.buckets) to_buckets(sides, r, call.groups[b], call.draws.uniform(kOffset, 0, h, r));
            sides[0].order(r, query_order + (bh * call.rounds + r) * call.q.rows);
            sides[1].order(r, key_order + (bh * call.rounds + r) * call.k.rows);
        }
    });
}

// The nearest of the ± axes to a row of which the float32 products are given: buckets 2c and 2c + 1 are the two ends of
// axis c. Those that float32 cannot tell from the best are judged in float64.
inline int64_t nearest_axis(const std::vector<double>& row, const Candidates& axes, const float* products) {
    float best = -1;
    for (int64_t c = 0; c < axes.count; c++) best = std::max(best, std::fabs(products[c]));
    float limit = best - 2 * doubt(std::sqrt(dot(row.data(), row.data(), axes.dim)), axes.longest, axes.dim);
    int64_t bucket = 0, close = 0;
    for (int64_t c = axes.count - 1; c >= 0; c--)
        if (!(std::fabs(products[c]) < limit)) {
            close++;
            bucket = 2 * c + (products[c] < 0);
        }
    if (close <= 1 && best > 0) return bucket;
    float furthest = -INFINITY;
    for (int64_t c = 0; c < axes.count; c++) {
        if (std::fabs(products[c]) < limit) continue;
        auto verdict = static_cast<float>(dot(row.data(), axes.exact.data() + c * axes.dim, axes.dim));
        if (verdict > furthest) furthest = verdict, bucket = 2 * c;
        if (-verdict > furthest) furthest = -verdict, bucket = 2 * c + 1;
    }
    return bucket;
}

// Cross-polytope buckets: the nearest of the ± axes after a random rotation.
inline void cross_polytope(const PolytopeCall& call, int64_t* buckets) {
    parallel_for(call.x.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, hx = h / (call.heads / call.x.heads), dim = call.x.dim;
        int64_t columns = call.columns[b], n = call.x.rows, stride = padded(columns);
        Buffer block(kRowBlock * dim), products(kRowBlock * std::max<int64_t>(stride, 1));
        std::vector<double> row(dim);
        for (int64_t r = 0; r < call.rounds; r++) {
            Candidates axes(columns, dim);
            for (int64_t c = 0; c < columns; c++) {
                breathe();
                for (int64_t d = 0; d < dim; d++)
                    axes.exact[c * dim + d] = call.draws.normal(kRotation, r * call.heads + h, d, c);
            }
            axes.prepare();
            int64_t* to = buckets + (bh * call.rounds + r) * n;
            for (int64_t first = 0; first < n; first += kRowBlock) {
                breathe();
                int64_t here = std::min(kRowBlock, n - first);
                read_real(call.x, b, hx, first, here, call.mask + b * n, block);
                if (!all_finite(block, here * dim)) zero_wild(block, here * dim);
                multiply(here, columns, dim, Strided{block, dim, 1}, axes.panels, dim, products, stride);
                for (int64_t i = 0; i < here; i++) {
                    for (int64_t d = 0; d < dim; d++) row[d] = block[i * dim + d];
                    to[first + i] = nearest_axis(row, axes, products + i * stride);
                }
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
