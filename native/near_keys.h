// The best keys of small groups of queries: several groups search together, in the clusters whose means or outliers one
// of them likes best, and each picks its own keys there.
#pragma once

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "near_faces.h"

namespace coterie::COTERIE_ISA {

inline int64_t count_at_least(const float* x, int64_t padded_size, float limit) {
    int64_t total = 0, j = 0;
    for (; j + 4 * kLanes <= padded_size; j += 4 * kLanes) {
        uint64_t first = at_least(load(x + j), limit) | at_least(load(x + j + kLanes), limit) << kLanes;
        uint64_t second = at_least(load(x + j + 2 * kLanes), limit) | at_least(load(x + j + 3 * kLanes), limit)
                                                                          << kLanes;
        total += std::popcount(first | second << 32);
    }
    for (; j < padded_size; j += kLanes) total += std::popcount(at_least(load(x + j), limit));
    return total;
}

// A limit that n of many numbers reach, or a few more where numbers are equal; NaN if there is none. It is looked for
// near `hint` first, and then `step` away from it, twice as much, and so on.
inline float limit_of(const float* x, int64_t padded_size, int64_t n, float hint, float step) {
    float low = hint, high = hint, middle = hint;
    bool below = false, above = false;
    for (int tries = 0; tries < 256; tries++) {
        int64_t reached = count_at_least(x, padded_size, middle);
        if (reached == n) return middle;
        (reached > n ? low : high) = middle;
        (reached > n ? below : above) = true;
        if (below && above) {
            middle = low + (high - low) / 2;
            if (!(middle > low && middle < high)) return low;
        } else {
            middle += below ? step : -step;
            step *= 2;
        }
    }
    return NAN;
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

// The clusters that the groups of a chunk see.
struct View {
    const int32_t* clusters = nullptr;
    int64_t seen = 0;
    int64_t total = 0;  // of the keys in them
    std::vector<int32_t> sizes{};

    void look(const NearHead& head, int64_t chunk) {
        const NearCall& call = head.call;
        int64_t at = head.keys.batch * call.chunks + chunk;
        seen = call.seen[at];
        clusters = call.visible + at * call.width;
        const int32_t* start = call.clusters.start.at(head.keys.batch, head.keys.head);
        const int32_t* stop = call.clusters.stop.at(head.keys.batch, head.keys.head);
        sizes.resize(seen);
        total = 0;
        for (int64_t slot = 0; slot < seen; slot++) total += sizes[slot] = stop[clusters[slot]] - start[clusters[slot]];
    }
};

// Groups first … last of a chunk, which search together.
struct Party {
    int64_t chunk, first, last;

    int64_t groups() const { return last - first; }
};

// The search parties of a sample.
inline std::vector<Party> parties_of(const NearCall& call, int64_t b) {
    std::vector<Party> found;
    for (int64_t chunk = 0; chunk < call.chunks; chunk++) {
        int64_t used = call.used[b * call.chunks + chunk];
        for (int64_t first = 0; first < used; first += call.together[b])
            found.push_back({chunk, first, std::min(used, first + call.together[b])});
    }
    return found;
}

// Which clusters each party of a batch searches, and the float32 products of its groups with their keys.
struct Searches {
    struct Search {
        int32_t party, slot, cluster, size;
        int64_t at;  // of the cluster's keys among those of the party
    };
    struct Span {
        int64_t first, last;  // of a party's searches
        int64_t keys;  // that it searches
        int64_t row, groups;  // its groups in the batch
        int64_t begin;  // of its scores: a row of padded(keys) for each group, those behind the keys −inf

        int64_t scores(int64_t group) const { return begin + group * padded(keys); }
    };
    std::vector<Search> all{};
    std::vector<Span> parties{};
    std::vector<float> scores{};

    void clear() {
        all.clear();
        parties.clear();
    }
    int64_t room() const { return parties.empty() ? 0 : parties.back().scores(parties.back().groups); }
    void add_party(int64_t groups) {
        auto first = static_cast<int64_t>(all.size());
        int64_t row = parties.empty() ? 0 : parties.back().row + parties.back().groups;
        parties.push_back({.first = first, .last = first, .keys = 0, .row = row, .groups = groups, .begin = room()});
    }
    // For the last party.
    void add(int64_t slot, int32_t cluster, int32_t size) {
        Span& mine = parties.back();
        all.push_back({
            .party = static_cast<int32_t>(parties.size() - 1),
            .slot = static_cast<int32_t>(slot),
            .cluster = cluster,
            .size = size,
            .at = mine.keys,
        });
        mine.keys += size;
        mine.last++;
    }
};

// Which of the clusters in view a party likes best. A group likes a cluster by the larger product with its mean or its
// outlier, less the largest that the group has with any; and a party likes it as much as one of its groups.
class Ranking {
public:
    // How much the groups of some parties of a chunk like the clusters that they see, in float32: (visible × groups).
    void like(const NearHead& head, const View& view, const float* queries, int64_t groups) {
        int64_t dim = head.call.k.dim, seen = view.seen;
        lanes_ = padded(groups);
        panels_.resize(lanes_ * dim);
        rows_.resize(std::max(groups, 2 * seen));
        for (int64_t each = 0; each < groups; each++) rows_[each] = queries + each * dim;
        transpose_to_panels(rows_.data(), groups, dim, panels_.data());
        for (int64_t j = 0; j < 2 * seen; j++)
            rows_[j] = head.faces.rough.data() + (head.face(view.clusters[j / 2]) * 2 + j % 2) * dim;
        likes_.resize(2 * seen * lanes_);
        multiply(2 * seen, groups, dim, Scattered{rows_.data()}, panels_.data(), dim, likes_.data(), lanes_);
        best_.assign(lanes_, -INFINITY);
        for (int64_t j = 0; j < seen; j++) {
            const float *mean = likes_.data() + 2 * j * lanes_, *outlier = mean + lanes_;
            bool empty = !view.sizes[j];
            for (int64_t lane = 0; lane < lanes_; lane += kLanes) {
                Vec each = max(load(mean + lane), load(outlier + lane));
                store(likes_.data() + j * lanes_ + lane, each);
                if (!empty) store(best_.data() + lane, max(each, load(best_.data() + lane)));
            }
        }
    }

    // Rank the clusters of the party of groups `lane` … until the best hold `reach` keys; returns how many those are.
    int64_t rank(NearHead& head, const View& view, const double* queries, int64_t lane, int64_t groups) {
        ranked_.clear();
        float slack = 0;
        for (int64_t g = 0; g < groups; g++) slack = std::max(slack, 2 * head.slack(queries + g * head.call.k.dim));
        for (int64_t slot = 0; slot < view.seen; slot++) {
            if (!view.sizes[slot]) continue;
            float top = -INFINITY;
            for (int64_t g = lane; g < lane + groups; g++) top = std::max(top, likes_[slot * lanes_ + g] - best_[g]);
            ranked_.emplace_back(top, slot);
        }
        auto [count, sure] = best(view, head.call.reach, slack);
        if (sure) return count;
        judge(head, view, queries, groups);
        return best(view, head.call.reach, 0).first;
    }

    // The slot of the i-th best cluster.
    int64_t slot(int64_t i) const { return ranked_[ranked_.size() - 1 - i].second; }

private:
    // In float64.
    void judge(NearHead& head, const View& view, const double* queries, int64_t groups) {
        int64_t dim = head.call.k.dim;
        std::vector<double> likes(ranked_.size());
        for (auto& each : ranked_) each.first = -INFINITY;
        for (int64_t g = 0; g < groups; g++) {
            const double* query = queries + g * dim;
            double top = -INFINITY;
            for (size_t i = 0; i < ranked_.size(); i++) {
                int64_t face = head.face(view.clusters[ranked_[i].second]);
                const double* mean = head.faces.means.data() + face * dim;
                likes[i] = std::max(dot(query, mean, dim), head.product(query, head.faces.outliers[face]));
                top = std::max(top, likes[i]);
            }
            for (size_t i = 0; i < ranked_.size(); i++)
                ranked_[i].first = std::max(ranked_[i].first, comparable(likes[i] - top));
        }
    }

    // How many of the best clusters hold `reach` keys, and whether float32 leaves no doubt. They come last, best last.
    std::pair<int64_t, bool> best(const View& view, int64_t reach, float slack) {
        auto worse = [](const Scored& x, const Scored& y) {
            return x.first < y.first || (x.first == y.first && x.second > y.second);
        };
        std::make_heap(ranked_.begin(), ranked_.end(), worse);
        auto last = ranked_.end();
        for (int64_t held = 0; last != ranked_.begin() && held < reach; held += view.sizes[last->second])
            std::pop_heap(ranked_.begin(), last--, worse);
        bool sure = last == ranked_.begin() || ranked_.front().first < last->first - slack;
        if (ranked_.end() - last > 1) sure = sure && (last + 1)->first > last->first + slack;
        return {ranked_.end() - last, sure && std::isfinite(slack)};
    }

    int64_t lanes_ = 0;
    std::vector<float> panels_, likes_, best_;
    std::vector<const float*> rows_;
    std::vector<Scored> ranked_;
};

// The float32 products of every group with the keys that its party searches: a cluster is read once for all of them.
class Products {
public:
    explicit Products(int64_t dim)
        : panels_(kKeyBlock * dim),
          wide_(kKeyBlock * dim),
          block_(kRowBlock * kKeyBlock),
          keys_(kKeyBlock),
          queries_(kRowBlock),
          scores_(kRowBlock) {}

    // `queries`: those of all groups of the batch.
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
        for (const auto& party : searches.parties)
            for (int64_t g = 0; g < party.groups; g++)
                std::fill(searches.scores.begin() + party.scores(g) + party.keys,
                          searches.scores.begin() + party.scores(g + 1), -INFINITY);
    }

private:
    // One cluster with the parties of the searches which[0 … count).
    void multiply_cluster(const NearHead& head, const float* queries, const int32_t* which, int64_t count,
                          Searches& searches) {
        int64_t size = searches.all[which[0]].size, dim = head.call.k.dim;
        const int32_t* keys = head.members(searches.all[which[0]].cluster);
        for (int64_t at = 0; at < size; at += kKeyBlock) {
            breathe();
            here_ = std::min(kKeyBlock, size - at);
            for (int64_t j = 0; j < here_; j++)
                keys_[j] = fetch(head.call.k, head.keys.batch, head.keys.head, keys[at + j], wide_ + j * dim);
            transpose_to_panels(keys_.data(), here_, dim, panels_);
            rows_ = 0;
            for (int64_t i = 0; i < count; i++) {
                const auto& search = searches.all[which[i]];
                const auto& party = searches.parties[search.party];
                for (int64_t g = 0; g < party.groups; g++) {
                    queries_[rows_] = queries + (party.row + g) * dim;
                    scores_[rows_] = searches.scores.data() + party.scores(g) + search.at + at;
                    if (++rows_ == kRowBlock) flush(dim);
                }
            }
            flush(dim);
        }
    }

    void flush(int64_t dim) {
        multiply(rows_, here_, dim, Scattered{queries_.data()}, panels_, dim, block_, kKeyBlock);
        for (int64_t i = 0; i < rows_; i++) std::copy_n(block_ + i * kKeyBlock, here_, scores_[i]);
        rows_ = 0;
    }

    Buffer panels_, wide_, block_;
    std::vector<const float*> keys_, queries_;
    std::vector<float*> scores_;
    int64_t rows_ = 0, here_ = 0;
};

// Keys that a party searches, each with the slot of its cluster.
struct Keys {
    std::vector<int32_t> keys{}, slots{};

    int64_t size() const { return static_cast<int64_t>(keys.size()); }
    void clear() {
        keys.clear();
        slots.clear();
    }
    void add(const int32_t* some, int64_t count, int32_t slot) {
        keys.insert(keys.end(), some, some + count);
        slots.insert(slots.end(), count, slot);
    }
};

// The best of some keys by their products with a query: in float32, and again in float64 where that is too close.
class Chooser {
public:
    // Which `wanted` of these are best. `scores`: float32 products, with −inf up to a multiple of kLanes.
    const std::vector<int32_t>& choose(NearHead& head, const Keys& from, const float* scores, const double* query,
                                       int64_t wanted) {
        auto n = from.size();
        if (wanted >= n) {
            sure_.resize(n);
            for (int64_t j = 0; j < n; j++) sure_[j] = static_cast<int32_t>(j);
            return sure_;
        }
        divide(scores, n, wanted, head.slack(query));
        int64_t rest = wanted - static_cast<int64_t>(sure_.size());
        if (static_cast<int64_t>(close_.size()) > rest) judge(head, from, query, rest);
        for (int64_t i = 0; i < rest; i++) sure_.push_back(static_cast<int32_t>(close_[i].second));
        return sure_;
    }

    // Forget the groups before: what they were must not matter for the order of what is chosen.
    void restart() {
        hint_ = 0;
        step_ = 1;
    }

private:
    // Those that are surely among the `wanted` best, and those that float32 cannot tell from the last of them.
    void divide(const float* scores, int64_t n, int64_t wanted, float slack) {
        int64_t stride = padded(n);
        float last = std::isfinite(slack) ? limit_of(scores, stride, wanted, hint_, step_) : NAN;
        if (std::isfinite(last)) {
            step_ = std::max(std::fabs(last - hint_), slack);
            hint_ = last;
        }
        close_.clear();
        sure_.clear();
        if (std::isfinite(last))
            for (int64_t j = 0; j < stride; j += kLanes)
                for (uint32_t high = at_least(load(scores + j), last - slack); high; high &= high - 1) {
                    int64_t at = j + std::countr_zero(high);
                    if (scores[at] > last + slack)
                        sure_.push_back(static_cast<int32_t>(at));
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
    void judge(NearHead& head, const Keys& from, const double* query, int64_t rest) {
        for (auto& [score, j] : close_) score = comparable(head.product(query, from.keys[j]));
        auto better = [&](const Scored& x, const Scored& y) {
            return x.first > y.first || (x.first == y.first && from.keys[x.second] < from.keys[y.second]);
        };
        std::nth_element(close_.begin(), close_.begin() + rest, close_.end(), better);
    }

    std::vector<int32_t> sure_;
    std::vector<Scored> close_;
    float hint_ = 0, step_ = 1;  // the limit of the group before, which is a similar one, and how far it moved
};

// Some search parties of one head. They say which clusters they search; then each cluster is multiplied with all groups
// that search it; then each group picks.
class NearWorker {
public:
    NearWorker(const NearCall& call, const double* queries, const Faces& faces, const Picks& picks)
        : call_(call),
          queries_(queries),
          picks_(picks),
          head_{.call = call, .faces = faces, .keys = {.rows = call.k}},
          products_(call.k.dim) {}

    static constexpr int64_t kParties = 4;  // at a time, so that their scores stay in the cache

    void batch(int64_t b, int64_t h, const Party* parties, int64_t count) {
        head_.keys.batch = b;
        head_.keys.head = h / (call_.heads / call_.k.heads);
        first_group_ = (b * call_.heads + h) * call_.groups;
        chooser_.restart();
        if (call_.near) search(parties, count);
        for (int64_t p = 0; p < count; p++) {
            breathe();
            view_.look(head_, parties[p].chunk);
            keys_.clear();
            if (call_.near) list(searches_.parties[p]);
            for (int64_t g = 0; g < parties[p].groups(); g++) meet(parties[p], p, g);
        }
    }

private:
    int64_t group_at(const Party& party, int64_t g) const {
        return first_group_ + party.chunk * call_.share() + party.first + g;
    }
    const double* query_of(const Party& party, int64_t g) const { return queries_ + group_at(party, g) * call_.k.dim; }

    void search(const Party* parties, int64_t count) {
        int64_t dim = call_.k.dim;
        rough_.clear();
        for (int64_t p = 0; p < count; p++)
            rough_.insert(rough_.end(), query_of(parties[p], 0), query_of(parties[p], parties[p].groups()));
        searches_.clear();
        for (int64_t p = 0, same, row = 0; p < count; p += same) {
            breathe();
            int64_t groups = 0;
            for (same = 0; p + same < count && parties[p + same].chunk == parties[p].chunk; same++)
                groups += parties[p + same].groups();
            view_.look(head_, parties[p].chunk);
            bool all = view_.total <= call_.reach;
            if (!all) ranking_.like(head_, view_, rough_.data() + row * dim, groups);
            for (int64_t each = p, lane = 0; each < p + same; lane += parties[each++].groups())
                choose(parties[each], lane, all);
            row += groups;
        }
        products_.score(head_, rough_.data(), searches_);
    }

    // The best clusters of a party, until they hold `reach` keys, or all that it sees.
    void choose(const Party& party, int64_t lane, bool all) {
        searches_.add_party(party.groups());
        auto add = [&](int64_t slot) { searches_.add(slot, view_.clusters[slot], view_.sizes[slot]); };
        if (all) {
            for (int64_t slot = 0; slot < view_.seen; slot++)
                if (view_.sizes[slot]) add(slot);
            return;
        }
        int64_t best = ranking_.rank(head_, view_, query_of(party, 0), lane, party.groups());
        for (int64_t i = 0; i < best; i++) add(ranking_.slot(i));
    }

    // The keys that a party searches.
    void list(const Searches::Span& span) {
        for (int64_t i = span.first; i < span.last; i++) {
            const auto& search = searches_.all[i];
            keys_.add(head_.members(search.cluster), search.size, search.slot);
        }
    }

    void meet(const Party& party, int64_t p, int64_t g) {
        static const std::vector<int32_t> nobody;
        const float* scores = call_.near ? searches_.scores.data() + searches_.parties[p].scores(g) : nullptr;
        write(scores ? chooser_.choose(head_, keys_, scores, query_of(party, g), call_.near) : nobody,
              group_at(party, g));
    }

    void write(const std::vector<int32_t>& chosen, int64_t group) {
        int32_t* keys = picks_.keys + group * call_.near;
        for (size_t i = 0; i < chosen.size(); i++) keys[i] = keys_.keys[chosen[i]];
        if (picks_.wide)
            count(chosen, picks_.wide + group * call_.room);
        else
            count(chosen, picks_.narrow + group * call_.room);
    }

    template <class T>
    void count(const std::vector<int32_t>& chosen, T* left) const {
        for (int64_t slot = 0; slot < view_.seen; slot++) left[slot] = static_cast<T>(view_.sizes[slot]);
        std::fill(left + view_.seen, left + call_.room, T{1});
        for (int32_t j : chosen) left[keys_.slots[j]]--;
    }

    const NearCall& call_;
    const double* queries_;  // (batch, heads, groups, dim)
    Picks picks_;
    int64_t first_group_ = 0;  // of the head
    std::vector<float> rough_;  // the batch's queries
    NearHead head_;
    View view_;
    Ranking ranking_;
    Searches searches_;
    Products products_;
    Chooser chooser_;
    Keys keys_;
};

// The near keys of each group, and how many keys it leaves of each cluster that it sees.
inline void near_keys(const NearCall& call, const double* queries, const Picks& picks) {
    int64_t heads = call.k.batch * call.heads, left = call.groups * call.room;
    parallel_for(heads, call.threads, [&](int64_t bh, int) {
        std::fill_n(picks.keys + bh * call.groups * call.near, call.groups * call.near, 0);
        if (picks.wide)
            std::fill_n(picks.wide + bh * left, left, 0);
        else
            std::fill_n(picks.narrow + bh * left, left, int16_t{0});
    });
    if (!call.groups) return;
    Faces faces(call);
    std::vector<std::vector<Party>> parties;
    int64_t batches = 0;
    for (int64_t b = 0; b < call.k.batch; b++) {
        parties.push_back(parties_of(call, b));
        batches = std::max(batches,
                           (static_cast<int64_t>(parties[b].size()) + NearWorker::kParties - 1) / NearWorker::kParties);
    }
    std::vector<std::unique_ptr<NearWorker>> workers(std::max(1, call.threads));
    parallel_for(heads * batches, call.threads, [&](int64_t task, int who) {
        int64_t bh = task / batches, first = task % batches * NearWorker::kParties;
        const auto& mine = parties[bh / call.heads];
        int64_t count = std::min(NearWorker::kParties, static_cast<int64_t>(mine.size()) - first);
        if (count <= 0) return;
        if (!workers[who]) workers[who] = std::make_unique<NearWorker>(call, queries, faces, picks);
        workers[who]->batch(bh / call.heads, bh % call.heads, mine.data() + first, count);
    });
}

}  // namespace coterie::COTERIE_ISA
