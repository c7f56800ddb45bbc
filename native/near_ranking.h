// Which of the clusters in view some groups of queries search.
#pragma once

#include "near_bytes.h"

namespace coterie::COTERIE_ISA {

// Stretches of places that are multiplied, whole panels at a time; what is computed besides becomes −inf.
struct Spans {
    struct Span {
        int64_t start, stop, first;  // its scores begin there, with those of its first panel

        int64_t panel() const { return start / kLanes; }
        int64_t panels() const { return (stop - 1) / kLanes - panel() + 1; }
    };
    std::vector<Span> all{};

    void clear() { all.clear(); }
    // After those before it.
    void add(int64_t start, int64_t stop) {
        if (!all.empty() && start <= all.back().stop)
            all.back().stop = std::max(all.back().stop, stop);
        else
            all.push_back({start, stop, scores()});
    }
    // How many scores there are for each left row.
    int64_t scores() const { return all.empty() ? 0 : all.back().first + all.back().panels() * kLanes; }
    int64_t at(size_t span, int64_t place) const { return all[span].first + place - all[span].panel() * kLanes; }

    void multiply(const LeftBytes& left, const RightBytes& right, float* to) const {
        int64_t stride = scores();
        for (size_t i = 0; i < all.size(); i++) {
            breathe();
            const Span& span = all[i];
            byte_products(left, right, span.panel(), span.panels(), to + span.first, stride);
            int64_t begin = at(i, span.start), end = at(i, span.stop), behind = span.first + span.panels() * kLanes;
            for (int64_t row = 0; row < left.rows; row++) {
                float* mine = to + row * stride;
                std::fill(mine + span.first, mine + begin, -INFINITY);
                std::fill(mine + end, mine + behind, -INFINITY);
            }
        }
    }
};

// A group likes a cluster by the larger product with its mean or its outlier, less the largest that the group has with
// any; and groups that search together like it as much as one of them.
class Ranking {
public:
    // The best of the clusters, until they hold `reach` keys.
    const std::vector<View::Cluster>& rank(const View& view, const KeyBytes& keys, const LeftBytes& queries,
                                           int64_t reach) {
        like(view, keys, queries);
        const float worst = *std::min_element(likes_.begin(), likes_.end());
        const float step = worst < 0 ? kSteps / -worst : 0;
        steps_.resize(likes_.size());
        std::fill_n(held_, kSteps + 1, 0);
        for (size_t i = 0; i < likes_.size(); i++) {  // larger likes are never in a smaller step
            steps_[i] = static_cast<int32_t>(std::min(float(kSteps), (likes_[i] - worst) * step));
            held_[steps_[i]] += view.clusters[i].stop - view.clusters[i].start;
        }
        int32_t last = kSteps;  // the step that some of are wanted
        for (; last > 0 && held_[last] < reach; last--) reach -= held_[last];
        ranked_.clear();
        for (size_t i = 0; i < steps_.size(); i++)
            if (steps_[i] == last) ranked_.push_back(static_cast<int32_t>(i));
        std::stable_sort(ranked_.begin(), ranked_.end(), [&](int32_t a, int32_t b) { return likes_[a] > likes_[b]; });
        for (int32_t i : ranked_) {
            if (reach <= 0) break;
            steps_[i]++;
            reach -= view.clusters[i].stop - view.clusters[i].start;
        }
        chosen_.clear();
        for (size_t i = 0; i < steps_.size(); i++)
            if (steps_[i] > last) chosen_.push_back(view.clusters[i]);
        return chosen_;
    }

private:
    // How much the groups together like each of view.clusters.
    void like(const View& view, const KeyBytes& keys, const LeftBytes& queries) {
        spans_.clear();
        for (const auto& each : view.clusters) spans_.add(each.id, each.id + 1);
        int64_t stride = spans_.scores();
        to_mean_.resize(queries.padded_rows() * stride);
        to_outlier_.resize(queries.padded_rows() * stride);
        spans_.multiply(queries, keys.means, to_mean_.data());
        spans_.multiply(queries, keys.outliers, to_outlier_.data());
        best_.assign(stride, -INFINITY);
        for (int64_t row = 0; row < queries.rows; row++) {
            float *mean = to_mean_.data() + row * stride, *outlier = to_outlier_.data() + row * stride;
            Vec top = splat(-INFINITY);
            for (int64_t j = 0; j < stride; j += kLanes) {
                store(mean + j, max(load(mean + j), load(outlier + j)));
                top = max(load(mean + j), top);
            }
            Vec most = splat(highest(top)), scale = splat(queries.scales[row]);
            for (int64_t j = 0; j < stride; j += kLanes)
                store(best_.data() + j, max((load(mean + j) - most) * scale, load(best_.data() + j)));
        }
        likes_.resize(view.clusters.size());
        size_t span = 0;
        for (size_t i = 0; i < likes_.size(); i++) {
            while (view.clusters[i].id >= spans_.all[span].stop) span++;
            likes_[i] = best_[spans_.at(span, view.clusters[i].id)];
        }
    }

    Spans spans_;
    std::vector<float> to_mean_, to_outlier_, best_, likes_;
    static constexpr int32_t kSteps = 255;
    int64_t held_[kSteps + 1];  // keys of the clusters of each step
    std::vector<int32_t> steps_, ranked_;
    std::vector<View::Cluster> chosen_;
};

}  // namespace coterie::COTERIE_ISA
