// The best keys of groups of queries, searched in the clusters whose means score best.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"

namespace coterie::COTERIE_ISA {

// What stands for the clusters of each key head when they are ranked, (clusters × dim) float64 each.
struct Faces {
    std::vector<double> means, outliers;  // an outlier is the key farthest from the mean
    std::vector<double> longest;          // the length of a head's longest key; NaN if some number is not finite

    explicit Faces(const NearCall& call)
        : means(call.batch * call.key_heads * call.clusters.count() * call.k.dim), outliers(means.size()),
          longest(call.batch * call.key_heads) {
        parallel_for(call.batch * call.key_heads, call.threads, [&](int64_t bh, int) { head(call, bh); });
    }

    void head(const NearCall& call, int64_t bh) {
        int64_t b = bh / call.key_heads, h = bh % call.key_heads, dim = call.k.dim, count = call.clusters.count();
        const int32_t *order = call.clusters.order.at(b, h), *start = call.clusters.start.at(b, h), *stop = call.clusters.stop.at(b, h);
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        double top = 0;
        bool wild = false;
        for (int64_t c = 0; c < count; c++) {
            double *mean = means.data() + (bh * count + c) * dim, *outlier = outliers.data() + (bh * count + c) * dim;
            for (int64_t i = start[c]; i < stop[c]; i++) {
                const float* key = fetch(call.k, b, h, order[i], scratch.data());
                double size = length(key, dim);
                if (std::isfinite(size)) {
                    for (int64_t d = 0; d < dim; d++) mean[d] += key[d];
                    top = std::max(top, size);
                } else {
                    read_double(call.k, b, h, order[i], scratch.data(), row.data());
                    for (int64_t d = 0; d < dim; d++) mean[d] += row[d];
                    wild = true;
                }
            }
            for (int64_t d = 0; d < dim; d++) mean[d] /= double(std::max(1, stop[c] - start[c]));
            float farthest = -1;
            for (int64_t i = start[c]; i < stop[c]; i++) {
                read_double(call.k, b, h, order[i], scratch.data(), row.data());
                float far = rounded(squared_distance(row.data(), mean, dim));
                if (far > farthest) {
                    farthest = far;
                    std::copy(row.begin(), row.end(), outlier);
                }
            }
        }
        longest[bh] = wild ? NAN : top;
    }

    static double squared_distance(const double* a, const double* b, int64_t n) {
        double lanes[8] = {0};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++) lanes[l] += (a[i + l] - b[i + l]) * (a[i + l] - b[i + l]);
        double total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        for (; i < n; i++) total += (a[i] - b[i]) * (a[i] - b[i]);
        return total;
    }
};

class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const Faces& faces, const float* logs, int32_t* picks, float* bias)
        : call_(call), queries_(queries), faces_(faces), picks_(picks), bias_(bias), dim_(call.k.dim), key_(dim_),
          scratch_(dim_), rough_(dim_), wide_(4 * dim_), logs_(logs) {}

    void group(int64_t b, int64_t h, int64_t g) {
        int64_t hk = h / (call_.heads / call_.key_heads), at = (b * call_.heads + h) * call_.groups + g;
        const double* query = queries_ + at * dim_;
        left_.assign(call_.visible_width, 0);
        int32_t *left = left_.data(), *picks = picks_ + at * call_.near;
        std::fill(picks, picks + call_.near, 0);
        const int32_t* visible = call_.visible + (b * call_.groups + g) * call_.visible_width;
        int64_t hidden = call_.visible_width - call_.seen[b * call_.groups + g];
        const int32_t *start = call_.clusters.start.at(b, hk), *stop = call_.clusters.stop.at(b, hk);
        int64_t total = 0;
        for (int64_t slot = hidden; slot < call_.visible_width; slot++) {
            left[slot] = stop[visible[slot]] - start[visible[slot]];
            total += left[slot];
        }
        if (int64_t wanted = std::min(call_.near, total)) {
            search(b, hk, query, visible, hidden, left, start, total);
            for (int64_t i = 0; i < dim_; i++) rough_[i] = static_cast<float>(query[i]);
            settle(b, hk, query, wanted, faces_.longest[b * call_.key_heads + hk]);
            for (int64_t i = 0; i < wanted; i++) {
                picks[i] = found_[i].key;
                left[found_[i].slot]--;
            }
        }
        float* bias = bias_ + at * call_.visible_width;
        for (int64_t slot = 0; slot < call_.visible_width; slot++) bias[slot] = logs_[left[slot]];
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
        int64_t first = (b * call_.key_heads + hk) * call_.clusters.count();
        for (int64_t slot = hidden; slot < call_.visible_width; slot++) {
            if (!sizes[slot]) continue;
            int64_t at = (first + visible[slot]) * dim_;
            double likes = std::max(dot(query, faces_.means.data() + at, dim_), dot(query, faces_.outliers.data() + at, dim_));
            float score = rounded(likes);
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
    void settle(int64_t b, int64_t hk, const double* query, int64_t wanted, double longest) {
        // inf and NaN count as 0 in planning; where there are any, every score is computed in float64.
        if (std::isfinite(longest)) {
            rank(b, hk);
            float slack = 2 * doubt(std::sqrt(dot(query, query, dim_)), longest, dim_);
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

    // Scores in float32, a few keys at a time.
    void rank(int64_t b, int64_t hk) {
        constexpr int kFew = 4;
        size_t i = 0;
        for (; i + kFew <= found_.size(); i += kFew) {
            const float* rows[kFew];
            Vec totals[kFew];
            for (int r = 0; r < kFew; r++) {
                rows[r] = fetch(call_.k, b, hk, found_[i + r].key, wide_.data() + r * dim_);
                totals[r] = splat(0);
            }
            int64_t d = 0;
            for (; d + kLanes <= dim_; d += kLanes) {
                Vec q = load(rough_.data() + d);
                for (int r = 0; r < kFew; r++) totals[r] = fma(load(rows[r] + d), q, totals[r]);
            }
            for (int r = 0; r < kFew; r++) found_[i + r].score = sum(totals[r]) + rest(rows[r], d);
        }
        for (; i < found_.size(); i++) {
            const float* row = fetch(call_.k, b, hk, found_[i].key, wide_.data());
            found_[i].score = rest(row, 0);
        }
    }

    float rest(const float* row, int64_t d) const {
        float total = 0;
        for (; d < dim_; d++) total += row[d] * rough_[d];
        return total;
    }

    const NearCall& call_;
    const double* queries_;
    const Faces& faces_;
    int32_t* picks_;
    float* bias_;
    int64_t dim_;
    std::vector<double> key_;
    std::vector<float> scratch_, rough_, wide_;
    std::vector<int32_t> left_;
    const float* logs_;  // of 0, 1, 2 …
    std::vector<Found> found_, clusters_;
};

inline void near_keys(const NearCall& call, const double* queries, int32_t* picks, float* bias) {
    Faces faces(call);
    std::vector<float> logs(call.k.rows + 1);
    for (size_t n = 0; n < logs.size(); n++) logs[n] = static_cast<float>(std::log(double(n)));
    constexpr int64_t kBlock = 16;
    int64_t blocks = (call.groups + kBlock - 1) / kBlock;
    parallel_for(call.batch * call.heads * blocks, call.threads, [&](int64_t task, int) {
        int64_t bh = task / blocks, first = task % blocks * kBlock;
        NearWorker worker(call, queries, faces, logs.data(), picks, bias);
        for (int64_t g = first; g < std::min(first + kBlock, call.groups); g++) worker.group(bh / call.heads, bh % call.heads, g);
    });
}

}  // namespace coterie::COTERIE_ISA
