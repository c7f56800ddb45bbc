// The best keys of groups of queries, searched in the clusters whose means score best.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"

namespace coterie::COTERIE_ISA {

// The mean key of every cluster, (batch, key heads, clusters, dim) float64.
inline std::vector<double> mean_keys(const NearCall& call) {
    int64_t dim = call.k.dim, count = call.clusters.count();
    std::vector<double> means(call.batch * call.key_heads * count * dim, 0.0);
    parallel_for(call.batch * call.key_heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.key_heads, h = bh % call.key_heads;
        const int32_t *order = call.clusters.order.at(b, h), *start = call.clusters.start.at(b, h), *stop = call.clusters.stop.at(b, h);
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        for (int64_t c = 0; c < count; c++) {
            double* mean = means.data() + (bh * count + c) * dim;
            for (int64_t i = start[c]; i < stop[c]; i++) {
                read_double(call.k, b, h, order[i], scratch.data(), row.data());
                for (int64_t d = 0; d < dim; d++) mean[d] += row[d];
            }
            for (int64_t d = 0; d < dim; d++) mean[d] /= double(std::max(1, stop[c] - start[c]));
        }
    });
    return means;
}

class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const double* means, int32_t* picks, int32_t* left)
        : call_(call), queries_(queries), means_(means), picks_(picks), left_(left), dim_(call.k.dim), key_(dim_),
          scratch_(dim_), rough_(padded(dim_)) {}

    void group(int64_t b, int64_t h, int64_t g) {
        int64_t hk = h / (call_.heads / call_.key_heads), at = (b * call_.heads + h) * call_.groups + g;
        const double* query = queries_ + at * dim_;
        int32_t *left = left_ + at * call_.visible_width, *picks = picks_ + at * call_.near;
        std::fill(left, left + call_.visible_width, 0);
        std::fill(picks, picks + call_.near, 0);
        const int32_t* visible = call_.visible + (b * call_.groups + g) * call_.visible_width;
        int64_t hidden = call_.visible_width - call_.seen[b * call_.groups + g];
        const int32_t *start = call_.clusters.start.at(b, hk), *stop = call_.clusters.stop.at(b, hk);
        int64_t total = 0;
        for (int64_t slot = hidden; slot < call_.visible_width; slot++) {
            left[slot] = stop[visible[slot]] - start[visible[slot]];
            total += left[slot];
        }
        int64_t wanted = std::min(call_.near, total);
        if (!wanted) return;
        search(b, hk, query, visible, hidden, left, start, total);
        for (int64_t i = 0; i < dim_; i++) rough_[i] = static_cast<float>(query[i]);
        settle(b, hk, query, wanted);
        for (int64_t i = 0; i < wanted; i++) {
            picks[i] = found_[i].key;
            left[found_[i].slot]--;
        }
    }

private:
    struct Found {
        float score;
        int32_t key, slot;
        bool operator<(const Found& other) const {  // best first, ties by position
            return score > other.score || (score == other.score && key < other.key);
        }
    };

    // List the keys of the best clusters until they are `reach` or all.
    void search(int64_t b, int64_t hk, const double* query, const int32_t* visible, int64_t hidden, const int32_t* sizes,
                const int32_t* start, int64_t total) {
        const int32_t* order = call_.clusters.order.at(b, hk);
        found_.clear();
        auto list = [&](int32_t slot) {
            const int32_t* keys = order + start[visible[slot]];
            for (int32_t i = 0; i < sizes[slot]; i++) found_.push_back({0, keys[i], slot});
        };
        if (total <= call_.reach) {
            for (int64_t slot = hidden; slot < call_.visible_width; slot++) list(static_cast<int32_t>(slot));
            return;
        }
        clusters_.clear();
        const double* means = means_ + (b * call_.key_heads + hk) * call_.clusters.count() * dim_;
        for (int64_t slot = hidden; slot < call_.visible_width; slot++) {
            if (!sizes[slot]) continue;
            float score = rounded(dot(query, means + visible[slot] * dim_, dim_));
            clusters_.push_back({score == 0 ? 0 : score, static_cast<int32_t>(slot), 0});
        }
        auto worse = [](const Found& x, const Found& y) { return y < x; };
        std::make_heap(clusters_.begin(), clusters_.end(), worse);
        for (auto last = clusters_.end(); last != clusters_.begin() && static_cast<int64_t>(found_.size()) < call_.reach; --last) {
            std::pop_heap(clusters_.begin(), last, worse);
            list((last - 1)->key);
        }
    }

    // Put the best `wanted` of the listed keys first, in order.
    void settle(int64_t b, int64_t hk, const double* query, int64_t wanted) {
        double longest = 0;
        for (Found& each : found_) {
            const float* row = fetch(call_.k, b, hk, each.key, scratch_.data());
            Vec total = splat(0), squares = splat(0);
            int64_t d = 0;
            for (; d + kLanes <= dim_; d += kLanes) {
                Vec x = load(row + d);
                total = fma(x, load(rough_.data() + d), total);
                squares = fma(x, x, squares);
            }
            float score = sum(total), square = sum(squares);
            for (; d < dim_; d++) {
                score += row[d] * rough_[d];
                square += row[d] * row[d];
            }
            each.score = score;
            longest = std::max(longest, double(square));
        }
        // inf and NaN count as 0 in planning; where there are any, every score is computed again.
        bool finite = std::isfinite(longest);
        for (const Found& each : found_) finite = finite && std::isfinite(each.score);
        if (finite) {
            float slack = 2 * doubt(std::sqrt(dot(query, query, dim_)), std::sqrt(longest) * 1.001, dim_);
            std::nth_element(found_.begin(), found_.begin() + (wanted - 1), found_.end());
            float threshold = found_[wanted - 1].score - slack;
            found_.erase(std::remove_if(found_.begin(), found_.end(), [&](const Found& x) { return x.score < threshold; }), found_.end());
        }
        for (Found& each : found_) {
            read_double(call_.k, b, hk, each.key, scratch_.data(), key_.data());
            each.score = rounded(dot(query, key_.data(), dim_));
            if (each.score == 0) each.score = 0;
        }
        std::partial_sort(found_.begin(), found_.begin() + wanted, found_.end());
    }

    const NearCall& call_;
    const double *queries_, *means_;
    int32_t *picks_, *left_;
    int64_t dim_;
    std::vector<double> key_;
    std::vector<float> scratch_, rough_;
    std::vector<Found> found_, clusters_;
};

inline void near_keys(const NearCall& call, const double* queries, int32_t* picks, int32_t* left) {
    std::vector<double> means = mean_keys(call);
    constexpr int64_t kBlock = 16;
    int64_t blocks = (call.groups + kBlock - 1) / kBlock;
    parallel_for(call.batch * call.heads * blocks, call.threads, [&](int64_t task, int) {
        int64_t bh = task / blocks, first = task % blocks * kBlock;
        NearWorker worker(call, queries, means.data(), picks, left);
        for (int64_t g = first; g < std::min(first + kBlock, call.groups); g++) worker.group(bh / call.heads, bh % call.heads, g);
    });
}

}  // namespace coterie::COTERIE_ISA
