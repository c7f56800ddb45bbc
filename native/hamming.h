// Lloyd's algorithm in Hamming space: the signs of random projections, packed into words.
#pragma once

#include <bit>
#include <numeric>
#include <vector>

#include "candidates.h"
#include "draws.h"

namespace coterie::COTERIE_ISA {

inline int distance(const uint64_t* a, const uint64_t* b, int64_t words) {
    int total = 0;
    for (int64_t w = 0; w < words; w++) total += std::popcount(a[w] ^ b[w]);
    return total;
}

// How many bits of two nibbles differ, for each second one twice over.
struct Differing {
    alignas(32) uint8_t bits[16][32];
    constexpr Differing() : bits() {
        for (unsigned a = 0; a < 16; a++)
            for (unsigned b = 0; b < 32; b++) bits[a][b] = static_cast<uint8_t>(std::popcount(a ^ (b & 15)));
    }
};
inline constexpr Differing differing;

// The nearest of some of k centres, strings of bits; the first of equals.
class NearestBits {
public:
    struct Found {
        int distance;
        int32_t center;
    };

    NearestBits(int64_t k, int64_t words, int64_t bits) : words_(words), nibbles_((bits + 3) / 4) {
        if (!quick()) return;
        int64_t width = rounded_up(k);
        planes_.resize(nibbles_ * width);
        nobody_.resize(width);
    }

    // Before the first look-up and whenever these centres, in ascending order, have moved.
    void prepare(const uint64_t* centers, const std::vector<int32_t>& which) {
        centers_ = centers;
        which_ = &which;
        if (!quick()) return;
        int64_t k = which.size();
        width_ = rounded_up(k);
        std::fill(nobody_.begin(), nobody_.begin() + k, uint8_t{0});
        std::fill(nobody_.begin() + k, nobody_.begin() + width_, uint8_t{128});
        for (int64_t p = 0; p < nibbles_; p++)
            for (int64_t c = 0; c < k; c++)
                planes_[p * width_ + c] =
                    static_cast<uint8_t>(centers[which[c] * words_ + p / 16] >> (4 * (p % 16)) & 15);
    }

    // For each of n strings; there must be a centre.
    void operator()(const uint64_t* mine, int64_t n, Found* found) const {
        for (int64_t first = 0; first < n; first += kRowBlock) {
            breathe();
            block(mine + first * words_, std::min(kRowBlock, n - first), found + first);
        }
    }

private:
    static int64_t rounded_up(int64_t k) { return (k + 31) / 32 * 32; }

    void block(const uint64_t* mine, int64_t n, Found* found) const {
        int64_t i = 0;
#if defined(__AVX2__)
        if (quick()) {
            for (; i + 2 <= n; i += 2) look_up<2>(mine + i * words_, found + i);
            for (; i < n; i++) look_up<1>(mine + i * words_, found + i);
            for (i = 0; i < n; i++) found[i].center = (*which_)[found[i].center];
        }
#endif
        for (; i < n; i++) {
            found[i].distance = INT32_MAX;
            for (int32_t c : *which_) {
                int d = distance(mine + i * words_, centers_ + c * words_, words_);
                if (d < found[i].distance) found[i] = {d, c};
            }
        }
    }

    // Distances are below 128, and there are instructions for it.
    bool quick() const {
#if defined(__AVX2__)
        return nibbles_ < 32;
#else
        return false;
#endif
    }

#if defined(__AVX2__)
    // A nibble of a row chooses a table, a nibble of 32 centres looks up how many bits differ. Rows share the loads.
    template <int Many>
    void look_up(const uint64_t* mine, Found* found) const {
        std::fill_n(found, Many, Found{256, 0});
        for (int64_t c = 0; c < width_; c += 128) {
            switch (std::min<int64_t>(4, (width_ - c) / 32)) {
                case 1: look_up<Many, 1>(mine, c, found); break;
                case 2: look_up<Many, 2>(mine, c, found); break;
                case 3: look_up<Many, 3>(mine, c, found); break;
                default: look_up<Many, 4>(mine, c, found);
            }
        }
    }

    template <int Many, int Blocks>
    void look_up(const uint64_t* mine, int64_t first, Found* found) const {
        __m256i sums[Many][Blocks];
        for (int r = 0; r < Many; r++)
            for (int i = 0; i < Blocks; i++)
                sums[r][i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nobody_.data() + first) + i);
        const uint8_t* planes = planes_.data() + first;
        for (int64_t w = 0; w < words_; w++) {
            uint64_t word[Many];
            for (int r = 0; r < Many; r++) word[r] = mine[r * words_ + w];
            for (int64_t p = 16 * w; p < std::min(nibbles_, 16 * (w + 1)); p++, planes += width_)
                for (int r = 0; r < Many; r++) {
                    __m256i table = _mm256_load_si256(reinterpret_cast<const __m256i*>(differing.bits[word[r] & 15]));
                    for (int i = 0; i < Blocks; i++) {
                        __m256i plane = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes) + i);
                        sums[r][i] = _mm256_add_epi8(sums[r][i], _mm256_shuffle_epi8(table, plane));
                    }
                    word[r] >>= 4;
                }
        }
        for (int r = 0; r < Many; r++) first_least<Blocks>(sums[r], first, found[r]);
    }

    template <int Blocks>
    static void first_least(const __m256i* sums, int64_t first, Found& best) {
        __m256i least = sums[0];
        for (int i = 1; i < Blocks; i++) least = _mm256_min_epu8(least, sums[i]);
        __m128i half = _mm_min_epu8(_mm256_castsi256_si128(least), _mm256_extracti128_si256(least, 1));
        half = _mm_min_epu8(half, _mm_srli_epi16(half, 8));
        int distance = _mm_cvtsi128_si32(_mm_minpos_epu16(_mm_and_si128(half, _mm_set1_epi16(255)))) & 255;
        if (distance >= best.distance) return;
        uint64_t equal[2] = {0, 0};
        for (int i = 0; i < Blocks; i++) {
            __m256i same = _mm256_cmpeq_epi8(sums[i], _mm256_set1_epi8(static_cast<char>(distance)));
            equal[i / 2] |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(same))} << (32 * (i % 2));
        }
        best = {distance, int32_t(first) + (equal[0] ? std::countr_zero(equal[0]) : 64 + std::countr_zero(equal[1]))};
    }
#endif

    int64_t words_, nibbles_, width_ = 0;
    std::vector<uint8_t> planes_, nobody_;  // nobody_: 128 behind the last centre
    const uint64_t* centers_ = nullptr;
    const std::vector<int32_t>* which_ = nullptr;
};

// The sign of each projection of a row, as bits.
inline void sign_bits(const HammingCall& call, const Rows& rows, int64_t b, int64_t h, const Candidates& planes,
                      std::vector<uint64_t>& bits, int64_t words) {
    int64_t dim = call.dim, stride = padded(call.bits);
    Buffer block(kRowBlock * dim), scores(kRowBlock * stride);
    std::vector<double> row(dim), sizes(kRowBlock);
    for (int64_t first = 0; first < call.rows; first += kRowBlock) {
        breathe();
        int64_t here = std::min(kRowBlock, call.rows - first);
        for (int64_t i = 0; i < here; i++) {
            float* to = block + i * dim;
            if (call.mask[b * call.rows + first + i])
                read_row(rows.row(b, h, first + i), rows.kind, dim, to);
            else
                std::fill(to, to + dim, 0.0f);
            sizes[i] = tame(to, dim);
        }
        multiply(here, call.bits, dim, Strided{block, dim, 1}, const_cast<Candidates&>(planes).panels, dim, scores,
                 stride);
        for (int64_t i = 0; i < here; i++) {
            float limit = doubt(sizes[i], planes.longest, dim);
            for (int64_t m = 0; m < call.bits; m += kLanes) {
                Vec s = load(scores + i * stride + m);
                uint64_t used = call.bits - m < kLanes ? (uint64_t{1} << (call.bits - m)) - 1 : 0xFFFF;
                uint64_t positive = at_least(s, 0) & used, close = used;
                if (std::isfinite(limit)) close &= ~uint64_t{at_least(abs(s), limit)};
                if (close)
                    for (int64_t d = 0; d < dim; d++) row[d] = block[i * dim + d];
                for (; close; close &= close - 1) {
                    int lane = std::countr_zero(close);
                    auto verdict = static_cast<float>(dot(row.data(), planes.exact.data() + (m + lane) * dim, dim));
                    positive = (positive & ~(uint64_t{1} << lane)) | uint64_t{verdict >= 0} << lane;
                }
                bits[(first + i) * words + m / 64] |= positive << (m % 64);
            }
        }
    }
}

// The bits of a byte as masks: all ones where a bit is set.
struct ByteBits {
    int32_t table[256][8];
    constexpr ByteBits() : table() {
        for (int byte = 0; byte < 256; byte++)
            for (int bit = 0; bit < 8; bit++) table[byte][bit] = -(byte >> bit & 1);
    }
    constexpr const int32_t* operator[](uint64_t byte) const { return table[byte]; }
};
inline constexpr ByteBits spread_byte;

inline void hamming_kmeans(const HammingCall& call, const Rows& rows, int64_t* labels) {
    parallel_for(call.batch * call.heads, call.threads, [&](int64_t bh, int) {
        int64_t b = bh / call.heads, h = bh % call.heads, words = (call.bits + 63) / 64, n = call.rows,
                k = call.clusters;
        if (n == 0) return;  // nobody to start from
        Candidates planes(call.bits, call.dim);
        for (int64_t m = 0; m < call.bits; m++) {
            breathe();
            for (int64_t d = 0; d < call.dim; d++)
                planes.exact[m * call.dim + d] = normal(kHyperplane, h, m, d, call.seed, call.layer);
        }
        planes.prepare();
        std::vector<uint64_t> bits(n * words, 0), centers(k * words);
        sign_bits(call, rows, b, h, planes, bits, words);
        std::vector<int64_t> real;
        for (int64_t i = 0; i < n; i++)
            if (call.mask[b * n + i]) real.push_back(i);
        auto chosen = one_of_each_span(kStarts, int64_t(real.size()), k, k, h, call.seed, call.layer);
        for (int64_t& c : chosen) c = real.empty() ? 0 : real[c];
        for (int64_t c = 0; c < k; c++) std::copy_n(bits.data() + chosen[c] * words, words, centers.data() + c * words);

        int64_t* label = labels + bh * n;
        std::vector<int32_t> ones(k * words * 64, 0), sizes(k, 0);
        NearestBits nearest(k, words, call.bits), nearest_moved(k, words, call.bits);
        std::vector<int32_t> all(k), moved;
        std::iota(all.begin(), all.end(), 0);
        std::vector<NearestBits::Found> found(n), among_moved(n);
        std::fill(label, label + n, -1);
        auto count = [&](int64_t i, int64_t c, int32_t step) {
            sizes[c] += step;
            int32_t* __restrict total = ones.data() + c * words * 64;
            for (int64_t w = 0; w < words; w++) {
                uint64_t word = bits[i * words + w];
                for (int byte = 0; byte < 8; byte++, word >>= 8, total += 8) {
                    const int32_t* __restrict each = spread_byte[word & 255];
                    for (int bit = 0; bit < 8; bit++) total[bit] += each[bit] & step;
                }
            }
        };
        for (int64_t step = 0;; step++) {
            bool stable = true;
            nearest.prepare(centers.data(), all);
            if (step == 0 || 4 * int64_t(moved.size()) > 3 * k) {
                nearest(bits.data(), n, found.data());
            } else if (!moved.empty()) {
                // Centres that stayed are no nearer than a row's own, unless that one has moved away from the row.
                nearest_moved.prepare(centers.data(), moved);
                nearest_moved(bits.data(), n, among_moved.data());
                for (int64_t i = 0; i < n; i++) {
                    const uint64_t* mine = bits.data() + i * words;
                    NearestBits::Found& own = found[i];
                    int now = distance(mine, centers.data() + own.center * words, words);
                    if (now > own.distance) {
                        nearest(mine, 1, &own);
                        continue;
                    }
                    own.distance = now;
                    const auto& other = among_moved[i];
                    if (other.distance < now || (other.distance == now && other.center < own.center)) own = other;
                }
            }
            for (int64_t i = 0; i < n; i++) {
                int64_t old = label[i], best = found[i].center;
                if (best == old) continue;
                stable = false;
                label[i] = best;
                if (!call.mask[b * n + i]) continue;
                if (old >= 0) count(i, old, -1);
                count(i, best, 1);
            }
            if (step == call.iterations || (stable && step)) break;
            moved.clear();
            for (int64_t c = 0; c < k; c++) {
                if (!sizes[c]) continue;
                bool here = false;
                for (int64_t w = 0; w < words; w++) {
                    uint64_t majority = 0;
                    for (int64_t m = w * 64; m < std::min(call.bits, w * 64 + 64); m++)
                        if (2 * ones[c * words * 64 + m] >= sizes[c]) majority |= uint64_t{1} << (m % 64);
                    here |= centers[c * words + w] != majority;
                    centers[c * words + w] = majority;
                }
                if (here) moved.push_back(static_cast<int32_t>(c));
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
