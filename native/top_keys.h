// The keys with the largest products.
#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <vector>

#include "candidates.h"

namespace coterie::COTERIE_ISA {

// A number that at least `count` of the scores reach: the count-th largest of the maxima of many small sets of them.
inline float at_least_count(const float* scores, int64_t width, int64_t count, std::vector<float>& maxima) {
    int64_t vectors = width / kLanes,
            sets = std::min(vectors, std::max<int64_t>(16, (4 * count + kLanes - 1) / kLanes));
    if (sets * kLanes < count) return -INFINITY;
    maxima.resize(sets * kLanes);
    for (int64_t set = 0; set < sets; set++) {
        Vec top = load(scores + set * kLanes);
        for (int64_t at = set + sets; at < vectors; at += sets) top = max(load(scores + at * kLanes), top);
        store(maxima.data() + set * kLanes, top);
    }
    std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
    return maxima[count - 1];
}

// Bring the `wanted` best to the front; those that float32 cannot tell from the last of them are judged by `exact`.
template <class Better, class Exact>
int64_t pick(std::vector<std::pair<float, int32_t>>& found, int64_t wanted, float slack, const Better& better,
             const Exact& exact) {
    if (!wanted || wanted == static_cast<int64_t>(found.size())) return wanted;
    std::nth_element(found.begin(), found.begin() + (wanted - 1), found.end(), better);
    float last = found[wanted - 1].first;
    auto close = std::partition(found.begin(), found.end(), [&](auto& x) { return x.first > last + slack; });
    auto end = std::partition(close, found.end(), [&](auto& x) { return x.first >= last - slack; });
    if (end - found.begin() > wanted) {
        for (auto each = close; each != end; ++each) each->first = exact(each->second);
        std::nth_element(close, found.begin() + (wanted - 1), end, better);
    }
    return wanted;
}

// Some of the queries of one head, and their float32 products with all its keys.
class TopBlock {
public:
    TopBlock(const TopCall& call, const double* queries, int64_t count, int64_t b, int64_t key_head)
        : call_(call),
          queries_(queries),
          count_(count),
          real_(call.mask + b * call.k.rows),
          masked_(std::find(real_, real_ + call.k.rows, 0) != real_ + call.k.rows),
          keys_{.rows = call.k, .batch = b, .head = key_head},
          scores_(count * padded(call.k.rows)) {
        score();
    }

    // The best of the first `visible` keys for query i, by position; the last are 0 where there are fewer.
    void pick_for(int64_t i, int64_t visible, int64_t* to) {
        const double* query = queries_ + i * call_.k.dim;
        int64_t width = padded(call_.k.rows);
        float slack = 2 * doubt(std::sqrt(dot(query, query, call_.k.dim)), longest_, call_.k.dim);
        float* s = scores_ + i * width;
        std::fill(s + visible, s + width, -INFINITY);
        if (masked_)
            for (int64_t j = 0; j < visible; j++)
                if (!real_[j]) s[j] = -INFINITY;
        found_.clear();
        if (std::isfinite(slack)) {
            float threshold = at_least_count(s, width, call_.count, maxima_) - slack;
            for (int64_t j = 0; j < visible; j += kLanes)
                for (uint32_t high = at_least(load(s + j), threshold); high; high &= high - 1) {
                    int64_t at = j + std::countr_zero(high);
                    if (at < visible && real_[at]) found_.emplace_back(s[at], static_cast<int32_t>(at));
                }
        } else {  // float32 cannot hold the products, or a query is inf or NaN
            for (int64_t j = 0; j < visible; j++)
                if (real_[j]) found_.emplace_back(exact(query, j), static_cast<int32_t>(j));
            slack = 0;
        }
        auto better = [](const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        int64_t wanted = std::min<int64_t>(call_.count, static_cast<int64_t>(found_.size()));
        int64_t sure = pick(found_, wanted, slack, better, [&](int64_t j) { return exact(query, j); });
        for (int64_t t = 0; t < call_.count; t++) to[t] = t < sure ? found_[t].second : 0;
        std::sort(to, to + sure);
    }

private:
    void score() {
        int64_t dim = call_.k.dim, n = call_.k.rows, width = padded(n);
        Buffer queries(count_ * dim), panels(kKeyBlock * dim), rows(kKeyBlock * dim);
        std::vector<const float*> pointers(kKeyBlock);
        for (int64_t i = 0; i < count_ * dim; i++) queries[i] = static_cast<float>(queries_[i]);
        for (int64_t j = 0; j < kKeyBlock; j++) pointers[j] = rows + j * dim;
        for (int64_t at = 0; at < n; at += kKeyBlock) {
            breathe();
            int64_t here = std::min(kKeyBlock, n - at);
            read_real(call_.k, keys_.batch, keys_.head, at, here, real_, rows);
            for (int64_t j = 0; j < here; j++)
                if (real_[at + j]) longest_ = std::max(longest_, settle(rows + j * dim));
            transpose_to_panels(pointers.data(), here, dim, panels);
            multiply(count_, here, dim, Strided{queries, dim, 1}, panels, dim, scores_ + at, width);
        }
    }

    // Make a key what counts of it; returns its length.
    double settle(float* key) {
        int64_t dim = call_.k.dim;
        double size = tame(key, dim);
        if (!call_.unit) return size;
        std::copy_n(key, dim, keys_.wide.data());
        scale_to_unit(keys_.wide.data(), dim);
        std::copy_n(keys_.wide.data(), dim, key);
        return length(key, dim);
    }

    float exact(const double* query, int64_t j) {
        keys_.exact(j);
        if (call_.unit) scale_to_unit(keys_.wide.data(), call_.k.dim);
        return comparable(dot(query, keys_.wide.data(), call_.k.dim));
    }

    const TopCall& call_;
    const double* queries_;
    int64_t count_;
    const uint8_t* real_;
    bool masked_;
    HeadRows keys_;
    double longest_ = 0;
    Buffer scores_;  // (count, padded keys)
    std::vector<std::pair<float, int32_t>> found_{};
    std::vector<float> maxima_{};
};

// For each row of `queries` (float64, scale included) the `count` real keys with the largest products, by position.
inline void top_keys(const TopCall& call, const double* queries, int64_t* top) {
    if (call.count == 0 || call.queries == 0) return;
    const int64_t most = std::clamp<int64_t>((1 << 20) / std::max<int64_t>(1, padded(call.k.rows)), 24, 120);
    int64_t blocks = (call.queries + most - 1) / most;
    double numbers = double(call.k.batch * call.heads * call.queries) * double(call.k.rows) * double(call.k.dim);
    parallel_for(call.k.batch * call.heads * blocks, threads_for(numbers, call.threads), [&](int64_t task, int) {
        int64_t bh = task / blocks, first = task % blocks * most, here = std::min(most, call.queries - first);
        int64_t b = bh / call.heads, hk = bh % call.heads / (call.heads / call.k.heads), n = call.k.rows;
        TopBlock block(call, queries + (bh * call.queries + first) * call.k.dim, here, b, hk);
        for (int64_t i = first; i < first + here; i++) {
            breathe();
            int64_t visible = call.limits ? std::clamp<int64_t>(call.limits[b * call.queries + i], 0, n) : n;
            block.pick_for(i - first, visible, top + (bh * call.queries + i) * call.count);
        }
    });
}

}  // namespace coterie::COTERIE_ISA
