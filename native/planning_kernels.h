// Planning kernels, compiled once per instruction set. What is compared is what the reference compares: a float64
// result rounded to float32, ties by position. Large searches run in float32 first, and only what is too close to call
// is computed again in float64.
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <vector>

#include "attention_kernels.h"
#include "planning.h"

namespace coterie::COTERIE_ISA {

// --- float64 pieces --------------------------------------------------------------------------------------------------

inline double dot(const double* a, const double* b, int64_t n) {
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] += a[i + l] * b[i + l];
    double total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

inline float rounded(double x) {
    if (std::isnan(x)) return FLT_MAX;
    return static_cast<float>(std::clamp(x, -double(FLT_MAX), double(FLT_MAX)));
}

// A row as float64; what is not finite is 0.
inline void read_double(const Rows& from, int64_t b, int64_t h, int64_t i, float* scratch, double* to) {
    read_row(from.row(b, h, i), from.kind, from.dim, scratch);
    for (int64_t d = 0; d < from.dim; d++) to[d] = std::isfinite(scratch[d]) ? scratch[d] : 0.0;
}

// --- sorting ---------------------------------------------------------------------------------------------------------

// An unsigned integer that grows with the float; −0 and 0 are one number.
inline uint32_t sortable(float x) {
    if (x == 0) x = 0;
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct Sorter {
    std::vector<uint32_t> keys, other_keys;
    std::vector<int32_t> order, other_order;

    void resize(int64_t n) {
        keys.resize(n);
        other_keys.resize(n);
        order.resize(n);
        other_order.resize(n);
    }

    // Stable radix sort of `keys`; the positions in ascending order go to `to`.
    void sort(int64_t n, int32_t* to) {
        constexpr int kBits = 11, kSize = 1 << kBits;
        std::vector<int32_t> counts(3 * kSize, 0);
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = keys[i];
            order[i] = static_cast<int32_t>(i);
            counts[key & (kSize - 1)]++;
            counts[kSize + ((key >> kBits) & (kSize - 1))]++;
            counts[2 * kSize + (key >> (2 * kBits))]++;
        }
        for (int pass = 0; pass < 3; pass++) {
            int32_t* count = counts.data() + pass * kSize;
            int32_t start = 0;
            for (int bucket = 0; bucket < kSize; bucket++) {
                int32_t here = count[bucket];
                count[bucket] = start;
                start += here;
            }
            int32_t* target = pass == 2 ? to : other_order.data();
            for (int64_t i = 0; i < n; i++) {
                int32_t at = count[(keys[i] >> (kBits * pass)) & (pass == 2 ? (1 << 10) - 1 : kSize - 1)]++;
                target[at] = order[i];
                if (pass < 2) other_keys[at] = keys[i];
            }
            if (pass < 2) {
                keys.swap(other_keys);
                order.swap(other_order);
            }
        }
    }
};

constexpr uint32_t kLast = 0xFFFFFFFFu;  // sorts after every float

inline void order_by(const float* scores, const uint8_t* mask, const OrderShape& shape, int32_t* order, int threads) {
    parallel_for(shape.lists, threads, [&](int64_t list, int) {
        thread_local Sorter sorter;
        sorter.resize(shape.length);
        const uint8_t* real = mask + list / shape.lists_per_mask * shape.length;
        for (int64_t i = 0; i < shape.length; i++)
            sorter.keys[i] = real[i] ? sortable(rounded(scores[list * shape.length + i])) : kLast;
        sorter.sort(shape.length, order + list * shape.length);
    });
}

// --- Smyrf's hashes --------------------------------------------------------------------------------------------------

// F(q)·a or G(k)·a from x·a, ‖x‖² and the largest squared norms; `more` is the rest of a.
inline double extend(int transform, int side, double hash, double norm, const double* longest, const double* more) {
    auto missing = [&](double total) { return std::sqrt(std::max(0.0, total - norm)); };
    switch (transform) {
        case 0: return hash + missing(longest[0] + longest[1]) * more[side ? 0 : 1];
        case 2: {  // l2-alsh, m = 3
            if (!side) return hash + 0.5 * (more[0] + more[1] + more[2]);
            double shrink = 0.83 / std::max(std::sqrt(longest[1]), DBL_MIN), power = shrink * shrink * norm;
            hash *= shrink;
            for (int m = 0; m < 3; m++, power *= power) hash += power * more[m];
            return hash;
        }
        case 3: return side ? hash + missing(longest[1]) * more[0] : hash;
        case 4: return side ? hash + missing(longest[1]) * more[0] : hash * (std::sqrt(longest[1]) / std::max(std::sqrt(norm), DBL_MIN));
        default: return hash;
    }
}

// E2LSH: ⌊h / width + shift⌋ with a width such that the hashes of a round span as many buckets as there are groups.
inline void to_buckets(const HashCall& call, int64_t h, int64_t r, int64_t b, const uint8_t* const* masks,
                       std::vector<double>* dots) {
    double low = INFINITY, high = -INFINITY;
    int64_t sizes[] = {call.q.rows, call.k.rows};
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < sizes[side]; i++)
            if (masks[side][i]) {
                low = std::min(low, dots[side][r * sizes[side] + i]);
                high = std::max(high, dots[side][r * sizes[side] + i]);
            }
    double width = std::max((high - low) / double(call.groups[b]), double(FLT_MIN));
    double shift = uniform(kOffset, 0, h, r, call.seed, call.layer);
    for (int side = 0; side < 2; side++)
        for (int64_t i = 0; i < sizes[side]; i++) {
            double& hash = dots[side][r * sizes[side] + i];
            hash = std::floor(hash / width + shift);
        }
}

inline void smyrf_orders(const HashCall& call, int32_t* query_order, int32_t* key_order) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        thread_local Sorter sorter;
        int64_t b = bh / call.heads, h = bh % call.heads, hk = h / (call.heads / call.key_heads);
        int64_t dim = call.q.dim, extra = call.transform == 0 ? 2 : call.transform == 2 ? 3 : call.transform >= 3 ? 1 : 0;
        std::vector<double> directions(call.rounds * (dim + extra));
        for (int64_t r = 0; r < call.rounds; r++)
            for (int64_t d = 0; d < dim + extra; d++)
                directions[r * (dim + extra) + d] = normal(kProjection, h, r, d, call.seed, call.layer);
        const Rows* sides[] = {&call.q, &call.k};
        const uint8_t* masks[] = {call.query_mask + b * call.q.rows, call.key_mask + b * call.k.rows};
        std::vector<double> dots[2], norms[2];
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        double longest[2] = {0, 0};
        for (int side = 0; side < 2; side++) {
            const Rows& rows = *sides[side];
            dots[side].resize(call.rounds * rows.rows);
            norms[side].resize(rows.rows);
            for (int64_t i = 0; i < rows.rows; i++) {
                if (!masks[side][i]) continue;
                read_double(rows, b, side ? hk : h, i, scratch.data(), row.data());
                norms[side][i] = dot(row.data(), row.data(), dim);
                longest[side] = std::max(longest[side], norms[side][i]);
                for (int64_t r = 0; r < call.rounds; r++)
                    dots[side][r * rows.rows + i] = dot(row.data(), directions.data() + r * (dim + extra), dim);
            }
        }
        for (int side = 0; side < 2; side++)
            for (int64_t r = 0; r < call.rounds; r++) {
                const double* more = directions.data() + r * (dim + extra) + dim;
                double* hashes = dots[side].data() + r * sides[side]->rows;
                for (int64_t i = 0; i < sides[side]->rows; i++)
                    if (masks[side][i]) hashes[i] = extend(call.transform, side, hashes[i], norms[side][i], longest, more);
            }
        for (int64_t r = 0; r < call.rounds; r++) {
            if (call.buckets) to_buckets(call, h, r, b, masks, dots);
            for (int side = 0; side < 2; side++) {
                int64_t n = sides[side]->rows;
                sorter.resize(n);
                for (int64_t i = 0; i < n; i++)
                    sorter.keys[i] = masks[side][i] ? sortable(rounded(dots[side][r * n + i])) : kLast;
                sorter.sort(n, (side ? key_order : query_order) + (bh * call.rounds + r) * n);
            }
        }
    });
}

// --- products of many rows with a few --------------------------------------------------------------------------------

// A small matrix (count × dim, float64) ready for both the float32 search and the float64 verdict.
struct Candidates {
    int64_t count, dim;
    std::vector<double> exact;
    Buffer panels;
    double longest = 0;

    Candidates(int64_t count, int64_t dim)
        : count(count), dim(dim), exact(count * dim), panels(std::max<int64_t>(1, padded(count) * dim)) {}

    // After `exact` has been written.
    void prepare() {
        std::vector<float> rough(exact.begin(), exact.end());
        std::vector<const float*> rows(count);
        longest = 0;
        for (int64_t c = 0; c < count; c++) {
            rows[c] = rough.data() + c * dim;
            longest = std::max(longest, std::sqrt(dot(exact.data() + c * dim, exact.data() + c * dim, dim)));
        }
        transpose_to_panels(rows.data(), count, dim, panels);
    }
};

// A bound on the error of a float32 product of vectors of these lengths.
inline float doubt(double a, double b, int64_t dim) { return static_cast<float>(4e-7 * (8 + std::sqrt(double(dim))) * a * b + 1e-30); }

// The length of a vector, a little more rather than less.
inline double length(const float* x, int64_t dim) {
    Vec squares = splat(0);
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) squares = fma(load(x + d), load(x + d), squares);
    double total = sum(squares);
    for (; d < dim; d++) total += double(x[d]) * x[d];
    return std::sqrt(total) * 1.001;
}

inline void assign_nearest(const double* x, int64_t rows, Candidates& centroids, const std::vector<double>& half_norms,
                           int64_t* labels) {
    int64_t dim = centroids.dim, count = centroids.count, stride = padded(count);
    Buffer block(kRowBlock * dim), scores(kRowBlock * stride);
    std::vector<float> half(half_norms.begin(), half_norms.end());
    half.resize(stride, INFINITY);
    for (int64_t first = 0; first < rows; first += kRowBlock) {
        int64_t here = std::min(kRowBlock, rows - first);
        for (int64_t i = 0; i < here * dim; i++) block[i] = static_cast<float>(x[first * dim + i]);
        multiply<false>(here, count, dim, block, dim, 1, centroids.panels, dim, scores, stride);
        for (int64_t i = 0; i < here; i++) {
            const double* row = x + (first + i) * dim;
            float* s = scores + i * stride;
            float best = INFINITY;
            for (int64_t c = 0; c < count; c++) {
                s[c] = half[c] - s[c];
                best = std::min(best, s[c]);
            }
            float limit = best + 2 * doubt(length(block + i * dim, dim) + centroids.longest, centroids.longest, dim);
            int64_t label = -1, close = 0;
            for (int64_t c = 0; c < count; c++)
                if (!(s[c] > limit)) {
                    close++;
                    if (label < 0) label = c;
                }
            if (close > 1) {
                float nearest = INFINITY;
                for (int64_t c = label; c < count; c++)
                    if (!(s[c] > limit)) {
                        float verdict = static_cast<float>(half_norms[c] - dot(row, centroids.exact.data() + c * dim, dim));
                        if (verdict < nearest) {
                            nearest = verdict;
                            label = c;
                        }
                    }
            }
            labels[first + i] = std::max<int64_t>(label, 0);
        }
    }
}

// --- k-means ---------------------------------------------------------------------------------------------------------

// One token from each of `clusters` equal spans of the real ones.
inline std::vector<int64_t> starts(const KmeansCall& call, int64_t b, int64_t h) {
    std::vector<int64_t> real, chosen(call.clusters, 0);
    for (int64_t i = 0; i < call.rows; i++)
        if (call.mask[b * call.rows + i]) real.push_back(i);
    int64_t n = static_cast<int64_t>(real.size());
    for (int64_t c = 0; c < call.clusters; c++) {
        int64_t first = c * n / call.clusters, size = std::max<int64_t>(1, (c + 1) * n / call.clusters - first);
        auto within = static_cast<int64_t>(uniform(kStarts, 0, h, c, call.seed, call.layer) * double(size));
        if (n) chosen[c] = real[std::min(first + within, n - 1)];
    }
    return chosen;
}

inline void euclidean_kmeans(const KmeansCall& call, const double* x, int64_t* labels, double* centroids) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, dim = call.dim;
        const double* points = x + bh * call.rows * dim;
        int64_t* label = labels + bh * call.rows;
        if (call.rows == 0) return;
        Candidates centers(call.clusters, dim);
        auto chosen = starts(call, b, bh % call.heads);
        for (int64_t c = 0; c < call.clusters; c++)
            std::copy_n(points + chosen[c] * dim, dim, centers.exact.data() + c * dim);
        std::vector<double> half(call.clusters), sums;
        std::vector<int64_t> counts, before;
        auto assign = [&] {
            for (int64_t c = 0; c < call.clusters; c++)
                half[c] = dot(centers.exact.data() + c * dim, centers.exact.data() + c * dim, dim) / 2;
            centers.prepare();
            assign_nearest(points, call.rows, centers, half, label);
        };
        assign();
        for (int64_t step = 0; step < call.iterations; step++) {
            sums.assign(call.clusters * dim, 0);
            counts.assign(call.clusters, 0);
            for (int64_t i = 0; i < call.rows; i++) {
                if (!call.mask[b * call.rows + i]) continue;
                counts[label[i]]++;
                double* sum = sums.data() + label[i] * dim;
                for (int64_t d = 0; d < dim; d++) sum[d] += points[i * dim + d];
            }
            for (int64_t c = 0; c < call.clusters; c++)
                if (counts[c])
                    for (int64_t d = 0; d < dim; d++) centers.exact[c * dim + d] = sums[c * dim + d] / double(counts[c]);
            before.assign(label, label + call.rows);
            assign();
            if (std::equal(before.begin(), before.end(), label)) break;  // a fixed point: nothing would change any more
        }
        std::copy(centers.exact.begin(), centers.exact.end(), centroids + bh * call.clusters * dim);
    });
}

inline int distance(const uint64_t* a, const uint64_t* b, int64_t words) {
    int total = 0;
    for (int64_t w = 0; w < words; w++) total += std::popcount(a[w] ^ b[w]);
    return total;
}

// The nearest of k words, the first of equals. Distance above and index below make one number to compare.
inline int64_t nearest_word(uint64_t word, const uint64_t* centers, int64_t k) {
    uint64_t least = ~0ull;
    int64_t c = 0;
#if defined(__AVX2__)
    // Bits of four words at a time, by a table of the bits of a nibble.
    const __m256i mine = _mm256_set1_epi64x(static_cast<int64_t>(word)), low = _mm256_set1_epi8(15);
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2,
                                           3, 2, 3, 3, 4);
    __m256i best = _mm256_set1_epi64x(INT64_MAX), index = _mm256_setr_epi64x(0, 1, 2, 3);
    for (; c + 4 <= k; c += 4) {
        __m256i x = _mm256_xor_si256(mine, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(centers + c)));
        __m256i bits = _mm256_add_epi8(_mm256_shuffle_epi8(table, _mm256_and_si256(x, low)),
                                       _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
        __m256i key = _mm256_or_si256(_mm256_slli_epi64(_mm256_sad_epu8(bits, _mm256_setzero_si256()), 32), index);
        best = _mm256_blendv_epi8(best, key, _mm256_cmpgt_epi64(best, key));
        index = _mm256_add_epi64(index, _mm256_set1_epi64x(4));
    }
    alignas(32) uint64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), best);
    least = std::min(std::min(lanes[0], lanes[1]), std::min(lanes[2], lanes[3]));
#endif
    for (; c < k; c++) least = std::min(least, uint64_t(std::popcount(word ^ centers[c])) << 32 | uint64_t(c));
    return static_cast<int64_t>(least & 0xFFFFFFFF);
}

// The sign of each projection of a row, as bits.
inline void sign_bits(const KmeansCall& call, const Rows& rows, int64_t b, int64_t h, const Candidates& planes,
                      std::vector<uint64_t>& bits, int64_t words) {
    int64_t dim = call.dim, stride = padded(call.bits);
    Buffer block(kRowBlock * dim), scores(kRowBlock * stride);
    std::vector<double> row(dim);
    std::vector<float> scratch(dim);
    for (int64_t first = 0; first < call.rows; first += kRowBlock) {
        int64_t here = std::min(kRowBlock, call.rows - first);
        for (int64_t i = 0; i < here; i++) {
            float* to = block + i * dim;
            if (call.mask[b * call.rows + first + i])
                read_row(rows.row(b, h, first + i), rows.kind, dim, to);
            else
                std::fill(to, to + dim, 0.0f);
        }
        if (!all_finite(block, here * dim)) zero_wild(block, here * dim);
        multiply<false>(here, call.bits, dim, block, dim, 1, const_cast<Candidates&>(planes).panels, dim, scores, stride);
        for (int64_t i = 0; i < here; i++) {
            float limit = doubt(length(block + i * dim, dim), planes.longest, dim);
            for (int64_t m = 0; m < call.bits; m += kLanes) {
                Vec s = load(scores + i * stride + m);
                uint64_t positive = at_least(s, 0), close = ~at_least(abs(s), limit) & 0xFFFF;
                if (close)
                    for (int64_t d = 0; d < dim; d++) row[d] = block[i * dim + d];
                for (int64_t lane = 0; close && lane < std::min<int64_t>(kLanes, call.bits - m); lane++)
                    if (close >> lane & 1) {
                        auto verdict = static_cast<float>(dot(row.data(), planes.exact.data() + (m + lane) * dim, dim));
                        positive = (positive & ~(uint64_t{1} << lane)) | uint64_t{verdict >= 0} << lane;
                    }
                if (call.bits - m < kLanes) positive &= (uint64_t{1} << (call.bits - m)) - 1;
                bits[(first + i) * words + m / 64] |= positive << (m % 64);
            }
        }
    }
}

// The bits of a byte as numbers.
struct ByteBits {
    int32_t table[256][8];
    constexpr ByteBits() : table() {
        for (int byte = 0; byte < 256; byte++)
            for (int bit = 0; bit < 8; bit++) table[byte][bit] = byte >> bit & 1;
    }
    constexpr const int32_t* operator[](uint64_t byte) const { return table[byte]; }
};
inline constexpr ByteBits spread_byte;

inline void hamming_kmeans(const KmeansCall& call, const Rows& rows, int64_t* labels) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, words = (call.bits + 63) / 64, n = call.rows, k = call.clusters;
        if (n == 0) return;  // nobody to start from
        Candidates planes(call.bits, call.dim);
        for (int64_t m = 0; m < call.bits; m++)
            for (int64_t d = 0; d < call.dim; d++)
                planes.exact[m * call.dim + d] = normal(kHyperplane, h, m, d, call.seed, call.layer);
        planes.prepare();
        std::vector<uint64_t> bits(n * words, 0), centers(k * words);
        sign_bits(call, rows, b, h, planes, bits, words);
        auto chosen = starts(call, b, h);
        for (int64_t c = 0; c < k; c++) std::copy_n(bits.data() + chosen[c] * words, words, centers.data() + c * words);

        int64_t* label = labels + bh * n;
        std::vector<int32_t> ones(k * words * 64, 0), sizes(k, 0);
        std::vector<int64_t> changed(k);
        for (int64_t c = 0; c < k; c++) changed[c] = c;
        std::vector<uint8_t> moved(k, 1);
        std::fill(label, label + n, -1);
        auto count = [&](int64_t i, int64_t c, int32_t step) {
            sizes[c] += step;
            int32_t* total = ones.data() + c * words * 64;
            for (int64_t w = 0; w < words; w++)
                for (int byte = 0; byte < 8; byte++) {
                    const int32_t* each = spread_byte[(bits[i * words + w] >> (8 * byte)) & 255];
                    for (int bit = 0; bit < 8; bit++) total[w * 64 + byte * 8 + bit] += step * each[bit];
                }
        };
        for (int64_t step = 0;; step++) {
            bool stable = true;
            for (int64_t i = 0; i < n; i++) {
                const uint64_t* mine = bits.data() + i * words;
                int64_t old = label[i], best = -1;
                int nearest = INT32_MAX;
                if (old >= 0 && !moved[old]) {
                    // Its centre stayed, so only centres that moved can be nearer than it.
                    best = old;
                    nearest = distance(mine, centers.data() + old * words, words);
                    for (int64_t c : changed) {
                        int d = distance(mine, centers.data() + c * words, words);
                        if (d < nearest || (d == nearest && c < best)) nearest = d, best = c;
                    }
                } else if (words == 1) {
                    best = nearest_word(*mine, centers.data(), k);
                } else {
                    for (int64_t c = 0; c < k; c++) {
                        int d = distance(mine, centers.data() + c * words, words);
                        if (d < nearest) nearest = d, best = c;
                    }
                }
                if (best == old) continue;
                stable = false;
                label[i] = best;
                if (!call.mask[b * n + i]) continue;
                if (old >= 0) count(i, old, -1);
                count(i, best, +1);
            }
            if (step == call.iterations || (stable && step)) break;
            changed.clear();
            for (int64_t c = 0; c < k; c++) {
                moved[c] = 0;
                if (!sizes[c]) continue;
                for (int64_t w = 0; w < words; w++) {
                    uint64_t majority = 0;
                    for (int64_t m = w * 64; m < std::min(call.bits, w * 64 + 64); m++)
                        if (2 * ones[c * words * 64 + m] >= sizes[c]) majority |= uint64_t{1} << (m % 64);
                    if (majority != centers[c * words + w]) moved[c] = 1;
                    centers[c * words + w] = majority;
                }
                if (moved[c]) changed.push_back(c);
            }
        }
    });
}

// The mean of the real members of each cluster, (clusters × dim) float64; an empty one is 0.
inline void cluster_means(const KmeansCall& call, const Rows& rows, const int64_t* labels, double* means) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, dim = call.dim;
        double* sums = means + bh * call.clusters * dim;
        std::vector<int64_t> sizes(call.clusters, 0);
        std::vector<double> row(dim);
        std::vector<float> scratch(dim);
        std::fill(sums, sums + call.clusters * dim, 0.0);
        for (int64_t i = 0; i < call.rows; i++) {
            if (!call.mask[b * call.rows + i]) continue;
            read_double(rows, b, h, i, scratch.data(), row.data());
            int64_t label = std::clamp<int64_t>(labels[bh * call.rows + i], 0, call.clusters - 1);
            sizes[label]++;
            for (int64_t d = 0; d < dim; d++) sums[label * dim + d] += row[d];
        }
        for (int64_t c = 0; c < call.clusters; c++)
            for (int64_t d = 0; d < dim && sizes[c]; d++) sums[c * dim + d] /= double(sizes[c]);
    });
}

// --- top keys --------------------------------------------------------------------------------------------------------

// A number that at least `count` of the scores reach: the count-th largest of the maxima of many small sets of them.
inline float at_least_count(const float* scores, int64_t width, int64_t count, std::vector<float>& maxima) {
    int64_t vectors = width / kLanes, sets = std::min(vectors, std::max<int64_t>(16, (4 * count + kLanes - 1) / kLanes));
    if (sets * kLanes < count) return -INFINITY;
    maxima.resize(sets * kLanes);
    for (int64_t set = 0; set < sets; set++) {
        Vec top = load(scores + set * kLanes);
        for (int64_t at = set + sets; at < vectors; at += sets) top = max(load(scores + at * kLanes), top);
        store(maxima.data() + set * kLanes, top);
    }
    std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
    return maxima[count - 1];
}

// For each row of `queries` (float64, scale included) the `count` real keys with the largest products, best first.
inline void top_keys(const TopCall& call, const double* queries, int64_t* top) {
    int64_t dim = call.k.dim, n = call.k.rows, width = padded(n);
    if (call.count == 0 || call.queries == 0) return;
    const int64_t kQueries = std::clamp<int64_t>((1 << 20) / std::max<int64_t>(1, width), 24, 120);
    int64_t blocks = (call.queries + kQueries - 1) / kQueries;
    parallel_for(call.batch * call.heads * blocks, call.threads, [&](int64_t task, int) {
        int64_t bh = task / blocks, first = task % blocks * kQueries, here = std::min(kQueries, call.queries - first);
        int64_t b = bh / call.heads, hk = bh % call.heads / (call.heads / call.key_heads);
        const uint8_t* real = call.mask + b * n;
        Buffer scores(kQueries * width), block(kQueries * dim), panels(kKeyBlock * dim), rows(kKeyBlock * dim);
        std::vector<const float*> pointers(kKeyBlock);
        std::vector<double> key(dim);
        std::vector<float> scratch(dim);
        const double* mine = queries + (bh * call.queries + first) * dim;
        for (int64_t i = 0; i < here * dim; i++) block[i] = static_cast<float>(mine[i]);
        double longest = 0;
        for (int64_t at = 0; at < n; at += kKeyBlock) {
            int64_t keys = std::min(kKeyBlock, n - at);
            for (int64_t j = 0; j < keys; j++) {
                float* row = rows + j * dim;
                pointers[j] = row;
                if (!real[at + j]) {
                    std::fill(row, row + dim, 0.0f);
                    continue;
                }
                read_row(call.k.row(b, hk, at + j), call.k.kind, dim, row);
                if (!all_finite(row, dim)) zero_wild(row, dim);
                longest = std::max(longest, length(row, dim));
            }
            transpose_to_panels(pointers.data(), keys, dim, panels);
            multiply<false>(here, keys, dim, block, dim, 1, panels, dim, scores + at, width);
        }
        std::vector<std::pair<float, int32_t>> found;
        std::vector<float> maxima;
        bool masked = std::find(real, real + n, 0) != real + n;
        auto better = [](const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        for (int64_t i = 0; i < here; i++) {
            const double* query = mine + i * dim;
            int64_t visible = call.limits ? std::clamp<int64_t>(call.limits[b * call.queries + first + i], 0, n) : n;
            float slack = 2 * doubt(std::sqrt(dot(query, query, dim)), longest, dim);
            float* s = scores + i * width;
            std::fill(s + visible, s + width, -INFINITY);
            if (masked)
                for (int64_t j = 0; j < visible; j++)
                    if (!real[j]) s[j] = -INFINITY;
            float threshold = at_least_count(s, width, call.count, maxima) - slack;
            found.clear();
            for (int64_t j = 0; j < visible; j += kLanes)
                for (uint32_t high = at_least(load(s + j), threshold); high; high &= high - 1) {
                    int64_t at = j + std::countr_zero(high);
                    if (at < visible && real[at]) found.emplace_back(s[at], static_cast<int32_t>(at));
                }
            int64_t wanted = std::min<int64_t>(call.count, static_cast<int64_t>(found.size()));
            if (wanted) {
                std::nth_element(found.begin(), found.begin() + (wanted - 1), found.end(), better);
                threshold = found[wanted - 1].first - slack;
                found.erase(std::remove_if(found.begin(), found.end(), [&](auto& x) { return x.first < threshold; }), found.end());
            }
            for (auto& [score, j] : found) {
                read_double(call.k, b, hk, j, scratch.data(), key.data());
                score = rounded(dot(query, key.data(), dim));
                if (score == 0) score = 0;
            }
            std::partial_sort(found.begin(), found.begin() + wanted, found.end(), better);
            int64_t* to = top + (bh * call.queries + first + i) * call.count;
            for (int64_t t = 0; t < call.count; t++) to[t] = t < wanted ? found[t].second : 0;
        }
    });
}

// --- cross-polytope --------------------------------------------------------------------------------------------------

// The nearest of the ± axes after a random rotation: buckets 2c and 2c + 1 are the two ends of axis c.
inline void cross_polytope(const PolytopeCall& call, int64_t* buckets) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, hx = h / (call.heads / call.row_heads), dim = call.x.dim;
        int64_t columns = call.columns[b], n = call.x.rows, stride = padded(columns);
        for (int64_t r = 0; r < call.rounds; r++) {
            Candidates axes(columns, dim);
            for (int64_t c = 0; c < columns; c++)
                for (int64_t d = 0; d < dim; d++)
                    axes.exact[c * dim + d] = normal(kRotation, r * call.heads + h, d, c, call.seed, call.layer);
            axes.prepare();
            Buffer block(kRowBlock * dim), scores(kRowBlock * std::max<int64_t>(stride, 1));
            std::vector<double> row(dim);
            std::vector<float> scratch(dim);
            int64_t* to = buckets + (bh * call.rounds + r) * n;
            for (int64_t first = 0; first < n; first += kRowBlock) {
                int64_t here = std::min(kRowBlock, n - first);
                for (int64_t i = 0; i < here; i++) {
                    float* x = block + i * dim;
                    if (call.mask[b * n + first + i])
                        read_row(call.x.row(b, hx, first + i), call.x.kind, dim, x);
                    else
                        std::fill(x, x + dim, 0.0f);
                }
                if (!all_finite(block, here * dim)) zero_wild(block, here * dim);
                multiply<false>(here, columns, dim, block, dim, 1, axes.panels, dim, scores, stride);
                for (int64_t i = 0; i < here; i++) {
                    const float* s = scores + i * stride;
                    float best = -1;
                    for (int64_t c = 0; c < columns; c++) best = std::max(best, std::fabs(s[c]));
                    for (int64_t d = 0; d < dim; d++) row[d] = block[i * dim + d];
                    float limit = best - 2 * doubt(std::sqrt(dot(row.data(), row.data(), dim)), axes.longest, dim);
                    int64_t bucket = 0, close = 0;
                    for (int64_t c = columns - 1; c >= 0; c--)
                        if (!(std::fabs(s[c]) < limit)) {
                            close++;
                            bucket = 2 * c + (s[c] < 0);
                        }
                    if (close > 1 || best <= 0) {
                        float furthest = -INFINITY;
                        for (int64_t c = 0; c < columns; c++) {
                            if (std::fabs(s[c]) < limit) continue;
                            auto verdict = static_cast<float>(dot(row.data(), axes.exact.data() + c * dim, dim));
                            if (verdict > furthest) furthest = verdict, bucket = 2 * c;
                            if (-verdict > furthest) furthest = -verdict, bucket = 2 * c + 1;
                        }
                    }
                    to[first + i] = bucket;
                }
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
