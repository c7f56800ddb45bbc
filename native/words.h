// Sixteen unsigned 32-bit words at a time, a lane each, beside the sixteen floats of simd.h: what Philox needs.
#pragma once

#include "simd.h"

namespace coterie::COTERIE_ISA {

#if defined(__AVX512F__)

struct Words {
    __m512i x;
};
inline Words load_words(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline Words splat_word(uint32_t a) { return {_mm512_set1_epi32(static_cast<int32_t>(a))}; }
inline Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.x, b.x)}; }
// The upper and lower halves of 64-bit products.
inline void multiply_words(Words a, uint32_t b, Words& high, Words& low) {
    __m512i factor = _mm512_set1_epi32(static_cast<int32_t>(b));
    __m512i even = _mm512_mul_epu32(a.x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.x, 32), factor);
    constexpr __mmask16 kOdd = 0xAAAA;
    high.x = _mm512_mask_blend_epi32(kOdd, _mm512_srli_epi64(even, 32), odd);
    low.x = _mm512_mask_blend_epi32(kOdd, even, _mm512_slli_epi64(odd, 32));
}
// `value` where a ≥ limit, else 0.
inline Vec where_at_least(Words a, uint32_t limit, float value) {
    __mmask16 mask = _mm512_cmpge_epu32_mask(a.x, _mm512_set1_epi32(static_cast<int32_t>(limit)));
    return {_mm512_maskz_mov_ps(mask, _mm512_set1_ps(value))};
}

#elif defined(__AVX2__)

struct Words {
    __m256i lo, hi;
};
inline Words load_words(const int32_t* p) {
    auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Words splat_word(uint32_t a) {
    __m256i x = _mm256_set1_epi32(static_cast<int32_t>(a));
    return {x, x};
}
inline Words operator^(Words a, Words b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline void multiply_words8(__m256i a, __m256i factor, __m256i& high, __m256i& low) {
    __m256i even = _mm256_mul_epu32(a, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
inline void multiply_words(Words a, uint32_t b, Words& high, Words& low) {
    __m256i factor = _mm256_set1_epi32(static_cast<int32_t>(b));
    multiply_words8(a.lo, factor, high.lo, low.lo);
    multiply_words8(a.hi, factor, high.hi, low.hi);
}
inline Vec where_at_least(Words a, uint32_t limit, float value) {
    __m256i least = _mm256_set1_epi32(static_cast<int32_t>(limit));
    auto chosen = [&](__m256i x) {
        __m256i mask = _mm256_cmpeq_epi32(_mm256_max_epu32(x, least), x);
        return _mm256_and_ps(_mm256_castsi256_ps(mask), _mm256_set1_ps(value));
    };
    return {chosen(a.lo), chosen(a.hi)};
}

#else

struct Words {
    uint32_t x[kLanes];
};
inline Words load_words(const int32_t* p) {
    Words made;
    for (int l = 0; l < kLanes; l++) made.x[l] = static_cast<uint32_t>(p[l]);
    return made;
}
inline Words splat_word(uint32_t a) {
    Words made;
    for (int l = 0; l < kLanes; l++) made.x[l] = a;
    return made;
}
inline Words operator^(Words a, Words b) {
    for (int l = 0; l < kLanes; l++) a.x[l] ^= b.x[l];
    return a;
}
inline void multiply_words(Words a, uint32_t b, Words& high, Words& low) {
    for (int l = 0; l < kLanes; l++) {
        uint64_t product = uint64_t{a.x[l]} * b;
        high.x[l] = static_cast<uint32_t>(product >> 32);
        low.x[l] = static_cast<uint32_t>(product);
    }
}
inline Vec where_at_least(Words a, uint32_t limit, float value) {
    float chosen[kLanes];
    for (int l = 0; l < kLanes; l++) chosen[l] = a.x[l] >= limit ? value : 0.0f;
    return load(chosen);
}

#endif

}  // namespace coterie::COTERIE_ISA
