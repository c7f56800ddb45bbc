// Keys as the mean of their cluster and a residual in 4 bits, and the products of residuals with a query in bytes.
#pragma once

#include "bytes.h"

namespace coterie::COTERIE_ISA {

// A residual is (2u − 15) · top / 15 for u = 0 … 15. Eight numbers take a quad: the first four the low halves of its
// bytes, the others the high ones. Panels hold a quad of each of kLanes keys after the other, whatever the instruction
// set.
constexpr int64_t kCoded = 8;
constexpr int32_t kCodeSteps = 15;
inline int64_t code_quads(int64_t dim) { return padded(dim) / kCoded; }

// The halves of bfloat16, and numbers of 16 bits, as floats.
#if defined(__AVX512F__)
inline Vec load_tops(const uint16_t* p) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))};
}
inline Vec load_shorts(const int16_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))))};
}
inline Quads low_halves(Quads x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Quads high_halves(Quads x) { return low_halves(_mm512_srli_epi16(x, 4)); }
#elif defined(__AVX2__)
inline __m256i widened(const void* p, bool sign) {
    __m128i x = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return sign ? _mm256_cvtepi16_epi32(x) : _mm256_cvtepu16_epi32(x);
}
inline Vec load_tops(const uint16_t* p) {
    auto half = [&](int i) { return _mm256_castsi256_ps(_mm256_slli_epi32(widened(p + 8 * i, false), 16)); };
    return {half(0), half(1)};
}
inline Vec load_shorts(const int16_t* p) {
    return {_mm256_cvtepi32_ps(widened(p, true)), _mm256_cvtepi32_ps(widened(p + 8, true))};
}
inline Quads low_halves(Quads x) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
}
inline Quads high_halves(Quads x) { return low_halves({_mm256_srli_epi16(x.lo, 4), _mm256_srli_epi16(x.hi, 4)}); }
#else
inline Vec load_tops(const uint16_t* p) {
    float each[kLanes];
    for (int i = 0; i < kLanes; i++) {
        uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
        std::memcpy(each + i, &bits, 4);
    }
    return load(each);
}
inline Vec load_shorts(const int16_t* p) {
    float each[kLanes];
    for (int i = 0; i < kLanes; i++) each[i] = p[i];
    return load(each);
}
#endif

// The least number of bfloat16 that is not below x > 0.
inline uint16_t top_above(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>((bits + 0xFFFF) >> 16);
}
inline float top_of(uint16_t top) {
    uint32_t bits = static_cast<uint32_t>(top) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// A query in bytes.
class QueryCode {
public:
    // `row` is followed by 0 up to a multiple of kLanes, and finite.
    void set(const float* row, int64_t dim) {
        bytes_.resize(padded(dim));
        quads_.resize(padded(dim) / kQuad);
        step_ = to_whole(row, dim, kMost, 0, bytes_.data()) / (kMost * kCodeSteps);
        std::memcpy(quads_.data(), bytes_.data(), bytes_.size());
        lift_ = 0;
        for (uint8_t each : bytes_) lift_ -= kCodeSteps * static_cast<int8_t>(each);
    }

    // What a panel of residuals adds to the products with the means of their clusters.
    Vec products(const uint8_t* panel, const uint16_t* tops) const {
        return (has_vnni() ? whole_products<true>(panel) : whole_products<false>(panel)) *
               (load_tops(tops) * splat(step_));
    }

private:
    static constexpr float kMost = 127;  // the sum of two products fits into 16 bits: 2·127·15 < 2^15

    template <bool Vnni>
    Vec whole_products(const uint8_t* panel) const {
        const int64_t count = static_cast<int64_t>(quads_.size()) / 2;
#if defined(__AVX2__) || defined(__AVX512F__)
        Whole sum = whole(0);
        for (int64_t q = 0; q < count; q++) {
            Quads both = load_quads(panel + q * kLanes * kQuad);
            sum = add_products<Vnni>(sum, low_halves(both), quads_.data() + 2 * q);
            sum = add_products<Vnni>(sum, high_halves(both), quads_.data() + 2 * q + 1);
        }
        return fma(to_floats(sum), splat(2), splat(static_cast<float>(lift_)));
#else
        int32_t sums[kLanes] = {0};
        for (int64_t q = 0; q < count; q++)
            for (int lane = 0; lane < kLanes; lane++)
                for (int j = 0; j < kQuad; j++) {
                    uint8_t both = panel[(q * kLanes + lane) * kQuad + j];
                    sums[lane] += static_cast<int8_t>(bytes_[q * kCoded + j]) * (both & 15) +
                                  static_cast<int8_t>(bytes_[q * kCoded + kQuad + j]) * (both >> 4);
                }
        float each[kLanes];
        for (int lane = 0; lane < kLanes; lane++) each[lane] = static_cast<float>(2 * sums[lane] + lift_);
        return load(each);
#endif
    }

    std::vector<uint8_t> bytes_{};
    std::vector<int32_t> quads_{};
    int32_t lift_ = 0;
    float step_ = 0;
};

}  // namespace coterie::COTERIE_ISA
