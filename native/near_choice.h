// The best of many numbers.
#pragma once

#include <bit>
#include <cfloat>
#include <span>
#include <vector>

#include "places.h"
#include "rows.h"

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

// A limit that `least` … `most` of many numbers reach, or more where numbers are equal; at least `least` must be
// finite. It is looked for at `limit` first, and then as if twice as many were reached `doubling` below.
inline float limit_of(const float* x, int64_t padded_size, int64_t least, int64_t most, float limit, float doubling) {
    float low = limit, high = limit;
    int64_t at_low = 0, at_high = 0;
    bool below = false, above = false;
    for (int tries = 1;; tries++) {
        int64_t reached = count_at_least(x, padded_size, limit);
        if (reached >= least && reached <= most) return limit;
        (reached > most ? low : high) = limit;
        (reached > most ? at_low : at_high) = reached;
        (reached > most ? below : above) = true;
        if (!(below && above)) {
            if (limit == (reached > most ? FLT_MAX : -FLT_MAX)) return limit;  // all of these are equal
            float step = doubling * std::min(4.0f, 2 * float(reached) / float(least + most) - 1);
            limit = std::clamp(limit + step, -FLT_MAX, FLT_MAX);  // −inf, which is nobody, must not reach it
            doubling *= 2;
            continue;
        }
        float share = float(2 * at_low - least - most) / float(2 * (at_low - at_high));
        limit = tries < 8 ? low + (high - low) * share : low;
        if (!(limit > low && limit < high)) limit = low / 2 + high / 2;
        if (!(limit > low && limit < high)) return low;
    }
}

// Chooses the largest of many numbers, and of equal ones those that stand for the keys with the lowest index. It is
// quick if they are like those that it chose from before, but those do not matter otherwise.
class Chooser {
public:
    // `scores`: −inf up to a multiple of kLanes and where there is no key; `held` are finite. Returns places.
    std::span<const int32_t> choose(const float* scores, int64_t padded_size, const int32_t* keys, int64_t held,
                                    int64_t wanted) {
        float loose = std::max(hint_, -FLT_MAX);
        int64_t some = collect(scores, padded_size, loose, some_);
        if (some < wanted || some > kLoose * wanted) {
            loose = limit_of(scores, padded_size, wanted, 2 * wanted, loose, doubling_);
            some = collect(scores, padded_size, loose, some_);
        }
        int64_t count = padded(some);
        float likely = loose + doubling_ * std::min(4.0f, float(some) / float(wanted) - 1);
        likely = std::clamp(likely, -FLT_MAX, FLT_MAX);
        if (static_cast<int64_t>(scores_.size()) < count) scores_.resize(count);
        for (int64_t i = 0; i < some; i++) scores_[i] = scores[some_[i]];
        std::fill(scores_.begin() + some, scores_.begin() + count, -INFINITY);
        float limit = limit_of(scores_.data(), count, wanted, wanted, likely, doubling_);
        // Where all are collected, `loose` may be far below them, and says nothing.
        if (some > wanted && some < held)
            doubling_ = std::max(
                1e-30f, std::min(kWidest, limit - loose) * std::min(4.0f, float(wanted) / float(some - wanted)));
        hint_ = limit - 1.25f * doubling_;
        int64_t found = collect(scores_.data(), count, limit, chosen_);
        for (int64_t i = 0; i < found; i++) chosen_[i] = some_[chosen_[i]];
        if (found > wanted) prefer_low(scores, limit, keys, wanted, found);
        return {chosen_.data(), static_cast<size_t>(wanted)};
    }

private:
    static constexpr float kWidest = 1e37f;  // no sum with it becomes NaN, after which no limit would be right
    static constexpr int64_t kLoose = 8;  // times as many are as quickly looked through as all of them once more

    // Write the places of those that reach the limit; returns how many they are.
    static int64_t collect(const float* x, int64_t padded_size, float limit, std::vector<int32_t>& places) {
        if (static_cast<int64_t>(places.size()) < padded_size) places.resize(padded_size);
        return places_at_least(x, padded_size, limit, places.data());
    }

    // More were found than are wanted, since some are equal to the limit: bring those with the lowest keys forward.
    void prefer_low(const float* scores, float limit, const int32_t* keys, int64_t wanted, int64_t found) {
        auto end = chosen_.begin() + found;
        auto equal = std::partition(chosen_.begin(), end, [&](int32_t x) { return scores[x] > limit; });
        std::nth_element(equal, chosen_.begin() + wanted, end, [&](int32_t x, int32_t y) { return keys[x] < keys[y]; });
    }

    std::vector<int32_t> some_, chosen_;
    std::vector<float> scores_;
    float hint_ = 0, doubling_ = 1;  // where limits are looked for
};

}  // namespace coterie::COTERIE_ISA
