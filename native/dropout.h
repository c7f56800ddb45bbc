// Dropout's factors: a pure function of (seed, head, query row, key), as in coterie/engine/reference.py, so that the
// backward pass draws them again.
#pragma once

#include <cstdint>

#include "arrays.h"
#include "draws.h"
#include "words.h"

namespace coterie::COTERIE_ISA {

class Dropout {
public:
    explicit Dropout(const Call& call)
        : p(call.dropout_p),
          seed(call.seed),
          limit(p < 1.0 ? static_cast<uint32_t>(p * 4294967296.0) : 0),
          kept(p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f) {}

    bool any() const { return p > 0; }

    // Of one pair: 0 or 1 / (1 − p).
    float factor(int64_t bh, int64_t row, int64_t key) const {
        auto word = philox(static_cast<uint32_t>(key), static_cast<uint32_t>(row), static_cast<uint32_t>(bh), kDropout,
                           seed)[0];
        return word >= limit ? kept : 0.0f;
    }

    // Of a row's pairs with n keys; `factors` has room for whole vectors.
    void draw(int64_t bh, int64_t row, const int32_t* key, int64_t n, float* factors) const {
        int64_t whole = n - n % kLanes;
        for (int64_t j = 0; j < whole; j += kLanes) draw_lanes(bh, row, key + j, factors + j);
        if (whole == n) return;
        int32_t last[kLanes] = {};
        for (int64_t j = whole; j < n; j++) last[j - whole] = key[j];
        draw_lanes(bh, row, last, factors + whole);
    }

private:
    // Philox of `draws.h` with a key in each lane.
    void draw_lanes(int64_t bh, int64_t row, const int32_t* key, float* factors) const {
        Words c0 = load_words(key), c1 = splat_word(static_cast<uint32_t>(row));
        Words c2 = splat_word(static_cast<uint32_t>(bh)), c3 = splat_word(kDropout);
        auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
        for (int round = 0; round < kPhiloxRounds; round++) {
            Words high0, low0, high1, low1;
            multiply_words(c0, kPhiloxMultipliers[0], high0, low0);
            multiply_words(c2, kPhiloxMultipliers[1], high1, low1);
            c0 = high1 ^ c1 ^ splat_word(k0);
            c2 = high0 ^ c3 ^ splat_word(k1);
            c1 = low1;
            c3 = low0;
            k0 += kPhiloxSteps[0];
            k1 += kPhiloxSteps[1];
        }
        store(factors, where_at_least(c0, limit, kept));
    }

    double p;
    uint64_t seed;
    uint32_t limit;  // words below it are dropped; p = 1 keeps with a factor of 0
    float kept;
};

}  // namespace coterie::COTERIE_ISA
