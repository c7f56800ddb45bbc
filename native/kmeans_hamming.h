// Lloyd's algorithm in Hamming space: the signs of random projections, packed into words.
#pragma once

#include <bit>
#include <numeric>
#include <vector>

#include "candidates.h"
#include "kmeans_starts.h"
#include "normals.h"

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

// The signs of the projections of one row of which the float32 products are given; those that float32 leaves in doubt
// are judged in float64.
inline void sign_bits(const float* row, const float* products, float limit, const Candidates& planes, double* exact,
                      uint64_t* bits) {
    for (int64_t m = 0; m < planes.count; m += kLanes) {
        Vec s = load(products + m);
        uint64_t used = planes.count - m < kLanes ? (uint64_t{1} << (planes.count - m)) - 1 : 0xFFFF;
        uint64_t positive = at_least(s, 0) & used, close = used;
        if (std::isfinite(limit)) close &= ~uint64_t{at_least(abs(s), limit)};
        if (close)
            for (int64_t d = 0; d < planes.dim; d++) exact[d] = row[d];
        for (; close; close &= close - 1) {
            int lane = std::countr_zero(close);
            auto verdict = static_cast<float>(dot(exact, planes.exact.data() + (m + lane) * planes.dim, planes.dim));
            positive = (positive & ~(uint64_t{1} << lane)) | uint64_t{verdict >= 0} << lane;
        }
        bits[m / 64] |= positive << (m % 64);
    }
}

// The signs of random projections of every row of a head, `words` words a row.
inline std::vector<uint64_t> sign_bits(const HammingCall& call, const float* normals, int64_t b, int64_t h,
                                       int64_t words) {
    int64_t dim = call.x.dim, stride = padded(call.bits);
    Candidates planes(call.bits, dim);
    std::copy_n(normals + h * call.bits * dim, call.bits * dim, planes.exact.data());
    planes.prepare();
    std::vector<uint64_t> bits(call.x.rows * words, 0);
    Buffer block(kRowBlock * dim), products(kRowBlock * stride);
    std::vector<double> exact(dim), sizes(kRowBlock);
    for (int64_t first = 0; first < call.x.rows; first += kRowBlock) {
        breathe();
        int64_t here = std::min(kRowBlock, call.x.rows - first);
        read_real(call.x, b, h, first, here, call.mask + b * call.x.rows, block);
        for (int64_t i = 0; i < here; i++) sizes[i] = tame(block + i * dim, dim);
        multiply(here, call.bits, dim, Strided{block, dim, 1}, planes.panels, dim, products, stride);
        for (int64_t i = 0; i < here; i++)
            sign_bits(block + i * dim, products + i * stride, doubt(sizes[i], planes.longest, dim), planes,
                      exact.data(), bits.data() + (first + i) * words);
    }
    return bits;
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

// Lloyd's iterations on the rows of one head. Only the rows that change their cluster are counted again, and only the
// centres that have moved are compared again.
class HammingClusters {
public:
    HammingClusters(const HammingCall& call, const float* normals, int64_t b, int64_t h, int64_t* labels)
        : words_((call.bits + 63) / 64),
          bits_count_(call.bits),
          n_(call.x.rows),
          k_(call.clusters),
          real_(call.mask + b * n_),
          labels_(labels),
          bits_(sign_bits(call, normals, b, h, words_)),
          centers_(k_ * words_),
          ones_(k_ * words_ * 64, 0),
          sizes_(k_, 0),
          all_(k_),
          nearest_(k_, words_, call.bits),
          nearest_moved_(k_, words_, call.bits),
          found_(n_),
          among_moved_(n_) {
        std::iota(all_.begin(), all_.end(), 0);
        std::fill(labels_, labels_ + n_, -1);
        std::vector<int64_t> rows;
        for (int64_t i = 0; i < n_; i++)
            if (real_[i]) rows.push_back(i);
        auto starts = one_of_each_span(call.draws, kStarts, h, int64_t(rows.size()), k_, k_);
        for (int64_t c = 0; c < k_; c++)
            std::copy_n(row(rows.empty() ? 0 : rows[starts[c]]), words_, centers_.data() + c * words_);
    }

    void run(int64_t iterations) {
        for (int64_t step = 0;; step++) {
            nearest_.prepare(centers_.data(), all_);
            if (step == 0 || 4 * int64_t(moved_.size()) > 3 * k_)
                nearest_(bits_.data(), n_, found_.data());
            else if (!moved_.empty())
                compare_with_moved();
            bool stable = relabel();
            if (step == iterations || (stable && step)) return;
            move_centers();
        }
    }

private:
    const uint64_t* row(int64_t i) const { return bits_.data() + i * words_; }

    // Centres that stayed are no nearer than a row's own, unless that one has moved away from the row.
    void compare_with_moved() {
        nearest_moved_.prepare(centers_.data(), moved_);
        nearest_moved_(bits_.data(), n_, among_moved_.data());
        for (int64_t i = 0; i < n_; i++) {
            NearestBits::Found& own = found_[i];
            int now = distance(row(i), centers_.data() + own.center * words_, words_);
            if (now > own.distance) {
                nearest_(row(i), 1, &own);
                continue;
            }
            own.distance = now;
            const auto& other = among_moved_[i];
            if (other.distance < now || (other.distance == now && other.center < own.center)) own = other;
        }
    }

    // Returns whether nothing has changed.
    bool relabel() {
        bool stable = true;
        for (int64_t i = 0; i < n_; i++) {
            int64_t old = labels_[i], best = found_[i].center;
            if (best == old) continue;
            stable = false;
            labels_[i] = best;
            if (!real_[i]) continue;
            if (old >= 0) count(i, old, -1);
            count(i, best, 1);
        }
        return stable;
    }

    void count(int64_t i, int64_t c, int32_t step) {
        sizes_[c] += step;
        int32_t* __restrict total = ones_.data() + c * words_ * 64;
        for (int64_t w = 0; w < words_; w++) {
            uint64_t word = row(i)[w];
            for (int byte = 0; byte < 8; byte++, word >>= 8, total += 8) {
                const int32_t* __restrict each = spread_byte[word & 255];
                for (int bit = 0; bit < 8; bit++) total[bit] += each[bit] & step;
            }
        }
    }

    // A centre is what most of its members have.
    void move_centers() {
        moved_.clear();
        for (int64_t c = 0; c < k_; c++) {
            if (!sizes_[c]) continue;
            bool here = false;
            for (int64_t w = 0; w < words_; w++) {
                uint64_t majority = 0;
                for (int64_t m = w * 64; m < std::min(bits_count_, w * 64 + 64); m++)
                    if (2 * ones_[c * words_ * 64 + m] >= sizes_[c]) majority |= uint64_t{1} << (m % 64);
                here |= centers_[c * words_ + w] != majority;
                centers_[c * words_ + w] = majority;
            }
            if (here) moved_.push_back(static_cast<int32_t>(c));
        }
    }

    int64_t words_, bits_count_, n_, k_;
    const uint8_t* real_;
    int64_t* labels_;
    std::vector<uint64_t> bits_, centers_;
    std::vector<int32_t> ones_, sizes_;  // of a centre's members: how often each bit is set, and how many they are
    std::vector<int32_t> all_, moved_;  // centres
    NearestBits nearest_, nearest_moved_;
    std::vector<NearestBits::Found> found_, among_moved_;
};

inline void hamming_kmeans(const HammingCall& call, int64_t* labels) {
    if (call.x.rows == 0) return;  // nobody to start from
    Normals planes = kept_normals().of(call.draws, kHyperplane, call.x.heads, call.bits, call.x.dim);
    double numbers = call.x.numbers() * double(call.bits + call.clusters * (call.iterations + 1) / 32);
    parallel_for(call.x.batch * call.x.heads, threads_for(numbers, call.threads), [&](int64_t bh, int) {
        HammingClusters clusters(call, planes->data(), bh / call.x.heads, bh % call.x.heads, labels + bh * call.x.rows);
        clusters.run(call.iterations);
    });
}

}  // namespace coterie::COTERIE_ISA
