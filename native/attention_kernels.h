// Grouped attention, forward and backward, fused per group: gather, scores, online softmax, output. Compiled once per
// instruction set. Nothing of the size of all scores is ever stored.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include "arrays.h"
#include "philox.h"
#include "simd.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

constexpr int64_t kRowBlock = 132;  // a multiple of the micro-kernel's rows, and enough for 100 centroids at once
constexpr int64_t kKeyBlock = 256;  // a multiple of kLanes
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Memory of one worker, aligned to cache lines.
class Buffer {
public:
    explicit Buffer(int64_t floats) : size_(floats), memory_(new float[floats + 16]) {
        auto address = reinterpret_cast<uintptr_t>(memory_.get());
        start_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
        std::fill(start_, start_ + floats, 0.0f);
    }
    operator float*() { return start_; }

private:
    int64_t size_;
    std::unique_ptr<float[]> memory_;
    float* start_;
};

// --- rows in and out -------------------------------------------------------------------------------------------------

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
        std::memcpy(to, from, dim * 4);
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

// Rows that will be read soon. Groups gather from all over a head, so the next one's rows are fetched while this one
// computes: a few at a time, as a core has room for a few dozen requests only, and then waits.
class Prefetch {
public:
    void clear() { count_ = at_ = 0; }

    void add(const Rows& from, int64_t batch, int64_t head, const int32_t* index, int64_t count) {
        int64_t lines = (from.dim * (from.kind == Kind::f32 ? 4 : 2) + 63) / 64;
        for (int64_t i = 0; i < count && count_ < kMost; i++)
            rows_[count_++] = {from.row(batch, head, index[i]), static_cast<int32_t>(lines)};
    }

    // Ask for the next few.
    void some(int few = 3) {
        for (; few && at_ < count_; few--, at_++)
            for (int32_t line = 0; line < rows_[at_].lines; line++) touch(rows_[at_].start + 64 * line);
    }

private:
    static void touch(const char* address) {
#if defined(__GNUC__) || defined(__clang__)
        __builtin_prefetch(address, 0, 2);
#else
        (void)address;
#endif
    }

    static constexpr int kMost = 512;
    struct {
        const char* start;
        int32_t lines;
    } rows_[kMost];
    int count_ = 0, at_ = 0;
};

inline bool all_finite(const float* x, int64_t count) {
    Vec total = splat(0);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) total = fma(load(x + i), splat(0), total);
    float rest = sum(total);
    for (; i < count; i++) rest += x[i] * 0.0f;
    return rest == 0.0f;
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

// --- matrix product --------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kMicro = 12;
#else
constexpr int kMicro = 6;
#endif

template <int M, bool Add>
inline void micro(int64_t depth, const float* a, int64_t row_step, int64_t depth_step, const float* panel, float* c,
                  int64_t c_stride) {
    Vec sums[M];
    for (int i = 0; i < M; i++) sums[i] = Add ? load(c + i * c_stride) : splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec b = load(panel + k * kLanes);
        for (int i = 0; i < M; i++) sums[i] = fma(splat(a[i * row_step + k * depth_step]), b, sums[i]);
    }
    for (int i = 0; i < M; i++) store(c + i * c_stride, sums[i]);
}

template <bool Add>
inline void micro_rest(int64_t rows, int64_t depth, const float* a, int64_t row_step, int64_t depth_step,
                       const float* panel, float* c, int64_t c_stride) {
    switch (rows) {
        case 1: return micro<1, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 2: return micro<2, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 3: return micro<3, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 4: return micro<4, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 5: return micro<5, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
        case 6: return micro<6, Add>(depth, a, row_step, depth_step, panel, c, c_stride);
    }
}

// C (rows × width) = or += A (rows × depth) · B (depth × width). A is read as a[i * row_step + k * depth_step]; B is
// panels with room for `b_rows` rows; C is row after row with room for padded(width) columns.
template <bool Add>
inline void multiply(int64_t rows, int64_t width, int64_t depth, const float* a, int64_t row_step, int64_t depth_step,
                     const float* b, int64_t b_rows, float* c, int64_t c_stride, Prefetch* prefetch = nullptr) {
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* panel = b + j * b_rows;
        int64_t i = 0;
        for (; i + kMicro <= rows; i += kMicro) {
            if (prefetch) prefetch->some();
            micro<kMicro, Add>(depth, a + i * row_step, row_step, depth_step, panel, c + i * c_stride + j, c_stride);
        }
        for (; i < rows; i += 6)
            micro_rest<Add>(std::min<int64_t>(6, rows - i), depth, a + i * row_step, row_step, depth_step, panel,
                            c + i * c_stride + j, c_stride);
    }
}

// C (rows × width) = scale · A · B, where the rows of A are anywhere in memory.
template <int M>
inline void micro_rows(int64_t depth, const float* const* a, float scale, const float* panel, float* c, int64_t c_stride) {
    Vec sums[M];
    for (int i = 0; i < M; i++) sums[i] = splat(0);
    for (int64_t k = 0; k < depth; k++) {
        Vec b = load(panel + k * kLanes);
        for (int i = 0; i < M; i++) sums[i] = fma(splat(a[i][k]), b, sums[i]);
    }
    for (int i = 0; i < M; i++) store(c + i * c_stride, sums[i] * splat(scale));
}

inline void multiply_rows(int64_t rows, int64_t width, int64_t depth, const float* const* a, float scale, const float* b,
                          int64_t b_rows, float* c, int64_t c_stride, Prefetch* prefetch = nullptr) {
    for (int64_t j = 0; j < width; j += kLanes) {
        const float* panel = b + j * b_rows;
        int64_t i = 0;
        for (; i + 6 <= rows; i += 6) {
            if (prefetch) prefetch->some();
            micro_rows<6>(depth, a + i, scale, panel, c + i * c_stride + j, c_stride);
        }
        float* to = c + i * c_stride + j;
        switch (rows - i) {
            case 1: micro_rows<1>(depth, a + i, scale, panel, to, c_stride); break;
            case 2: micro_rows<2>(depth, a + i, scale, panel, to, c_stride); break;
            case 3: micro_rows<3>(depth, a + i, scale, panel, to, c_stride); break;
            case 4: micro_rows<4>(depth, a + i, scale, panel, to, c_stride); break;
            case 5: micro_rows<5>(depth, a + i, scale, panel, to, c_stride); break;
        }
    }
}

// --- which pairs meet ------------------------------------------------------------------------------------------------

// Where one group's work happens.
struct Group {
    int64_t batch, head, key_head;  // indices
    const Round* round;
    const int32_t* rows;  // query rows of the group
    int64_t row_count, first_slot;
    const int32_t* keys;
    int64_t key_count, first_key_slot;
};

inline Group group_at(const Call& call, const Round& round, int64_t bh, int64_t g) {
    Group group{bh / call.heads, bh % call.heads, 0, &round, nullptr, 0, 0, nullptr, 0, 0};
    group.key_head = group.head / (call.heads / call.key_heads);
    const int32_t* offsets = round.query_offsets.at(group.batch, group.head);
    group.first_slot = offsets[g];
    group.row_count = offsets[g + 1] - offsets[g];
    group.rows = round.query_order.at(group.batch, group.head) + offsets[g];
    group.first_key_slot = round.key_start.at(group.batch, group.head)[g];
    group.key_count = round.key_stop.at(group.batch, group.head)[g] - group.first_key_slot;
    group.keys = round.key_order.at(group.batch, group.head) + group.first_key_slot;
    return group;
}

inline int64_t query_position(const Call& call, int64_t b, int64_t h, int64_t row) {
    if (row < call.num_queries) return row + call.offset[b];
    int64_t virtual_rows = call.q.rows - call.num_queries;
    return call.query_positions ? call.query_positions[(b * call.heads + h) * virtual_rows + row - call.num_queries] : 0;
}

inline int64_t key_position(const Call& call, int64_t b, int64_t hk, int64_t key) {
    if (key < call.num_keys) return key;
    int64_t virtual_rows = call.k.rows - call.num_keys;
    return call.key_positions ? call.key_positions[(b * call.key_heads + hk) * virtual_rows + key - call.num_keys] : 0;
}

inline bool seen(const Call& call, bool windowed, int64_t low, int64_t high, int64_t ahead) {
    return !(call.causal && ahead < 0) && !(windowed && (ahead < low || ahead > high));
}

// How often a query meets each key over all rounds, for duplicates="once". Counters are kept at zero between rows.
class Multiplicity {
public:
    explicit Multiplicity(const Call& call) : call_(call), counts_(call.k.rows, 0) {
        for (auto& round : call.rounds) slots_.emplace_back(round.query_offsets.at(0, 0) ? call.q.rows : 0, -1);
    }

    // Must be called before the first group of a head.
    void enter(int64_t bh) {
        if (bh == bh_) return;
        bh_ = bh;
        int64_t b = bh / call_.heads, h = bh % call_.heads;
        for (size_t r = 0; r < call_.rounds.size(); r++) {
            auto& round = call_.rounds[r];
            std::fill(slots_[r].begin(), slots_[r].end(), -1);
            const int32_t* order = round.query_order.at(b, h);
            int64_t used = round.query_offsets.at(b, h)[round.groups()];
            for (int64_t s = 0; s < used; s++) slots_[r][order[s]] = static_cast<int32_t>(s);
        }
    }

    // Subtract log m from the scores of `row` with keys[0 … count).
    void divide(int64_t row, const int32_t* keys, int64_t count, float* scores) {
        walk(row, +1);
        for (int64_t j = 0; j < count; j++)
            if (counts_[keys[j]] > 1) scores[j] -= std::log(static_cast<float>(counts_[keys[j]]));
        walk(row, -1);
    }

private:
    void walk(int64_t row, int32_t step) {
        int64_t b = bh_ / call_.heads, h = bh_ % call_.heads, hk = h / (call_.heads / call_.key_heads);
        int64_t position = query_position(call_, b, h, row);
        for (size_t r = 0; r < call_.rounds.size(); r++) {
            auto& round = call_.rounds[r];
            int32_t slot = slots_[r][row];
            if (slot < 0) continue;
            const int32_t* offsets = round.query_offsets.at(b, h);
            int64_t g = std::upper_bound(offsets, offsets + round.groups() + 1, slot) - offsets - 1;
            const int32_t* order = round.key_order.at(b, h);
            int64_t stop = round.key_stop.at(b, h)[g];
            const int32_t* skip = round.skip ? round.skip + ((bh_ * round.query_order.length) + slot) * round.skips : nullptr;
            for (int64_t s = round.key_start.at(b, h)[g]; s < stop; s++) {
                int32_t key = order[s];
                if (skip && std::binary_search(skip, skip + round.skips, key)) continue;
                bool placed = call_.causal || round.windowed;
                if (placed && !seen(call_, round.windowed, round.low, round.high, position - key_position(call_, b, hk, key)))
                    continue;
                counts_[key] += step;
            }
        }
    }

    const Call& call_;
    int64_t bh_ = -1;
    std::vector<int32_t> counts_;
    std::vector<std::vector<int32_t>> slots_;
};

// Turn raw scores of a block into the plan's: biases, masks, multiplicities, and −inf where a pair does not meet.
inline void settle_scores(const Call& call, const Group& group, int64_t first_row, int64_t rows, int64_t first_key,
                          int64_t keys, float* scores, int64_t stride, Multiplicity* multiplicity) {
    const Round* round = group.round;
    const int32_t* key = group.keys + first_key;
    int64_t b = group.batch, h = group.head, bh = b * call.heads + h;
    int64_t width = padded(keys);
    bool windowed = round && round->windowed, placed = call.causal || windowed;
    int32_t positions[kKeyBlock];
    if (placed)
        for (int64_t j = 0; j < keys; j++)
            positions[j] = static_cast<int32_t>(key_position(call, b, group.key_head, key[j]));
    bool real_masks = call.mask || call.key_mask || call.query_mask;
    if (width == keys && !placed && !real_masks && !multiplicity && !(round && (round->bias || round->skip))) return;
    bool ascending = round && round->skip && std::is_sorted(key, key + keys);
    for (int64_t i = 0; i < rows; i++) {
        float* row = scores + i * stride;
        int64_t query = group.rows[first_row + i];
        for (int64_t j = keys; j < width; j++) row[j] = kNone;
        if (round && round->bias) {
            const float* bias = round->bias + bh * round->key_order.length + group.first_key_slot + first_key;
            for (int64_t j = 0; j < keys; j++) row[j] += bias[j];
        }
        if (call.mask) {  // a virtual row has no row of its own in it; the caller has seen to that
            int64_t at = call.mask.offset(b, h, call.mask.strides[2] ? query : 0, 0), step = call.mask.strides[3];
            if (call.mask.is_float) {
                auto* values = static_cast<const float*>(call.mask.data) + at;
                for (int64_t j = 0; j < keys; j++) {
                    float add = values[step ? key[j] * step : 0];
                    row[j] = add == kNone ? kNone : row[j] + add;
                }
            } else {
                auto* allowed = static_cast<const uint8_t*>(call.mask.data) + at;
                for (int64_t j = 0; j < keys; j++)
                    if (!allowed[step ? key[j] * step : 0]) row[j] = kNone;
            }
        }
        if (real_masks) {
            if (call.key_mask)
                for (int64_t j = 0; j < keys; j++)
                    if (key[j] < call.num_keys && !call.key_mask[b * call.num_keys + key[j]]) row[j] = kNone;
            if (call.query_mask && query < call.num_queries && !call.query_mask[b * call.num_queries + query])
                std::fill(row, row + keys, kNone);
        }
        if (multiplicity) multiplicity->divide(query, key, keys, row);
        if (placed) {
            int64_t position = query_position(call, b, h, query);
            int64_t low = windowed ? position - round->high : std::numeric_limits<int32_t>::min();
            int64_t high = windowed ? position - round->low : std::numeric_limits<int32_t>::max();
            if (call.causal) high = std::min(high, position);
            auto first = static_cast<int32_t>(std::clamp<int64_t>(low, -(1ll << 31), (1ll << 31) - 1));
            auto last = static_cast<int32_t>(std::clamp<int64_t>(high, -(1ll << 31), (1ll << 31) - 1));
            for (int64_t j = 0; j < keys; j++) row[j] = positions[j] >= first && positions[j] <= last ? row[j] : kNone;
        }
        if (round && round->skip) {
            const int32_t* skip =
                round->skip + (bh * round->query_order.length + group.first_slot + first_row + i) * round->skips;
            if (ascending) {
                const int32_t* last = std::upper_bound(skip, skip + round->skips, key[keys - 1]);
                for (const int32_t* s = std::lower_bound(skip, last, key[0]); s < last; s++)
                    for (auto found = std::lower_bound(key, key + keys, *s); found < key + keys && *found == *s; found++)
                        row[found - key] = kNone;
            } else {
                for (int64_t j = 0; j < keys; j++)
                    if (std::binary_search(skip, skip + round->skips, key[j])) row[j] = kNone;
            }
        }
    }
}

// Dropout's factor of a pair: 0 or 1 / (1 − p).
inline float keep(const Call& call, int64_t bh, int64_t row, int64_t key) {
    auto word = philox(static_cast<uint32_t>(key), static_cast<uint32_t>(row), static_cast<uint32_t>(bh), kDropout, call.seed)[0];
    auto limit = static_cast<uint64_t>(call.dropout_p * 4294967296.0);
    return word >= limit && call.dropout_p < 1.0 ? static_cast<float>(1.0 / (1.0 - call.dropout_p)) : 0.0f;
}

// --- forward ---------------------------------------------------------------------------------------------------------

struct ForwardWorker {
    const Call& call;
    const Forward& result;
    int64_t dim, value_dim, value_width;
    Buffer rows, query, keys, values, scores, partial, row_memory;
    std::vector<const float*> pointers, query_rows;
    int64_t checked_head = -1;
    bool head_finite = false;  // of the values of checked_head
    Prefetch prefetch;
    std::unique_ptr<Multiplicity> multiplicity;
    float* totals;  // (batch * heads * query rows): running sum; result.lse holds the running maximum

    ForwardWorker(const Call& call, const Forward& result, float* totals)
        : call(call),
          result(result),
          dim(call.q.dim),
          value_dim(call.v.dim),
          value_width(padded(call.v.dim)),
          rows(kKeyBlock * std::max(dim, value_width)),
          query(kRowBlock * dim),
          keys(kKeyBlock * dim),
          values(kKeyBlock * value_width),
          scores(kRowBlock * kKeyBlock),
          partial(kRowBlock * value_width),
          row_memory(value_width),
          pointers(kKeyBlock),
          query_rows(kRowBlock),
          multiplicity(call.once ? new Multiplicity(call) : nullptr),
          totals(totals) {}

    // Whether all values of a head are finite; if so, its tiles need not be looked at.
    bool values_finite(int64_t batch, int64_t key_head) {
        int64_t at = batch * call.key_heads + key_head;
        if (at == checked_head) return head_finite;
        checked_head = at;
        head_finite = true;
        for (int64_t j = 0; j < call.v.rows && head_finite; j++) {
            const char* from = call.v.row(batch, key_head, j);
            if (call.v.kind == Kind::f32) {
                head_finite = all_finite(reinterpret_cast<const float*>(from), value_dim);
            } else {
                read_row(from, call.v.kind, value_dim, row_memory);
                head_finite = all_finite(row_memory, value_dim);
            }
        }
        return head_finite;
    }

    void gather_keys(const Group& group, int64_t first, int64_t count) {
        for (int64_t j = 0; j < count; j++) {
            const char* from = call.k.row(group.batch, group.key_head, group.keys[first + j]);
            if (call.k.kind == Kind::f32) {
                pointers[j] = reinterpret_cast<const float*>(from);
            } else {
                read_row(from, call.k.kind, dim, rows + j * dim);
                pointers[j] = rows + j * dim;
            }
        }
        transpose_to_panels(pointers.data(), count, dim, keys);
    }

    // Returns whether all values are finite.
    bool gather_values(const Group& group, int64_t first, int64_t count) {
        for (int64_t j = 0; j < count; j++) {
            const char* from = call.v.row(group.batch, group.key_head, group.keys[first + j]);
            const float* row = reinterpret_cast<const float*>(from);
            if (call.v.kind != Kind::f32) {
                read_row(from, call.v.kind, value_dim, row_memory);
                row = row_memory;
            }
            row_to_panels(row, value_dim, j, kKeyBlock, values);
        }
        if (values_finite(group.batch, group.key_head)) return true;
        for (int64_t c = 0; c < value_width; c += kLanes)
            if (!all_finite(values + c * kKeyBlock, count * kLanes)) return false;
        return true;
    }

    void run(const Group& group, const Group* next = nullptr) {
        if (!group.row_count || !group.key_count) return;
        int64_t bh = group.batch * call.heads + group.head;
        if (multiplicity) multiplicity->enter(bh);
        bool gathered = false, finite = true;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += kRowBlock) {
            int64_t row_count = std::min(kRowBlock, group.row_count - first_row);
            for (int64_t i = 0; i < row_count; i++) {
                const char* from = call.q.row(group.batch, group.head, group.rows[first_row + i]);
                query_rows[i] = reinterpret_cast<const float*>(from);
                if (call.q.kind == Kind::f32) continue;
                read_row(from, call.q.kind, dim, query + i * dim);
                query_rows[i] = query + i * dim;
            }
            for (int64_t first_key = 0; first_key < group.key_count; first_key += kKeyBlock) {
                int64_t key_count = std::min(kKeyBlock, group.key_count - first_key);
                if (!gathered || group.key_count > kKeyBlock) {
                    gather_keys(group, first_key, key_count);
                    finite = gather_values(group, first_key, key_count);
                    gathered = true;
                }
                expect_soon(next);
                multiply_rows(row_count, key_count, dim, query_rows.data(), call.scale, keys, dim, scores, kKeyBlock, &prefetch);
                settle_scores(call, group, first_row, row_count, first_key, key_count, scores, kKeyBlock, multiplicity.get());
                accumulate(group, first_row, row_count, first_key, key_count, finite);
                next = nullptr;
            }
        }
    }

    // List what the next group will read: keys, values, queries, and the sums so far.
    void expect_soon(const Group* next) {
        if (!next) return;
        prefetch.clear();
        prefetch.add(call.k, next->batch, next->key_head, next->keys, next->key_count);
        prefetch.add(call.v, next->batch, next->key_head, next->keys, next->key_count);
        prefetch.add(call.q, next->batch, next->head, next->rows, next->row_count);
        int64_t head_size = call.q.rows * value_dim;
        Rows sums{result.out, Kind::f32, call.heads * head_size, head_size, value_dim, call.q.rows, value_dim};
        prefetch.add(sums, next->batch, next->head, next->rows, next->row_count);
    }

    // Softmax weights of a block of settled scores, added to the rows' running sums.
    void accumulate(const Group& group, int64_t first_row, int64_t row_count, int64_t first_key, int64_t key_count,
                    bool finite) {
        int64_t width = padded(key_count), bh = group.batch * call.heads + group.head;
        float fades[kRowBlock];
        for (int64_t i = 0; i < row_count; i++) {
            float* row = scores + i * kKeyBlock;
            int64_t at = bh * call.q.rows + group.rows[first_row + i];
            Vec top = splat(kNone);
            for (int64_t j = 0; j < width; j += kLanes) top = max(load(row + j), top);
            // A row that has met nobody yet has total 0 (one that met NaN has not).
            bool fresh = totals[at] == 0;
            float best = std::max(result.lse[at], highest(top)), base = best == kNone ? 0.0f : best;
            float fade = fades[i] = fresh ? 0.0f : std::exp(result.lse[at] - base);
            float mass;
            if (finite) {
                Vec total = splat(0);
                for (int64_t j = 0; j < width; j += kLanes) {
                    Vec weight = exp(load(row + j) - splat(base));
                    total = total + weight;
                    store(row + j, weight);
                }
                mass = sum(total);
            } else {
                mass = spread_wild(group, first_row + i, first_key, key_count, row, base, fade, at);
            }
            result.lse[at] = best;
            totals[at] = (fresh ? 0.0f : totals[at] * fade) + mass;
            if (call.dropout_p > 0 && finite)
                for (int64_t j = 0; j < key_count; j++)
                    if (row[j] != 0) row[j] *= keep(call, bh, group.rows[first_row + i], group.keys[first_key + j]);
        }
        if (!finite) return;
        multiply<false>(row_count, value_dim, key_count, scores, kKeyBlock, 1, values, kKeyBlock, partial, value_width, &prefetch);
        for (int64_t i = 0; i < row_count; i++) {
            float* out = result.out + (bh * call.q.rows + group.rows[first_row + i]) * value_dim;
            const float* add = partial + i * value_width;
            float fade = fades[i];
            if (fade == 0)
                for (int64_t d = 0; d < value_dim; d++) out[d] = add[d];
            else
                for (int64_t d = 0; d < value_dim; d++) out[d] = out[d] * fade + add[d];
        }
    }

    // The same for one row where some value is inf or NaN: a pair that does not meet contributes nothing.
    float spread_wild(const Group& group, int64_t row_index, int64_t first_key, int64_t key_count, const float* row,
                      float base, float fade, int64_t at) {
        float* out = result.out + at * value_dim;
        int64_t bh = group.batch * call.heads + group.head, query_row = group.rows[row_index];
        for (int64_t d = 0; d < value_dim; d++) out[d] = fade == 0 ? 0.0f : out[d] * fade;
        float mass = 0;
        for (int64_t j = 0; j < key_count; j++) {
            if (row[j] == kNone) continue;
            float weight = std::exp(row[j] - base);
            mass += weight;
            if (call.dropout_p > 0) weight *= keep(call, bh, query_row, group.keys[first_key + j]);
            for (int64_t d = 0; d < value_dim; d++)
                out[d] += weight * values[(d / kLanes) * kLanes * kKeyBlock + j * kLanes + d % kLanes];
        }
        return mass;
    }

    // One query with its self key alone.
    void fall_back(int64_t bh, int64_t row) {
        int32_t query_row = static_cast<int32_t>(row);
        int32_t key = call.self_keys[(bh / call.heads) * call.num_queries + row];
        if (key < 0) return;
        Group group{bh / call.heads, bh % call.heads, 0, nullptr, &query_row, 1, 0, &key, 1, 0};
        group.key_head = group.head / (call.heads / call.key_heads);
        run(group);
    }
};

inline void forward(const Call& call, const Forward& result) {
    int64_t heads = call.batch * call.heads, rows = heads * call.q.rows;
    std::fill(result.lse, result.lse + rows, kNone);
    std::unique_ptr<float[]> totals(new float[rows]());
    // No out row is read before it is written; those that meet nobody are zeroed at the end.
    std::vector<std::unique_ptr<ForwardWorker>> workers(std::max(1, call.threads));
    auto worker_at = [&](int worker) -> ForwardWorker& {
        if (!workers[worker]) workers[worker] = std::make_unique<ForwardWorker>(call, result, totals.get());
        return *workers[worker];
    };
    auto finish = [&](int64_t bh, ForwardWorker& worker) {
        if (call.self_keys)
            for (int64_t i = 0; i < call.num_queries; i++) {
                bool lonely = totals[bh * call.q.rows + i] == 0;
                result.alone[bh * call.num_queries + i] = lonely;
                if (lonely) worker.fall_back(bh, i);
            }
        for (int64_t at = bh * call.q.rows; at < (bh + 1) * call.q.rows; at++) {
            float* out = result.out + at * call.v.dim;
            float total = totals[at];
            if (total == 0) {
                std::fill(out, out + call.v.dim, 0.0f);
                result.lse[at] = kNone;
                continue;
            }
            float share = 1.0f / total;
            for (int64_t d = 0; d < call.v.dim; d++) out[d] *= share;
            result.lse[at] += std::log(total);
        }
    };
    if (heads >= call.threads) {
        parallel_for(heads, call.threads, [&](int64_t bh, int who) {
            ForwardWorker& worker = worker_at(who);
            for (auto& round : call.rounds)
                for (int64_t g = 0; g < round.groups(); g++) {
                    Group next = group_at(call, round, bh, std::min(g + 1, round.groups() - 1));
                    worker.run(group_at(call, round, bh, g), &next);
                }
            finish(bh, worker);
        });
        return;
    }
    // Few heads: share out the groups of a round, which have no query in common.
    for (auto& round : call.rounds) {
        int64_t chunk = std::max<int64_t>(1, round.groups() / (8 * call.threads)), chunks = (round.groups() + chunk - 1) / chunk;
        parallel_for(heads * chunks, call.threads, [&](int64_t task, int who) {
            int64_t bh = task / chunks, first = task % chunks * chunk;
            for (int64_t g = first; g < std::min(first + chunk, round.groups()); g++)
                worker_at(who).run(group_at(call, round, bh, g));
        });
    }
    parallel_for(heads, call.threads, [&](int64_t bh, int who) { finish(bh, worker_at(who)); });
}

// --- virtual rows ----------------------------------------------------------------------------------------------------

inline void means(const Segments& segments, const Rows& x, float* result) {
    int64_t count = segments.start.length;
    parallel_for(segments.batch * segments.heads, segments.threads, [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h), *order = segments.order.at(b, h);
        std::vector<float> row(x.dim);
        for (int64_t s = 0; s < count; s++) {
            float* mean = result + (bh * count + s) * x.dim;
            std::fill(mean, mean + x.dim, 0.0f);
            for (int64_t i = start[s]; i < stop[s]; i++) {
                read_row(x.row(b, h, order[i]), x.kind, x.dim, row.data());
                for (int64_t d = 0; d < x.dim; d++) mean[d] += row[d];
            }
            float size = static_cast<float>(std::max(1, stop[s] - start[s]));
            for (int64_t d = 0; d < x.dim; d++) mean[d] /= size;
        }
    });
}

// Each member gets its share of its mean's gradient; `result` (batch, heads, rows, dim) is zeroed.
inline void means_backward(const Segments& segments, const float* grad, int64_t rows, int64_t dim, float* result) {
    int64_t count = segments.start.length;
    parallel_for(segments.batch * segments.heads, segments.threads, [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h), *order = segments.order.at(b, h);
        for (int64_t s = 0; s < count; s++) {
            const float* mean = grad + (bh * count + s) * dim;
            float size = static_cast<float>(std::max(1, stop[s] - start[s]));
            for (int64_t i = start[s]; i < stop[s]; i++) {
                float* to = result + (bh * rows + order[i]) * dim;
                for (int64_t d = 0; d < dim; d++) to[d] += mean[d] / size;
            }
        }
    });
}

// --- backward --------------------------------------------------------------------------------------------------------

struct BackwardWorker {
    const Call& call;
    const Backward& result;
    int64_t dim, width, value_dim, value_width;
    Buffer query, query_panels, grad, grad_panels, key_rows, keys, keys_transposed, value_rows, values_transposed;
    Buffer weights, grad_weights, raw, sums;
    std::vector<const float*> pointers, query_rows;
    std::unique_ptr<Multiplicity> multiplicity;

    BackwardWorker(const Call& call, const Backward& result)
        : call(call),
          result(result),
          dim(call.q.dim),
          width(padded(call.q.dim)),
          value_dim(call.v.dim),
          value_width(padded(call.v.dim)),
          query(kRowBlock * dim),
          query_panels(kRowBlock * width),
          grad(kRowBlock * value_dim),
          grad_panels(kRowBlock * value_width),
          key_rows(kKeyBlock * dim),
          keys(kKeyBlock * width),
          keys_transposed(kKeyBlock * dim),
          value_rows(kKeyBlock * value_dim),
          values_transposed(kKeyBlock * value_dim),
          weights(kRowBlock * kKeyBlock),
          grad_weights(kRowBlock * kKeyBlock),
          raw(kRowBlock * kKeyBlock),
          sums(std::max(kRowBlock, kKeyBlock) * std::max(width, value_width)),
          pointers(kKeyBlock),
          query_rows(kRowBlock),
          multiplicity(call.once ? new Multiplicity(call) : nullptr) {}

    void gather(const Rows& from, int64_t head, const Group& group, int64_t first, int64_t count, float* rows,
                float* transposed) {
        for (int64_t j = 0; j < count; j++) {
            read_row(from.row(group.batch, head, group.keys[first + j]), from.kind, from.dim, rows + j * from.dim);
            pointers[j] = rows + j * from.dim;
        }
        transpose_to_panels(pointers.data(), count, from.dim, transposed);
    }

    void run(const Group& group) {
        if (!group.row_count || !group.key_count) return;
        int64_t bh = group.batch * call.heads + group.head;
        if (multiplicity) multiplicity->enter(bh);
        bool gathered = false;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += kRowBlock) {
            int64_t row_count = std::min(kRowBlock, group.row_count - first_row);
            float shifts[kRowBlock], lses[kRowBlock];
            bool wild_grad = load_rows(group, first_row, row_count, shifts, lses);
            for (int64_t first_key = 0; first_key < group.key_count; first_key += kKeyBlock) {
                int64_t key_count = std::min(kKeyBlock, group.key_count - first_key);
                if (!gathered || group.key_count > kKeyBlock) {
                    gather(call.k, group.key_head, group, first_key, key_count, key_rows, keys_transposed);
                    gather(call.v, group.key_head, group, first_key, key_count, value_rows, values_transposed);
                    if (!all_finite(key_rows, key_count * dim)) zero_wild(key_rows, key_count * dim);
                    for (int64_t j = 0; j < key_count; j++) row_to_panels(key_rows + j * dim, dim, j, kKeyBlock, keys);
                    gathered = true;
                }
                multiply_rows(row_count, key_count, dim, query_rows.data(), call.scale, keys_transposed, dim, raw, kKeyBlock);
                settle_scores(call, group, first_row, row_count, first_key, key_count, raw, kKeyBlock, multiplicity.get());
                multiply<false>(row_count, key_count, value_dim, grad, value_dim, 1, values_transposed, value_dim,
                                grad_weights, kKeyBlock);
                differentiate(group, first_row, row_count, first_key, key_count, shifts, lses);
                spread(group, first_row, row_count, first_key, key_count, wild_grad);
            }
        }
    }

    // Queries and upstream gradients of a block of rows; shift = dlse − out · dout. Returns whether some
    // gradient is inf or NaN.
    bool load_rows(const Group& group, int64_t first_row, int64_t row_count, float* shifts, float* lses) {
        for (int64_t i = 0; i < row_count; i++) {
            int64_t row = group.rows[first_row + i], at = (group.batch * call.heads + group.head) * call.q.rows + row;
            float* q = query + i * dim;
            read_row(call.q.row(group.batch, group.head, row), call.q.kind, dim, q);
            query_rows[i] = q;
            float* g = grad + i * value_dim;
            read_row(result.grad_out.row(group.batch, group.head, row), result.grad_out.kind, value_dim, g);
            const float* out = result.out + at * value_dim;
            double dot = 0;  // what is left of p·(dp − dot) is small, so dot must be good
            for (int64_t d = 0; d < value_dim; d++) dot += double(g[d]) * out[d];
            shifts[i] = static_cast<float>(result.grad_lse[at] - dot);
            lses[i] = result.lse[at] == kNone ? 0.0f : result.lse[at];
            row_to_panels(g, value_dim, i, kRowBlock, grad_panels);
        }
        const float* q = query;
        bool wild_query = !all_finite(q, row_count * dim);
        for (int64_t i = 0; i < row_count; i++) {
            row_to_panels(query + i * dim, dim, i, kRowBlock, query_panels);
            if (wild_query)
                for (int64_t c = 0; c < width; c += kLanes)
                    zero_wild(query_panels + c * kRowBlock + i * kLanes, kLanes);
        }
        return !all_finite(grad, row_count * value_dim);
    }

    // weights ← p (dropped out), grad_weights ← ds = p (dp − out·dout + dlse); both 0 where a pair does not meet.
    void differentiate(const Group& group, int64_t first_row, int64_t row_count, int64_t first_key, int64_t key_count,
                       const float* shifts, const float* lses) {
        int64_t bh = group.batch * call.heads + group.head, columns = padded(key_count);
        for (int64_t i = 0; i < row_count; i++) {
            float *s = raw + i * kKeyBlock, *p = weights + i * kKeyBlock, *ds = grad_weights + i * kKeyBlock;
            if (call.dropout_p > 0) {
                for (int64_t j = 0; j < key_count; j++) {
                    bool met = s[j] != kNone;
                    float weight = met ? std::exp(s[j] - lses[i]) : 0.0f;
                    float factor = met ? keep(call, bh, group.rows[first_row + i], group.keys[first_key + j]) : 0.0f;
                    p[j] = weight * factor;
                    ds[j] = met ? weight * (ds[j] * factor + shifts[i]) : 0.0f;
                }
                continue;
            }
            Vec lse = splat(lses[i]), shift = splat(shifts[i]);
            for (int64_t j = 0; j < columns; j += kLanes) {
                Vec score = load(s + j), weight = where_met(score, exp(score - lse));
                store(p + j, weight);
                store(ds + j, where_met(score, weight * (load(ds + j) + shift)));
            }
        }
    }

    void spread(const Group& group, int64_t first_row, int64_t row_count, int64_t first_key, int64_t key_count,
                bool wild_grad) {
        int64_t bh = group.batch * call.heads + group.head, bk = group.batch * call.key_heads + group.key_head;
        multiply<false>(row_count, dim, key_count, grad_weights, kKeyBlock, 1, keys, kKeyBlock, sums, width);
        for (int64_t i = 0; i < row_count; i++) {
            float* to = result.grad_q + (bh * call.q.rows + group.rows[first_row + i]) * dim;
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[i * width + d];
        }
        multiply<false>(key_count, dim, row_count, grad_weights, 1, kKeyBlock, query_panels, kRowBlock, sums, width);
        for (int64_t j = 0; j < key_count; j++) {
            float* to = result.grad_k + (bk * call.k.rows + group.keys[first_key + j]) * dim;
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[j * width + d];
        }
        if (!wild_grad) {
            multiply<false>(key_count, value_dim, row_count, weights, 1, kKeyBlock, grad_panels, kRowBlock, sums, value_width);
            for (int64_t j = 0; j < key_count; j++) {
                float* to = result.grad_v + (bk * call.k.rows + group.keys[first_key + j]) * value_dim;
                for (int64_t d = 0; d < value_dim; d++) to[d] += sums[j * value_width + d];
            }
        } else {
            for (int64_t j = 0; j < key_count; j++) {
                float* to = result.grad_v + (bk * call.k.rows + group.keys[first_key + j]) * value_dim;
                for (int64_t i = 0; i < row_count; i++)
                    if (raw[i * kKeyBlock + j] != kNone)
                        for (int64_t d = 0; d < value_dim; d++) to[d] += weights[i * kKeyBlock + j] * grad[i * value_dim + d];
            }
        }
        if (result.grad_mask) {
            const int64_t* strides = result.grad_mask_strides;
            for (int64_t i = 0; i < row_count; i++)
                for (int64_t j = 0; j < key_count; j++)
                    result.grad_mask[group.batch * strides[0] + group.head * strides[1] +
                                     (strides[2] ? group.rows[first_row + i] * strides[2] : 0) +
                                     (strides[3] ? group.keys[first_key + j] * strides[3] : 0)] +=
                        grad_weights[i * kKeyBlock + j];
        }
    }
};

// Heads that share keys are one task, so that every sum is made in one order. A mask is shared by all.
inline void backward(const Call& call, const Backward& result) {
    int64_t shared = call.heads / call.key_heads;
    int threads = result.grad_mask ? 1 : call.threads;
    std::vector<std::unique_ptr<BackwardWorker>> workers(std::max(1, threads));
    parallel_for(call.batch * call.key_heads, threads, [&](int64_t bk, int who) {
        if (!workers[who]) workers[who] = std::make_unique<BackwardWorker>(call, result);
        BackwardWorker& worker = *workers[who];
        for (int64_t bh = bk * shared; bh < (bk + 1) * shared; bh++) {
            for (auto& round : call.rounds)
                for (int64_t g = 0; g < round.groups(); g++) worker.run(group_at(call, round, bh, g));
            if (!call.self_keys) continue;
            for (int64_t i = 0; i < call.num_queries; i++) {
                int32_t row = static_cast<int32_t>(i), key = call.self_keys[(bh / call.heads) * call.num_queries + i];
                if (!result.alone[bh * call.num_queries + i] || key < 0) continue;
                Group group{bh / call.heads, bh % call.heads, bk % call.key_heads, nullptr, &row, 1, 0, &key, 1, 0};
                worker.run(group);
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
