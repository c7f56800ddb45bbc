// The best keys of groups of queries, searched in the clusters whose means score best.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <memory>
#include <vector>

#include "candidates.h"
#include "top_keys.h"

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

// The groups of one chunk, which search the same keys.
class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const Faces& faces, const float* logs, int32_t* picks, float* bias)
        : call_(call), queries_(queries), faces_(faces), logs_(logs), picks_(picks), bias_(bias), dim_(call.k.dim),
          width_(call.visible_width), share_(call.groups / call.chunks), block_(share_ * dim_), panels_(kKeyBlock * dim_),
          rows_(kKeyBlock * dim_), pointers_(kKeyBlock), key_(dim_), scratch_(dim_) {}

    void chunk(int64_t b, int64_t h, int64_t c) {
        int64_t hk = h / (call_.heads / call_.key_heads), first = (b * call_.heads + h) * call_.groups + c * share_;
        const int32_t* visible = call_.visible + (b * call_.chunks + c) * width_;
        const int32_t *start = call_.clusters.start.at(b, hk), *stop = call_.clusters.stop.at(b, hk);
        hidden_ = width_ - call_.seen[b * call_.chunks + c];
        sizes_.assign(width_, 0);
        int64_t total = 0;
        for (int64_t slot = hidden_; slot < width_; slot++) total += sizes_[slot] = stop[visible[slot]] - start[visible[slot]];
        int64_t wanted = std::min(call_.near, total);
        if (wanted) {
            choose(b, hk, first, visible, total);
            list(call_.clusters.order.at(b, hk), start, visible);
            score(b, hk, first);
        }
        for (int64_t g = 0; g < share_; g++) {
            int32_t* picks = picks_ + (first + g) * call_.near;
            left_ = sizes_;
            std::fill(picks, picks + call_.near, 0);
            if (wanted) pick(b, hk, queries_ + (first + g) * dim_, scores_.data() + g * padded(size()), wanted, picks);
            float* bias = bias_ + (first + g) * width_;
            for (int64_t slot = 0; slot < width_; slot++) bias[slot] = logs_[left_[slot]];
        }
    }

private:
    int64_t size() const { return static_cast<int64_t>(keys_.size()); }

    // Which clusters to search: of each group the best, until they hold `reach` keys.
    void choose(int64_t b, int64_t hk, int64_t first, const int32_t* visible, int64_t total) {
        chosen_.assign(width_, total <= call_.reach);
        if (total <= call_.reach) return;
        int64_t head = (b * call_.key_heads + hk) * call_.clusters.count();
        auto worse = [](const std::pair<float, int64_t>& x, const std::pair<float, int64_t>& y) {
            return x.first < y.first || (x.first == y.first && x.second > y.second);
        };
        for (int64_t g = 0; g < share_; g++) {
            const double* query = queries_ + (first + g) * dim_;
            ranked_.clear();
            for (int64_t slot = hidden_; slot < width_; slot++) {
                if (!sizes_[slot]) continue;
                int64_t at = (head + visible[slot]) * dim_;
                float likes = rounded(std::max(dot(query, faces_.means.data() + at, dim_), dot(query, faces_.outliers.data() + at, dim_)));
                ranked_.emplace_back(likes == 0 ? 0 : likes, slot);
            }
            std::make_heap(ranked_.begin(), ranked_.end(), worse);
            int64_t held = 0;
            for (auto last = ranked_.end(); last != ranked_.begin() && held < call_.reach; --last) {
                std::pop_heap(ranked_.begin(), last, worse);
                chosen_[(last - 1)->second] = 1;
                held += sizes_[(last - 1)->second];
            }
        }
    }

    void list(const int32_t* order, const int32_t* start, const int32_t* visible) {
        keys_.clear();
        slots_.clear();
        for (int64_t slot = hidden_; slot < width_; slot++)
            for (int32_t i = 0; chosen_[slot] && i < sizes_[slot]; i++) {
                keys_.push_back(order[start[visible[slot]] + i]);
                slots_.push_back(static_cast<int32_t>(slot));
            }
    }

    // The products of the groups' queries with the listed keys, in float32.
    void score(int64_t b, int64_t hk, int64_t first) {
        int64_t stride = padded(size());
        if (static_cast<int64_t>(scores_.size()) < share_ * stride) scores_.resize(share_ * stride);
        for (int64_t i = 0; i < share_ * dim_; i++) block_[i] = static_cast<float>(queries_[first * dim_ + i]);
        for (int64_t at = 0; at < size(); at += kKeyBlock) {
            int64_t here = std::min(kKeyBlock, size() - at);
            for (int64_t j = 0; j < here; j++) {
                pointers_[j] = fetch(call_.k, b, hk, keys_[at + j], rows_ + j * dim_);
                if (std::isfinite(faces_.longest[b * call_.key_heads + hk]) || all_finite(pointers_[j], dim_)) continue;
                std::copy_n(pointers_[j], dim_, rows_ + j * dim_);  // inf and NaN count as 0 in planning
                zero_wild(rows_ + j * dim_, dim_);
                pointers_[j] = rows_ + j * dim_;
            }
            transpose_to_panels(pointers_.data(), here, dim_, panels_);
            multiply<false>(share_, here, dim_, block_, dim_, 1, panels_, dim_, scores_.data() + at, stride);
        }
    }

    // The `wanted` best of the listed keys, in the order of the list; those that float32 cannot tell from the last one
    // that is wanted are judged in float64.
    void pick(int64_t b, int64_t hk, const double* query, float* scores, int64_t wanted, int32_t* picks) {
        int64_t n = size(), stride = padded(n), taken = 0;
        std::fill(scores + n, scores + stride, -INFINITY);
        double longest = faces_.longest[b * call_.key_heads + hk];
        float slack = 2 * doubt(std::sqrt(dot(query, query, dim_)), std::isfinite(longest) ? longest : 0, dim_);
        float last = std::isfinite(longest) ? nth_largest(scores, stride, wanted) : NAN;
        close_.clear();
        auto take = [&](int64_t j) {
            picks[taken++] = keys_[j];
            left_[slots_[j]]--;
        };
        if (std::isfinite(last) && std::isfinite(slack)) {
            for (int64_t j = 0; j < n; j += kLanes)
                for (uint32_t high = at_least(load(scores + j), last - slack); high; high &= high - 1) {
                    int64_t at = j + std::countr_zero(high);
                    if (scores[at] > last + slack)
                        take(at);
                    else
                        close_.emplace_back(scores[at], at);
                }
        } else {
            for (int64_t j = 0; j < n; j++) close_.emplace_back(0.0f, j);
        }
        int64_t rest = wanted - taken;
        if (static_cast<int64_t>(close_.size()) > rest) {
            for (auto& [score, j] : close_) {
                read_double(call_.k, b, hk, keys_[j], scratch_.data(), key_.data());
                score = rounded(dot(query, key_.data(), dim_));
                if (score == 0) score = 0;
            }
            auto better = [&](const std::pair<float, int64_t>& x, const std::pair<float, int64_t>& y) {
                return x.first > y.first || (x.first == y.first && keys_[x.second] < keys_[y.second]);
            };
            std::nth_element(close_.begin(), close_.begin() + rest, close_.end(), better);
        }
        for (int64_t i = 0; i < rest; i++) take(close_[i].second);
    }

    float nth_largest(const float* scores, int64_t stride, int64_t n) {
        float bound = at_least_count(scores, stride, n, high_);
        high_.clear();
        for (int64_t j = 0; j < stride; j += kLanes)
            for (uint32_t above = at_least(load(scores + j), bound); above; above &= above - 1)
                high_.push_back(scores[j + std::countr_zero(above)]);
        std::nth_element(high_.begin(), high_.begin() + (n - 1), high_.end(), std::greater<float>());
        return high_[n - 1];
    }

    const NearCall& call_;
    const double* queries_;
    const Faces& faces_;
    const float* logs_;  // of 0, 1, 2 …
    int32_t* picks_;
    float* bias_;
    int64_t dim_, width_, share_, hidden_ = 0;
    Buffer block_, panels_, rows_;
    std::vector<const float*> pointers_;
    std::vector<double> key_;
    std::vector<float> scratch_, scores_, high_;
    std::vector<int32_t> sizes_, left_, keys_, slots_;
    std::vector<uint8_t> chosen_;
    std::vector<std::pair<float, int64_t>> ranked_, close_;
};

inline void near_keys(const NearCall& call, const double* queries, int32_t* picks, float* bias) {
    if (!call.chunks) return;
    Faces faces(call);
    std::vector<float> logs(call.k.rows + 1);
    for (size_t n = 0; n < logs.size(); n++) logs[n] = static_cast<float>(std::log(double(n)));
    std::vector<std::unique_ptr<NearWorker>> workers(std::max(1, call.threads));
    parallel_for(call.batch * call.heads * call.chunks, call.threads, [&](int64_t task, int who) {
        if (!workers[who]) workers[who] = std::make_unique<NearWorker>(call, queries, faces, logs.data(), picks, bias);
        int64_t bh = task / call.chunks;
        workers[who]->chunk(bh / call.heads, bh % call.heads, task % call.chunks);
    });
}

}  // namespace coterie::COTERIE_ISA
