// Rows in 8 or 16 bits, and their products: whole numbers, so that they are the same in any order and on every machine.
#pragma once

#include <cstdlib>
#include <vector>

#include "orders.h"
#include "pages.h"

namespace coterie::COTERIE_ISA {

constexpr int kQuad = 4;  // bytes that are multiplied and added up at a time
constexpr int32_t kLift = 128;  // is added to right factors: instructions want one factor without a sign
constexpr float kLeftMost = 63, kRightMost = 127;  // so the sum of two products fits into 16 bits: 2·63·255 < 2^15

// COTERIE_VNNI=0 in the environment does without products of bytes in one instruction, to test that.
inline bool without_vnni() {
    const char* wanted = std::getenv("COTERIE_VNNI");
    return wanted && !std::strcmp(wanted, "0");
}

// Put the quad of a lane of a panel where the products look for it.
inline void put_quad(uint8_t* to, int64_t lane, const uint8_t* quad) {
#if defined(__AVX2__) || defined(__AVX512F__)
    std::memcpy(to + lane * kQuad, quad, kQuad);
#else
    for (int j = 0; j < kQuad; j++) to[j * kLanes + lane] = quad[j];
#endif
}

// Quads of a row of so many numbers, each a T.
template <class T = uint8_t>
inline int64_t quads_of(int64_t dim) {
    return padded(dim) * static_cast<int64_t>(sizeof(T)) / kQuad;
}

// The lowest bytes of whole numbers.
inline void store_whole(uint8_t* to, Vec whole, int32_t lift) {
#if defined(__AVX512F__)
    __m512i lifted = _mm512_add_epi32(_mm512_cvtps_epi32(whole.x), _mm512_set1_epi32(lift));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(lifted));
#elif defined(__AVX2__)
    __m256i lifts = _mm256_set1_epi32(lift);
    __m256i pairs = _mm256_packs_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole.lo), lifts),
                                       _mm256_add_epi32(_mm256_cvtps_epi32(whole.hi), lifts));
    __m256i low = _mm256_and_si256(_mm256_permute4x64_epi64(pairs, 0xD8), _mm256_set1_epi16(0xFF));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi16(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
    float each[kLanes];
    store(each, whole);
    for (int i = 0; i < kLanes; i++) to[i] = static_cast<uint8_t>(static_cast<int32_t>(each[i]) + lift);
#endif
}

// Whole numbers of 16 bits, with their signs.
inline void store_whole(int16_t* to, Vec whole, int32_t) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(whole.x)));
#elif defined(__AVX2__)
    __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.lo), _mm256_cvtps_epi32(whole.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(pairs, 0xD8));
#else
    float each[kLanes];
    store(each, whole);
    for (int i = 0; i < kLanes; i++) to[i] = static_cast<int16_t>(each[i]);
#endif
}

// A row x as whole numbers, round(most · x / max|x|); returns max|x|, inside of what is safe to multiply with. `x` is
// followed by 0 up to a multiple of kLanes, and there must be room for as many numbers. `lost`: how far x is from what
// the numbers say, a little more rather than less; inf where x is too long or too short for them. Numbers are the same
// on every machine, unless `lost` is asked for: then it alone counts.
template <class T>
inline float to_whole(const float* x, int64_t dim, float most, int32_t lift, T* to, float* lost = nullptr) {
    Vec tops = splat(0);
    for (int64_t d = 0; d < dim; d += kLanes) tops = max(abs(load(x + d)), tops);
    float top = highest(tops), safe = std::clamp(top, 1e-30f, 1e28f);
    if (!lost) {
        Vec divisor = splat(top > 0 ? top : 1);
        for (int64_t d = 0; d < dim; d += kLanes) store_whole(to + d, round(load(x + d) / divisor * splat(most)), lift);
        return safe;
    }
    Vec factor = splat(most / safe), step = splat(-safe / most), squares = splat(0);
    for (int64_t d = 0; d < dim; d += kLanes) {
        Vec each = load(x + d), whole = round(each * factor), off = fma(whole, step, each);
        store_whole(to + d, whole, lift);
        squares = fma(off, off, squares);
    }
    *lost = safe == top || top == 0 ? 1.001f * std::sqrt(sum(squares)) : INFINITY;
    return safe;
}

#if defined(__AVX512F__)

constexpr int kByteRows = 8;  // left rows at a time
constexpr int kBytePanels = 2;  // panels at a time
using Whole = __m512i;  // a struct would go through memory
using Quads = __m512i;  // kQuad bytes of each of kLanes right rows
inline Whole whole(int32_t a) { return _mm512_set1_epi32(a); }
inline Quads load_quads(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Vec to_floats(Whole a) { return {_mm512_cvtepi32_ps(a)}; }

// CPUs with AVX-512 have VNNI from 2019 on.
inline bool has_vnni() {
    static const bool found = __builtin_cpu_supports("avx512vnni") && !without_vnni();
    return found;
}
template <bool Vnni>
inline Whole add_products(Whole sum, const Quads& right, const int32_t* left) {
    if constexpr (Vnni) {
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(right), "v"(_mm512_set1_epi32(*left)));
        return sum;
    } else {
        __m512i pairs = _mm512_maddubs_epi16(right, _mm512_set1_epi32(*left));
        return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    }
}

constexpr bool kHasShorts = true;  // products of 16 bits
inline Whole add_products_of_shorts(Whole sum, const Quads& right, const int32_t* left) {
    return _mm512_add_epi32(sum, _mm512_madd_epi16(right, _mm512_set1_epi32(*left)));
}

#elif defined(__AVX2__)

constexpr int kByteRows = 4;
constexpr int kBytePanels = 1;
struct Whole {
    __m256i lo, hi;
};
struct Quads {
    __m256i lo, hi;
};
inline Whole whole(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
inline Quads load_quads(const uint8_t* p) {
    auto* at = reinterpret_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Vec to_floats(Whole a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// Some CPUs without AVX-512 have VNNI all the same (AVX-VNNI, from 2021 on).
inline bool has_vnni() {
    static const bool found = __builtin_cpu_supports("avxvnni") && !without_vnni();
    return found;
}
template <bool Vnni>
inline Whole add_products(Whole sum, const Quads& right, const int32_t* left) {
    const __m256i each = _mm256_set1_epi32(*left);
    if constexpr (Vnni) {
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.lo) : "x"(right.lo), "x"(each));
        asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum.hi) : "x"(right.hi), "x"(each));
        return sum;
    } else {
        const __m256i one = _mm256_set1_epi16(1);
        auto products = [&](__m256i x) { return _mm256_madd_epi16(_mm256_maddubs_epi16(x, each), one); };
        return {_mm256_add_epi32(sum.lo, products(right.lo)), _mm256_add_epi32(sum.hi, products(right.hi))};
    }
}
constexpr bool kHasShorts = true;
inline Whole add_products_of_shorts(Whole sum, const Quads& right, const int32_t* left) {
    __m256i each = _mm256_set1_epi32(*left);
    return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(right.lo, each)),
            _mm256_add_epi32(sum.hi, _mm256_madd_epi16(right.hi, each))};
}

#else

constexpr int kByteRows = 4;
constexpr int kBytePanels = 1;
struct Whole {
    int32_t x[kLanes];
};
struct Quads {
    const uint8_t* x;
};
inline Whole whole(int32_t a) {
    Whole r;
    for (int i = 0; i < kLanes; i++) r.x[i] = a;
    return r;
}
inline Quads load_quads(const uint8_t* p) { return {p}; }
inline Vec to_floats(Whole a) {
    Vec r;
    for (int i = 0; i < kLanes; i++) r.x[i] = static_cast<float>(a.x[i]);
    return r;
}
inline bool has_vnni() { return false; }
template <bool>
inline Whole add_products(Whole sum, const Quads& right, const int32_t* left) {
    int8_t each[kQuad];
    std::memcpy(each, left, kQuad);
    for (int j = 0; j < kQuad; j += 2) {
        const uint8_t *first = right.x + j * kLanes, *second = first + kLanes;
        int16_t pairs[kLanes];
        for (int i = 0; i < kLanes; i++) pairs[i] = static_cast<int16_t>(each[j] * first[i] + each[j + 1] * second[i]);
        for (int i = 0; i < kLanes; i++) sum.x[i] += pairs[i];
    }
    return sum;
}
constexpr bool kHasShorts = false;
inline Whole add_products_of_shorts(Whole sum, const Quads&, const int32_t*) { return sum; }

#endif

// Left factors: a few rows, in blocks of kByteRows. T is what a number takes.
template <class T>
struct Left {
    int64_t quads = 0, rows = 0;
    float most = kLeftMost;
    std::vector<int32_t> bytes{};  // (blocks, quads, kByteRows)
    std::vector<int32_t> first{};  // (blocks, kByteRows): what undoes kLift
    std::vector<float> scales{};  // (rows)

    // `largest`: more than kLeftMost only for products with VNNI.
    void clear(int64_t dim, float largest = kLeftMost) {
        quads = quads_of<T>(dim);
        rows = 0;
        most = largest;
        bytes.clear();
        first.clear();
        scales.clear();
    }
    int64_t padded_rows() const { return static_cast<int64_t>(first.size()); }
    // `row` is followed by 0 up to a multiple of kLanes; `lost` as in `to_whole`.
    void add(const float* row, int64_t dim, float* lost = nullptr) {
        row_.resize(quads * kQuad / sizeof(T));
        scales.push_back(to_whole(row, dim, most, 0, row_.data(), lost) / (most * (kLifted ? kRightMost : most)));
        if (rows % kByteRows == 0) {
            bytes.resize(bytes.size() + quads * kByteRows);
            first.resize(first.size() + kByteRows);
        }
        int32_t* to = bytes.data() + rows / kByteRows * quads * kByteRows + rows % kByteRows;
        auto* from = reinterpret_cast<const uint8_t*>(row_.data());
        const int64_t count = quads;
        for (int64_t i = 0; i < count; i++) std::memcpy(to + i * kByteRows, from + i * kQuad, kQuad);
        int32_t total = 0;
        if (kLifted)
            for (int64_t i = 0; i < count * kQuad; i++) total += static_cast<int8_t>(from[i]);
        first[rows++] = -kLift * total;
    }

private:
    static constexpr bool kLifted = sizeof(T) == 1;
    std::vector<T> row_{};
};
using LeftBytes = Left<uint8_t>;
using LeftShorts = Left<int16_t>;

// Right factors: rows in panels of kLanes, which hold kQuad bytes of each row after the other.
template <class T>
class Right {
public:
    Right(int64_t rows, int64_t dim)
        : rows_(rows), quads_(quads_of<T>(dim)), bytes_(padded(rows) * quads_ * kQuad), scales_(padded(rows)) {}

    int64_t rows() const { return rows_; }
    const uint8_t* panel(int64_t p) const { return bytes_.data() + p * kLanes * quads_ * kQuad; }
    const float* scales(int64_t p) const { return scales_.data() + p * kLanes; }

    // `row`: quads · kQuad bytes of numbers, as `to_whole` writes them.
    void put(int64_t place, const T* row, float scale) {
        uint8_t* to = bytes_.data() + place / kLanes * quads_ * kLanes * kQuad;
        auto* from = reinterpret_cast<const uint8_t*>(row);
        const int64_t quads = quads_, lane = place % kLanes;  // `to` may be anything, even this
        for (int64_t i = 0; i < quads; i++) put_quad(to + i * kLanes * kQuad, lane, from + i * kQuad);
        scales_[place] = scale;
    }

    // kLanes rows from a multiple of kLanes on, `row_of(i)` and `scale_of(i)` each.
    template <class RowOf, class ScaleOf>
    void put_panel(int64_t place, RowOf row_of, ScaleOf scale_of) {
#if defined(__AVX2__) || defined(__AVX512F__)
        if (quads_ % 8 == 0) {
            const float* rows[kLanes];  // quads are moved as floats are
            for (int64_t i = 0; i < kLanes; i++) {
                rows[i] = reinterpret_cast<const float*>(row_of(i));
                scales_[place + i] = scale_of(i);
            }
            auto* to = reinterpret_cast<float*>(bytes_.data() + place * quads_ * kQuad);
            for (int64_t q = 0; q < quads_; q += 8)
                for (int64_t i = 0; i < kLanes; i += 8) transpose8(rows + i, q, to + q * kLanes + i);
            return;
        }
#endif
        for (int64_t i = 0; i < kLanes; i++) put(place + i, row_of(i), scale_of(i));
    }

private:
    int64_t rows_, quads_;
    Pages<uint8_t> bytes_;
    Pages<float> scales_;
};
using RightBytes = Right<uint8_t>;
using RightShorts = Right<int16_t>;

// A block of left rows with `Panels` panels.
template <bool Vnni, int Panels, class T>
inline void few_products(const Left<T>& left, int64_t block, const Right<T>& right, int64_t panel, float* to,
                         int64_t stride) {
    Whole sums[Panels][kByteRows];
    COTERIE_UNROLL
    for (int p = 0; p < Panels; p++) COTERIE_UNROLL
    for (int i = 0; i < kByteRows; i++) sums[p][i] = whole(left.first[block * kByteRows + i]);
    const uint8_t* bytes = right.panel(panel);
    const int64_t next = left.quads * kLanes * kQuad;  // from a panel to the one behind it
    const int32_t* rows = left.bytes.data() + block * left.quads * kByteRows;
    for (int64_t q = 0; q < left.quads; q++, bytes += kLanes * kQuad, rows += kByteRows) {
        Quads here[Panels];
        COTERIE_UNROLL
        for (int p = 0; p < Panels; p++) here[p] = load_quads(bytes + p * next);
        COTERIE_UNROLL
        for (int i = 0; i < kByteRows; i++) COTERIE_UNROLL
        for (int p = 0; p < Panels; p++) {
            if constexpr (sizeof(T) == 1)
                sums[p][i] = add_products<Vnni>(sums[p][i], here[p], rows + i);
            else
                sums[p][i] = add_products_of_shorts(sums[p][i], here[p], rows + i);
        }
    }
    COTERIE_UNROLL
    for (int p = 0; p < Panels; p++) {
        Vec scales = load(right.scales(panel + p));
        COTERIE_UNROLL
        for (int i = 0; i < kByteRows; i++) store(to + i * stride + p * kLanes, to_floats(sums[p][i]) * scales);
    }
}

// The products of a block of left rows with `count` panels from `panel` on, relative to each left row's scale.
template <bool Vnni, class T>
inline void block_products(const Left<T>& left, int64_t block, const Right<T>& right, int64_t panel, int64_t count,
                           float* to, int64_t stride) {
    int64_t p = 0;
    for (; p + kBytePanels <= count; p += kBytePanels)
        few_products<Vnni, kBytePanels>(left, block, right, panel + p, to + p * kLanes, stride);
    for (; p < count; p++) few_products<Vnni, 1>(left, block, right, panel + p, to + p * kLanes, stride);
}
template <class T>
inline void block_products(const Left<T>& left, int64_t block, const Right<T>& right, int64_t panel, int64_t count,
                           float* to, int64_t stride) {
    if (has_vnni())
        block_products<true>(left, block, right, panel, count, to, stride);
    else
        block_products<false>(left, block, right, panel, count, to, stride);
}

// The same for all left rows, up to a multiple of kByteRows.
inline void byte_products(const LeftBytes& left, const RightBytes& right, int64_t panel, int64_t count, float* to,
                          int64_t stride) {
    for (int64_t row = 0; row < left.rows; row += kByteRows)
        block_products(left, row / kByteRows, right, panel, count, to + row * stride, stride);
}

}  // namespace coterie::COTERIE_ISA
