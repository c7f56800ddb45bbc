// Sixteen floats at a time: one AVX-512 register, two AVX2 registers, or a plain array that any compiler vectorises.
// Compiled once per instruction set; COTERIE_ISA is the namespace of that copy.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef COTERIE_ISA
#error "COTERIE_ISA must name the instruction set of this copy"
#endif

// Sums stay in registers only if every loop over them is unrolled.
#if defined(__GNUC__) && !defined(__clang__)
#define COTERIE_UNROLL _Pragma("GCC unroll 16")
#else
#define COTERIE_UNROLL
#endif

namespace coterie::COTERIE_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

struct Vec {
    __m512 x;
};
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.x); }
inline Vec splat(float a) { return {_mm512_set1_ps(a)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.x, b.x)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.x, b.x)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.x, b.x)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.x, b.x)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.x, b.x)}; }  // b if either is NaN
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.x, b.x)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for an integral n in [-127, 127], 0 at -127.
inline Vec exp2i(Vec n) {
    return {
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.x), _mm512_set1_epi32(127)), 23))};
}
inline Vec zero_below(Vec value, Vec x, float limit) {
    return {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.x, _mm512_set1_ps(limit), _CMP_LT_OQ), value.x, _mm512_setzero_ps())};
}
// a where x > -inf or x is NaN, else 0.
inline Vec where_met(Vec x, Vec a) {
    __mmask16 met = _mm512_cmp_ps_mask(x.x, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
    return {_mm512_maskz_mov_ps(met, a.x)};
}

// Bit i is set where lane i is ≥ limit (not NaN).
inline uint32_t at_least(Vec a, float limit) { return _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(limit), _CMP_GE_OQ); }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.x)}; }

// Half as many doubles.
struct Wide {
    __m512d x;
};
inline Wide widen(const float* p) { return {_mm512_cvtps_pd(_mm256_loadu_ps(p))}; }
inline Wide load_wide(const double* p) { return {_mm512_loadu_pd(p)}; }
inline Wide operator+(Wide a, Wide b) { return {_mm512_add_pd(a.x, b.x)}; }
inline void store(double* p, Wide a) { _mm512_storeu_pd(p, a.x); }

// How many vectors `sum_each` takes: their sums of lanes become consecutive floats.
constexpr int kSums = 16;
inline void sum_each(const Vec* a, float scale, float* to) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; i++)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i].x, a[2 * i + 1].x),
                                 _mm512_unpackhi_ps(a[2 * i].x, a[2 * i + 1].x));
    for (int i = 0; i < 4; i++) {
        __m512d even = _mm512_castps_pd(pairs[2 * i]), odd = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd)));
    }
    // Each quarter of fours[i] now holds parts of the sums of a[4i … 4i+3].
    auto halves = [](__m512 x, __m512 y) {
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xEE));
    };
    __m512 low = halves(fours[0], fours[1]), high = halves(fours[2], fours[3]);
    __m512 sums = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
    _mm512_storeu_ps(to, _mm512_mul_ps(sums, _mm512_set1_ps(scale)));
}

#elif defined(__AVX2__)

struct Vec {
    __m256 lo, hi;
};
inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 round8(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec round(Vec a) { return {round8(a.lo), round8(a.hi)}; }
inline __m256 exp2i8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec exp2i(Vec n) { return {exp2i8(n.lo), exp2i8(n.hi)}; }
inline Vec zero_below(Vec value, Vec x, float limit) {
    __m256 l = _mm256_set1_ps(limit);
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.lo, l, _CMP_LT_OQ), value.lo),
            _mm256_andnot_ps(_mm256_cmp_ps(x.hi, l, _CMP_LT_OQ), value.hi)};
}
inline Vec where_met(Vec x, Vec a) {
    __m256 none = _mm256_set1_ps(-INFINITY);
    return {_mm256_and_ps(_mm256_cmp_ps(x.lo, none, _CMP_NEQ_UQ), a.lo),
            _mm256_and_ps(_mm256_cmp_ps(x.hi, none, _CMP_NEQ_UQ), a.hi)};
}

inline uint32_t at_least(Vec a, float limit) {
    __m256 l = _mm256_set1_ps(limit);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, l, _CMP_GE_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, l, _CMP_GE_OQ))) << 8;
}
inline Vec abs(Vec a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}

struct Wide {
    __m256d lo, hi;
};
inline Wide widen(const float* p) { return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))}; }
inline Wide load_wide(const double* p) { return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}; }
inline Wide operator+(Wide a, Wide b) { return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
inline void store(double* p, Wide a) {
    _mm256_storeu_pd(p, a.lo);
    _mm256_storeu_pd(p + 4, a.hi);
}

#else

struct Vec {
    float x[kLanes];
};
#define COTERIE_LANES(expression)                           \
    Vec r;                                                  \
    for (int i = 0; i < kLanes; i++) r.x[i] = (expression); \
    return r
inline Vec load(const float* p) { COTERIE_LANES(p[i]); }
inline void store(float* p, Vec a) { std::memcpy(p, a.x, sizeof a.x); }
inline Vec splat(float a) { COTERIE_LANES(a); }
inline Vec operator+(Vec a, Vec b) { COTERIE_LANES(a.x[i] + b.x[i]); }
inline Vec operator-(Vec a, Vec b) { COTERIE_LANES(a.x[i] - b.x[i]); }
inline Vec operator*(Vec a, Vec b) { COTERIE_LANES(a.x[i] * b.x[i]); }
inline Vec operator/(Vec a, Vec b) { COTERIE_LANES(a.x[i] / b.x[i]); }
inline Vec fma(Vec a, Vec b, Vec c) { COTERIE_LANES(a.x[i] * b.x[i] + c.x[i]); }
inline Vec max(Vec a, Vec b) { COTERIE_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline Vec min(Vec a, Vec b) { COTERIE_LANES(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
inline Vec round(Vec a) { COTERIE_LANES(std::nearbyintf(a.x[i])); }
inline Vec exp2i(Vec n) {
    Vec r;
    for (int i = 0; i < kLanes; i++) {
        // A NaN must not be converted; what comes out is multiplied by one.
        int32_t bits = n.x[i] == n.x[i] ? (static_cast<int32_t>(n.x[i]) + 127) * (1 << 23) : 0x3f800000;
        std::memcpy(&r.x[i], &bits, 4);
    }
    return r;
}
inline Vec zero_below(Vec value, Vec x, float limit) { COTERIE_LANES(x.x[i] < limit ? 0.0f : value.x[i]); }
inline Vec where_met(Vec x, Vec a) { COTERIE_LANES(x.x[i] != -INFINITY ? a.x[i] : 0.0f); }
inline Vec abs(Vec a) { COTERIE_LANES(std::fabs(a.x[i])); }
inline uint32_t at_least(Vec a, float limit) {
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; i++) bits |= static_cast<uint32_t>(a.x[i] >= limit) << i;
    return bits;
}
#undef COTERIE_LANES

struct Wide {
    double x[kLanes / 2];
};
inline Wide widen(const float* p) {
    Wide r;
    for (int i = 0; i < kLanes / 2; i++) r.x[i] = p[i];
    return r;
}
inline Wide load_wide(const double* p) {
    Wide r;
    std::memcpy(r.x, p, sizeof r.x);
    return r;
}
inline Wide operator+(Wide a, Wide b) {
    for (int i = 0; i < kLanes / 2; i++) a.x[i] += b.x[i];
    return a;
}
inline void store(double* p, Wide a) { std::memcpy(p, a.x, sizeof a.x); }

#endif

// The sum and the highest of all lanes: lane i with lane i + 8, then with i + 4, and so on.
#if defined(__AVX2__) || defined(__AVX512F__)
#if defined(__AVX512F__)
inline __m256 low_half(Vec a) { return _mm512_castps512_ps256(a.x); }
inline __m256 high_half(Vec a) { return _mm512_extractf32x8_ps(a.x, 1); }
#else
inline __m256 low_half(Vec a) { return a.lo; }
inline __m256 high_half(Vec a) { return a.hi; }
#endif
inline float sum(Vec a) {
    __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float highest(Vec a) {
    __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
// Of four vectors: their sums of lanes become consecutive floats.
inline void sum_four(const Vec* a, float scale, float* to) {
    __m256 eights[4];
    for (int i = 0; i < 4; i++) eights[i] = _mm256_add_ps(low_half(a[i]), high_half(a[i]));
    __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(eights[0], eights[1]), _mm256_hadd_ps(eights[2], eights[3]));
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    _mm_storeu_ps(to, _mm_mul_ps(sums, _mm_set1_ps(scale)));
}
#else
inline float sum(Vec a) {
    for (int step = kLanes / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a.x[i] += a.x[i + step];
    return a.x[0];
}
inline float highest(Vec a) {
    for (int step = kLanes / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a.x[i] = a.x[i] > a.x[i + step] ? a.x[i] : a.x[i + step];
    return a.x[0];
}
inline void sum_four(const Vec* a, float scale, float* to) {
    for (int i = 0; i < 4; i++) to[i] = sum(a[i]) * scale;
}
#endif

#if !defined(__AVX512F__)
constexpr int kSums = 4;
inline void sum_each(const Vec* a, float scale, float* to) { sum_four(a, scale, to); }
#endif

// e^x to about one unit in the last place: x = n·ln 2 + r with |r| ≤ ln 2 / 2, and a polynomial in r. NaN stays NaN.
inline Vec exp(Vec x) {
    Vec bounded = min(splat(88.0f), max(splat(-87.0f), x));
    Vec n = round(bounded * splat(1.44269504088896341f));
    Vec r = fma(n, splat(-0.693359375f), bounded);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
    return zero_below(p * exp2i(n), x, -87.0f);
}

}  // namespace coterie::COTERIE_ISA
