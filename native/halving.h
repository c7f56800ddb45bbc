// Similar rows side by side, in leaves of equal size: rows are cut in two at the middle of the direction that they
// differ in most, and each half again, down to leaves that stay together.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"

namespace coterie::COTERIE_ISA {

// One part of one head. Where its rows lie to each other is measured on whole numbers, so small that float32 products
// of them would be exact, as the reference's are: so the halves do not depend on the order of summation.
class Halving {
public:
    Halving(const HalveCall& call, int64_t b, int64_t h, int64_t part)
        : rows_{.rows = call.x, .batch = b, .head = h},
          dim_(call.x.dim),
          width_(padded(call.x.dim)),
          first_(call.parts.first(b, part)),
          size_(call.parts.size(b, part)),
          leaves_(call.leaves[b * call.parts.count + part]),
          together_(call.together[b]),
          most_(std::clamp(std::floor(2048 / std::sqrt(double(std::max<int64_t>(1, dim_)))), 1.0, 127.0)),
          row_(call.parts.rows(b, part)),
          whole_(std::max<int64_t>(1, size_ * width_)),
          direction_(width_),
          squares_(size_),
          along_(size_),
          few_(2 * dim_),
          sums_(2 * dim_),
          index_(size_),
          sorted_(size_) {
        double longest = 0;
        for (int64_t i = 0; i < size_; i++) longest = std::max<double>(longest, longest_of(rows_.tame(row_[i])));
        for (int64_t i = 0; i < size_; i++) {
            index_[i] = static_cast<int32_t>(i);
            round_to_whole(rows_.tame(row_[i]), longest, at(i));
        }
        measure(0, size_, [&](int32_t i) { return at(i); }, squares_);
    }

    // The rows of the part leaf by leaf.
    void run(int32_t* order) {
        split(0, leaves_);
        for (int64_t i = 0; i < size_; i++) order[first_ + i] = row_[index_[i]];
    }

private:
    int64_t edge(int64_t leaf) const { return leaf * size_ / leaves_; }
    int16_t* at(int64_t i) { return whole_.data() + i * width_; }

    float longest_of(const float* x) const {
        float longest = 0;
        for (int64_t d = 0; d < dim_; d++) longest = std::max(longest, std::fabs(x[d]));
        return longest;
    }

    template <class T>
    void round_to_whole(const T* x, double longest, int16_t* to) const {
        if (longest == 0) longest = 1;
        for (int64_t d = 0; d < dim_; d++) to[d] = static_cast<int16_t>(std::nearbyint(double(x[d]) * most_ / longest));
    }

    void split(int64_t first, int64_t last) {
        int64_t begin = edge(first), end = edge(last), count = last - first;
        if (begin == end) return;
        if (count <= together_) {
            std::sort(index_.begin() + begin, index_.begin() + end);
            return;
        }
        int64_t middle = first + (count + 2 * together_ - 1) / (2 * together_) * together_, cut = edge(middle);
        if (begin < cut && cut < end) {
            breathe();
            look_between(begin, end);
            divide(begin, cut, end);
        }
        split(first, middle);
        split(middle, last);
    }

    // found[i] = the product of row i, of some slots, with by(i).
    template <class By>
    void measure(int64_t begin, int64_t end, const By& by, std::vector<int32_t>& found) {
        for (int64_t slot = begin; slot < end; slot++) {
            const int16_t *x = at(index_[slot]), *y = by(index_[slot]);
            int32_t total = 0;
            for (int64_t d = 0; d < width_; d++) total += x[d] * y[d];
            found[index_[slot]] = total;
        }
    }

    // The row of a node that is farthest from row i, ties to the first.
    int32_t farthest(int64_t begin, int64_t end, int32_t i) {
        measure(begin, end, [&](int32_t) { return at(i); }, along_);
        int32_t top = -1, found = i;
        for (int64_t slot = begin; slot < end; slot++) {
            int32_t j = index_[slot];
            int32_t far = squares_[j] + squares_[i] - 2 * along_[j];
            if (far < top || (far == top && j > found)) continue;
            top = far;
            found = j;
        }
        return found;
    }

    // Along the line between two means: of the rows that are nearer to the one of two that are far apart, and of those
    // that are not.
    void look_between(int64_t begin, int64_t end) {
        int32_t one = farthest(begin, end, *std::min_element(index_.begin() + begin, index_.begin() + end));
        int32_t other = farthest(begin, end, one);
        for (int64_t d = 0; d < width_; d++) direction_[d] = static_cast<int16_t>(at(one)[d] - at(other)[d]);
        const int16_t* direction = direction_.data();
        measure(begin, end, [&](int32_t) { return direction; }, along_);
        int32_t middle = squares_[one] - squares_[other];
        std::fill(sums_.begin(), sums_.end(), 0.0);
        int64_t near = 0;
        for (int64_t slot = begin; slot < end;) {
            std::fill(few_.begin(), few_.end(), 0);
            for (int64_t stop = std::min(end, slot + kFew); slot < stop; slot++) {
                const int16_t* x = at(index_[slot]);
                bool mine = 2 * along_[index_[slot]] > middle;
                near += mine;
                int32_t* to = few_.data() + (mine ? 0 : dim_);
                for (int64_t d = 0; d < dim_; d++) to[d] += x[d];
            }
            for (int64_t d = 0; d < 2 * dim_; d++) sums_[d] += few_[d];
        }
        double longest = 0;
        for (int64_t d = 0; d < dim_; d++) {
            sums_[d] = double(end - begin - near) * sums_[d] - double(near) * sums_[dim_ + d];
            longest = std::max(longest, std::fabs(sums_[d]));
        }
        round_to_whole(sums_.data(), longest, direction_.data());
    }

    // The halves of a node along the direction, ties by position.
    void divide(int64_t begin, int64_t cut, int64_t end) {
        const int16_t* direction = direction_.data();
        measure(begin, end, [&](int32_t) { return direction; }, along_);
        for (int64_t slot = begin; slot < end; slot++) {
            int32_t i = index_[slot];
            sorted_[slot] = int64_t{along_[i]} * (int64_t{1} << 32) + i;
        }
        std::nth_element(sorted_.begin() + begin, sorted_.begin() + cut, sorted_.begin() + end);
        for (int64_t slot = begin; slot < end; slot++) index_[slot] = static_cast<int32_t>(sorted_[slot] & UINT32_MAX);
    }

    static constexpr int64_t kFew = 1 << 15;  // rows whose sums fit into 32 bits

    HeadRows rows_;
    int64_t dim_, width_, first_, size_, leaves_, together_;
    double most_;  // the largest whole number
    const int32_t* row_;
    std::vector<int16_t> whole_, direction_;
    std::vector<int32_t> squares_, along_, few_;
    std::vector<double> sums_;
    std::vector<int32_t> index_;
    std::vector<int64_t> sorted_;  // of each row: how far along, then its number
};

// order (batch, heads, slots): the rows of each part leaf by leaf.
inline void halve(const HalveCall& call, int32_t* order) {
    int64_t heads = call.x.batch * call.x.heads, slots = call.parts.slots, parts = call.parts.count;
    parallel_for(heads, threads_for(double(heads * slots), call.threads), [&](int64_t bh, int) {
        std::copy_n(call.parts.order + bh / call.x.heads * slots, slots, order + bh * slots);
    });
    parallel_for(heads * parts, threads_for(8 * call.x.numbers(), call.threads), [&](int64_t task, int) {
        int64_t bh = task / parts, b = bh / call.x.heads, part = task % parts;
        if (call.leaves[b * parts + part] > call.together[b])
            Halving(call, b, bh % call.x.heads, part).run(order + bh * slots);
    });
}

}  // namespace coterie::COTERIE_ISA
