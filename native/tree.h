// The clusters of a cache's finished chunks that a query sees, and those inside of them. `merged.py` says how chunks
// that are far away are merged: level 0 are the chunks, level l has blocks of 4^l of them.
#pragma once

#include "rows.h"

namespace coterie::COTERIE_ISA {

constexpr int64_t kTimes = 4;  // blocks that are one of the next level, as `TIMES` in Python

struct Node {
    int32_t level, block;
    int32_t which;  // of the clusters of its block
    int32_t seen;  // which of the clusters that the query sees it is, or is inside of
};

// How many blocks of a level stand for the first of so many chunks: the level below shows the rest.
inline int64_t blocks_of(int level, int64_t chunks, int64_t shown) {
    int64_t size = int64_t{1} << 2 * level;
    if (size > chunks) return 0;
    return std::max<int64_t>(0, chunks - shown * ((size - 1) / (kTimes - 1))) / size;
}

// Where a block is kept.
inline int64_t number_of(int level, int64_t block) {
    if (!level) return block;
    int64_t at = level - 1;
    for (int64_t last = ((block + 1) << 2 * level) - 1; last; last /= kTimes) at += last / kTimes;
    return at;
}

// The clusters of one key head of one sample.
class Tree {
public:
    Tree(const DecodeCall& call, int64_t bh)
        : call_(call), of_chunks_(bh * call.clusters), of_blocks_(bh * call.blocks * call.per), bh_(bh) {}

    // Those that a query sees behind so many chunks, those of the oldest keys first.
    void see(int64_t chunks, std::vector<Node>& nodes) const {
        int top = 0;
        while (blocks_of(top + 1, chunks, call_.shown)) top++;
        for (int level = top; level >= 0; level--) {
            int64_t first = kTimes * blocks_of(level + 1, chunks, call_.shown);
            int64_t stop = blocks_of(level, chunks, call_.shown);
            if (number_of(level, stop - 1) >= (level ? call_.blocks : call_.clusters / call_.per))
                throw Malformed("rank: expected finished chunks before the previous one, got too few of them");
            for (int64_t block = first; block < stop; block++)
                for (int64_t which = 0; which < call_.per; which++)
                    nodes.push_back({level, static_cast<int32_t>(block), static_cast<int32_t>(which),
                                     static_cast<int32_t>(nodes.size())});
        }
    }

    // What is inside of a cluster of a block.
    template <class Visit>
    void open(const Node& node, Visit visit) const {
        const int64_t inside = kTimes * call_.per;
        const int32_t* labels = call_.labels + (bh_ * call_.blocks + number_of(node.level, node.block)) * inside;
        for (int64_t i = 0; i < inside; i++)
            if (labels[i] == node.which)
                visit(Node{node.level - 1, static_cast<int32_t>(kTimes * node.block + i / call_.per),
                           static_cast<int32_t>(i % call_.per), node.seen});
    }

    // The places of the keys of a chunk's own cluster.
    std::pair<int32_t, int32_t> places(const Node& node) const {
        const int32_t* offsets = call_.offsets + bh_ * (call_.clusters + 1) + node.block * call_.per + node.which;
        if (offsets[0] < 0 || offsets[1] < offsets[0] || offsets[1] > call_.places)
            throw Malformed("offsets: expected ascending places, got others");
        return {offsets[0], offsets[1]};
    }

    int32_t size(const Node& node) const {
        if (!node.level) {
            auto [first, stop] = places(node);
            return stop - first;
        }
        int32_t size = call_.block_sizes[at(node)];
        if (size < 0) throw Malformed("block_sizes: expected at least 0, got less");
        return size;
    }

    const int16_t* mean_key(const Node& node) const {
        return (node.level ? call_.block_keys : call_.mean_keys) + at(node) * padded(call_.k.dim);
    }
    const int16_t* mean_value(const Node& node) const {
        return (node.level ? call_.block_values : call_.mean_values) + at(node) * padded(call_.v.dim);
    }
    float key_step(const Node& node) const { return (node.level ? call_.block_key_steps : call_.key_steps)[at(node)]; }
    float value_step(const Node& node) const {
        return (node.level ? call_.block_value_steps : call_.value_steps)[at(node)];
    }

private:
    int64_t at(const Node& node) const {
        return (node.level ? of_blocks_ : of_chunks_) + number_of(node.level, node.block) * call_.per + node.which;
    }

    const DecodeCall& call_;
    int64_t of_chunks_, of_blocks_, bh_;
};

}  // namespace coterie::COTERIE_ISA
