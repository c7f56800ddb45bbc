// Lloyd's algorithm in Euclidean space inside the parts of a sequence, and the means of clusters.
#pragma once

#include <vector>

#include "candidates.h"
#include "draws.h"

namespace coterie::COTERIE_ISA {

// The rows of one part, one head of them.
class Points {
public:
    Points(const KmeansCall& call, int64_t b, int64_t h, int64_t part)
        : call_(call), b_(b), h_(h), rows_(call.order + b * call.slots + call.start[b * call.parts + part]),
          size_(call.stop[b * call.parts + part] - call.start[b * call.parts + part]), scratch_(call.x.dim) {}

    int64_t size() const { return size_; }
    int32_t row(int64_t i) const { return rows_[i]; }

    void read(int64_t i, double* to) {
        read_double(call_.x, b_, h_, rows_[i], scratch_.data(), to);
        if (call_.unit) scale_to_unit(to, call_.x.dim);
    }

private:
    const KmeansCall& call_;
    int64_t b_, h_;
    const int32_t* rows_;
    int64_t size_;
    std::vector<float> scratch_;
};

// The nearest centroid of each of the points chosen[0 … n), or of the first n.
inline void assign_nearest(Points& points, const int64_t* chosen, int64_t n, Candidates& centroids, int64_t count,
                           std::vector<int64_t>& labels) {
    int64_t dim = centroids.dim, stride = padded(count);
    Buffer block(kRowBlock * dim), scores(kRowBlock * stride), half(stride);
    std::vector<double> exact_half(count), rows(kRowBlock * dim);
    for (int64_t c = 0; c < stride; c++) {
        if (c >= count) {
            half[c] = INFINITY;
            continue;
        }
        exact_half[c] = dot(centroids.exact.data() + c * dim, centroids.exact.data() + c * dim, dim) / 2;
        half[c] = static_cast<float>(exact_half[c]);
    }
    centroids.prepare();
    labels.resize(n);
    for (int64_t first = 0; first < n; first += kRowBlock) {
        int64_t here = std::min(kRowBlock, n - first);
        for (int64_t i = 0; i < here; i++) points.read(chosen ? chosen[first + i] : first + i, rows.data() + i * dim);
        for (int64_t i = 0; i < here * dim; i++) block[i] = static_cast<float>(rows[i]);
        multiply<false>(here, count, dim, block, dim, 1, centroids.panels, dim, scores, stride);
        for (int64_t i = 0; i < here; i++) {
            float* s = scores + i * stride;
            Vec top = splat(-INFINITY);  // x·c − ‖c‖²/2 is largest where ‖x − c‖² is smallest
            for (int64_t c = 0; c < stride; c += kLanes) {
                Vec each = load(s + c) - load(half + c);
                store(s + c, each);
                top = max(each, top);
            }
            float limit = highest(top) - 2 * doubt(length(block + i * dim, dim) + centroids.longest, centroids.longest, dim);
            if (!std::isfinite(limit)) limit = -INFINITY;
            int64_t label = -1;
            float nearest = INFINITY;
            bool exact = false;
            for (int64_t c = 0; c < stride; c += kLanes)
                for (uint32_t close = std::isfinite(limit) ? at_least(load(s + c), limit) : 0xFFFFu; close; close &= close - 1) {
                    int64_t at = c + std::countr_zero(close);
                    if (at >= count) break;
                    auto verdict = [&](int64_t which) {
                        return static_cast<float>(exact_half[which] - dot(rows.data() + i * dim, centroids.exact.data() + which * dim, dim));
                    };
                    if (label < 0) {
                        label = at;
                        continue;
                    }
                    if (!exact) nearest = verdict(label);
                    exact = true;
                    if (float other = verdict(at); other < nearest) nearest = other, label = at;
                }
            labels[first + i] = std::max<int64_t>(label, 0);
        }
    }
}

inline void kmeans(const KmeansCall& call, int64_t* labels, double* centroids) {
    int64_t dim = call.x.dim, rows = call.x.rows;
    std::fill(labels, labels + call.batch * call.heads * rows, 0);
    parallel_for(call.batch * call.heads * call.parts, call.threads, [&](int64_t task, int) {
        int64_t part = task % call.parts, bh = task / call.parts, b = bh / call.heads, h = bh % call.heads;
        int64_t at = bh * call.parts + part, capacity = call.clusters;
        int64_t draw = call.per_head ? h : 0;
        Points points(call, b, h, part);
        int64_t n = points.size(), used = call.counts ? std::clamp<int64_t>(call.counts[b * call.parts + part], 0, capacity) : capacity;
        double* result = centroids + at * capacity * dim;
        if (call.given) {
            std::copy_n(call.given + at * capacity * dim, capacity * dim, result);
        } else {
            std::fill(result, result + capacity * dim, 0.0);
            if (n) {
                auto chosen = one_of_each_span(kStarts, n, capacity, used, draw, call.seed, call.layer);
                for (int64_t c = 0; c < capacity; c++) points.read(chosen[c], result + c * dim);
            }
        }
        if (!n || !used) return;
        Candidates centers(used, dim);
        std::copy_n(result, used * dim, centers.exact.data());

        std::vector<int64_t> sample;
        int64_t train = n;
        if (call.sample && call.sample * used < n) {
            train = call.sample * used;
            sample = one_of_each_span(kSample, n, train, train, draw, call.seed, call.layer);
        }
        const int64_t* trained = sample.empty() ? nullptr : sample.data();
        std::vector<int64_t> label, before, counts;
        std::vector<double> sums, row(dim);
        for (int64_t step = 0; step < call.iterations; step++) {
            before.swap(label);
            assign_nearest(points, trained, train, centers, used, label);
            if (step && before == label) break;  // a fixed point: nothing would change any more
            sums.assign(used * dim, 0);
            counts.assign(used, 0);
            for (int64_t i = 0; i < train; i++) {
                points.read(trained ? trained[i] : i, row.data());
                counts[label[i]]++;
                double* sum = sums.data() + label[i] * dim;
                for (int64_t d = 0; d < dim; d++) sum[d] += row[d];
            }
            for (int64_t c = 0; c < used; c++)
                for (int64_t d = 0; d < dim && counts[c]; d++) centers.exact[c * dim + d] = sums[c * dim + d] / double(counts[c]);
        }
        if (call.unit)
            for (int64_t c = 0; c < used; c++) scale_to_unit(centers.exact.data() + c * dim, dim);
        assign_nearest(points, nullptr, n, centers, used, label);
        for (int64_t i = 0; i < n; i++) labels[bh * rows + points.row(i)] = label[i];
        std::copy_n(centers.exact.data(), used * dim, result);
    });
}

// The mean of the real members of each cluster, (clusters × dim) float64; an empty one is 0.
inline void cluster_means(const MeansCall& call, const int64_t* labels, double* means) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, dim = call.x.dim;
        double* sums = means + bh * call.clusters * dim;
        std::vector<int64_t> sizes(call.clusters, 0);
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        std::fill(sums, sums + call.clusters * dim, 0.0);
        for (int64_t i = 0; i < call.x.rows; i++) {
            if (!call.mask[b * call.x.rows + i]) continue;
            read_double(call.x, b, h, i, scratch.data(), row.data());
            int64_t label = std::clamp<int64_t>(labels[bh * call.x.rows + i], 0, call.clusters - 1);
            sizes[label]++;
            for (int64_t d = 0; d < dim; d++) sums[label * dim + d] += row[d];
        }
        for (int64_t c = 0; c < call.clusters; c++)
            for (int64_t d = 0; d < dim && sizes[c]; d++) sums[c * dim + d] /= double(sizes[c]);
    });
}

}  // namespace coterie::COTERIE_ISA
