// The finished keys that a new query may pick from, worked out once for all heads that share a key head.
#pragma once

#include "codes.h"
#include "few_queries.h"

namespace coterie::COTERIE_ISA {

// A query as floats, followed by 0 up to a multiple of kLanes.
inline void read_query(const DecodeCall& call, int64_t b, int64_t h, int64_t i, float* to) {
    read_row(call.q.row(b, h, i), call.q.kind, call.q.dim, to);
    std::fill(to + call.q.dim, to + padded(call.q.dim), 0.0f);
}

struct FarKeys {
    int64_t begin = 0;  // how many keys come before those that are met exactly
    int64_t held = 0;  // keys that may be picked, in slots: cluster after cluster
    std::vector<int32_t> sizes{};  // of the finished clusters
    std::vector<float> likes{};  // (share, padded clusters): scores of their means
    std::vector<int32_t> chosen{};  // the clusters whose keys are held, in order
    std::vector<int32_t> first{};  // the slot of the first key of each
    std::vector<int32_t> ranks{};  // of a slot, among the real keys

    const float* likes_of(int64_t sharer) const { return likes.data() + sharer * padded(clusters()); }
    int64_t clusters() const { return static_cast<int64_t>(sizes.size()); }
    int32_t cluster_of(int32_t slot) const {
        return chosen[std::upper_bound(first.begin(), first.end(), slot) - first.begin() - 1];
    }

    void look(const DecodeCall& call, int64_t b, int64_t head, int64_t i) {
        int64_t rank = call.rank[b * call.q.rows + i];
        if (rank < 0) return;
        begin = rank + 1 < call.least ? 0 : std::max<int64_t>(0, rank / call.chunk - 1) * call.chunk;
        int64_t far = std::max<int64_t>(0, begin - call.sinks), count = far ? begin / call.chunk * call.per : 0;
        if (far > call.places || count > call.clusters)
            throw Malformed("rank: expected finished chunks before the previous one, got too few of them");
        if (!far) return;
        const int64_t bh = b * call.k.heads + head;
        const int32_t* offsets = call.offsets + bh * (call.clusters + 1);
        if (offsets[0] != 0 || offsets[count] != far) throw Malformed("offsets: expected those of all keys");
        sizes.resize(count);
        for (int64_t c = 0; c < count; c++) {
            sizes[c] = offsets[c + 1] - offsets[c];
            if (sizes[c] < 0) throw Malformed("offsets: expected ascending ones");
        }
        like(call, b, head, i);
        if (!call.near) return;
        for (int64_t c = 0; c < count; c++)
            if (sizes[c]) chosen.push_back(static_cast<int32_t>(c));
        if (far > call.reach) choose(call);
        for (int32_t c : chosen) {
            first.push_back(static_cast<int32_t>(held));
            held += sizes[c];
        }
        ranks.resize(held);
        int32_t* to = ranks.data();
        for (int32_t c : chosen) {
            auto start = static_cast<int32_t>(c / call.per * call.chunk);
            for (int64_t place = offsets[c]; place < offsets[c + 1]; place++) {
                int64_t at = bh * call.places + place;
                int32_t within = call.narrow ? call.narrow[at] : call.wide[at];
                if (within < 0 || within >= call.chunk)
                    throw Malformed("order: expected places in a chunk, got others");
                *to++ = start + within;
            }
        }
    }

private:
    static constexpr int64_t kBlock = 64;

    // The means are read once for all heads.
    void like(const DecodeCall& call, int64_t b, int64_t head, int64_t i) {
        const int64_t share = call.q.heads / call.k.heads, wide = padded(call.k.dim), step = padded(clusters());
        likes.resize(share * step);
        std::vector<float> queries(share * wide), rows(kBlock * wide);
        std::vector<const float*> block(kBlock);
        for (int64_t j = 0; j < kBlock; j++) block[j] = rows.data() + j * wide;
        for (int64_t h = 0; h < share; h++) read_query(call, b, head * share + h, i, queries.data() + h * wide);
        const int64_t from = (b * call.k.heads + head) * call.clusters;
        Prefetch none;
        for (int64_t c = 0; c < clusters(); c += kBlock) {
            breathe();
            int64_t here = std::min(kBlock, clusters() - c);
            const int16_t* means = call.mean_keys + (from + c) * wide;
            for (int64_t d = 0; d < here * wide; d += kLanes) store(rows.data() + d, load_shorts(means + d));
            for (int64_t h = 0; h < share;) {
                auto few = [&](auto some) {
                    few_dots<some>(queries.data() + h * wide, block.data(), here, wide, call.scale,
                                   likes.data() + h * step + c, step, none);
                    h += some;
                };
                if (share - h >= 3)
                    few(std::integral_constant<int, 3>());
                else
                    few(std::integral_constant<int, 1>());
            }
        }
        for (int64_t h = 0; h < share; h++)
            for (int64_t c = 0; c < clusters(); c++) likes[h * step + c] *= call.key_steps[from + c];
    }

    // Of `chosen`, those that one of the heads likes best, until they hold `reach` keys.
    void choose(const DecodeCall& call) {
        const int64_t share = call.q.heads / call.k.heads;
        std::vector<float> best(clusters(), -INFINITY);
        for (int64_t h = 0; h < share; h++) {
            const float* mine = likes_of(h);
            auto finite = [&](int32_t c) { return std::isfinite(mine[c]) ? mine[c] : 0; };
            float most = -INFINITY;
            for (int32_t c : chosen) most = std::max(most, finite(c));
            for (int32_t c : chosen) best[c] = std::max(best[c], finite(c) - most);
        }
        auto worse = [&](int32_t x, int32_t y) { return best[x] != best[y] ? best[x] < best[y] : x > y; };
        std::make_heap(chosen.begin(), chosen.end(), worse);
        auto rest = chosen.end();
        for (int64_t enough = 0; rest != chosen.begin() && enough < call.reach; enough += sizes[*rest])
            std::pop_heap(chosen.begin(), rest--, worse);
        chosen.erase(chosen.begin(), rest);
        std::sort(chosen.begin(), chosen.end());
    }
};

}  // namespace coterie::COTERIE_ISA
