// Rows in: gathered, widened to float32, packed for the micro-kernel, and fetched ahead of time.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "arrays.h"
#include "simd.h"

namespace coterie::COTERIE_ISA {

constexpr int64_t kRowBlock = 132;  // a multiple of the micro-kernel's rows, and enough for 100 centroids at once
constexpr int64_t kKeyBlock = 256;  // a multiple of kLanes
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Memory of one worker, aligned to cache lines.
class Buffer {
public:
    explicit Buffer(int64_t floats) : Buffer(floats, kUnset) { std::fill(start_, start_ + floats, 0.0f); }

    // What is written before it is read need not be 0: a short call would take longer to clear it than for all the
    // rest.
    enum Contents { kUnset };
    Buffer(int64_t floats, Contents) : memory_(new float[floats + 16]) {
        auto address = reinterpret_cast<uintptr_t>(memory_.get());
        start_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
    }
    operator float*() { return start_; }

private:
    std::unique_ptr<float[]> memory_;
    float* start_;
};

inline float half_to_float(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {
        float tiny = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &tiny, 4);
        bits |= sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// One row as floats. Every kind is widened exactly.
inline void read_row(const char* from, Kind kind, int64_t dim, float* to) {
    if (kind == Kind::f32) {
        if (dim) std::memcpy(to, from, dim * 4);  // a tensor of no numbers may have no address
    } else if (kind == Kind::bf16) {
        auto* x = reinterpret_cast<const uint16_t*>(from);
        auto* bits = reinterpret_cast<uint32_t*>(to);
        for (int64_t d = 0; d < dim; d++) bits[d] = static_cast<uint32_t>(x[d]) << 16;
    } else {
        auto* x = reinterpret_cast<const uint16_t*>(from);
        int64_t d = 0;
#if defined(__F16C__)
        for (; d + 8 <= dim; d += 8)
            _mm256_storeu_ps(to + d, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + d))));
#endif
        for (; d < dim; d++) to[d] = half_to_float(x[d]);
    }
}

// One row as floats: where it lies if it is float32, otherwise widened into `scratch`.
inline const float* fetch(const Rows& from, int64_t batch, int64_t head, int64_t index, float* scratch) {
    const char* at = from.row(batch, head, index);
    if (from.kind_at(index) == Kind::f32) return reinterpret_cast<const float*>(at);
    read_row(at, from.kind, from.dim, scratch);
    return scratch;
}

// Where some rows lie. As a rule all are rows of their own, or all are means.
template <class T>
inline void locate(const Rows::Head& at, const int32_t* index, int64_t count, const T** to) {
    auto cast = [](const char* row) { return reinterpret_cast<const T*>(row); };
    int32_t least = INT32_MAX, most = INT32_MIN;
    for (int64_t j = 0; j < count; j++) {
        least = std::min(least, index[j]);
        most = std::max(most, index[j]);
    }
    if (most < at.own)
        for (int64_t j = 0; j < count; j++) to[j] = cast(at.first + index[j] * at.step);
    else if (least >= at.own)
        for (int64_t j = 0; j < count; j++) to[j] = cast(at.first_mean + (index[j] - at.own) * at.mean_step);
    else
        for (int64_t j = 0; j < count; j++) to[j] = cast(at(index[j]));
}

// Where each of several rows lies; those that are not float32 are widened into `scratch`, one after the other.
inline void fetch_all(const Rows& from, int64_t batch, int64_t head, const int32_t* index, int64_t count,
                      float* scratch, const float** rows) {
    if (from.kind == Kind::f32) {
        locate(from.at(batch, head), index, count, rows);
    } else {
        for (int64_t j = 0; j < count; j++) rows[j] = fetch(from, batch, head, index[j], scratch + j * from.dim);
    }
}

// Some rows as floats, one after the other; 0 for those that are not real.
inline void read_real(const Rows& from, int64_t batch, int64_t head, int64_t first, int64_t count, const uint8_t* real,
                      float* to) {
    for (int64_t i = first; i < first + count; i++, to += from.dim) {
        if (real[i])
            read_row(from.row(batch, head, i), from.kind, from.dim, to);
        else
            std::fill(to, to + from.dim, 0.0f);
    }
}

// Ask for a row, or other memory, that will be read soon.
template <int Nearness = 2>
inline void touch(const void* start, int64_t bytes) {
    auto* row = static_cast<const char*>(start);
#if defined(__GNUC__) || defined(__clang__)
    if (bytes == 256) {  // as many as are asked for most: loops so short take longer than what they do
        __builtin_prefetch(row, 0, Nearness);
        __builtin_prefetch(row + 64, 0, Nearness);
        __builtin_prefetch(row + 128, 0, Nearness);
        __builtin_prefetch(row + 192, 0, Nearness);
        return;
    }
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, Nearness);
#else
    (void)row, (void)bytes;
#endif
}

// Rows that will be read soon. Groups gather from all over a head, so the next one's rows are fetched while this one
// computes: a few at a time, as a core has room for a few dozen requests only, and then waits. They come into the
// second cache, or into the first one with a `Nearness` of 3.
template <int Nearness = 2>
class PrefetchTo {
public:
    void clear() { count_ = at_ = 0; }

    void add(const Rows& from, int64_t batch, int64_t head, const int32_t* index, int64_t count) {
        int64_t bytes = from.dim * (from.kind == Kind::f32 ? 4 : 2);
        int most = static_cast<int>(std::min<int64_t>(count, kMost - count_));
        locate(from.at(batch, head), index, most, rows_ + count_);
        std::fill_n(bytes_ + count_, most, static_cast<int32_t>(bytes));
        count_ += most;
    }

    // How often `some` will be called until these rows are read.
    void pace(int64_t calls) {
        few_ = static_cast<int>(std::max<int64_t>(3, (count_ + calls - 1) / std::max<int64_t>(1, calls)));
    }

    // Ask for the next few.
    void some() {
        for (int few = few_; few && at_ < count_; few--, at_++) touch<Nearness>(rows_[at_], bytes_[at_]);
    }

private:
    static constexpr int kMost = 768;
    const char* rows_[kMost];
    int32_t bytes_[kMost];
    int count_ = 0, at_ = 0, few_ = 3;
};
using Prefetch = PrefetchTo<>;

// Vectors of sums for some rows at a time, so that all stay in registers: what they are multiplied with is read from
// its beginning to its end where there are enough of them, as memory comes faster in order.
#if defined(__AVX512F__)
constexpr int few_columns_of(int) { return 4; }
#else
constexpr int few_columns_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

inline bool all_finite(const float* x, int64_t count) {
    Vec total = splat(0);  // 0, or NaN
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) total = fma(load(x + i), splat(0), total);
    float rest = 0;
    for (; i < count; i++) rest += x[i] * 0.0f;
    return at_least(total, 0) == (1u << kLanes) - 1 && rest == 0.0f;
}

inline void zero_wild(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (!std::isfinite(x[i])) x[i] = 0;
}

// Panels: a matrix (rows × width) stored as blocks of kLanes columns, each block row after row, so that the
// micro-kernel reads it in one stream. `stride` is the number of rows that a block has room for.
inline void row_to_panels(const float* row, int64_t width, int64_t index, int64_t stride, float* panels) {
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) store(panels + (c * stride + index * kLanes), load(row + c));
    if (c < width) {
        float* to = panels + (c * stride + index * kLanes);
        for (int64_t d = 0; d < kLanes; d++) to[d] = c + d < width ? row[c + d] : 0.0f;
    }
}

#if defined(__AVX2__) || defined(__AVX512F__)
inline void transpose8(const float* const* rows, int64_t at, float* to) {  // to[d * kLanes + i] = rows[i][at + d]
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(rows[i] + at);
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * kLanes, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * kLanes, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}
#endif

// The transpose of (count × width) rows as panels of kLanes rows: panel p holds rows 16p … 16p+15, dimension after
// dimension. Missing rows are zero.
inline void transpose_to_panels(const float* const* rows, int64_t count, int64_t width, float* panels) {
    for (int64_t first = 0; first < count; first += kLanes) {
        float* panel = panels + first * width;
        int64_t here = std::min<int64_t>(kLanes, count - first);
        if (here < kLanes) std::fill(panel, panel + kLanes * width, 0.0f);
        int64_t done = 0;
#if defined(__AVX2__) || defined(__AVX512F__)
        for (; done + 8 <= here; done += 8) {
            int64_t d = 0;
            for (; d + 8 <= width; d += 8) transpose8(rows + first + done, d, panel + d * kLanes + done);
            for (; d < width; d++)
                for (int64_t i = 0; i < 8; i++) panel[d * kLanes + done + i] = rows[first + done + i][d];
        }
#endif
        for (; done < here; done++)
            for (int64_t d = 0; d < width; d++) panel[d * kLanes + done] = rows[first + done][d];
    }
}

}  // namespace coterie::COTERIE_ISA
