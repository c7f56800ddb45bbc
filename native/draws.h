// Draws of tokens.
#pragma once

#include <algorithm>
#include <vector>

#include "philox.h"

namespace coterie {

// One rank from each of `used` equal spans of [0, n), and what the formula gives for the rest of `spans`.
inline std::vector<int64_t> one_of_each_span(Stream stream, int64_t n, int64_t spans, int64_t used, int64_t head,
                                             uint64_t seed, int64_t layer) {
    std::vector<int64_t> ranks(spans, 0);
    used = std::max<int64_t>(1, used);
    for (int64_t s = 0; s < spans && n; s++) {
        int64_t first = s * n / used, size = std::max<int64_t>(1, (s + 1) * n / used - first);
        auto within = static_cast<int64_t>(uniform(stream, 0, head, s, seed, layer) * double(size));
        ranks[s] = std::min(first + within, n - 1);
    }
    return ranks;
}

}  // namespace coterie
