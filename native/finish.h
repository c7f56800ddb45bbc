// Finished chunks of a cache: their keys cluster by cluster, in bytes, and the mean of each cluster.
#pragma once

#include "bytes.h"

namespace coterie::COTERIE_ISA {

inline void finish(const FinishCall& call) {
    int64_t heads = call.k.heads, dim = call.k.dim, wide = quads_of(dim) * kQuad;
    parallel_for(call.k.batch * heads, threads_for(8 * call.k.numbers(), call.threads), [&](int64_t task, int) {
        int64_t s = task / heads, h = task % heads, bh = call.samples[s] * heads + h, count = call.k.rows;
        const int64_t* labels = call.labels + task * count;
        std::vector<int64_t> next(call.clusters + 1);
        for (int64_t i = 0; i < count; i++) next[labels[i] + 1]++;
        for (int64_t c = 0; c < call.clusters; c++) next[c + 1] += next[c];
        int32_t* offsets = call.offsets + bh * (call.all_clusters + 1) + call.first_cluster;
        for (int64_t c = 0; c < call.clusters; c++)
            offsets[c + 1] = static_cast<int32_t>(call.first_place + next[c + 1]);
        std::vector<int64_t> sizes(call.clusters);
        for (int64_t c = 0; c < call.clusters; c++) sizes[c] = next[c + 1] - next[c];
        std::vector<double> keys(call.clusters * dim), values(call.clusters * call.v.dim);
        std::vector<float> scratch(std::max(dim, call.v.dim)), row(padded(dim));
        std::vector<uint8_t> whole(wide);
        uint8_t* bytes = call.bytes + bh * (call.places / kLanes) * wide * kLanes;
        for (int64_t i = 0; i < count; i++) {
            if (i % 1024 == 0) breathe();
            int64_t label = labels[i], place = call.first_place + next[label]++;
            const float* value = fetch(call.v, s, h, i, scratch.data());
            for (int64_t d = 0; d < call.v.dim; d++) values[label * call.v.dim + d] += value[d];
            const float* key = fetch(call.k, s, h, i, scratch.data());
            for (int64_t d = 0; d < dim; d++) keys[label * dim + d] += key[d];
            std::copy_n(key, dim, row.data());
            zero_wild(row.data(), dim);
            call.order[bh * call.places + place] = call.rows[s * count + i];
            call.scales[bh * call.places + place] = to_whole(row.data(), dim, kRightMost, kLift, whole.data());
            uint8_t* panel = bytes + place / kLanes * wide * kLanes + place % kLanes * kQuad;
            for (int64_t q = 0; q < wide / kQuad; q++)
                std::memcpy(panel + q * kLanes * kQuad, &whole[q * kQuad], kQuad);
        }
        auto write = [&](const std::vector<double>& sums, int64_t size, float* means) {
            means += (bh * call.all_clusters + call.first_cluster) * size;
            for (int64_t c = 0; c < call.clusters; c++)
                for (int64_t d = 0; d < size; d++)
                    means[c * size + d] =
                        static_cast<float>(sums[c * size + d] / double(std::max<int64_t>(1, sizes[c])));
        };
        write(keys, dim, call.mean_keys);
        write(values, call.v.dim, call.mean_values);
    });
}

}  // namespace coterie::COTERIE_ISA
