// Finished chunks of a cache: the mean of each cluster in 16 bits, and its keys as residuals to it in 4.
#pragma once

#include "codes.h"

namespace coterie::COTERIE_ISA {

// The clusters of one key head of one sample.
class Finisher {
public:
    Finisher(const FinishCall& call, int64_t s, int64_t h)
        : call_(call),
          s_(s),
          h_(h),
          bh_(call.samples[s] * call.k.heads + h),
          labels_(call.labels + (s * call.k.heads + h) * call.k.rows),
          next_(call.clusters + 1),
          scratch_(std::max(call.k.dim, call.v.dim)),
          codes_(padded(call.k.dim), 8) {}  // half a step, where there is nothing

    void run() {
        for (int64_t i = 0; i < call_.k.rows; i++) next_[labels_[i] + 1]++;
        sizes_.assign(next_.begin() + 1, next_.end());
        for (int64_t c = 0; c < call_.clusters; c++) next_[c + 1] += next_[c];
        int32_t* offsets = call_.offsets + bh_ * (call_.all_clusters + 1) + call_.first_cluster;
        for (int64_t c = 0; c < call_.clusters; c++)
            offsets[c + 1] = static_cast<int32_t>(call_.first_place + next_[c + 1]);
        average(call_.v, call_.mean_values, call_.value_steps);
        average(call_.k, call_.mean_keys, call_.key_steps);
        std::vector<float> row(call_.k.dim);
        for (int64_t i = 0; i < call_.k.rows; i++) {
            if (i % 1024 == 0) breathe();
            code(i, call_.first_place + next_[labels_[i]]++, row.data());
        }
    }

private:
    // What a step is not finite for stands for no number.
    void average(const Rows& x, int16_t* means, float* steps) {
        int64_t dim = x.dim, wide = padded(dim);
        std::vector<double> sums(call_.clusters * dim);
        for (int64_t i = 0; i < x.rows; i++) {
            const float* row = fetch(x, s_, h_, i, scratch_.data());
            for (int64_t d = 0; d < dim; d++) sums[labels_[i] * dim + d] += row[d];
        }
        means += (bh_ * call_.all_clusters + call_.first_cluster) * wide;
        steps += bh_ * call_.all_clusters + call_.first_cluster;
        for (int64_t c = 0; c < call_.clusters; c++) {
            double* mean = sums.data() + c * dim;
            bool finite = true;
            float top = 0;
            for (int64_t d = 0; d < dim; d++) {
                mean[d] /= double(std::max<int64_t>(1, sizes_[c]));
                finite = finite && std::abs(mean[d]) <= FLT_MAX;
                top = std::max(top, static_cast<float>(std::abs(mean[d])));
            }
            float step = std::max(top, 1e-30f) / kMost;
            for (int64_t d = 0; d < wide; d++)
                means[c * wide + d] =
                    d < dim && finite ? static_cast<int16_t>(std::nearbyint(mean[d] / double(step))) : int16_t{0};
            steps[c] = finite ? step : NAN;
        }
    }

    void code(int64_t i, int64_t place, float* row) {
        int64_t dim = call_.k.dim, cluster = bh_ * call_.all_clusters + call_.first_cluster + labels_[i];
        const int16_t* mean = call_.mean_keys + cluster * padded(dim);
        float step = std::isfinite(call_.key_steps[cluster]) ? call_.key_steps[cluster] : 0, top = 1e-30f;
        const float* key = fetch(call_.k, s_, h_, i, scratch_.data());
        for (int64_t d = 0; d < dim; d++) {
            row[d] = std::isfinite(key[d]) ? static_cast<float>(double(key[d]) - double(mean[d]) * double(step)) : 0;
            top = std::max(top, std::min(1e28f, std::abs(row[d])));
        }
        uint16_t above = top_above(top);
        call_.tops[bh_ * call_.places + place] = above;
        int64_t at = (call_.first_rank + i) % call_.chunk, quads = code_quads(dim);
        if (call_.narrow)
            call_.narrow[bh_ * call_.places + place] = static_cast<uint8_t>(at);
        else
            call_.wide[bh_ * call_.places + place] = static_cast<int32_t>(at);
        uint8_t* panel = call_.codes + (bh_ * (call_.places / kLanes) + place / kLanes) * quads * kLanes * kQuad;
        const float most = top_of(above);
        for (int64_t d = 0; d < dim; d++) {
            double steps = std::nearbyint(double(row[d] / most) * 7.5 - 0.5);
            codes_[d] = static_cast<uint8_t>(static_cast<int>(std::min(7.0, std::max(-8.0, steps))) + 8);
        }
        for (int64_t q = 0; q < quads; q++)
            for (int64_t j = 0; j < kQuad; j++)
                panel[(q * kLanes + place % kLanes) * kQuad + j] =
                    static_cast<uint8_t>(codes_[q * kCoded + j] | codes_[q * kCoded + kQuad + j] << 4);
    }

    static constexpr float kMost = 32767;
    const FinishCall& call_;
    const int64_t s_, h_, bh_;
    const int64_t* labels_;
    std::vector<int64_t> next_, sizes_{};
    std::vector<float> scratch_;
    std::vector<uint8_t> codes_;
};

inline void finish(const FinishCall& call) {
    int64_t heads = call.k.heads;
    parallel_for(call.k.batch * heads, threads_for(8 * call.k.numbers(), call.threads),
                 [&](int64_t task, int) { Finisher(call, task / heads, task % heads).run(); });
}

}  // namespace coterie::COTERIE_ISA
