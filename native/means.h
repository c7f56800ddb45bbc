// Virtual rows: segment means, and their gradient.
#pragma once

#include "rows.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

inline int threads_for_means(const Segments& segments, int64_t dim) {
    double members = double(segments.batch * segments.heads) * double(segments.order.length + segments.count());
    return threads_for(2 * members * double(dim), segments.threads);
}

constexpr int64_t kAhead = 8;  // members, as a rule of this segment and the next
constexpr int64_t kColumns = 4;  // vectors of the rows that are met most, whose sums stay in registers

inline void means(const Segments& segments, const Rows& x, float* result) {
    int64_t count = segments.count();
    parallel_for(segments.batch * segments.heads, threads_for_means(segments, x.dim), [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h);
        const int32_t* order = segments.order.at(b, h);
        std::vector<float> row(x.dim);
        auto stored = x.at(b, h);
        const int64_t bytes = x.dim * (x.kind == Kind::f32 ? 4 : 2);
        int64_t period = 1;  // a list of segments is often given twice over
        while (period < count && (start[period] != start[0] || stop[period] != stop[0])) period++;
        for (int64_t s = 0; s < count; s++) {
            breathe();
            float* mean = result + (bh * count + s) * x.dim;
            if (s >= period && start[s] == start[s - period] && stop[s] == stop[s - period]) {
                std::copy_n(mean - period * x.dim, x.dim, mean);
                continue;
            }
            std::fill(mean, mean + x.dim, 0.0f);
            auto member = [&](int64_t i) {
                if (i + kAhead < segments.order.length) touch(stored(order[i + kAhead]), bytes);
                return fetch(x, b, h, order[i], row.data());
            };
            if (x.dim == kColumns * kLanes) {
                Vec sums[kColumns];
                for (int64_t d = 0; d < kColumns; d++) sums[d] = splat(0);
                for (int64_t i = start[s]; i < stop[s]; i++) {
                    const float* one = member(i);
                    for (int64_t d = 0; d < kColumns; d++) sums[d] = sums[d] + load(one + d * kLanes);
                }
                for (int64_t d = 0; d < kColumns; d++) store(mean + d * kLanes, sums[d]);
            } else {
                for (int64_t i = start[s]; i < stop[s]; i++) {
                    const float* one = member(i);
                    for (int64_t d = 0; d < x.dim; d++) mean[d] += one[d];
                }
            }
            float size = static_cast<float>(std::max(1, stop[s] - start[s]));
            for (int64_t d = 0; d < x.dim; d++) mean[d] /= size;
        }
    });
}

// Each member gets its share of its mean's gradient.
inline void means_backward(const Segments& segments, Gradient& gradient) {
    int64_t count = segments.count(), dim = gradient.dim;
    parallel_for(segments.batch * segments.heads, threads_for_means(segments, dim), [&](int64_t bh, int) {
        int64_t b = bh / segments.heads, h = bh % segments.heads;
        const int32_t *start = segments.start.at(b, h), *stop = segments.stop.at(b, h);
        const int32_t* order = segments.order.at(b, h);
        for (int64_t s = 0; s < count; s++) {
            breathe();
            const float* mean = gradient.row(bh, gradient.own_rows + s);
            float size = static_cast<float>(std::max(1, stop[s] - start[s]));
            for (int64_t i = start[s]; i < stop[s]; i++) {
                float* to = gradient.row(bh, order[i]);
                for (int64_t d = 0; d < dim; d++) to[d] += mean[d] / size;
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
