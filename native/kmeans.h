// Lloyd's algorithm in Euclidean space inside the parts of a sequence, and the means of clusters.
#pragma once

#include <bit>
#include <vector>

#include "candidates.h"
#include "kmeans_starts.h"

namespace coterie::COTERIE_ISA {

// The rows of one part, one head of them: as float32 where they lie, if they can be used as they are.
class Points {
public:
    Points(const KmeansCall& call, int64_t b, int64_t h, int64_t part)
        : call_(call),
          b_(b),
          h_(h),
          rows_(call.parts.rows(b, part)),
          size_(call.parts.size(b, part)),
          pointers_(size_),
          lengths_(size_),
          scratch_(call.x.dim),
          exact_(call.x.dim) {
        int64_t dim = call.x.dim;
        for (int64_t i = 0; i < size_; i++) {
            bool in_place = call.x.kind_at(rows_[i]) == Kind::f32 && !call.unit;
            const float* row = reinterpret_cast<const float*>(call.x.row(b, h, rows_[i]));
            if (in_place && all_finite(row, dim)) {
                pointers_[i] = row;
            } else {
                if (copies_.empty()) copies_.resize(size_ * dim);
                read(i, exact_.data());
                std::copy(exact_.begin(), exact_.end(), copies_.begin() + i * dim);
                pointers_[i] = copies_.data() + i * dim;
            }
            lengths_[i] = static_cast<float>(length(pointers_[i], dim));
        }
    }

    int64_t size() const { return size_; }
    int32_t row(int64_t i) const { return rows_[i]; }
    const float* rough(int64_t i) const { return pointers_[i]; }
    float length_of(int64_t i) const { return lengths_[i]; }

    void read(int64_t i, double* to) {
        read_double(call_.x, b_, h_, rows_[i], scratch_.data(), to);
        if (call_.unit) scale_to_unit(to, call_.x.dim);
    }

    void add_to(int64_t i, double* sum) {
        int64_t dim = call_.x.dim;
        const float* row = pointers_[i];
        if (call_.unit) {
            read(i, exact_.data());
            for (int64_t d = 0; d < dim; d++) sum[d] += exact_[d];
        } else {
            for (int64_t d = 0; d < dim; d++) sum[d] += row[d];
        }
    }

private:
    const KmeansCall& call_;
    int64_t b_, h_;
    const int32_t* rows_;
    int64_t size_;
    std::vector<const float*> pointers_;
    std::vector<float> lengths_, copies_, scratch_;
    std::vector<double> exact_;
};

// Finds the nearest centroid: in float32 first, and again in float64 where that is too close to call.
class Nearest {
public:
    Nearest(Points& points, Candidates& centroids)
        : points_(points),
          centroids_(centroids),
          dim_(centroids.dim),
          stride_(padded(centroids.count)),
          scores_(kRowBlock * stride_),
          half_(stride_),
          exact_half_(centroids.count),
          row_(dim_),
          block_(kRowBlock) {}

    // For the points chosen[0 … n), or the first n.
    void assign(const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        for (int64_t c = 0; c < stride_; c++) {
            const double* center = centroids_.exact.data() + c * dim_;
            if (c < centroids_.count) exact_half_[c] = dot(center, center, dim_) / 2;
            half_[c] = c < centroids_.count ? static_cast<float>(exact_half_[c]) : INFINITY;
        }
        centroids_.prepare();
        labels.resize(n);
        for (int64_t first = 0; first < n; first += kRowBlock) {
            breathe();
            int64_t here = std::min(kRowBlock, n - first);
            for (int64_t i = 0; i < here; i++) block_[i] = points_.rough(chosen ? chosen[first + i] : first + i);
            multiply(here, centroids_.count, dim_, Scattered{block_.data()}, centroids_.panels, dim_, scores_, stride_);
            for (int64_t i = 0; i < here; i++)
                labels[first + i] = decide(scores_ + i * stride_, chosen ? chosen[first + i] : first + i);
        }
    }

private:
    int64_t decide(float* s, int64_t point) {
        Vec top = splat(-INFINITY);  // x·c − ‖c‖²/2 is largest where ‖x − c‖² is smallest
        for (int64_t c = 0; c < stride_; c += kLanes) {
            Vec each = load(s + c) - load(half_ + c);
            store(s + c, each);
            top = max(each, top);
        }
        float best = highest(top),
              slack = 2 * doubt(points_.length_of(point) + centroids_.longest, centroids_.longest, dim_);
        float limit = std::isfinite(best) && std::isfinite(slack) ? best - slack : -INFINITY;
        int64_t label = -1;
        float nearest = INFINITY;
        bool read = false;
        auto verdict = [&](int64_t c) {
            return static_cast<float>(exact_half_[c] - dot(row_.data(), centroids_.exact.data() + c * dim_, dim_));
        };
        for (int64_t c = 0; c < stride_; c += kLanes)
            for (uint32_t close = limit == -INFINITY ? 0xFFFFu : at_least(load(s + c), limit); close;
                 close &= close - 1) {
                int64_t at = c + std::countr_zero(close);
                if (at >= centroids_.count) break;
                if (label < 0) {
                    label = at;
                    continue;
                }
                if (!read) {
                    points_.read(point, row_.data());
                    nearest = verdict(label);
                    read = true;
                }
                if (float other = verdict(at); other < nearest) nearest = other, label = at;
            }
        return std::max<int64_t>(label, 0);
    }

    Points& points_;
    Candidates& centroids_;
    int64_t dim_, stride_;
    Buffer scores_, half_;
    std::vector<double> exact_half_, row_;
    std::vector<const float*> block_;
};

// Lloyd's iterations on the points chosen[0 … n), or the first n. An empty cluster keeps its centroid.
inline void train(Points& points, const int64_t* chosen, int64_t n, int64_t iterations, Nearest& nearest,
                  Candidates& centroids) {
    std::vector<int64_t> label, before, counts;
    std::vector<double> sums;
    int64_t dim = centroids.dim;
    for (int64_t step = 0; step < iterations; step++) {
        before.swap(label);
        nearest.assign(chosen, n, label);
        if (step && before == label) break;  // a fixed point: nothing would change any more
        sums.assign(centroids.count * dim, 0);
        counts.assign(centroids.count, 0);
        for (int64_t i = 0; i < n; i++) {
            counts[label[i]]++;
            points.add_to(chosen ? chosen[i] : i, sums.data() + label[i] * dim);
        }
        for (int64_t c = 0; c < centroids.count; c++)
            for (int64_t d = 0; d < dim && counts[c]; d++)
                centroids.exact[c * dim + d] = sums[c * dim + d] / double(counts[c]);
    }
}

inline void kmeans(const KmeansCall& call, int64_t* labels, double* centroids) {
    int64_t heads = call.x.heads, dim = call.x.dim, rows = call.x.rows, capacity = call.clusters;
    std::fill(labels, labels + call.x.batch * heads * rows, 0);
    parallel_for(call.x.batch * heads * call.parts.count, call.threads, [&](int64_t at, int) {
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
        Nearest nearest(points, centers);
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
    parallel_for(call.x.batch * call.x.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.x.heads, h = bh % call.x.heads, dim = call.x.dim;
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
