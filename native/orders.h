// Numbers to compare, as the reference compares them (a float64 result rounded to float32, ties by position), and a
// stable radix sort.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "planning.h"
#include "rows.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

template <class T>  // float or double: both are exact
inline double dot(const T* a, const double* b, int64_t n) {
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] += double(a[i + l]) * b[i + l];
    double total = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
    for (; i < n; i++) total += double(a[i]) * b[i];
    return total;
}

// A number as it is compared: a finite float32.
inline float rounded(double x) {
    double high = x < double(FLT_MAX) ? x : double(FLT_MAX);  // NaN too
    return static_cast<float>(high > -double(FLT_MAX) ? high : -double(FLT_MAX));
}

// The same, with −0 and 0 one number.
inline float comparable(double x) {
    float score = rounded(x);
    return score == 0 ? 0.0f : score;
}

// A row as float64; what is not finite is 0.
inline void read_double(const Rows& from, int64_t b, int64_t h, int64_t i, float* scratch, double* to) {
    const float* row = fetch(from, b, h, i, scratch);
    if (all_finite(row, from.dim))
        for (int64_t d = 0; d < from.dim; d++) to[d] = row[d];
    else
        for (int64_t d = 0; d < from.dim; d++) to[d] = std::isfinite(row[d]) ? row[d] : 0.0;
}

// The rows of one head, one at a time, as they are or in float64.
struct HeadRows {
    const Rows& rows;
    int64_t batch = 0, head = 0;
    std::vector<float> scratch = std::vector<float>(rows.dim);
    std::vector<double> wide = std::vector<double>(rows.dim);

    const float* rough(int64_t i) { return fetch(rows, batch, head, i, scratch.data()); }
    // What is not finite is 0.
    const float* tame(int64_t i) {
        const float* row = rough(i);
        if (all_finite(row, rows.dim)) return row;
        if (row != scratch.data()) std::copy_n(row, rows.dim, scratch.data());
        zero_wild(scratch.data(), rows.dim);
        return scratch.data();
    }
    const double* exact(int64_t i) {
        read_double(rows, batch, head, i, scratch.data(), wide.data());
        return wide.data();
    }
};

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

    // The positions of `keys` in ascending order, ties by position.
    void sort(int64_t n, int32_t* to) {
        // Up to here, counting who comes before whom beats branches that nobody can guess.
        constexpr int64_t kTiny = 160;
        if (n <= kTiny) {
            int64_t both[kTiny];
            for (int64_t i = 0; i < n; i++)
                both[i] = int64_t{static_cast<int32_t>(keys[i] ^ 0x80000000u)} * (int64_t{1} << 32) + i;
            for (int64_t i = 0; i < n; i++) {
                int64_t mine = both[i], before = 0;
                for (int64_t j = 0; j < n; j++) before += both[j] < mine;
                to[before] = static_cast<int32_t>(i);
            }
            return;
        }
        constexpr int64_t kFew = 400;  // below, clearing the counters of radix sort takes longer than all the rest
        if (n < kFew) {
            uint64_t both[kFew];
            for (int64_t i = 0; i < n; i++) both[i] = uint64_t{keys[i]} << 32 | static_cast<uint64_t>(i);
            std::sort(both, both + n);
            for (int64_t i = 0; i < n; i++) to[i] = static_cast<int32_t>(both[i] & 0xFFFFFFFFu);
            return;
        }
        radix_sort(n, to);
    }

private:
    void radix_sort(int64_t n, int32_t* to) {
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
    parallel_for(shape.lists, threads_for(16 * double(shape.lists * shape.length), threads), [&](int64_t list, int) {
        thread_local Sorter sorter;
        sorter.resize(shape.length);
        const uint8_t* real = mask + list * shape.length;
        for (int64_t i = 0; i < shape.length; i++)
            sorter.keys[i] = real[i] ? sortable(rounded(scores[list * shape.length + i])) : kLast;
        sorter.sort(shape.length, order + list * shape.length);
    });
}

// Members of each label in order of position, and where each label starts; those that are masked come last.
inline void group_by(const int64_t* labels, const uint8_t* mask, const OrderShape& shape, int64_t groups,
                     int32_t* order, int32_t* offsets, int threads) {
    parallel_for(shape.lists, threads_for(4 * double(shape.lists * shape.length), threads), [&](int64_t list, int) {
        const int64_t* label = labels + list * shape.length;
        const uint8_t* real = mask + list * shape.length;
        std::vector<int32_t> next(groups + 2, 0);
        auto of = [&](int64_t i) { return real[i] ? label[i] : groups; };
        for (int64_t i = 0; i < shape.length; i++) next[of(i) + 1]++;
        for (int64_t g = 0; g <= groups; g++) next[g + 1] += next[g];
        std::copy_n(next.data(), groups + 1, offsets + list * (groups + 1));
        for (int64_t i = 0; i < shape.length; i++) order[list * shape.length + next[of(i)]++] = static_cast<int32_t>(i);
    });
}

}  // namespace coterie::COTERIE_ISA
