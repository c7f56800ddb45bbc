// The rows that k-means starts from and trains on.
#pragma once

#include <algorithm>
#include <vector>

#include "draws.h"

namespace coterie {

// One rank from each of `used` equal spans of [0, n), and what the formula gives for the rest of `spans`.
inline std::vector<int64_t> one_of_each_span(const Draws& draws, Stream stream, int64_t head, int64_t n, int64_t spans,
                                             int64_t used) {
    std::vector<int64_t> ranks(spans, 0);
    used = std::max<int64_t>(1, used);
    for (int64_t s = 0; s < spans && n; s++) {
        int64_t first = s * n / used, size = std::max<int64_t>(1, (s + 1) * n / used - first);
        auto within = static_cast<int64_t>(draws.uniform(stream, 0, head, s) * double(size));
        ranks[s] = std::min(first + within, n - 1);
    }
    return ranks;
}

}  // namespace coterie
