// What stands for the clusters of keys when they are ranked.
#pragma once

#include <vector>

#include "candidates.h"
#include "pages.h"

namespace coterie::COTERIE_ISA {

// The mean of each cluster of each key head, and its outlier, which is the key that is farthest from the mean.
struct Faces {
    Pages<double> means;  // (batch, key heads, clusters, dim)
    std::vector<int32_t> outliers;  // (batch, key heads, clusters): which key
    Pages<float> rough;  // (batch, key heads, clusters, 2, dim): mean and outlier in float32
    std::vector<double> longest;  // (batch, key heads): the length of the longest key; NaN if some number is not finite

    explicit Faces(const NearCall& call)
        : means(call.k.batch * call.k.heads * call.clusters.count() * call.k.dim),
          outliers(call.k.batch * call.k.heads * call.clusters.count()),
          rough(2 * means.size()),
          longest(call.k.batch * call.k.heads) {
        parallel_for(call.k.batch * call.k.heads, call.threads, [&](int64_t bh, int) {
            HeadRows keys{.rows = call.k, .batch = bh / call.k.heads, .head = bh % call.k.heads};
            const int32_t* start = call.clusters.start.at(keys.batch, keys.head);
            const int32_t* stop = call.clusters.stop.at(keys.batch, keys.head);
            const int32_t* order = call.clusters.order.at(keys.batch, keys.head);
            for (int64_t c = 0; c < call.clusters.count(); c++) {
                breathe();
                int64_t at = bh * call.clusters.count() + c;
                add_mean(keys, at, order + start[c], stop[c] - start[c], longest[bh]);
                find_outlier(keys, at, order + start[c], stop[c] - start[c]);
            }
        });
    }

private:
    void add_mean(HeadRows& keys, int64_t at, const int32_t* members, int64_t count, double& top) {
        int64_t dim = keys.rows.dim;
        double* mean = means.data() + at * dim;
        for (int64_t i = 0; i < count; i++) {
            const float* key = keys.rough(members[i]);
            double size = length(key, dim);
            if (std::isfinite(size)) {
                for (int64_t d = 0; d < dim; d++) mean[d] += key[d];
                if (size > top) top = size;  // stays NaN once it is
            } else {
                const double* finite = keys.exact(members[i]);
                for (int64_t d = 0; d < dim; d++) mean[d] += finite[d];
                top = NAN;
            }
        }
        for (int64_t d = 0; d < dim; d++) mean[d] /= double(std::max<int64_t>(1, count));
        std::copy(mean, mean + dim, rough.data() + at * 2 * dim);
    }

    void find_outlier(HeadRows& keys, int64_t at, const int32_t* members, int64_t count) {
        int64_t dim = keys.rows.dim;
        float farthest = -1;
        for (int64_t i = 0; i < count; i++) {
            const double* key = keys.exact(members[i]);
            float far = rounded(squared_distance(key, means.data() + at * dim, dim));
            if (far <= farthest) continue;
            farthest = far;
            outliers[at] = members[i];
            std::copy(key, key + dim, rough.data() + (at * 2 + 1) * dim);
        }
    }

    static double squared_distance(const double* a, const double* b, int64_t n) {
        double lanes[8] = {0};
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            for (int l = 0; l < 8; l++) lanes[l] += (a[i + l] - b[i + l]) * (a[i + l] - b[i + l]);
        double total =
            ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        for (; i < n; i++) total += (a[i] - b[i]) * (a[i] - b[i]);
        return total;
    }
};

}  // namespace coterie::COTERIE_ISA
