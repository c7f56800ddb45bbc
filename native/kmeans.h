// Lloyd's algorithm in Euclidean and in Hamming space, and the means of clusters.
#pragma once

#include <bit>
#include <vector>

#include "candidates.h"
#include "philox.h"

namespace coterie::COTERIE_ISA {

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

}  // namespace coterie::COTERIE_ISA
