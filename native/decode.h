// One step of near–far decoding: few new queries and the keys of a cache, whose finished chunks are in clusters.
#pragma once

#include <memory>
#include <mutex>

#include "bytes.h"
#include "near_choice.h"

namespace coterie::COTERIE_ISA {

// A panel of kLanes keys, kQuad bytes of each after the other, whatever the instruction set; the products of one query
// with each of them, relative to the query's scale.
template <bool Vnni>
inline void panel_products(const LeftBytes& query, const uint8_t* panel, const float* scales, float* to) {
#if defined(__AVX2__) || defined(__AVX512F__)
    Whole sum = whole(query.first[0]);
    for (int64_t q = 0; q < query.quads; q++)
        sum = add_products<Vnni>(sum, load_quads(panel + q * kLanes * kQuad), query.bytes.data() + q * kByteRows);
    store(to, to_floats(sum) * load(scales));
#else
    int32_t sums[kLanes];
    std::fill_n(sums, kLanes, query.first[0]);
    for (int64_t q = 0; q < query.quads; q++, panel += kLanes * kQuad) {
        int8_t each[kQuad];
        std::memcpy(each, query.bytes.data() + q * kByteRows, kQuad);
        for (int lane = 0; lane < kLanes; lane++)
            for (int j = 0; j < kQuad; j++) sums[lane] += each[j] * panel[lane * kQuad + j];
    }
    for (int lane = 0; lane < kLanes; lane++) to[lane] = static_cast<float>(sums[lane]) * scales[lane];
#endif
}

// The products of a query with some rows.
inline void dot_products(const float* query, const float* const* rows, int64_t count, int64_t dim, float scale,
                         float* to) {
    for (int64_t first = 0; first < count; first += kSums) {
        int64_t here = std::min<int64_t>(kSums, count - first);
        Vec sums[kSums];
        float rest[kSums] = {0}, each[kSums];
        for (int64_t j = 0; j < kSums; j++) {
            const float* row = rows[first + std::min(j, here - 1)];
            Vec sum = splat(0);
            int64_t d = 0;
            for (; d + kLanes <= dim; d += kLanes) sum = fma(load(query + d), load(row + d), sum);
            for (; d < dim; d++) rest[j] += query[d] * row[d];
            sums[j] = sum;
        }
        sum_each(sums, 1, each);
        for (int64_t j = 0; j < here; j++) to[first + j] = (each[j] + rest[j]) * scale;
    }
}

// Answers queries, one after the other; keeps what it allocates.
class DecodeWorker {
public:
    explicit DecodeWorker(const DecodeCall& call)
        : call_(call), query_(padded(call.q.dim)), others_(padded(call.q.dim)) {}

    void answer(int64_t b, int64_t h, int64_t i) {
        int64_t heads = call_.q.heads, dim = call_.v.dim, at = (b * heads + h) * call_.q.rows + i;
        float* out = call_.out + at * dim;
        std::fill_n(out, dim, 0.0f);
        if (call_.picks) std::fill_n(call_.picks + at * call_.near, call_.near, -1);
        int64_t rank = call_.rank[b * call_.q.rows + i];
        if (rank < 0) return;
        b_ = b, head_ = h / (heads / call_.k.heads);
        read(h, i, query_.data(), 1);
        begin_ = rank + 1 < call_.least ? 0 : std::max<int64_t>(0, rank / call_.chunk - 1) * call_.chunk;
        far_ = std::max<int64_t>(0, begin_ - call_.sinks);
        clusters_ = far_ ? begin_ / call_.chunk * call_.per : 0;
        if (far_ > call_.places || clusters_ > call_.clusters)
            throw Malformed("rank: expected finished chunks before the previous one, got too few of them");
        rows_.clear();
        pick(h, i);
        if (call_.picks) std::copy(rows_.begin(), rows_.end(), call_.picks + at * call_.near);
        const int32_t* real = call_.real + b * call_.k.rows;
        for (int64_t r = 0; r < std::min(call_.sinks, begin_); r++) rows_.push_back(checked(real[r]));
        for (int64_t r = begin_; r <= rank; r++) rows_.push_back(checked(real[r]));
        meet(out);
    }

private:
    int32_t checked(int32_t row) const {
        if (row < 0 || row >= call_.k.rows) throw Malformed("order: expected rows of k, got others");
        return row;
    }

    void read(int64_t h, int64_t i, float* to, float scale) const {
        read_row(call_.q.row(b_, h, i), call_.q.kind, call_.q.dim, to);
        for (int64_t d = 0; d < call_.q.dim; d++) to[d] *= scale;
        std::fill(to + call_.q.dim, to + padded(call_.q.dim), 0.0f);
    }

    // The near keys, and how many keys each cluster has left.
    void pick(int64_t h, int64_t i) {
        left_.assign(clusters_, 0);
        if (!far_) return;
        const int32_t* offsets = call_.offsets + (b_ * call_.k.heads + head_) * (call_.clusters + 1);
        const int32_t* order = call_.order + (b_ * call_.k.heads + head_) * call_.places;
        if (offsets[0] != 0 || offsets[clusters_] != far_) throw Malformed("offsets: expected those of all keys");
        for (int64_t c = 0; c < clusters_; c++) {
            left_[c] = offsets[c + 1] - offsets[c];
            if (left_[c] < 0) throw Malformed("offsets: expected ascending ones");
        }
        if (far_ <= call_.near) {
            for (int64_t place = 0; place < far_; place++) rows_.push_back(checked(order[place]));
            std::fill(left_.begin(), left_.end(), 0);
            return;
        }
        if (!call_.near) return;
        score(h, i, offsets, order);
        int64_t wide = padded(held_);
        bool all = held_ == far_;
        if (count_at_least(scores_.data(), wide, -FLT_MAX) < call_.near ||
            count_at_least(scores_.data(), wide, INFINITY))
            throw Malformed("scales: expected finite numbers");
        for (int32_t at : chooser_.choose(scores_.data(), wide, all ? order : listed_.data(), held_, call_.near)) {
            int32_t place = all ? at : places_[at];
            rows_.push_back(checked(order[place]));
            int64_t cluster = std::upper_bound(offsets, offsets + clusters_ + 1, place) - offsets - 1;
            left_[cluster]--;
        }
        ask_for(rows_);
    }

    // Products with all far keys; or with those of the best clusters, side by side.
    void score(int64_t h, int64_t i, const int32_t* offsets, const int32_t* order) {
        left_bytes_.clear(call_.k.dim);
        read(h, i, others_.data(), call_.scale);
        zero_wild(others_.data(), call_.k.dim);
        left_bytes_.add(others_.data(), call_.k.dim);
        held_ = far_;
        if (far_ > call_.reach) choose_clusters(i);
        scores_.resize(padded(held_));
        if (held_ == far_) {
            for (int64_t panel = 0; panel * kLanes < far_; panel++)
                multiply_panel(panel, scores_.data() + panel * kLanes);
        } else {
            places_.resize(held_);
            listed_.resize(held_);
            float products[kLanes];
            int64_t at = 0, last = -1;
            for (int32_t c : ranked_)
                for (int32_t place = offsets[c]; place < offsets[c + 1]; place++, at++) {
                    if (place / kLanes != last) multiply_panel(last = place / kLanes, products);
                    scores_[at] = products[place % kLanes];
                    places_[at] = place;
                    listed_[at] = order[place];
                }
        }
        std::fill(scores_.begin() + held_, scores_.end(), -INFINITY);
    }

    void multiply_panel(int64_t panel, float* to) const {
        int64_t bh = b_ * call_.k.heads + head_, wide = quads_of(call_.k.dim) * kQuad * kLanes;
        const uint8_t* bytes = call_.bytes + (bh * (call_.places / kLanes) + panel) * wide;
        const float* scales = call_.scales + bh * call_.places + panel * kLanes;
        if (has_vnni())
            panel_products<true>(left_bytes_, bytes, scales, to);
        else
            panel_products<false>(left_bytes_, bytes, scales, to);
    }

    // `ranked_`: the clusters whose mean keys one of the heads that share them likes best, until they hold `reach`
    // keys, in order.
    void choose_clusters(int64_t i) {
        int64_t share = call_.q.heads / call_.k.heads;
        list_means(call_.mean_keys, call_.k.dim, clusters_);
        likes_.resize(clusters_);
        best_.assign(clusters_, -INFINITY);
        for (int64_t h = head_ * share; h < (head_ + 1) * share; h++) {
            read(h, i, others_.data(), 1);
            dot_products(others_.data(), means_.data(), clusters_, call_.k.dim, call_.scale, likes_.data());
            float most = -INFINITY;
            for (int64_t c = 0; c < clusters_; c++)
                if (left_[c]) most = std::max(most, likes_[c]);
            for (int64_t c = 0; c < clusters_; c++) best_[c] = std::max(best_[c], likes_[c] - most);
        }
        ranked_.clear();
        for (int64_t c = 0; c < clusters_; c++)
            if (left_[c]) ranked_.push_back(static_cast<int32_t>(c));
        auto worse = [&](int32_t x, int32_t y) { return best_[x] != best_[y] ? best_[x] < best_[y] : x > y; };
        std::make_heap(ranked_.begin(), ranked_.end(), worse);
        auto rest = ranked_.end();
        for (held_ = 0; rest != ranked_.begin() && held_ < call_.reach; held_ += left_[*rest])
            std::pop_heap(ranked_.begin(), rest--, worse);
        ranked_.erase(ranked_.begin(), rest);
        std::sort(ranked_.begin(), ranked_.end());
    }

    void list_means(const float* means, int64_t dim, int64_t count) {
        const float* first = means + (b_ * call_.k.heads + head_) * call_.clusters * dim;
        means_.resize(count);
        for (int64_t c = 0; c < count; c++) means_[c] = first + c * dim;
    }

    void ask_for(const std::vector<int32_t>& rows) const {
#if defined(__GNUC__) || defined(__clang__)
        auto keys = call_.k.at(b_, head_), values = call_.v.at(b_, head_);
        int64_t lines = (call_.k.dim * (call_.k.kind == Kind::f32 ? 4 : 2) + 63) / 64;
        for (int32_t row : rows)
            for (int64_t line = 0; line < lines; line++) {
                __builtin_prefetch(keys(row) + 64 * line, 0, 2);
                __builtin_prefetch(values(row) + 64 * line, 0, 2);
            }
#else
        (void)rows;
#endif
    }

    // One softmax over the rows that are met exactly and the means of what is left.
    void meet(float* out) {
        auto exact = static_cast<int64_t>(rows_.size());
        weights_.resize(exact + clusters_ + kSums);
        float* weights = weights_.data();
        for (int64_t first = 0; first < exact; first += kBlock) {
            int64_t here = std::min(kBlock, exact - first);
            fetch_block(call_.k, first, here);
            dot_products(query_.data(), block_.data(), here, call_.k.dim, call_.scale, weights + first);
        }
        list_means(call_.mean_keys, call_.k.dim, clusters_);
        if (clusters_) dot_products(query_.data(), means_.data(), clusters_, call_.k.dim, call_.scale, weights + exact);
        for (int64_t c = 0; c < clusters_; c++)
            weights[exact + c] = left_[c] ? weights[exact + c] + log_of(left_[c]) : -INFINITY;
        float total = to_weights(weights, exact + clusters_);
        for (int64_t first = 0; first < exact; first += kBlock) {
            int64_t here = std::min(kBlock, exact - first);
            fetch_block(call_.v, first, here);
            add_weighted(block_.data(), weights + first, here, out);
        }
        list_means(call_.mean_values, call_.v.dim, clusters_);
        add_weighted(means_.data(), weights + exact, clusters_, out);
        for (int64_t d = 0; d < call_.v.dim; d++) out[d] /= total;
    }

    static float log_of(int32_t count) { return count < kLogs ? logs()[count] : std::log(static_cast<float>(count)); }

    void fetch_block(const Rows& from, int64_t first, int64_t count) {
        if (from.kind != Kind::f32) scratch_.resize(kBlock * from.dim);
        block_.resize(kBlock);
        fetch_all(from, b_, head_, rows_.data() + first, count, scratch_.data(), block_.data());
    }

    // e^(x − the largest), in place; returns their sum.
    static float to_weights(float* x, int64_t count) {
        float most = -INFINITY;
        for (int64_t j = 0; j < count; j++) most = std::max(most, x[j]);
        int64_t j = 0;
        Vec sums = splat(0);
        for (; j + kLanes <= count; j += kLanes) {
            Vec each = exp(load(x + j) - splat(most));
            store(x + j, each);
            sums = sums + each;
        }
        float total = sum(sums);
        for (; j < count; j++) total += x[j] = std::exp(x[j] - most);
        return total;
    }

    void add_weighted(const float* const* rows, const float* weights, int64_t count, float* out) const {
        int64_t dim = call_.v.dim, d = 0;
        for (; d + 4 * kLanes <= dim; d += 4 * kLanes) {
            Vec sums[4];
            for (int j = 0; j < 4; j++) sums[j] = load(out + d + j * kLanes);
            for (int64_t r = 0; r < count; r++) {
                Vec weight = splat(weights[r]);
                for (int j = 0; j < 4; j++) sums[j] = fma(weight, load(rows[r] + d + j * kLanes), sums[j]);
            }
            for (int j = 0; j < 4; j++) store(out + d + j * kLanes, sums[j]);
        }
        for (int64_t r = 0; d < dim && r < count; r++)
            for (int64_t e = d; e < dim; e++) out[e] += weights[r] * rows[r][e];
    }

    static constexpr int64_t kBlock = 64;
    const DecodeCall& call_;
    int64_t b_ = 0, head_ = 0, begin_ = 0, far_ = 0, clusters_ = 0, held_ = 0;
    std::vector<float> query_, others_, scores_, likes_, best_, weights_, scratch_;
    std::vector<int32_t> rows_, left_, ranked_, places_, listed_;
    std::vector<const float*> means_, block_;
    LeftBytes left_bytes_;
    Chooser chooser_;
};

inline void decode(const DecodeCall& call) {
    double met = double(std::min(call.k.rows, call.clusters + call.reach + call.sinks + call.chunk));
    int threads = threads_for(call.q.numbers() * met, call.threads);
    std::vector<std::unique_ptr<DecodeWorker>> workers(threads);
    parallel_for(call.q.batch * call.q.heads * call.q.rows, threads, [&](int64_t task, int who) {
        if (!workers[who]) workers[who] = std::make_unique<DecodeWorker>(call);
        int64_t bh = task / call.q.rows;
        workers[who]->answer(bh / call.q.heads, bh % call.q.heads, task % call.q.rows);
    });
}

}  // namespace coterie::COTERIE_ISA
