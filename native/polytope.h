// Cross-polytope buckets.
#pragma once

#include <vector>

#include "candidates.h"
#include "philox.h"

namespace coterie::COTERIE_ISA {

// The nearest of the ± axes after a random rotation: buckets 2c and 2c + 1 are the two ends of axis c.
inline void cross_polytope(const PolytopeCall& call, int64_t* buckets) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, hx = h / (call.heads / call.row_heads), dim = call.x.dim;
        int64_t columns = call.columns[b], n = call.x.rows, stride = padded(columns);
        for (int64_t r = 0; r < call.rounds; r++) {
            Candidates axes(columns, dim);
            for (int64_t c = 0; c < columns; c++) {
                breathe();
                for (int64_t d = 0; d < dim; d++)
                    axes.exact[c * dim + d] = normal(kRotation, r * call.heads + h, d, c, call.seed, call.layer);
            }
            axes.prepare();
            Buffer block(kRowBlock * dim), scores(kRowBlock * std::max<int64_t>(stride, 1));
            std::vector<double> row(dim);
            std::vector<float> scratch(dim);
            int64_t* to = buckets + (bh * call.rounds + r) * n;
            for (int64_t first = 0; first < n; first += kRowBlock) {
                breathe();
                int64_t here = std::min(kRowBlock, n - first);
                for (int64_t i = 0; i < here; i++) {
                    float* x = block + i * dim;
                    if (call.mask[b * n + first + i])
                        read_row(call.x.row(b, hx, first + i), call.x.kind, dim, x);
                    else
                        std::fill(x, x + dim, 0.0f);
                }
                if (!all_finite(block, here * dim)) zero_wild(block, here * dim);
                multiply(here, columns, dim, Strided{block, dim, 1}, axes.panels, dim, scores, stride);
                for (int64_t i = 0; i < here; i++) {
                    const float* s = scores + i * stride;
                    float best = -1;
                    for (int64_t c = 0; c < columns; c++) best = std::max(best, std::fabs(s[c]));
                    for (int64_t d = 0; d < dim; d++) row[d] = block[i * dim + d];
                    float limit = best - 2 * doubt(std::sqrt(dot(row.data(), row.data(), dim)), axes.longest, dim);
                    int64_t bucket = 0, close = 0;
                    for (int64_t c = columns - 1; c >= 0; c--)
                        if (!(std::fabs(s[c]) < limit)) {
                            close++;
                            bucket = 2 * c + (s[c] < 0);
                        }
                    if (close > 1 || best <= 0) {
                        float furthest = -INFINITY;
                        for (int64_t c = 0; c < columns; c++) {
                            if (std::fabs(s[c]) < limit) continue;
                            auto verdict = static_cast<float>(dot(row.data(), axes.exact.data() + c * dim, dim));
                            if (verdict > furthest) furthest = verdict, bucket = 2 * c;
                            if (-verdict > furthest) furthest = -verdict, bucket = 2 * c + 1;
                        }
                    }
                    to[first + i] = bucket;
                }
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
