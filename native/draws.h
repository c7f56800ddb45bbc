// Random draws as a pure function of (seed, layer, stream, index), as in coterie/draws.py: Philox4x32-10.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace coterie {

// What a draw is for; two purposes never share a number.
enum Stream : uint32_t {
    kProjection = 1,
    kOffset = 2,
    kRotation = 3,
    kHyperplane = 4,
    kStarts = 5,
    kDropout = 6,
    kSample = 7
};

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMultipliers[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t kPhiloxSteps[2] = {0x9E3779B9, 0xBB67AE85};

inline std::array<uint32_t, 4> philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; round++) {
        uint64_t p0 = uint64_t{kPhiloxMultipliers[0]} * c0, p1 = uint64_t{kPhiloxMultipliers[1]} * c2;
        uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += kPhiloxSteps[0];
        k1 += kPhiloxSteps[1];
    }
    return {c0, c1, c2, c3};
}

inline double unit(uint32_t word) { return (word + 0.5) / 4294967296.0; }

// The draws of one layer of a model; (a, b, c) is the index of a draw within its stream.
struct Draws {
    uint64_t seed = 0;
    int64_t layer = 0;

    std::array<uint32_t, 4> words(Stream stream, uint32_t a, uint32_t b, uint32_t c) const {
        return philox(a, b, c, (static_cast<uint32_t>(layer) << 8) | stream, seed);
    }

    double uniform(Stream stream, uint32_t a, uint32_t b, uint32_t c) const { return unit(words(stream, a, b, c)[0]); }

    // A standard normal draw, rounded to float32 so that every libm agrees.
    double normal(Stream stream, uint32_t a, uint32_t b, uint32_t c) const {
        auto two = words(stream, a, b, c);
        constexpr double pi = 3.141592653589793238462643383279502884;
        double draw = std::sqrt(-2.0 * std::log(unit(two[0]))) * std::cos(2.0 * pi * unit(two[1]));
        return static_cast<double>(static_cast<float>(draw));
    }
};

}  // namespace coterie
