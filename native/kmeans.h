// Lloyd's algorithm in Euclidean space inside the parts of a sequence, and the means of clusters.
#pragma once

#include <vector>

#include "kmeans_starts.h"
#include "nearest.h"

namespace coterie::COTERIE_ISA {

// Lloyd's iterations on the points chosen[0 … n), or the first n. An empty cluster keeps its centroid.
inline void train(Points& points, const int64_t* chosen, int64_t n, int64_t iterations, Nearest& nearest,
                  Candidates& centroids) {
    std::vector<int64_t> label, before, next;
    std::vector<int32_t> members(n);
    int64_t dim = centroids.dim;
    for (int64_t step = 0; step < iterations; step++) {
        before.swap(label);
        nearest.assign(chosen, n, label);
        if (step && before == label) break;  // a fixed point: nothing would change any more
        next.assign(centroids.count + 1, 0);
        for (int64_t i = 0; i < n; i++) next[label[i] + 1]++;
        for (int64_t c = 0; c < centroids.count; c++) next[c + 1] += next[c];
        for (int64_t i = 0; i < n; i++) members[next[label[i]]++] = static_cast<int32_t>(chosen ? chosen[i] : i);
        for (int64_t c = 0, first = 0; c < centroids.count; first = next[c++]) {
            int64_t count = next[c] - first;
            if (!count) continue;
            double* mean = centroids.exact.data() + c * dim;
            points.add_up(members.data() + first, count, mean);
            for (int64_t d = 0; d < dim; d++) mean[d] /= double(count);
        }
    }
}

inline void kmeans(const KmeansCall& call, int64_t* labels, double* centroids) {
    int64_t heads = call.x.heads, dim = call.x.dim, rows = call.x.rows, capacity = call.clusters;
    std::fill(labels, labels + call.x.batch * heads * rows, 0);
    int threads = threads_for(call.x.numbers() * double(capacity * (call.iterations + 1)), call.threads);
    parallel_for(call.x.batch * heads * call.parts.count, threads, [&](int64_t at, int) {
        int64_t part = at % call.parts.count, bh = at / call.parts.count, b = bh / heads, h = bh % heads;
        int64_t drawn = call.per_head ? h : 0, used = capacity;
        if (call.counts) used = std::clamp<int64_t>(call.counts[b * call.parts.count + part], 0, capacity);
        Points points(call, b, h, part);
        int64_t n = points.size();
        double* result = centroids + at * capacity * dim;
        if (call.given) {
            std::copy_n(call.given + at * capacity * dim, capacity * dim, result);
        } else {
            std::fill(result, result + capacity * dim, 0.0);
            if (n) {
                auto starts = one_of_each_span(call.draws, kStarts, drawn, n, capacity, used);
                for (int64_t c = 0; c < capacity; c++) points.read(starts[c], result + c * dim);
            }
        }
        if (!n || !used) return;
        Candidates centers(used, dim);
        std::copy_n(result, used * dim, centers.exact.data());
        Nearest nearest(points, centers, call.iterations + 1);
        if (int64_t most = call.sample * used; call.sample && most < n) {
            auto sample = one_of_each_span(call.draws, kSample, drawn, n, most, most);
            train(points, sample.data(), most, call.iterations, nearest, centers);
        } else {
            train(points, nullptr, n, call.iterations, nearest, centers);
        }
        if (call.unit)
            for (int64_t c = 0; c < used; c++) scale_to_unit(centers.exact.data() + c * dim, dim);
        std::vector<int64_t> label;
        nearest.assign(nullptr, n, label);
        for (int64_t i = 0; i < n; i++) labels[bh * rows + points.row(i)] = label[i];
        std::copy_n(centers.exact.data(), used * dim, result);
    });
}

// The mean of the real members of each cluster, (clusters × dim) float64; an empty one is 0.
inline void cluster_means(const MeansCall& call, const int64_t* labels, double* means) {
    parallel_for(call.x.batch * call.x.heads, threads_for(2 * call.x.numbers(), call.threads), [&](int64_t bh, int) {
        int64_t b = bh / call.x.heads, h = bh % call.x.heads, dim = call.x.dim;
        double* sums = means + bh * call.clusters * dim;
        std::vector<int64_t> sizes(call.clusters, 0);
        HeadRows rows{.rows = call.x, .batch = b, .head = h};
        std::fill(sums, sums + call.clusters * dim, 0.0);
        for (int64_t i = 0; i < call.x.rows; i++) {
            if (!call.mask[b * call.x.rows + i]) continue;
            const float* row = rows.tame(i);
            int64_t label = std::clamp<int64_t>(labels[bh * call.x.rows + i], 0, call.clusters - 1);
            sizes[label]++;
            add_up(&row, 1, dim, sums + label * dim);
        }
        for (int64_t c = 0; c < call.clusters; c++)
            for (int64_t d = 0; d < dim && sizes[c]; d++) sums[c * dim + d] /= double(sizes[c]);
    });
}

}  // namespace coterie::COTERIE_ISA
