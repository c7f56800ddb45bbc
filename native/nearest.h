// The nearest of some centroids: roughly first, and in float64 where that is too close to call.
#pragma once

#include <bit>
#include <vector>

#include "bytes.h"
#include "candidates.h"

namespace coterie::COTERIE_ISA {

// The rows of one part, one head of them: as float32 where they lie, if they can be used as they are.
class Points {
public:
    Points(const KmeansCall& call, int64_t b, int64_t h, int64_t part)
        : call_(call),
          b_(b),
          h_(h),
          rows_(call.parts.rows(b, part)),
          size_(call.parts.size(b, part)),
          pointers_(size_),
          lengths_(size_),
          scratch_(call.x.dim),
          exact_(call.x.dim) {
        int64_t dim = call.x.dim;
        for (int64_t i = 0; i < size_; i++) {
            bool in_place = call.x.kind_at(rows_[i]) == Kind::f32 && !call.unit;
            const float* row = reinterpret_cast<const float*>(call.x.row(b, h, rows_[i]));
            double size = in_place ? length(row, dim) : INFINITY;
            if (std::isfinite(size) || (in_place && all_finite(row, dim))) {
                pointers_[i] = row;
            } else {
                if (copies_.empty()) copies_.resize(size_ * dim);
                read(i, exact_.data());
                std::copy(exact_.begin(), exact_.end(), copies_.begin() + i * dim);
                pointers_[i] = copies_.data() + i * dim;
                size = length(pointers_[i], dim);
            }
            lengths_[i] = static_cast<float>(size);
        }
    }

    int64_t size() const { return size_; }
    int32_t row(int64_t i) const { return rows_[i]; }
    const float* rough(int64_t i) const { return pointers_[i]; }
    float length_of(int64_t i) const { return lengths_[i]; }
    // The point itself, if float32 holds it; otherwise null.
    const float* exact(int64_t i) const { return call_.unit ? nullptr : pointers_[i]; }

    void read(int64_t i, double* to) {
        read_double(call_.x, b_, h_, rows_[i], scratch_.data(), to);
        if (call_.unit) scale_to_unit(to, call_.x.dim);
    }

    void add_to(int64_t i, double* sum) {
        int64_t dim = call_.x.dim;
        const float* row = pointers_[i];
        if (call_.unit) {
            read(i, exact_.data());
            for (int64_t d = 0; d < dim; d++) sum[d] += exact_[d];
        } else {
            for (int64_t d = 0; d < dim; d++) sum[d] += row[d];
        }
    }

private:
    const KmeansCall& call_;
    int64_t b_, h_;
    const int32_t* rows_;
    int64_t size_;
    std::vector<const float*> pointers_;
    std::vector<float> lengths_, copies_, scratch_;
    std::vector<double> exact_;
};

// Points as whole numbers of few bits, and how far each is from what they say.
template <class T>
class RoughPoints {
public:
    // The points chosen[0 … n), or the first n; numbers are at most `most`.
    void read(const Points& points, const int64_t* chosen, int64_t n, int64_t dim, float most) {
        if (chosen == chosen_ && n == left.rows) return;
        chosen_ = chosen;
        left.clear(dim, most);
        lost.resize(n);
        row_.assign(padded(dim), 0);
        for (int64_t i = 0; i < n; i++) {
            const float* row = points.rough(chosen ? chosen[i] : i);
            if (dim % kLanes) row = std::copy_n(row, dim, row_.data()) - dim;
            left.add(row, dim, &lost[i]);
        }
    }

    Left<T> left;
    std::vector<float> lost;

private:
    const int64_t* chosen_ = nullptr;
    std::vector<float> row_;
};

// Products of points and centroids in few bits.
template <class T>
class RoughProducts {
public:
    RoughProducts(int64_t centroids, int64_t dim)
        : dim_(dim),
          most_(sizeof(T) == 1 ? kRightMost
                               : std::min(4095.0f, std::floor(46340 / std::sqrt(static_cast<float>(padded(dim)))))),
          right_(centroids, dim),
          row_(padded(dim)),
          whole_(padded(dim)) {}

    const Left<T>& left() const { return points_.left; }
    float lost(int64_t i) const { return points_.lost[i]; }

    // Returns how far a centroid is from what its numbers say, at most.
    float read(const Points& points, const int64_t* chosen, int64_t n, const Candidates& centroids) {
        points_.read(points, chosen, n, dim_, most_);
        float farthest = 0;
        for (int64_t c = 0; c < centroids.count; c++) {
            for (int64_t d = 0; d < dim_; d++) row_[d] = static_cast<float>(centroids.exact[c * dim_ + d]);
            float lost = 0;
            right_.put(c, whole_.data(),
                       to_whole(row_.data(), dim_, most_, sizeof(T) == 1 ? kLift : 0, whole_.data(), &lost));
            farthest = std::max(farthest, lost);
        }
        return farthest;
    }

    // Of a block of points with all centroids.
    void multiply(int64_t block, float* to, int64_t stride) const {
        block_products(points_.left, block, right_, 0, stride / kLanes, to, stride);
    }

private:
    int64_t dim_;
    float most_;  // sums of products of shorts fit into 32 bits
    RoughPoints<T> points_;
    Right<T> right_;
    std::vector<float> row_;
    std::vector<T> whole_;
};

// Finds the nearest centroid of points. The products that tell are those of bytes where there is an instruction for
// them, a quarter of the work, those of 16 bits where there is none, half of it, and those of float32 where few are
// needed. All are off by less than a bound, and who is within it of the best is judged in float64: the result is the
// same.
class Nearest {
public:
    // `passes`: how often points will be assigned, about.
    Nearest(Points& points, Candidates& centroids, int64_t passes)
        : points_(points),
          centroids_(centroids),
          dim_(centroids.dim),
          stride_(padded(centroids.count)),
          rough_(kHasShorts && dim_ <= kWidest && stride_ / kLanes * passes >= kWorthIt),
          scores_((rough_ ? kByteRows : kRowBlock) * stride_),
          half_(stride_),
          exact_half_(centroids.count),
          row_(dim_),
          block_(kRowBlock),
          bytes_(rough_ && has_vnni() ? centroids.count : 0, dim_),
          shorts_(rough_ && !has_vnni() ? centroids.count : 0, dim_) {}

    // For the points chosen[0 … n), or the first n.
    void assign(const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        for (int64_t c = 0; c < stride_; c++) {
            const double* center = centroids_.exact.data() + c * dim_;
            if (c < centroids_.count) exact_half_[c] = dot(center, center, dim_) / 2;
            half_[c] = c < centroids_.count ? static_cast<float>(exact_half_[c]) : INFINITY;
        }
        labels.resize(n);
        if (rough_)
            centroids_.measure();
        else
            centroids_.prepare();
        doubt_ = Doubt(centroids_.longest, dim_);
        if (!rough_)
            assign_by_floats(chosen, n, labels);
        else if (has_vnni())
            assign_roughly(bytes_, chosen, n, labels);
        else
            assign_roughly(shorts_, chosen, n, labels);
    }

private:
    static constexpr int64_t kWidest = 1 << 15;  // sums of products of bytes fit into 32 bits
    static constexpr int64_t kWorthIt = 4;  // panels of centroids that each point meets, from which on few bits pay

    void assign_by_floats(const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        for (int64_t first = 0; first < n; first += kRowBlock) {
            breathe();
            int64_t here = std::min(kRowBlock, n - first);
            for (int64_t i = 0; i < here; i++) block_[i] = points_.rough(chosen ? chosen[first + i] : first + i);
            multiply(here, centroids_.count, dim_, Scattered{block_.data()}, centroids_.panels, dim_, scores_, stride_);
            for (int64_t i = 0; i < here; i++) {
                int64_t point = chosen ? chosen[first + i] : first + i;
                labels[first + i] = decide(scores_ + i * stride_, 1, point, 0);
            }
        }
    }

    template <class T>
    void assign_roughly(RoughProducts<T>& products, const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        float lost = products.read(points_, chosen, n, centroids_);
        for (int64_t first = 0; first < n; first += kByteRows) {
            if (first % kRowBlock < kByteRows) breathe();
            products.multiply(first / kByteRows, scores_, stride_);
            for (int64_t i = first; i < std::min(n, first + kByteRows); i++) {
                int64_t point = chosen ? chosen[i] : i;
                float mine = products.lost(i), size = points_.length_of(point) + mine;
                float off = 1.001f * (mine * static_cast<float>(centroids_.longest) + size * lost);
                labels[i] = decide(scores_ + (i - first) * stride_, products.left().scales[i], point, off);
            }
        }
    }

    // `s`: the products with a point, relative to `scale` and off by `off` at most, besides what float32 rounds.
    int64_t decide(float* s, float scale, int64_t point, float off) {
        Vec top = splat(-INFINITY), times = splat(scale);  // x·c − ‖c‖²/2 is largest where ‖x − c‖² is smallest
        for (int64_t c = 0; c < stride_; c += kLanes) {
            Vec each = load(s + c) * times - load(half_ + c);
            store(s + c, each);
            top = max(each, top);
        }
        float best = highest(top), slack = 2 * (off + doubt_(points_.length_of(point) + centroids_.longest));
        float limit = std::isfinite(best) && std::isfinite(slack) ? best - slack : -INFINITY;
        if (limit == -INFINITY) return judge(s, limit, point);
        int64_t label = -1;
        for (int64_t first = 0; first < stride_; first += 64) {
            uint64_t close = 0;
            for (int64_t c = first; c < std::min(stride_, first + 64); c += kLanes)
                close |= uint64_t{at_least(load(s + c), limit)} << (c - first);
            if (!close) continue;
            if (label >= 0 || (close & (close - 1))) return judge(s, limit, point);
            label = first + std::countr_zero(close);
        }
        return label;
    }

    // The nearest of those that reach the limit, by float64; the first of equals.
    int64_t judge(const float* s, float limit, int64_t point) {
        if (const float* row = points_.exact(point)) return judge(s, limit, row);
        points_.read(point, row_.data());
        return judge(s, limit, row_.data());
    }

    template <class T>
    int64_t judge(const float* s, float limit, const T* row) const {
        int64_t label = 0;
        float nearest = INFINITY;
        for (int64_t c = 0; c < centroids_.count; c += kLanes)
            for (uint32_t close = limit == -INFINITY ? 0xFFFFu : at_least(load(s + c), limit); close;
                 close &= close - 1) {
                int64_t at = c + std::countr_zero(close);
                if (at >= centroids_.count) break;
                double product = dot(row, centroids_.exact.data() + at * dim_, dim_);
                if (auto far = static_cast<float>(exact_half_[at] - product); far < nearest) nearest = far, label = at;
            }
        return label;
    }

    Points& points_;
    Candidates& centroids_;
    int64_t dim_, stride_;
    bool rough_;
    Buffer scores_, half_;
    std::vector<double> exact_half_, row_;
    std::vector<const float*> block_;
    RoughProducts<uint8_t> bytes_;
    RoughProducts<int16_t> shorts_;
    Doubt doubt_{0, 0};
};

}  // namespace coterie::COTERIE_ISA
