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

// For each row of `queries` (float64, scale included) the `count` real keys with the largest products, by position.
inline void top_keys(const TopCall& call, const double* queries, int64_t* top) {
    int64_t dim = call.k.dim, n = call.k.rows, width = padded(n);
    if (call.count == 0 || call.queries == 0) return;
    const int64_t kQueries = std::clamp<int64_t>((1 << 20) / std::max<int64_t>(1, width), 24, 120);
    int64_t blocks = (call.queries + kQueries - 1) / kQueries;
    parallel_for(call.batch * call.heads * blocks, call.threads, [&](int64_t task, int) {
        int64_t bh = task / blocks, first = task % blocks * kQueries, here = std::min(kQueries, call.queries - first);
        int64_t b = bh / call.heads, hk = bh % call.heads / (call.heads / call.key_heads);
        const uint8_t* real = call.mask + b * n;
        Buffer scores(kQueries * width), block(kQueries * dim), panels(kKeyBlock * dim), rows(kKeyBlock * dim);
        std::vector<const float*> pointers(kKeyBlock);
        std::vector<double> key(dim);
        std::vector<float> scratch(dim);
        const double* mine = queries + (bh * call.queries + first) * dim;
        for (int64_t i = 0; i < here * dim; i++) block[i] = static_cast<float>(mine[i]);
        double longest = 0;
        for (int64_t at = 0; at < n; at += kKeyBlock) {
            breathe();
            int64_t keys = std::min(kKeyBlock, n - at);
            for (int64_t j = 0; j < keys; j++) {
                float* row = rows + j * dim;
                pointers[j] = row;
                if (!real[at + j]) {
                    std::fill(row, row + dim, 0.0f);
                    continue;
                }
                read_row(call.k.row(b, hk, at + j), call.k.kind, dim, row);
                double size = tame(row, dim);
                if (call.unit) {
                    std::copy_n(row, dim, key.data());
                    scale_to_unit(key.data(), dim);
                    std::copy_n(key.data(), dim, row);
                    size = length(row, dim);
                }
                longest = std::max(longest, size);
            }
            transpose_to_panels(pointers.data(), keys, dim, panels);
            multiply(here, keys, dim, Strided{block, dim, 1}, panels, dim, scores + at, width);
        }
        std::vector<std::pair<float, int32_t>> found;
        std::vector<float> maxima;
        bool masked = std::find(real, real + n, 0) != real + n;
        auto better = [](const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        for (int64_t i = 0; i < here; i++) {
            breathe();
            const double* query = mine + i * dim;
            int64_t visible = call.limits ? std::clamp<int64_t>(call.limits[b * call.queries + first + i], 0, n) : n;
            float slack = 2 * doubt(std::sqrt(dot(query, query, dim)), longest, dim);
            float* s = scores + i * width;
            std::fill(s + visible, s + width, -INFINITY);
            if (masked)
                for (int64_t j = 0; j < visible; j++)
                    if (!real[j]) s[j] = -INFINITY;
            auto exact = [&](int64_t j) {
                read_double(call.k, b, hk, j, scratch.data(), key.data());
                if (call.unit) scale_to_unit(key.data(), dim);
                float score = rounded(dot(query, key.data(), dim));
                return score == 0 ? 0.0f : score;
            };
            found.clear();
            if (std::isfinite(slack)) {
                float threshold = at_least_count(s, width, call.count, maxima) - slack;
                for (int64_t j = 0; j < visible; j += kLanes)
                    for (uint32_t high = at_least(load(s + j), threshold); high; high &= high - 1) {
                        int64_t at = j + std::countr_zero(high);
                        if (at < visible && real[at]) found.emplace_back(s[at], static_cast<int32_t>(at));
                    }
            } else {  // float32 cannot hold the products, or a query is inf or NaN
                for (int64_t j = 0; j < visible; j++)
                    if (real[j]) found.emplace_back(exact(j), static_cast<int32_t>(j));
                slack = 0;
            }
            int64_t wanted = std::min<int64_t>(call.count, static_cast<int64_t>(found.size()));
            int64_t* to = top + (bh * call.queries + first + i) * call.count;
            int64_t sure = pick(found, wanted, slack, better, exact);
            for (int64_t t = 0; t < call.count; t++) to[t] = t < sure ? found[t].second : 0;
            std::sort(to, to + sure);
        }
    });
}

}  // namespace coterie::COTERIE_ISA
