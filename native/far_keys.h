// The finished keys that a new query may pick from, worked out once for all heads that share a key head.
#pragma once

#include <numeric>

#include "codes.h"
#include "few_queries.h"
#include "tree.h"

namespace coterie::COTERIE_ISA {

// A query as floats, followed by 0 up to a multiple of kLanes.
inline void read_query(const DecodeCall& call, int64_t b, int64_t h, int64_t i, float* to) {
    read_row(call.q.row(b, h, i), call.q.kind, call.q.dim, to);
    std::fill(to + call.q.dim, to + padded(call.q.dim), 0.0f);
}

class FarKeys {
public:
    int64_t begin = 0;  // how many keys come before those that are met exactly
    int64_t held = 0;  // keys that may be picked, in slots: cluster after cluster
    int64_t seen = 0;  // clusters that are met through their means: the first ones of all
    std::vector<int32_t> sizes{};  // of all clusters that were looked at
    std::vector<const int16_t*> values{};  // the mean values of those that are seen
    std::vector<float> value_steps{};
    struct Held {
        int32_t node;  // which of all clusters
        int32_t first_place, slot;
    };
    std::vector<Held> chosen{};  // the clusters whose keys are held
    std::vector<int32_t> ranks{};  // of a slot, among the real keys

    // The score of a cluster's mean key, for one of the heads.
    float like(int64_t node, int64_t sharer) const { return likes_[node * share_ + sharer]; }
    int32_t seen_of(int32_t slot) const {
        auto after = [](int32_t slot, const Held& each) { return slot < each.slot; };
        return nodes_[(std::upper_bound(chosen.begin(), chosen.end(), slot, after) - 1)->node].seen;
    }

    void look(const DecodeCall& call, int64_t b, int64_t head, int64_t i) {
        int64_t rank = call.rank[b * call.q.rows + i];
        if (rank < 0) return;
        begin = rank + 1 < call.least ? 0 : std::max<int64_t>(0, rank / call.chunk - 1) * call.chunk;
        int64_t far = std::max<int64_t>(0, begin - call.sinks);
        if (far > call.places)
            throw Malformed("rank: expected finished chunks before the previous one, got too few of them");
        if (!far) return;
        const Tree tree(call, b * call.k.heads + head);
        share_ = call.q.heads / call.k.heads;
        queries_.resize(share_ * padded(call.k.dim));
        for (int64_t h = 0; h < share_; h++)
            read_query(call, b, head * share_ + h, i, queries_.data() + h * padded(call.k.dim));
        tree.see(begin / call.chunk, nodes_);
        const int32_t* offsets = call.offsets + (b * call.k.heads + head) * (call.clusters + 1);
        if (offsets[0] != 0 || offsets[begin / call.chunk * call.per] != far)
            throw Malformed("offsets: expected those of all keys");
        seen = static_cast<int64_t>(nodes_.size());
        like_more(call, tree);
        for (int64_t at = 0; at < seen; at++) {
            values.push_back(tree.mean_value(nodes_[at]));
            value_steps.push_back(tree.value_step(nodes_[at]));
        }
        if (!call.near) return;
        search(call, tree);
        hold(call, tree, far, b * call.k.heads + head);
    }

private:
    static constexpr int64_t kBlock = 64;
    static constexpr int64_t kAhead = 8;  // means that are asked for before they are read, as they lie anywhere

    // The chunks' own clusters that are liked best, from the top: of each level, clusters are opened that hold `wider`
    // times as many keys as are looked at.
    void search(const DecodeCall& call, const Tree& tree) {
        for (int32_t at = 0; at < seen; at++)
            if (sizes[at]) front_.push_back(at);
        for (int32_t level = nodes_[0].level; level > 0; level--) {
            choose(call.wider > INT64_MAX / call.reach ? INT64_MAX : call.wider * call.reach);
            opened_.clear();
            for (int32_t at : front_) {
                if (nodes_[at].level != level) {
                    opened_.push_back(at);
                    continue;
                }
                tree.open(Node(nodes_[at]), [&](const Node& inside) {
                    if (!tree.size(inside)) return;
                    opened_.push_back(static_cast<int32_t>(nodes_.size()));
                    nodes_.push_back(inside);
                });
            }
            front_.swap(opened_);
            like_more(call, tree);
        }
        choose(call.reach);
    }

    // The sizes of the clusters that are new, and the scores of their means, which are read once for all heads.
    void like_more(const DecodeCall& call, const Tree& tree) {
        const int64_t wide = padded(call.k.dim), count = static_cast<int64_t>(nodes_.size());
        int64_t done = static_cast<int64_t>(sizes.size());
        likes_.resize(count * share_);
        rows_.resize(kBlock * wide);
        scores_.resize(share_ * kBlock);
        block_.resize(kBlock);
        for (int64_t j = 0; j < kBlock; j++) block_[j] = rows_.data() + j * wide;
        Prefetch none;
        for (; done < count; done += kBlock) {
            breathe();
            int64_t here = std::min(kBlock, count - done);
            for (int64_t j = 0; j < here; j++) {
                if (done + j + kAhead < count) touch(tree.mean_key(nodes_[done + j + kAhead]), 2 * wide);
                const int16_t* mean = tree.mean_key(nodes_[done + j]);
                for (int64_t d = 0; d < wide; d += kLanes) store(rows_.data() + j * wide + d, load_shorts(mean + d));
                sizes.push_back(tree.size(nodes_[done + j]));
            }
            for (int64_t h = 0; h < share_;) {
                auto few = [&](auto some) {
                    few_dots<some>(queries_.data() + h * wide, block_.data(), here, wide, call.scale,
                                   scores_.data() + h * kBlock, kBlock, none);
                    h += some;
                };
                if (share_ - h >= 3)
                    few(std::integral_constant<int, 3>());
                else
                    few(std::integral_constant<int, 1>());
            }
            for (int64_t j = 0; j < here; j++) {
                float step = tree.key_step(nodes_[done + j]);
                for (int64_t h = 0; h < share_; h++) likes_[(done + j) * share_ + h] = scores_[h * kBlock + j] * step;
            }
        }
    }

    // Of `front_`, those that one of the heads likes best, until they hold enough keys.
    void choose(int64_t enough) {
        int64_t all = 0;
        for (int32_t at : front_) all += sizes[at];
        if (all <= enough) return;
        const auto count = static_cast<int32_t>(front_.size());
        std::vector<float> best(count, -INFINITY);
        for (int64_t h = 0; h < share_; h++) {
            auto finite = [&](int32_t at) { return std::isfinite(like(at, h)) ? like(at, h) : 0; };
            float most = -INFINITY;
            for (int32_t at : front_) most = std::max(most, finite(at));
            for (int32_t i = 0; i < count; i++) best[i] = std::max(best[i], finite(front_[i]) - most);
        }
        auto better = [&](int32_t x, int32_t y) { return best[x] != best[y] ? best[x] > best[y] : x < y; };
        order_.resize(count);
        std::iota(order_.begin(), order_.end(), 0);
        // The first `low` of them in order do not hold enough, as they hold `found`; the first `high` do.
        int64_t low = 0, high = count, found = 0;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2, more = 0;
            auto first = order_.begin() + low, cut = order_.begin() + middle;
            std::nth_element(first, cut, order_.begin() + high, better);
            for (auto each = first; each < cut; each++) more += sizes[front_[*each]];
            if (found + more < enough)
                found += more, low = middle;
            else
                high = middle;
        }
        for (int64_t i = high; i < count; i++) front_[order_[i]] = -1;
        std::erase(front_, -1);
    }

    void hold(const DecodeCall& call, const Tree& tree, int64_t far, int64_t bh) {
        for (int32_t at : front_) {
            chosen.push_back({at, tree.places(nodes_[at]).first, static_cast<int32_t>(held)});
            const int64_t place = bh * call.places + chosen.back().first_place;
            if (call.narrow)
                touch(call.narrow + place, sizes[at]);
            else
                touch(call.wide + place, 4 * sizes[at]);
            held += sizes[at];
            if (held > far) throw Malformed("offsets: expected each key once");
        }
        ranks.resize(held);
        int32_t* to = ranks.data();
        for (const Held& each : chosen) {
            auto start = static_cast<int32_t>(nodes_[each.node].block * call.chunk);
            for (int64_t place = each.first_place; place < each.first_place + sizes[each.node]; place++) {
                int64_t at = bh * call.places + place;
                int32_t within = call.narrow ? call.narrow[at] : call.wide[at];
                if (within < 0 || within >= call.chunk)
                    throw Malformed("order: expected places in a chunk, got others");
                *to++ = start + within;
            }
        }
    }

    int64_t share_ = 1;
    std::vector<Node> nodes_{};  // all clusters that were looked at
    std::vector<float> likes_{};  // (all of them, share)
    std::vector<int32_t> front_{}, opened_{}, order_{};
    std::vector<float> queries_{}, rows_{}, scores_{};
    std::vector<const float*> block_{};
};

}  // namespace coterie::COTERIE_ISA
