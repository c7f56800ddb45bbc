// The keys of a head as bytes, cluster by cluster, and what stands for each cluster when they are ranked.
#pragma once

#include "bytes.h"

namespace coterie::COTERIE_ISA {

// The clusters that the groups of a chunk see.
struct View {
    struct Cluster {
        int64_t start, stop, slot;  // where its keys are listed, and where it is in view
        int32_t id;
    };
    int64_t seen = 0;
    int64_t total = 0;  // of the keys in them
    std::vector<int32_t> sizes{};  // (seen)
    std::vector<Cluster> clusters{};  // those that have keys

    // Those that groups of a chunk see, with the keys of head h; returns whether that is something new.
    bool look(const NearCall& call, int64_t b, int64_t h, int64_t chunk) {
        if (b == b_ && h == h_ && chunk == chunk_) return false;
        b_ = b, h_ = h, chunk_ = chunk;
        const int32_t* visible = call.visible + (b * call.chunks + chunk) * call.width;
        const int32_t *start = call.clusters.start.at(b, h), *stop = call.clusters.stop.at(b, h);
        seen = call.seen[b * call.chunks + chunk];
        total = 0;
        sizes.resize(seen);
        clusters.clear();
        for (int64_t slot = 0; slot < seen; slot++) {
            int32_t id = visible[slot];
            total += sizes[slot] = stop[id] - start[id];
            if (sizes[slot]) clusters.push_back({start[id], stop[id], slot, id});
        }
        return true;
    }

private:
    int64_t b_ = -1, h_ = -1, chunk_ = -1;
};

// The keys of one head. They are read and then put, by kPieces tasks each that do not meet.
class KeyBytes {
public:
    static constexpr int64_t kPieces = 8;

    KeyBytes(const NearCall& call, int64_t b, int64_t h)
        : order(call.clusters.order.at(b, h)),
          keys(call.clusters.order.length, call.k.dim),
          means(ranked(call, b, h) ? call.clusters.count() : 0, call.k.dim),
          outliers(means.rows(), call.k.dim),
          call_(call),
          b_(b),
          h_(h),
          wide_(quads_of(call.k.dim) * kQuad),
          bytes_(call.k.rows * wide_),
          scales_(call.k.rows) {}

    // A piece of the rows as bytes.
    void read(int64_t piece) {
        int64_t dim = call_.k.dim;
        std::vector<float> scratch(dim), copy(padded(dim));
        for (int64_t i = piece * call_.k.rows / kPieces; i < (piece + 1) * call_.k.rows / kPieces; i++) {
            if (i % 1024 == 0) breathe();
            const float* row = fetch(call_.k, b_, h_, i, scratch.data());
            if (dim % kLanes || !all_finite(row, dim)) {
                std::copy_n(row, dim, copy.data());
                zero_wild(copy.data(), dim);
                row = copy.data();
            }
            scales_[i] = to_whole(row, dim, kRightMost, kLift, bytes_.data() + i * wide_);
        }
    }

    // A piece of the clusters, once all rows are read.
    void put(int64_t piece) {
        int64_t count = call_.clusters.count();
        const int32_t *start = call_.clusters.start.at(b_, h_), *stop = call_.clusters.stop.at(b_, h_);
        for (int64_t c = piece * count / kPieces; c < (piece + 1) * count / kPieces; c++) {
            breathe();
            for (int32_t place = start[c]; place < stop[c]; place++) put(keys, place, order[place]);
            if (means.rows() && start[c] < stop[c]) add_face(c);
        }
    }

    // What is not needed once everything is put.
    void forget_rows() { bytes_ = {}; }

    // So that their memory does not grow with the number of heads.
    static int64_t heads_at_a_time(const NearCall& call) {
        int64_t each = call.clusters.order.length * (quads_of(call.k.dim) * kQuad + 4);
        return std::max<int64_t>(1, kBudget / std::max<int64_t>(1, each));
    }

    const int32_t* const order;
    RightBytes keys;  // by their places in `order`
    RightBytes means,
        outliers;  // of each cluster, if some are to be ranked; an outlier is the key farthest from the mean

private:
    static constexpr int64_t kBudget = 8 << 20;

    // Whether someone sees more keys than can be searched.
    static bool ranked(const NearCall& call, int64_t b, int64_t h) {
        View view;
        for (int64_t chunk = 0; chunk < call.chunks; chunk++) {
            view.look(call, b, h, chunk);
            if (view.total > call.reach) return true;
        }
        return false;
    }

    void put(RightBytes& to, int64_t place, int32_t key) { to.put(place, bytes_.data() + key * wide_, scales_[key]); }

    void add_face(int64_t c) {
        HeadRows rows{.rows = call_.k, .batch = b_, .head = h_};
        int64_t dim = call_.k.dim;
        int32_t first = call_.clusters.start.at(b_, h_)[c], stop = call_.clusters.stop.at(b_, h_)[c];
        std::vector<double> mean(dim);
        for (int32_t place = first; place < stop; place++) {
            const double* key = rows.exact(order[place]);
            for (int64_t d = 0; d < dim; d++) mean[d] += key[d];
        }
        for (int64_t d = 0; d < dim; d++) mean[d] /= double(stop - first);
        int32_t outlier = 0;
        float farthest = -1;
        for (int32_t place = first; place < stop; place++) {
            float far = rounded(squared_distance(rows.exact(order[place]), mean.data(), dim));
            if (far <= farthest) continue;
            farthest = far;
            outlier = order[place];
        }
        put(outliers, c, outlier);
        std::vector<float> rough(padded(dim));
        std::vector<uint8_t> bytes(wide_);
        for (int64_t d = 0; d < dim; d++) rough[d] = rounded(mean[d]);
        float scale = to_whole(rough.data(), dim, kRightMost, kLift, bytes.data());
        means.put(c, bytes.data(), scale);
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

    const NearCall& call_;
    int64_t b_, h_;
    int64_t wide_;  // bytes of a row
    Pages<uint8_t> bytes_;  // (rows, wide): all keys, while they are put
    std::vector<float> scales_;
};

}  // namespace coterie::COTERIE_ISA
