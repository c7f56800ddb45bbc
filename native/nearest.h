// The nearest of some centroids: roughly first, and in float64 where that is too close to call.
#pragma once

#include <cfloat>
#include <numeric>
#include <vector>

#include "bytes.h"
#include "candidates.h"
#include "places.h"

namespace coterie::COTERIE_ISA {

// The rows of one part, one head of them: as float32 where they lie, if they can be used as they are. Where they are
// many, they are looked at when they are first asked for.
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
        if (!at_hand()) return;
        for (int64_t i = 0; i < size_; i++) admit(i);  // memory is fastest row after row
    }

    int64_t size() const { return size_; }
    int32_t row(int64_t i) const { return rows_[i]; }
    const float* rough(int64_t i) {
        if (!pointers_[i]) admit(i);
        return pointers_[i];
    }
    // Some of the points will be asked for soon.
    void expect(const int64_t* chosen, int64_t first, int64_t stop, Prefetch& prefetch) const {
        prefetch.clear();
        if (at_hand()) return;
        if (!chosen) prefetch.add(call_.x, b_, h_, rows_ + first, std::min(stop, size_) - first);
        for (int64_t i = first; chosen && i < stop; i++) prefetch.add(call_.x, b_, h_, rows_ + chosen[i], 1);
        prefetch.pace(stop - first);
    }
    // Once it was asked for.
    float length_of(int64_t i) const { return lengths_[i]; }
    // The point itself, if float32 holds it; otherwise null.
    const float* exact(int64_t i) { return call_.unit ? nullptr : rough(i); }

    void read(int64_t i, double* to) {
        read_double(call_.x, b_, h_, rows_[i], scratch_.data(), to);
        if (call_.unit) scale_to_unit(to, call_.x.dim);
    }

    // The sum of these points, one after the other.
    void add_up(const int32_t* members, int64_t count, double* sum) {
        int64_t dim = call_.x.dim;
        std::fill(sum, sum + dim, 0.0);
        if (call_.unit) {
            for (int64_t i = 0; i < count; i++) {
                read(members[i], exact_.data());
                for (int64_t d = 0; d < dim; d++) sum[d] += exact_[d];
            }
            return;
        }
        members_.resize(count);
        for (int64_t i = 0; i < count; i++) members_[i] = rough(members[i]);
        coterie::COTERIE_ISA::add_up(members_.data(), count, dim, sum);
    }

private:
    // Whether there are so few that they stay in the cache until they are used.
    bool at_hand() const { return size_ * call_.x.dim <= 1 << 17; }

    void admit(int64_t i) {
        int64_t dim = call_.x.dim;
        bool in_place = call_.x.kind_at(rows_[i]) == Kind::f32 && !call_.unit;
        const float* row = reinterpret_cast<const float*>(call_.x.row(b_, h_, rows_[i]));
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

    const KmeansCall& call_;
    int64_t b_, h_;
    const int32_t* rows_;
    int64_t size_;
    std::vector<const float*> pointers_, members_;
    std::vector<float> lengths_, copies_, scratch_;
    std::vector<double> exact_;
};

// Some points as whole numbers of few bits, and how far each is from what they say.
template <class T>
class RoughPoints {
public:
    // The points chosen[0 … n), or the first n; numbers are at most `most`.
    void choose(const int64_t* chosen, int64_t n, int64_t dim, float most) {
        if (chosen == chosen_ && n == n_) return;
        chosen_ = chosen;
        n_ = n;
        dim_ = dim;
        left.clear(dim, most);
        lost.resize(n);
        row_.assign(padded(dim), 0);
    }

    // Read the first `count` of them, as far as that is still to be done.
    void read(Points& points, int64_t count) {
        if (left.rows < count)
            points.expect(chosen_, std::min(n_, left.rows + kAhead), std::min(n_, count + kAhead), soon_);
        for (int64_t i = left.rows; i < count; i++) {
            soon_.some();
            const float* row = points.rough(chosen_ ? chosen_[i] : i);
            if (dim_ % kLanes) row = std::copy_n(row, dim_, row_.data()) - dim_;
            left.add(row, dim_, &lost[i]);
        }
    }

    Left<T> left;
    std::vector<float> lost;

private:
    static constexpr int64_t kAhead = 16;

    const int64_t* chosen_ = nullptr;
    int64_t n_ = -1, dim_ = 0;
    std::vector<float> row_;
    Prefetch soon_;
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
          rows_(centroids * padded(dim)),
          whole_(padded(dim)) {}

    // The centroids as float32, each followed by 0 up to a multiple of kLanes.
    const float* row(int64_t c) const { return rows_.data() + c * padded(dim_); }
    float scale(int64_t i) const { return points_.left.scales[i]; }
    float lost(int64_t i) const { return points_.lost[i]; }

    // `off`: how far each centroid is from what its numbers say.
    void prepare(const int64_t* chosen, int64_t n, const Candidates& centroids, float* off) {
        points_.choose(chosen, n, dim_, most_);
        for (int64_t c = 0; c < centroids.count; c++) {
            float* row = rows_.data() + c * padded(dim_);
            for (int64_t d = 0; d < dim_; d++) row[d] = static_cast<float>(centroids.exact[c * dim_ + d]);
            right_.put(c, whole_.data(),
                       to_whole(row, dim_, most_, sizeof(T) == 1 ? kLift : 0, whole_.data(), off + c));
        }
    }

    // Of a block of points, of which there are `until` up to its end, with all centroids.
    void multiply(Points& points, int64_t block, int64_t until, float* to, int64_t stride) {
        points_.read(points, until);
        block_products(points_.left, block, right_, 0, stride / kLanes, to, stride);
    }

private:
    int64_t dim_;
    float most_;  // sums of products of shorts fit into 32 bits
    RoughPoints<T> points_;
    Right<T> right_;
    std::vector<float> rows_;
    std::vector<T> whole_;
};

// Finds the nearest centroid of points. The products that tell are those of bytes where there is an instruction for
// them, a quarter of the work, those of 16 bits where there is none, half of it, and those of float32 where few are
// needed. All are off by less than a bound: centroids within it of the best are looked at again in float32, and those
// that are still too close in float64, so the result is the same.
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
          length_(stride_),
          lost_(stride_),
          exact_half_(centroids.count),
          row_(dim_),
          block_(kRowBlock),
          close_((rough_ ? kBatch : 1) * stride_ + kLanes),
          closer_(stride_ + kLanes),
          again_(stride_ + 2 * kLanes),
          bytes_(rough_ && has_vnni() ? centroids.count : 0, dim_),
          shorts_(rough_ && !has_vnni() ? centroids.count : 0, dim_) {}

    // For the points chosen[0 … n), or the first n.
    void assign(const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        labels.assign(n, 0);
        if (centroids_.count == 1) return;
        for (int64_t c = 0; c < stride_; c++) {
            const double* center = centroids_.exact.data() + c * dim_;
            if (c < centroids_.count) exact_half_[c] = dot(center, center, dim_) / 2;
            half_[c] = c < centroids_.count ? static_cast<float>(-exact_half_[c]) : -INFINITY;
            // Never 0: times a bound of inf that would be NaN, which is no bound.
            length_[c] = FLT_MIN;
            if (c < centroids_.count) length_[c] += 1.001f * static_cast<float>(std::sqrt(2 * exact_half_[c]));
        }
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
            for (int64_t i = 0; i < here; i++)
                labels[first + i] = decide(scores_ + i * stride_, chosen ? chosen[first + i] : first + i);
        }
    }

    // By float32 products with a point.
    int64_t decide(float* s, int64_t point) {
        Vec top = splat(-INFINITY);  // x·c − ‖c‖²/2 is largest where ‖x − c‖² is smallest
        const float* half = half_;
        for (int64_t c = 0; c < stride_; c += kLanes) {
            Vec each = load(s + c) + load(half + c);
            store(s + c, each);
            top = max(each, top);
        }
        float best = highest(top), slack = 2 * doubt(point);
        int64_t found = centroids_.count;
        if (std::isfinite(best) && std::isfinite(slack))
            found = few_places_at_least(s, stride_, best - slack, close_.data());
        else
            std::iota(close_.begin(), close_.begin() + found, 0);
        return found == 1 ? close_[0] : judge(close_.data(), found, point);
    }

    template <class T>
    void assign_roughly(RoughProducts<T>& products, const int64_t* chosen, int64_t n, std::vector<int64_t>& labels) {
        products.prepare(chosen, n, centroids_, lost_);
        farthest_ = *std::max_element(static_cast<float*>(lost_), lost_ + centroids_.count);
        for (int64_t first = 0; first < n; first += kBatch) {
            breathe();
            begin();
            int64_t stop = std::min(n, first + kBatch);
            for (int64_t i = first; i < stop; i++) {
                if (i % kByteRows == 0)
                    products.multiply(points_, i / kByteRows, std::min(stop, i + kByteRows), scores_, stride_);
                int64_t point = chosen ? chosen[i] : i;
                list<T>(scores_ + i % kByteRows * stride_, products.scale(i), point, products.lost(i));
            }
            for (int64_t i = first; i < stop; i++) {
                auto [close, count] = listed_[i - first];
                labels[i] = count == 1 ? *close : look_again(products, close, count, chosen ? chosen[i] : i);
            }
        }
    }

    // Before some points are listed: who has several centroids is told later, since it cannot be foreseen.
    void begin() {
        listed_.clear();
        next_ = close_.data();
    }

    // List which centroids may be the nearest. `s`: the products with a point, relative to `scale`; `lost`: how far the
    // point is from what was multiplied.
    template <class T>
    void list(float* s, float scale, int64_t point, float lost) {
        Vec top = splat(-INFINITY), times = splat(scale);
        Vec mine = splat(1.001f * lost), size = splat(FLT_MIN + 1.001f * (points_.length_of(point) + lost));
        Vec off = fma(mine, splat(static_cast<float>(centroids_.longest)), size * splat(farthest_));
        const float *half = half_, *length = length_, *theirs = lost_;
        const int64_t stride = stride_;
        for (int64_t c = 0; c < stride; c += kLanes) {
            Vec each = fma(load(s + c), times, load(half + c));
            if constexpr (sizeof(T) == 1)  // of more bits few are close
                off = fma(mine, load(length + c), size * load(theirs + c));
            store(s + c, each + off);
            top = max(each - off, top);
        }
        float least = highest(top), slack = 2 * doubt(point);
        int64_t found = centroids_.count;
        if (std::isfinite(least) && std::isfinite(slack))
            found = few_places_at_least(s, stride, least - slack, next_);
        else
            std::iota(next_, next_ + found, 0);
        listed_.push_back({next_, found});
        next_ += found;
    }

    float doubt(int64_t point) const { return doubt_(points_.length_of(point) + centroids_.longest); }

    // The nearest of these, which may be followed by others.
    template <class T>
    int64_t look_again(const RoughProducts<T>& products, const int32_t* close, int64_t count, int64_t point) {
        float slack = 2 * doubt(point);
        if (!std::isfinite(slack)) return judge(close, count, point);
        const float* x = points_.rough(point);
        int64_t first = 0;
        for (; first + kAgain <= count; first += kAgain) again(products, x, close + first, again_ + first);
        if (first < count) {
            int32_t last[kAgain];
            for (int64_t i = 0; i < kAgain; i++) last[i] = close[std::min(first + i, count - 1)];
            again(products, x, last, again_ + first);
        }
        store(again_ + count, splat(-INFINITY));
        Vec top = splat(-INFINITY);
        for (int64_t i = 0; i < count; i += kLanes) top = max(load(again_ + i), top);
        int64_t left = few_places_at_least(again_, padded(count), highest(top) - slack, closer_.data());
        for (int64_t i = 0; i < left; i++) closer_[i] = close[closer_[i]];
        return left == 1 ? closer_[0] : judge(closer_.data(), left, point);
    }

    // What float32 says of a few centroids.
    template <class T>
    void again(const RoughProducts<T>& products, const float* x, const int32_t* which, float* to) {
        Vec sums[kAgain];
        const float* rows[kAgain];
        for (int i = 0; i < kAgain; i++) sums[i] = splat(0), rows[i] = products.row(which[i]);
        int64_t d = 0;
        for (; d + kLanes <= dim_; d += kLanes)
            for (int i = 0; i < kAgain; i++) sums[i] = fma(load(x + d), load(rows[i] + d), sums[i]);
        sum_four(sums, 1, to);
        for (int i = 0; i < kAgain; i++) {
            for (int64_t rest = d; rest < dim_; rest++) to[i] += x[rest] * rows[i][rest];
            to[i] += half_[which[i]];
        }
    }

    // The nearest of these by float64; the first of equals.
    int64_t judge(const int32_t* which, int64_t count, int64_t point) {
        if (const float* row = points_.exact(point)) return judge(which, count, row);
        points_.read(point, row_.data());
        return judge(which, count, row_.data());
    }

    template <class T>
    int64_t judge(const int32_t* which, int64_t count, const T* row) const {
        int64_t label = 0;
        float nearest = INFINITY;
        for (int64_t i = 0; i < count; i++) {
            double product = dot(row, centroids_.exact.data() + which[i] * dim_, dim_);
            if (auto far = static_cast<float>(exact_half_[which[i]] - product); far < nearest)
                nearest = far, label = which[i];
        }
        return label;
    }

    static constexpr int64_t kBatch = 8 * kByteRows;  // points that are listed at a time
    static constexpr int kAgain = 4;  // centroids that are looked at again at a time

    Points& points_;
    Candidates& centroids_;
    int64_t dim_, stride_;
    bool rough_;
    Buffer scores_;
    Buffer half_, length_, lost_;  // of each centroid: −‖c‖²/2, ‖c‖, and how far it is from its whole numbers
    std::vector<double> exact_half_, row_;
    std::vector<const float*> block_;
    std::vector<int32_t> close_, closer_;
    float farthest_ = 0;  // of lost_
    int32_t* next_ = nullptr;  // in close_
    std::vector<std::pair<const int32_t*, int64_t>> listed_{};  // of each point
    Buffer again_;
    RoughProducts<uint8_t> bytes_;
    RoughProducts<int16_t> shorts_;
    Doubt doubt_{0, 0};
};

}  // namespace coterie::COTERIE_ISA
