// The best keys of groups of queries, searched in the clusters whose means or outliers score best.
#pragma once

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "near_faces.h"

namespace coterie::COTERIE_ISA {

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

using Scored = std::pair<float, int64_t>;

// The keys of one key head, and what stands for their clusters.
struct NearHead {
    const NearCall& call;
    const Faces& faces;
    HeadRows keys;

    int64_t index() const { return keys.batch * call.k.heads + keys.head; }
    int64_t face(int64_t cluster) const { return index() * call.clusters.count() + cluster; }
    const int32_t* members(int64_t cluster) const {
        return call.clusters.order.at(keys.batch, keys.head) + call.clusters.start.at(keys.batch, keys.head)[cluster];
    }

    // By how much two float32 products with a query may differ and yet be in the wrong order.
    float slack(const double* query) const {
        return 2 * doubt(std::sqrt(dot(query, query, call.k.dim)), faces.longest[index()], call.k.dim);
    }
    double product(const double* query, int64_t key) { return dot(query, keys.exact(key), call.k.dim); }
};

// The clusters that the groups of a chunk see: those in the slots from `hidden` on.
struct View {
    const int32_t* clusters = nullptr;
    int64_t hidden = 0;
    int64_t total = 0;  // of the keys in them
    std::vector<int32_t> left{};  // of the keys of each, once some are picked

    void look(const NearHead& head, int64_t chunk) {
        const NearCall& call = head.call;
        int64_t at = head.keys.batch * call.chunks + chunk;
        hidden = call.width - call.seen[at];
        clusters = call.visible + at * call.width;
        const int32_t* start = call.clusters.start.at(head.keys.batch, head.keys.head);
        const int32_t* stop = call.clusters.stop.at(head.keys.batch, head.keys.head);
        left.assign(call.width, 0);
        total = 0;
        for (int64_t slot = hidden; slot < call.width; slot++)
            total += left[slot] = stop[clusters[slot]] - start[clusters[slot]];
    }
};

// Which clusters each group of a batch searches, and the float32 products of its query with their keys.
struct Searches {
    struct Search {
        int32_t group, slot, cluster, size;
        int64_t at;  // of the scores of the cluster's keys
    };
    struct Span {
        int64_t first, last;  // of a group's searches
        int64_t begin, end;  // of its scores; up to a multiple of kLanes, those behind are −inf
    };
    std::vector<Search> all{};
    std::vector<Span> groups{};
    std::vector<float> scores{};

    void clear() {
        all.clear();
        groups.clear();
    }
    int64_t room() const { return groups.empty() ? 0 : padded(groups.back().end); }
    void add_group() {
        auto first = static_cast<int64_t>(all.size());
        groups.push_back({.first = first, .last = first, .begin = room(), .end = room()});
    }
    // For the last group.
    void add(int64_t slot, int32_t cluster, int32_t size) {
        Span& mine = groups.back();
        all.push_back({
            .group = static_cast<int32_t>(groups.size() - 1),
            .slot = static_cast<int32_t>(slot),
            .cluster = cluster,
            .size = size,
            .at = mine.end,
        });
        mine.end += size;
        mine.last++;
    }
};

// Which of the clusters in view a group likes best.
class Ranking {
public:
    Ranking(int64_t share, int64_t dim) : lanes_(padded(share)), panels_(lanes_ * dim) {}

    // How much the groups of a chunk like the clusters that they see, in float32: (visible × groups).
    void like(const NearHead& head, const View& view, const float* queries) {
        int64_t share = head.call.share(), dim = head.call.k.dim, seen = head.call.width - view.hidden;
        rows_.resize(std::max(share, 2 * seen));
        for (int64_t each = 0; each < share; each++) rows_[each] = queries + each * dim;
        transpose_to_panels(rows_.data(), share, dim, panels_);
        for (int64_t j = 0; j < 2 * seen; j++)
            rows_[j] = head.faces.rough.data() + (head.face(view.clusters[view.hidden + j / 2]) * 2 + j % 2) * dim;
        likes_.resize(2 * seen * lanes_);
        multiply(2 * seen, share, dim, Scattered{rows_.data()}, panels_, dim, likes_.data(), lanes_);
        for (int64_t j = 0; j < seen; j++) {
            const float *mean = likes_.data() + 2 * j * lanes_, *outlier = mean + lanes_;
            for (int64_t lane = 0; lane < lanes_; lane += kLanes)
                store(likes_.data() + j * lanes_ + lane, max(load(mean + lane), load(outlier + lane)));
        }
    }

    // Rank the clusters of group `lane` of the chunk until the best hold `reach` keys; returns how many those are.
    int64_t rank(NearHead& head, const View& view, const double* query, int64_t lane) {
        ranked_.clear();
        for (int64_t slot = view.hidden; slot < head.call.width; slot++)
            if (view.left[slot]) ranked_.emplace_back(likes_[(slot - view.hidden) * lanes_ + lane], slot);
        auto [count, sure] = best(view, head.call.reach, head.slack(query));
        if (sure) return count;
        for (auto& [likes, slot] : ranked_) {
            int64_t face = head.face(view.clusters[slot]);  // of a cluster with members: those without are not ranked
            const double* mean = head.faces.means.data() + face * head.call.k.dim;
            likes =
                comparable(std::max(dot(query, mean, head.call.k.dim), head.product(query, head.faces.outliers[face])));
        }
        return best(view, head.call.reach, 0).first;
    }

    // The slot of the i-th best cluster.
    int64_t slot(int64_t i) const { return ranked_[ranked_.size() - 1 - i].second; }

private:
    // How many of the best clusters hold `reach` keys, and whether float32 leaves no doubt. They come last, best last.
    std::pair<int64_t, bool> best(const View& view, int64_t reach, float slack) {
        auto worse = [](const Scored& x, const Scored& y) {
            return x.first < y.first || (x.first == y.first && x.second > y.second);
        };
        std::make_heap(ranked_.begin(), ranked_.end(), worse);
        auto last = ranked_.end();
        for (int64_t held = 0; last != ranked_.begin() && held < reach; held += view.left[last->second])
            std::pop_heap(ranked_.begin(), last--, worse);
        bool sure = last == ranked_.begin() || ranked_.front().first < last->first - slack;
        if (ranked_.end() - last > 1) sure = sure && (last + 1)->first > last->first + slack;
        return {ranked_.end() - last, sure && std::isfinite(slack)};
    }

    int64_t lanes_;
    Buffer panels_;
    std::vector<float> likes_;
    std::vector<const float*> rows_;
    std::vector<Scored> ranked_;
};

// The float32 products of every group with the keys that it searches: a cluster is read once for all of them.
class Products {
public:
    explicit Products(int64_t dim)
        : panels_(kKeyBlock * dim),
          wide_(kKeyBlock * dim),
          block_(kRowBlock * kKeyBlock),
          keys_(kKeyBlock),
          queries_(kRowBlock) {}

    void score(const NearHead& head, const float* queries, Searches& searches) {
        searches.scores.resize(searches.room());
        int64_t clusters = head.call.clusters.count();
        std::vector<int32_t> starts(clusters + 1, 0), order(searches.all.size());
        for (const auto& each : searches.all) starts[each.cluster + 1]++;
        for (int64_t c = 0; c < clusters; c++) starts[c + 1] += starts[c];
        std::vector<int32_t> next(starts);
        for (size_t i = 0; i < order.size(); i++) order[next[searches.all[i].cluster]++] = static_cast<int32_t>(i);
        for (int64_t c = 0; c < clusters; c++)
            if (starts[c] < starts[c + 1])
                multiply_cluster(head, queries, order.data() + starts[c], starts[c + 1] - starts[c], searches);
        for (const auto& group : searches.groups)
            std::fill(searches.scores.begin() + group.end, searches.scores.begin() + padded(group.end), -INFINITY);
    }

private:
    // One cluster with the groups of the searches which[0 … count).
    void multiply_cluster(const NearHead& head, const float* queries, const int32_t* which, int64_t count,
                          Searches& searches) {
        int64_t size = searches.all[which[0]].size, dim = head.call.k.dim;
        const int32_t* keys = head.members(searches.all[which[0]].cluster);
        for (int64_t at = 0; at < size; at += kKeyBlock) {
            int64_t here = std::min(kKeyBlock, size - at);
            for (int64_t j = 0; j < here; j++)
                keys_[j] = fetch(head.call.k, head.keys.batch, head.keys.head, keys[at + j], wide_ + j * dim);
            transpose_to_panels(keys_.data(), here, dim, panels_);
            for (int64_t first = 0; first < count; first += kRowBlock) {
                breathe();
                int64_t some = std::min(kRowBlock, count - first);
                for (int64_t i = 0; i < some; i++) queries_[i] = queries + searches.all[which[first + i]].group * dim;
                multiply(some, here, dim, Scattered{queries_.data()}, panels_, dim, block_, kKeyBlock);
                for (int64_t i = 0; i < some; i++)
                    std::copy_n(block_ + i * kKeyBlock, here,
                                searches.scores.data() + searches.all[which[first + i]].at + at);
            }
        }
    }

    Buffer panels_, wide_, block_;
    std::vector<const float*> keys_, queries_;
};

// The best of the keys that a group searches.
class Picker {
public:
    // The `wanted` best of group g's keys; the view has them no longer left.
    void pick(NearHead& head, const Searches& searches, int64_t g, const double* query, int64_t wanted, View& view,
              int32_t* picks) {
        list(head, searches, g);
        divide(searches.scores.data() + searches.groups[g].begin, wanted, head.slack(query));
        int64_t taken = 0;
        auto take = [&](int64_t j) {
            picks[taken++] = keys_[j];
            view.left[slots_[j]]--;
        };
        for (int64_t at : sure_) take(at);
        int64_t rest = std::min<int64_t>(wanted - taken, close_.size());
        if (static_cast<int64_t>(close_.size()) > rest) judge(head, query, rest);
        for (int64_t i = 0; i < rest; i++) take(close_[i].second);
    }

private:
    void list(const NearHead& head, const Searches& searches, int64_t g) {
        keys_.clear();
        slots_.clear();
        for (int64_t i = searches.groups[g].first; i < searches.groups[g].last; i++) {
            const auto& search = searches.all[i];
            const int32_t* keys = head.members(search.cluster);
            keys_.insert(keys_.end(), keys, keys + search.size);
            slots_.insert(slots_.end(), search.size, search.slot);
        }
    }

    // Those that are surely among the `wanted` best, and those that float32 cannot tell from the last of them.
    void divide(const float* scores, int64_t wanted, float slack) {
        auto n = static_cast<int64_t>(keys_.size()), stride = padded(n);
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
        if (found >= wanted && static_cast<int64_t>(sure_.size()) <= wanted) return;
        sure_.clear();
        close_.clear();
        for (int64_t j = 0; j < n; j++) close_.emplace_back(0.0f, j);
    }

    // Bring the `rest` best of the close ones to the front.
    void judge(NearHead& head, const double* query, int64_t rest) {
        for (auto& [score, j] : close_) score = comparable(head.product(query, keys_[j]));
        auto better = [&](const Scored& x, const Scored& y) {
            return x.first > y.first || (x.first == y.first && keys_[x.second] < keys_[y.second]);
        };
        std::nth_element(close_.begin(), close_.begin() + rest, close_.end(), better);
    }

    std::vector<int32_t> keys_, slots_;  // of everything that the group searches
    std::vector<int64_t> sure_;
    std::vector<Scored> close_;
};

// What groups meet, (batch, heads, groups, width + near): the virtual rows of the clusters that they see, then keys.
struct Meetings {
    int32_t* rows;
    float* bias;
};

// A batch of groups of one head. They say which clusters they search; then each cluster is multiplied with all groups
// that search it; then each group picks.
class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const Faces& faces, const float* logs, Meetings met)
        : call_(call),
          queries_(queries),
          logs_(logs),
          met_(met),
          head_{.call = call, .faces = faces, .keys = {.rows = call.k}},
          ranking_(call.share(), call.k.dim),
          products_(call.k.dim) {}

    void batch(int64_t b, int64_t h, int64_t first, int64_t count) {
        head_.keys.batch = b;
        head_.keys.head = h / (call_.heads / call_.k.heads);
        int64_t at = (b * call_.heads + h) * call_.groups + first, dim = call_.k.dim, share = call_.share();
        const double* queries = queries_ + at * dim;
        rough_.assign(queries, queries + count * dim);
        searches_.clear();
        for (int64_t g = 0; g < count; g += share) {
            breathe();
            view_.look(head_, (first + g) / share);
            bool all = view_.total <= call_.reach;
            if (call_.near && !all) ranking_.like(head_, view_, rough_.data() + g * dim);
            for (int64_t lane = 0; lane < share; lane++) choose(queries + (g + lane) * dim, lane, all);
        }
        products_.score(head_, rough_.data(), searches_);
        for (int64_t g = 0; g < count; g++) {
            breathe();
            view_.look(head_, (first + g) / share);
            meet(g, queries + g * dim, at + g);
        }
    }

private:
    // The best clusters of a group, until they hold `reach` keys, or all that it sees.
    void choose(const double* query, int64_t lane, bool all) {
        searches_.add_group();
        if (!call_.near) return;
        auto add = [&](int64_t slot) { searches_.add(slot, view_.clusters[slot], view_.left[slot]); };
        if (all) {
            for (int64_t slot = view_.hidden; slot < call_.width; slot++)
                if (view_.left[slot]) add(slot);
            return;
        }
        int64_t best = ranking_.rank(head_, view_, query, lane);
        for (int64_t i = 0; i < best; i++) add(ranking_.slot(i));
    }

    void meet(int64_t g, const double* query, int64_t at) {
        int64_t width = call_.width;
        int32_t* rows = met_.rows + at * (width + call_.near);
        float* bias = met_.bias + at * (width + call_.near);
        std::fill_n(rows + width, call_.near, 0);
        std::fill_n(bias + width, call_.near, 0.0f);
        int64_t wanted = std::min(call_.near, view_.total);
        if (wanted) picker_.pick(head_, searches_, g, query, wanted, view_, rows + width);
        for (int64_t slot = 0; slot < width; slot++) {
            rows[slot] = static_cast<int32_t>(call_.k.rows) + (slot < view_.hidden ? 0 : view_.clusters[slot]);
            bias[slot] = logs_[view_.left[slot]];
        }
    }

    const NearCall& call_;
    const double* queries_;  // (batch, heads, groups, dim)
    const float* logs_;  // of 0, 1, 2 …
    Meetings met_;
    std::vector<float> rough_;  // the batch's queries
    NearHead head_;
    View view_;
    Ranking ranking_;
    Searches searches_;
    Products products_;
    Picker picker_;
};

// What each group meets: the virtual rows of the clusters that it sees, and its near keys; and their biases.
inline void near_keys(const NearCall& call, const double* queries, int32_t* met, float* bias) {
    if (!call.chunks || !call.groups) return;
    Faces faces(call);
    std::vector<float> logs(call.k.rows + 1);
    for (size_t n = 0; n < logs.size(); n++) logs[n] = static_cast<float>(std::log(double(n)));
    int64_t share = call.share(), batch = std::max<int64_t>(1, 512 / share) * share;
    std::vector<std::unique_ptr<NearWorker>> workers(std::max(1, call.threads));
    int64_t batches = (call.groups + batch - 1) / batch;
    parallel_for(call.k.batch * call.heads * batches, call.threads, [&](int64_t task, int who) {
        Meetings meetings{.rows = met, .bias = bias};
        if (!workers[who]) workers[who] = std::make_unique<NearWorker>(call, queries, faces, logs.data(), meetings);
        int64_t bh = task / batches, first = task % batches * batch;
        workers[who]->batch(bh / call.heads, bh % call.heads, first, std::min(batch, call.groups - first));
    });
}

}  // namespace coterie::COTERIE_ISA
