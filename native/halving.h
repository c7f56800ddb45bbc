// Similar rows side by side, in leaves of equal size: rows are cut in two at the middle of the direction that they
// differ in most, and each half again, down to leaves that stay together.
#pragma once

#include <algorithm>
#include <vector>

#include "candidates.h"

namespace coterie::COTERIE_ISA {

// One part of one head. Where its rows lie to each other is measured on whole numbers, so small that float32 products
// of them are exact: so the halves do not depend on the order of summation.
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
          sums_(2 * dim_),
          index_(size_) {
        double longest = 0;
        for (int64_t i = 0; i < size_; i++) {
            const double* x = rows_.exact(row_[i]);
            for (int64_t d = 0; d < dim_; d++) longest = std::max(longest, std::fabs(x[d]));
        }
        for (int64_t i = 0; i < size_; i++) {
            index_[i] = static_cast<int32_t>(i);
            round_to_whole(rows_.exact(row_[i]), longest, at(i));
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
    float* at(int64_t i) { return whole_ + i * width_; }

    void round_to_whole(const double* x, double longest, float* to) const {
        if (longest == 0) longest = 1;
        for (int64_t d = 0; d < dim_; d++) to[d] = static_cast<float>(std::nearbyint(x[d] * most_ / longest));
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
    void measure(int64_t begin, int64_t end, const By& by, std::vector<float>& found) {
        for (int64_t slot = begin; slot < end; slot++) {
            const float *x = at(index_[slot]), *y = by(index_[slot]);
            Vec total = splat(0);
            for (int64_t d = 0; d < width_; d += kLanes) total = fma(load(x + d), load(y + d), total);
            found[index_[slot]] = sum(total);
        }
    }

    // The row of a node that is farthest from row i, ties to the first.
    int32_t farthest(int64_t begin, int64_t end, int32_t i) {
        measure(begin, end, [&](int32_t) { return at(i); }, along_);
        float top = -1;
        int32_t found = i;
        for (int64_t slot = begin; slot < end; slot++) {
            int32_t j = index_[slot];
            float far = squares_[j] + squares_[i] - 2 * along_[j];
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
        for (int64_t d = 0; d < width_; d++) direction_[d] = at(one)[d] - at(other)[d];
        const float* direction = direction_;
        measure(begin, end, [&](int32_t) { return direction; }, along_);
        float middle = squares_[one] - squares_[other];
        std::fill(sums_.begin(), sums_.end(), 0.0);
        int64_t near = 0;
        for (int64_t slot = begin; slot < end; slot++) {
            const float* x = at(index_[slot]);
            bool mine = 2 * along_[index_[slot]] > middle;
            near += mine;
            double* to = sums_.data() + (mine ? 0 : dim_);
            for (int64_t d = 0; d < dim_; d++) to[d] += x[d];
        }
        double longest = 0;
        for (int64_t d = 0; d < dim_; d++) {
            sums_[d] = double(end - begin - near) * sums_[d] - double(near) * sums_[dim_ + d];
            longest = std::max(longest, std::fabs(sums_[d]));
        }
        round_to_whole(sums_.data(), longest, direction_);
    }

    // The halves of a node along the direction, ties by position.
    void divide(int64_t begin, int64_t cut, int64_t end) {
        const float* direction = direction_;
        measure(begin, end, [&](int32_t) { return direction; }, along_);
        auto before = [&](int32_t x, int32_t y) { return along_[x] < along_[y] || (along_[x] == along_[y] && x < y); };
        std::nth_element(index_.begin() + begin, index_.begin() + cut, index_.begin() + end, before);
    }

    HeadRows rows_;
    int64_t dim_, width_, first_, size_, leaves_, together_;
    double most_;  // the largest whole number
    const int32_t* row_;
    Buffer whole_, direction_;
    std::vector<float> squares_, along_;
    std::vector<double> sums_;
    std::vector<int32_t> index_;
};

// order (batch, heads, slots): the rows of each part leaf by leaf.
inline void halve(const HalveCall& call, int32_t* order) {
    int64_t heads = call.x.batch * call.x.heads, slots = call.parts.slots, parts = call.parts.count;
    parallel_for(heads, call.threads, [&](int64_t bh, int) {
        std::copy_n(call.parts.order + bh / call.x.heads * slots, slots, order + bh * slots);
    });
    parallel_for(heads * parts, call.threads, [&](int64_t task, int) {
        int64_t bh = task / parts, b = bh / call.x.heads, part = task % parts;
        if (call.leaves[b * parts + part] > call.together[b])
            Halving(call, b, bh % call.x.heads, part).run(order + bh * slots);
    });
}

}  // namespace coterie::COTERIE_ISA
