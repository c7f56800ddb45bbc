// Products of whole numbers of 16 bits whose sums fit into 32.
#pragma once

#include "simd.h"

namespace coterie::COTERIE_ISA {

// `width`: a multiple of kLanes.
inline int32_t dot_of_shorts(const int16_t* x, const int16_t* y, int64_t width) {
    int32_t total = 0;
    for (int64_t d = 0; d < width; d++) total += x[d] * y[d];
    return total;
}

// Of eight rows with one.
inline void dots_of_shorts(const int16_t* const* rows, const int16_t* y, int64_t width, int32_t* to) {
#if defined(__AVX2__)
    __m256i sums[8];
    for (auto& each : sums) each = _mm256_setzero_si256();
    for (int64_t d = 0; d < width; d += kLanes) {
        __m256i by = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y + d));
        for (int i = 0; i < 8; i++) {
            __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + d));
            sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(row, by));
        }
    }
    auto fours = [](const __m256i* a) {
        return _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
    };
    __m256i first = fours(sums), second = fours(sums + 4);  // halves of the sums of four rows each
    __m256i all = _mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                                   _mm256_permute2x128_si256(first, second, 0x31));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), all);
#else
    for (int i = 0; i < 8; i++) to[i] = dot_of_shorts(rows[i], y, width);
#endif
}

}  // namespace coterie::COTERIE_ISA
