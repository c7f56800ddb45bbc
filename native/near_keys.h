// The best keys of groups of queries, searched in the clusters whose means score best.
#pragma once

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "candidates.h"
#include "pages.h"

namespace coterie::COTERIE_ISA {

// What stands for the clusters of each key head when they are ranked: the mean, and the outlier, which is the key that
// is farthest from it.
struct Faces {
    Pages<double> means;  // (batch, key heads, clusters, dim)
    std::vector<int32_t> outliers;  // (batch, key heads, clusters): which key
    Pages<float> rough;  // (batch, key heads, clusters, 2, dim): mean and outlier in float32
    std::vector<double> longest;  // (batch, key heads): the length of the longest key; NaN if some number is not finite

    explicit Faces(const NearCall& call)
        : means(call.batch * call.key_heads * call.clusters.count() * call.k.dim),
          outliers(call.batch * call.key_heads * call.clusters.count()),
          rough(2 * means.size()),
          longest(call.batch * call.key_heads) {
        parallel_for(call.batch * call.key_heads, call.threads, [&](int64_t bh, int) { head(call, bh); });
    }

    void head(const NearCall& call, int64_t bh) {
        int64_t b = bh / call.key_heads, h = bh % call.key_heads, dim = call.k.dim, count = call.clusters.count();
        const int32_t *order = call.clusters.order.at(b, h), *start = call.clusters.start.at(b, h),
                      *stop = call.clusters.stop.at(b, h);
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        double top = 0;
        for (int64_t c = 0; c < count; c++) {
            breathe();
            double* mean = means.data() + (bh * count + c) * dim;
            float* both = rough.data() + (bh * count + c) * 2 * dim;
            for (int64_t i = start[c]; i < stop[c]; i++) {
                const float* key = fetch(call.k, b, h, order[i], scratch.data());
                double size = length(key, dim);
                if (std::isfinite(size)) {
                    for (int64_t d = 0; d < dim; d++) mean[d] += key[d];
                    if (size > top) top = size;  // stays NaN once it is
                } else {
                    read_double(call.k, b, h, order[i], scratch.data(), row.data());
                    for (int64_t d = 0; d < dim; d++) mean[d] += row[d];
                    top = NAN;
                }
            }
            for (int64_t d = 0; d < dim; d++) mean[d] /= double(std::max(1, stop[c] - start[c]));
            float farthest = -1;
            for (int64_t i = start[c]; i < stop[c]; i++) {
                read_double(call.k, b, h, order[i], scratch.data(), row.data());
                float far = rounded(squared_distance(row.data(), mean, dim));
                if (far > farthest) {
                    farthest = far;
                    outliers[bh * count + c] = order[i];
                    std::copy(row.begin(), row.end(), both + dim);
                }
            }
            std::copy(mean, mean + dim, both);
        }
        longest[bh] = top;
    }

    static double squared_distance(const double* a, const double* b, int64_t n) {
        double lanes[8] = {0};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++) lanes[l] += (a[i + l] - b[i + l]) * (a[i + l] - b[i + l]);
        double total =
            ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        for (; i < n; i++) total += (a[i] - b[i]) * (a[i] - b[i]);
        return total;
    }
};

// The n-th largest of many numbers, by halving the interval that it is in; −inf entries do not count.
inline float nth_largest(const float* x, int64_t padded_size, int64_t n) {
    auto count = [&](float limit) {
        int64_t total = 0;
        for (int64_t j = 0; j < padded_size; j += kLanes) total += std::popcount(at_least(load(x + j), limit));
        return total;
    };
    Vec top = splat(-INFINITY), bottom = splat(-INFINITY);
    for (int64_t j = 0; j < padded_size; j += kLanes) {
        Vec each = load(x + j);
        top = max(each, top);
        bottom = max(where_met(each, splat(0) - each), bottom);
    }
    // At least n numbers reach `low`, fewer reach `high`.
    float low = -std::max(highest(bottom), 0.0f), high = highest(top);
    if (count(high) >= n) return high;
    for (float middle; (middle = low + (high - low) / 2) > low && middle < high;) {
        int64_t reached = count(middle);
        (reached >= n ? low : high) = middle;
        if (reached == n) break;
    }
    Vec least = splat(INFINITY);  // the smallest that reaches `low`
    for (int64_t j = 0; j < padded_size; j += kLanes) {
        alignas(64) float each[kLanes];
        uint32_t reached = at_least(load(x + j), low);
        if (!reached) continue;
        store(each, load(x + j));
        for (int lane = 0; lane < kLanes; lane++)
            if (!(reached >> lane & 1)) each[lane] = INFINITY;
        least = min(load(each), least);
    }
    return -highest(splat(0) - least);
}

// A batch of groups of one head. They say which clusters they search; then each cluster is multiplied with all groups
// that search it; then each group picks.
class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const Faces& faces, const float* logs, int32_t* met,
               float* bias)
        : call_(call),
          queries_(queries),
          faces_(faces),
          logs_(logs),
          met_(met),
          bias_(bias),
          dim_(call.k.dim),
          width_(call.visible_width),
          share_(call.groups / call.chunks),
          query_(padded(share_) * dim_),
          panels_(kKeyBlock * dim_),
          wide_(kKeyBlock * dim_),
          block_(kRowBlock * kKeyBlock),
          pointers_(kKeyBlock),
          rows_(kRowBlock),
          scratch_(dim_),
          key_(dim_) {}

    void batch(int64_t b, int64_t h, int64_t first, int64_t count) {
        b_ = b;
        hk_ = h / (call_.heads / call_.key_heads);
        first_ = (b * call_.heads + h) * call_.groups + first;
        searches_.clear();
        begin_.assign(1, 0);
        rough_.assign(queries_ + first_ * dim_, queries_ + (first_ + count) * dim_);
        for (int64_t g = 0; g < count; g += share_) {
            breathe();
            look(first + g);
            if (call_.near && total_ > call_.reach) like(g);
            for (int64_t each = g; each < g + share_; each++) choose(each, each - g);
        }
        score(count);
        for (int64_t g = 0; g < count; g++) {
            breathe();
            look(first + g);
            int32_t* met = met_ + (first_ + g) * (width_ + call_.near);
            float* bias = bias_ + (first_ + g) * (width_ + call_.near);
            std::fill_n(met + width_, call_.near, 0);
            std::fill_n(bias + width_, call_.near, 0.0f);
            if (int64_t wanted = std::min(call_.near, total_)) pick(g, wanted, met + width_);
            for (int64_t slot = 0; slot < width_; slot++) {
                met[slot] = static_cast<int32_t>(call_.k.rows) + (slot < hidden_ ? 0 : visible_[slot]);
                bias[slot] = logs_[left_[slot]];
            }
        }
    }

private:
    using Scored = std::pair<float, int64_t>;
    struct Search {
        int32_t group, slot, cluster, size;
        int64_t at;  // of the scores of the cluster's keys
    };

    const int32_t* members(int64_t cluster) const {
        return call_.clusters.order.at(b_, hk_) + call_.clusters.start.at(b_, hk_)[cluster];
    }
    double longest() const { return faces_.longest[b_ * call_.key_heads + hk_]; }

    // What a group sees.
    void look(int64_t g) {
        int64_t c = g / share_;
        hidden_ = width_ - call_.seen[b_ * call_.chunks + c];
        visible_ = call_.visible + (b_ * call_.chunks + c) * width_;
        const int32_t *start = call_.clusters.start.at(b_, hk_), *stop = call_.clusters.stop.at(b_, hk_);
        left_.assign(width_, 0);
        total_ = 0;
        for (int64_t slot = hidden_; slot < width_; slot++)
            total_ += left_[slot] = stop[visible_[slot]] - start[visible_[slot]];
    }

    // How much the groups of a chunk like the clusters that they see, in float32: (visible × groups).
    void like(int64_t g) {
        int64_t head = (b_ * call_.key_heads + hk_) * call_.clusters.count(), lanes = padded(share_),
                seen = width_ - hidden_;
        std::vector<const float*> rows(std::max(share_, 2 * seen));
        for (int64_t each = 0; each < share_; each++) rows[each] = rough_.data() + (g + each) * dim_;
        transpose_to_panels(rows.data(), share_, dim_, query_);
        for (int64_t j = 0; j < 2 * seen; j++)
            rows[j] = faces_.rough.data() + ((head + visible_[hidden_ + j / 2]) * 2 + j % 2) * dim_;
        likes_.resize(2 * seen * lanes);
        multiply(2 * seen, share_, dim_, Scattered{rows.data()}, query_, dim_, likes_.data(), lanes);
        for (int64_t j = 0; j < seen; j++)
            for (int64_t lane = 0; lane < lanes; lane += kLanes)
                store(likes_.data() + j * lanes + lane, max(load(likes_.data() + 2 * j * lanes + lane),
                                                            load(likes_.data() + (2 * j + 1) * lanes + lane)));
    }

    // The clusters that hold at least `reach` keys, best first; returns how many, and whether float32 leaves no doubt.
    std::pair<int64_t, bool> rank(float slack) {
        auto worse = [](const Scored& x, const Scored& y) {
            return x.first < y.first || (x.first == y.first && x.second > y.second);
        };
        std::make_heap(ranked_.begin(), ranked_.end(), worse);
        auto last = ranked_.end();
        for (int64_t held = 0; last != ranked_.begin() && held < call_.reach; held += left_[last->second])
            std::pop_heap(ranked_.begin(), last--, worse);
        bool sure = last == ranked_.begin() || ranked_.front().first < last->first - slack;
        if (ranked_.end() - last > 1) sure = sure && (last + 1)->first > last->first + slack;
        return {ranked_.end() - last, sure && std::isfinite(slack)};
    }

    // The best clusters of a group, until they hold `reach` keys, or all.
    void choose(int64_t g, int64_t lane) {
        int64_t held = begin_.back();
        auto add = [&](int64_t slot) {
            searches_.push_back({int32_t(g), int32_t(slot), visible_[slot], left_[slot], held});
            held += left_[slot];
        };
        if (call_.near && total_ <= call_.reach) {
            for (int64_t slot = hidden_; slot < width_; slot++)
                if (left_[slot]) add(slot);
        } else if (call_.near) {
            const double* query = queries_ + (first_ + g) * dim_;
            int64_t head = (b_ * call_.key_heads + hk_) * call_.clusters.count(), lanes = padded(share_);
            ranked_.clear();
            for (int64_t slot = hidden_; slot < width_; slot++)
                if (left_[slot]) ranked_.emplace_back(likes_[(slot - hidden_) * lanes + lane], slot);
            auto [count, sure] = rank(2 * doubt(std::sqrt(dot(query, query, dim_)), longest(), dim_));
            if (!sure) {
                for (auto& [likes, slot] : ranked_) {
                    int64_t face = head + visible_[slot];  // of a cluster with members: those without are not ranked
                    read_double(call_.k, b_, hk_, faces_.outliers[face], scratch_.data(), key_.data());
                    likes = rounded(
                        std::max(dot(query, faces_.means.data() + face * dim_, dim_), dot(query, key_.data(), dim_)));
                    if (likes == 0) likes = 0;
                }
                count = rank(0).first;
            }
            for (int64_t i = 1; i <= count; i++) add(ranked_[ranked_.size() - i].second);
        }
        ends_.resize(g + 1);
        ends_[g] = held;
        begin_.push_back(padded(held));
        firsts_.resize(g + 2);
        firsts_[0] = 0;
        firsts_[g + 1] = static_cast<int64_t>(searches_.size());
    }

    // The float32 products of every group with the keys that it searches.
    void score(int64_t count) {
        scores_.resize(begin_[count]);
        std::vector<int32_t> starts(call_.clusters.count() + 1, 0), order(searches_.size());
        for (const Search& each : searches_) starts[each.cluster + 1]++;
        for (size_t c = 1; c < starts.size(); c++) starts[c] += starts[c - 1];
        std::vector<int32_t> next(starts);
        for (size_t i = 0; i < searches_.size(); i++) order[next[searches_[i].cluster]++] = static_cast<int32_t>(i);
        for (int64_t c = 0; c < call_.clusters.count(); c++)
            if (starts[c] < starts[c + 1]) multiply_cluster(c, order.data() + starts[c], starts[c + 1] - starts[c]);
        for (int64_t g = 0; g < count; g++)
            std::fill(scores_.begin() + ends_[g], scores_.begin() + begin_[g + 1], -INFINITY);
    }

    void multiply_cluster(int64_t cluster, const int32_t* which, int64_t count) {
        const int32_t* keys = members(cluster);
        int64_t size = searches_[which[0]].size;
        for (int64_t at = 0; at < size; at += kKeyBlock) {
            int64_t here = std::min(kKeyBlock, size - at);
            for (int64_t j = 0; j < here; j++) pointers_[j] = fetch(call_.k, b_, hk_, keys[at + j], wide_ + j * dim_);
            transpose_to_panels(pointers_.data(), here, dim_, panels_);
            for (int64_t first = 0; first < count; first += kRowBlock) {
                breathe();
                int64_t some = std::min(kRowBlock, count - first);
                for (int64_t i = 0; i < some; i++) rows_[i] = rough_.data() + searches_[which[first + i]].group * dim_;
                multiply(some, here, dim_, Scattered{rows_.data()}, panels_, dim_, block_, kKeyBlock);
                for (int64_t i = 0; i < some; i++)
                    std::copy_n(block_ + i * kKeyBlock, here, scores_.data() + searches_[which[first + i]].at + at);
            }
        }
    }

    // The `wanted` best of a group's keys; those that float32 cannot tell from the last that is wanted are judged in
    // float64.
    void pick(int64_t g, int64_t wanted, int32_t* picks) {
        const double* query = queries_ + (first_ + g) * dim_;
        const float* scores = scores_.data() + begin_[g];
        int64_t n = ends_[g] - begin_[g], stride = padded(n), taken = 0;
        keys_.clear();
        slots_.clear();
        for (int64_t i = firsts_[g]; i < firsts_[g + 1]; i++) {
            const int32_t* keys = members(searches_[i].cluster);
            keys_.insert(keys_.end(), keys, keys + searches_[i].size);
            slots_.insert(slots_.end(), searches_[i].size, searches_[i].slot);
        }
        auto take = [&](int64_t j) {
            picks[taken++] = keys_[j];
            left_[slots_[j]]--;
        };
        float slack = 2 * doubt(std::sqrt(dot(query, query, dim_)), longest(), dim_);
        float last = std::isfinite(slack) ? nth_largest(scores, stride, wanted) : NAN;
        close_.clear();
        sure_.clear();
        if (std::isfinite(last))
            for (int64_t j = 0; j < stride; j += kLanes)
                for (uint32_t high = at_least(load(scores + j), last - slack); high; high &= high - 1) {
                    int64_t at = j + std::countr_zero(high);
                    if (scores[at] > last + slack)
                        sure_.push_back(at);
                    else
                        close_.emplace_back(0.0f, at);
                }
        // inf and NaN, which count as 0 in planning, and products too large for float32: those are in no order there.
        int64_t found = static_cast<int64_t>(sure_.size() + close_.size());
        if (found < wanted || static_cast<int64_t>(sure_.size()) > wanted) {
            sure_.clear();
            close_.clear();
            for (int64_t j = 0; j < n; j++) close_.emplace_back(0.0f, j);
        }
        for (int64_t at : sure_) take(at);
        int64_t rest = std::min<int64_t>(wanted - taken, close_.size());
        if (static_cast<int64_t>(close_.size()) > rest) {
            for (auto& [score, j] : close_) {
                read_double(call_.k, b_, hk_, keys_[j], scratch_.data(), key_.data());
                score = rounded(dot(query, key_.data(), dim_));
                if (score == 0) score = 0;
            }
            auto better = [&](const Scored& x, const Scored& y) {
                return x.first > y.first || (x.first == y.first && keys_[x.second] < keys_[y.second]);
            };
            std::nth_element(close_.begin(), close_.begin() + rest, close_.end(), better);
        }
        for (int64_t i = 0; i < rest; i++) take(close_[i].second);
    }

    const NearCall& call_;
    const double* queries_;
    const Faces& faces_;
    const float* logs_;  // of 0, 1, 2 …
    int32_t* met_;
    float* bias_;
    int64_t dim_, width_, share_, first_ = 0, hidden_ = 0, total_ = 0, b_ = 0, hk_ = 0;
    const int32_t* visible_ = nullptr;
    Buffer query_, panels_, wide_, block_;
    std::vector<const float*> pointers_, rows_;
    std::vector<float> rough_, scratch_, scores_, likes_;
    std::vector<double> key_;
    std::vector<int64_t> begin_, ends_, firsts_;  // of a group's scores, and of its searches
    std::vector<int64_t> sure_;
    std::vector<Search> searches_;
    std::vector<int32_t> left_, keys_, slots_;
    std::vector<Scored> ranked_, close_;
};

// What each group meets: the virtual rows of the clusters that it sees, and its near keys; and their biases.
inline void near_keys(const NearCall& call, const double* queries, int32_t* met, float* bias) {
    if (!call.chunks) return;
    Faces faces(call);
    std::vector<float> logs(call.k.rows + 1);
    for (size_t n = 0; n < logs.size(); n++) logs[n] = static_cast<float>(std::log(double(n)));
    int64_t share = call.groups / call.chunks, batch = std::max<int64_t>(1, 512 / std::max<int64_t>(1, share)) * share;
    if (!batch) return;
    std::vector<std::unique_ptr<NearWorker>> workers(std::max(1, call.threads));
    int64_t batches = (call.groups + batch - 1) / batch;
    parallel_for(call.batch * call.heads * batches, call.threads, [&](int64_t task, int who) {
        if (!workers[who]) workers[who] = std::make_unique<NearWorker>(call, queries, faces, logs.data(), met, bias);
        int64_t bh = task / batches, first = task % batches * batch;
        workers[who]->batch(bh / call.heads, bh % call.heads, first, std::min(batch, call.groups - first));
    });
}

}  // namespace coterie::COTERIE_ISA
