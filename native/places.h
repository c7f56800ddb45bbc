// Where bits are set.
#pragma once

#include <algorithm>
#include <bit>

#include "simd.h"

namespace coterie::COTERIE_ISA {

// Write first + i for each bit i that is set, one after the other. There must be room for kLanes of them.
#if defined(__AVX512F__)
inline void write_places(uint32_t bits, int32_t first, int32_t* to) {
    __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    each = _mm512_add_epi32(each, _mm512_set1_epi32(first));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), each));
}
#elif defined(__AVX2__)
struct SetBits {
    alignas(8) uint8_t places[256][8] = {};
    constexpr SetBits() {
        for (int bits = 0; bits < 256; bits++)
            for (int i = 0, n = 0; i < 8; i++)
                if (bits >> i & 1) places[bits][n++] = static_cast<uint8_t>(i);
    }
};
inline void write_places(uint32_t bits, int32_t first, int32_t* to) {
    static constexpr SetBits kSet;
    auto write = [&](uint32_t some, int32_t from) {
        __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kSet.places[some]));
        __m256i each = _mm256_add_epi32(_mm256_cvtepu8_epi32(places), _mm256_set1_epi32(from));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), each);
    };
    write(bits & 255, first);
    to += std::popcount(bits & 255);
    write(bits >> 8, first + 8);
}
#else
inline void write_places(uint32_t bits, int32_t first, int32_t* to) {
    for (; bits; bits &= bits - 1) *to++ = first + std::countr_zero(bits);
}
#endif

// List where numbers reach a limit, which must not be NaN; returns how many do. There must be room for kLanes more.
inline int64_t places_at_least(const float* x, int64_t padded_size, float limit, int32_t* places) {
    int32_t* to = places;
    for (int64_t j = 0; j < padded_size; j += kLanes) {
        uint32_t high = at_least(load(x + j), limit);
        write_places(high, static_cast<int32_t>(j), to);
        to += std::popcount(high);
    }
    return to - places;
}

// The same where few do, as a rule one.
inline int64_t few_places_at_least(const float* x, int64_t padded_size, float limit, int32_t* places) {
#if defined(__AVX512F__)
    return places_at_least(x, padded_size, limit, places);
#else
    int32_t* to = places;
    for (int64_t first = 0; first < padded_size; first += 64) {
        uint64_t high = 0;
        for (int64_t j = first; j < std::min(padded_size, first + 64); j += kLanes)
            high |= uint64_t{at_least(load(x + j), limit)} << (j - first);
        do {
            *to = static_cast<int32_t>(first + std::countr_zero(high));
            to += high != 0;
            high &= high - 1;
        } while (high);
    }
    return to - places;
#endif
}

}  // namespace coterie::COTERIE_ISA
