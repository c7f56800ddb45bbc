// The keys of a head as bytes, cluster by cluster, and what stands for each cluster when they are ranked.
#pragma once

#include "bytes.h"
#include "candidates.h"

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

    explicit KeyBytes(const NearCall& call)
        : keys(call.clusters.order.length, call.k.dim), call_(call), wide_(quads_of(call.k.dim) * kQuad) {}

    // Before another head is read, where the last one was: memory that is new would have to be cleared first.
    void turn_to(int64_t b, int64_t h) {
        b_ = b, h_ = h;
        order = call_.clusters.order.at(b, h);
        ranked_ = ranked(call_, b, h);
        if (ranked_ && !means.rows()) {
            means = RightBytes(call_.clusters.count(), call_.k.dim);
            outliers = RightBytes(call_.clusters.count(), call_.k.dim);
        }
        bytes_.resize(call_.k.rows * wide_);
        scales_.resize(call_.k.rows);
    }

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
        const int64_t last = (piece + 1) * count / kPieces;
        for (int64_t c = piece * count / kPieces, next; c < last; c = next) {
            breathe();
            for (next = c + 1; next < last && start[next] == stop[next - 1];) next++;
            put_all(start[c], stop[next - 1]);
        }
        if (!ranked_) return;
        Faces rows(call_.k.dim);
        for (int64_t c = piece * count / kPieces; c < last; c++) {
            breathe();
            if (start[c] < stop[c]) add_face(c, rows);
        }
    }

    // What is not needed once everything is put.
    void forget_rows() { bytes_ = {}; }

    // So that their memory does not grow with the number of heads.
    static int64_t heads_at_a_time(const NearCall& call) {
        int64_t each = call.clusters.order.length * (quads_of(call.k.dim) * kQuad + 4);
        return std::max<int64_t>(1, kBudget / std::max<int64_t>(1, each));
    }

    const int32_t* order = nullptr;
    RightBytes keys;  // by their places in `order`
    RightBytes means{0, 0},
        outliers{0, 0};  // of each cluster, if some are to be ranked; an outlier is the key farthest from the mean

private:
    static constexpr int64_t kBudget = 2 << 20;
    static constexpr int64_t kSome = 64;  // keys at a time

    // Some keys of a cluster, and its mean.
    struct Faces {
        const float* keys[kSome];
        std::vector<float> copies, rough;
        std::vector<double> mean;
        std::vector<uint8_t> bytes;
        Prefetch soon{};

        explicit Faces(int64_t dim)
            : copies(kSome * dim), rough(padded(dim)), mean(dim), bytes(quads_of(dim) * kQuad) {}
    };

    // Whether someone sees more keys than can be searched.
    static bool ranked(const NearCall& call, int64_t b, int64_t h) {
        View view;
        for (int64_t chunk = 0; chunk < call.chunks; chunk++) {
            view.look(call, b, h, chunk);
            if (view.total > call.reach) return true;
        }
        return false;
    }

    // The keys of some places that follow each other.
    void put_all(int64_t place, int64_t stop) {
        while (place < stop) {
            if (place % kLanes || stop - place < kLanes) {
                put(keys, place, order[place]);
                place++;
                continue;
            }
            keys.put_panel(
                place, [&](int64_t i) { return bytes_.data() + order[place + i] * wide_; },
                [&](int64_t i) { return scales_[order[place + i]]; });
            place += kLanes;
        }
    }

    void put(RightBytes& to, int64_t place, int32_t key) { to.put(place, bytes_.data() + key * wide_, scales_[key]); }

    void add_face(int64_t c, Faces& rows) {
        int64_t dim = call_.k.dim;
        int32_t first = call_.clusters.start.at(b_, h_)[c], stop = call_.clusters.stop.at(b_, h_)[c];
        std::fill(rows.mean.begin(), rows.mean.end(), 0.0);
        for (int32_t place = first; place < stop; place += kSome) {
            int64_t some = fetch_tame(place, stop, rows);
            add_up(rows.keys, some, dim, rows.mean.data());
        }
        for (int64_t d = 0; d < dim; d++) rows.mean[d] /= double(stop - first);
        int32_t outlier = 0;
        float farthest = -1;
        for (int32_t place = first; place < stop; place += kSome) {
            int64_t some = stop - first > kSome ? fetch_tame(place, stop, rows) : stop - first;
            for (int64_t i = 0; i < some; i++) {
                float far = rounded(squared_distance(rows.keys[i], rows.mean.data(), dim));
                if (far <= farthest) continue;
                farthest = far;
                outlier = order[place + i];
            }
        }
        put(outliers, c, outlier);
        for (int64_t d = 0; d < dim; d++) rows.rough[d] = rounded(rows.mean[d]);
        float scale = to_whole(rows.rough.data(), dim, kRightMost, kLift, rows.bytes.data());
        means.put(c, rows.bytes.data(), scale);
    }

    // The next few keys of a cluster; what is not finite is 0.
    int64_t fetch_tame(int32_t place, int32_t stop, Faces& rows) const {
        int64_t dim = call_.k.dim, some = std::min<int64_t>(kSome, stop - place);
        int64_t behind = std::min<int64_t>(some, call_.clusters.order.length - place - some);
        rows.soon.clear();
        rows.soon.add(call_.k, b_, h_, order + place + some, behind);  // the next cluster's, as a rule
        rows.soon.pace(some);
        for (int64_t i = 0; i < some; i++) {
            rows.soon.some();
            float* copy = rows.copies.data() + i * dim;
            rows.keys[i] = fetch(call_.k, b_, h_, order[place + i], copy);
            if (all_finite(rows.keys[i], dim)) continue;
            if (rows.keys[i] != copy) std::copy_n(rows.keys[i], dim, copy);
            zero_wild(copy, dim);
            rows.keys[i] = copy;
        }
        return some;
    }

    static double squared_distance(const float* a, const double* b, int64_t n) {
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
    int64_t b_ = 0, h_ = 0;
    bool ranked_ = false;
    int64_t wide_;  // bytes of a row
    Pages<uint8_t> bytes_{};  // (rows, wide): all keys, while they are put
    std::vector<float> scales_{};
};

}  // namespace coterie::COTERIE_ISA
