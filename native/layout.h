// Where tokens are: lists of the real ones, and pieces of equal size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace coterie {

// The real tokens of one sample.
struct Real {
    std::vector<int32_t> before;  // each token: how many real ones come before it; and behind the last, all of them

    Real(const uint8_t* mask, int64_t length) : before(length + 1) {
        for (int64_t i = 0; i < length; i++) before[i + 1] = before[i] + (mask[i] != 0);
    }
    int64_t count() const { return before.back(); }
    int64_t length() const { return static_cast<int64_t>(before.size()) - 1; }
    bool at(int64_t i) const { return before[i] != before[i + 1]; }

    // The real ones first, in order, then the others.
    void list(int32_t* order) const {
        for (int64_t i = 0; i < length(); i++)
            order[at(i) ? int64_t{before[i]} : count() + i - before[i]] = static_cast<int32_t>(i);
    }
};

// Where the i-th of `pieces` parts of `count` things begins; they differ by at most one, and those behind are empty.
inline int64_t balanced(int64_t i, int64_t count, int64_t pieces) {
    return std::min(i, pieces) * count / std::max<int64_t>(1, pieces);
}

// How many clusters n tokens have: √(share·n), or `clusters` to every `tokens` of them, or `room`; and `room` at most.
struct Count {
    int64_t share, clusters, tokens, room;

    int64_t of(int64_t n) const {
        if (share) return std::clamp<int64_t>(std::llround(std::ceil(std::sqrt(double(share) * double(n)))), 1, room);
        if (tokens) return std::clamp<int64_t>((n * clusters + tokens - 1) / tokens, 1, room);
        return room;
    }
};

}  // namespace coterie
