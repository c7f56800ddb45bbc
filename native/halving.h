// Similar rows side by side, in leaves of equal size: rows are cut in two at the middle of the direction that they
// differ in most, and each half again, down to leaves that stay together.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"
#include "shorts.h"

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
          few_(2 * width_),
          sums_(2 * dim_),
          index_(size_),
          behind_(size_) {
        double longest = 0;
        for (int64_t i = 0; i < size_; i++) longest = std::max<double>(longest, longest_of(rows_.tame(row_[i])));
        for (int64_t i = 0; i < size_; i++) {
            index_[i] = static_cast<int32_t>(i);
            round_to_whole(rows_.tame(row_[i]), longest, at(i));
            const int16_t* own = at(i);
            squares_[i] = dot_of_shorts(own, own, width_);
        }
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
        Vec tops = splat(0);
        int64_t d = 0;
        for (; d + kLanes <= dim_; d += kLanes) tops = max(abs(load(x + d)), tops);
        float longest = highest(tops);
        for (; d < dim_; d++) longest = std::max(longest, std::fabs(x[d]));
        return longest;
    }

    // round(x · most / longest). A product instead of the quotient rounds to the same, unless it is all but halfway.
    template <class T>
    void round_to_whole(const T* x, double longest, int16_t* to) const {
        if (longest == 0) longest = 1;
        const double factor = most_ / longest;
        int32_t halfway = 0;
        for (int64_t d = 0; d < dim_; d++) {
            double product = double(x[d]) * factor, whole = std::nearbyint(product);
            halfway += std::fabs(product - whole) > 0.499999;
            to[d] = static_cast<int16_t>(whole);
        }
        if (!halfway) return;
        for (int64_t d = 0; d < dim_; d++) to[d] = static_cast<int16_t>(std::nearbyint(double(x[d]) * most_ / longest));
    }

    void split(int64_t first, int64_t last) {
        int64_t begin = edge(first), end = edge(last), count = last - first;
        if (begin == end || count <= together_) return;
        int64_t middle = first + (count + 2 * together_ - 1) / (2 * together_) * together_, cut = edge(middle);
        if (begin < cut && cut < end) {
            breathe();
            look_between(begin, end);
            divide(begin, cut, end);
        }
        split(first, middle);
        split(middle, last);
    }

    // along_ = the products of the rows of some slots with one vector.
    void measure(int64_t begin, int64_t end, const int16_t* by) {
        int64_t slot = begin;
        for (; slot + kDots <= end; slot += kDots) {
            const int16_t* rows[kDots];
            for (int i = 0; i < kDots; i++) rows[i] = at(index_[slot + i]);
            dots_of_shorts(rows, by, width_, along_.data() + slot);
        }
        for (; slot < end; slot++) along_[slot] = dot_of_shorts(at(index_[slot]), by, width_);
    }

    // The row of a node that is farthest from row i, the first of equals.
    int32_t farthest(int64_t begin, int64_t end, int32_t i) {
        measure(begin, end, at(i));
        int32_t top = INT32_MIN, found = i;
        for (int64_t slot = begin; slot < end; slot++) {
            int32_t far = squares_[index_[slot]] - 2 * along_[slot];
            if (far > top) top = far, found = index_[slot];
        }
        return found;
    }

    // Along the line between two means: of the rows that are nearer to the one of two that are far apart, and of those
    // that are not.
    void look_between(int64_t begin, int64_t end) {
        int32_t one = farthest(begin, end, index_[begin]);
        int32_t other = farthest(begin, end, one);
        for (int64_t d = 0; d < width_; d++) direction_[d] = static_cast<int16_t>(at(one)[d] - at(other)[d]);
        measure(begin, end, direction_.data());
        int32_t middle = squares_[one] - squares_[other];
        std::fill(sums_.begin(), sums_.end(), 0.0);
        int64_t near = 0;
        for (int64_t slot = begin; slot < end;) {
            std::fill(few_.begin(), few_.end(), 0);
            for (int64_t stop = std::min(end, slot + kFew); slot < stop; slot++) {
                const int16_t* x = at(index_[slot]);
                bool mine = 2 * along_[slot] > middle;
                near += mine;
                int32_t* to = few_.data() + (mine ? 0 : width_);
                for (int64_t d = 0; d < width_; d++) to[d] += x[d];
            }
            for (int64_t d = 0; d < dim_; d++) {
                sums_[d] += few_[d];
                sums_[dim_ + d] += few_[width_ + d];
            }
        }
        double longest = 0;
        for (int64_t d = 0; d < dim_; d++) {
            sums_[d] = double(end - begin - near) * sums_[d] - double(near) * sums_[dim_ + d];
            longest = std::max(longest, std::fabs(sums_[d]));
        }
        round_to_whole(sums_.data(), longest, direction_.data());
    }

    // The halves of a node along the direction, ties by position; each stays in order.
    void divide(int64_t begin, int64_t cut, int64_t end) {
        measure(begin, end, direction_.data());
        int32_t edge = ranked(along_.data() + begin, end - begin, cut - begin);
        int64_t ties = cut - begin;  // that come before the cut
        for (int64_t slot = begin; slot < end; slot++) ties -= along_[slot] < edge;
        int64_t before = begin, behind = 0;
        for (int64_t slot = begin; slot < end; slot++) {
            int32_t i = index_[slot];
            bool tie = along_[slot] == edge, first = along_[slot] < edge || (tie && ties > 0);
            ties -= tie;
            index_[before] = i;
            behind_[behind] = i;
            before += first;
            behind += !first;
        }
        std::copy_n(behind_.begin(), behind, index_.begin() + cut);
    }

    // The number that `rank` others come before.
    static int32_t ranked(const int32_t* x, int64_t count, int64_t rank) {
        int64_t low = x[0], high = x[0];  // it is one of low … high
        for (int64_t i = 0; i < count; i++) {
            low = std::min<int64_t>(low, x[i]);
            high = std::max<int64_t>(high, x[i]);
        }
        while (low < high) {
            auto middle = static_cast<int32_t>((low + high) >> 1);
            int32_t upto = 0;
            for (int64_t i = 0; i < count; i++) upto += x[i] <= middle;
            if (upto > rank)
                high = middle;
            else
                low = middle + 1;
        }
        return static_cast<int32_t>(low);
    }

    static constexpr int kDots = 8;
    static constexpr int64_t kFew = 1 << 15;  // rows whose sums fit into 32 bits

    HeadRows rows_;
    int64_t dim_, width_, first_, size_, leaves_, together_;
    double most_;  // the largest whole number
    const int32_t* row_;
    std::vector<int16_t> whole_, direction_;
    std::vector<int32_t> squares_, along_, few_;  // along_: of each slot
    std::vector<double> sums_;
    std::vector<int32_t> index_, behind_;  // rows in slots, those of a node in order
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
