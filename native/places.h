// Where bits are set.
#pragma once

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

}  // namespace coterie::COTERIE_ISA
