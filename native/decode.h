// One step of near–far decoding: few new queries and the keys of a cache, whose finished chunks are in clusters.
#pragma once

#include <memory>

#include "far_keys.h"
#include "near_choice.h"

namespace coterie::COTERIE_ISA {

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
        : call_(call), query_(padded(call.q.dim)), likely_(padded(call.q.dim)) {}

    // `far`: what the heads that share a key head of `h` may pick from.
    void answer(int64_t b, int64_t h, int64_t i, const FarKeys& far) {
        int64_t heads = call_.q.heads, dim = call_.v.dim, at = (b * heads + h) * call_.q.rows + i;
        float* out = call_.out + at * dim;
        std::fill_n(out, dim, 0.0f);
        if (call_.picks) std::fill_n(call_.picks + at * call_.near, call_.near, -1);
        int64_t rank = call_.rank[b * call_.q.rows + i], share = heads / call_.k.heads;
        if (rank < 0) return;
        b_ = b, head_ = h / share, real_ = call_.real + b * call_.k.rows;
        read_query(call_, b, h, i, query_.data());
        rows_.clear();
        left_.assign(far.sizes.begin(), far.sizes.begin() + far.seen);
        sharer_ = h % share;
        pick(far);
        if (call_.picks) std::copy(rows_.begin(), rows_.end(), call_.picks + at * call_.near);
        for (int64_t r = 0; r < std::min(call_.sinks, far.begin); r++) rows_.push_back(row_at(r));
        for (int64_t r = far.begin; r <= rank; r++) rows_.push_back(row_at(r));
        meet(far, out);
    }

private:
    int32_t row_at(int64_t rank) const {
        int32_t row = real_[rank];
        if (row < 0 || row >= call_.k.rows) throw Malformed("real: expected rows of k, got others");
        return row;
    }

    // The near keys, and how many keys each cluster has left: the best by their codes, and the best of those by their
    // keys.
    void pick(const FarKeys& far) {
        if (!call_.near || !far.held) return;
        int64_t shortlist = std::min(kShortlist * call_.near, far.held);
        slots_.resize(shortlist);
        if (shortlist < far.held) {
            score(far);
            auto found = chooser_.choose(scores_.data(), padded(far.held), far.ranks.data(), far.held, shortlist);
            std::copy(found.begin(), found.end(), slots_.begin());
        } else {
            for (int64_t at = 0; at < shortlist; at++) slots_[at] = static_cast<int32_t>(at);
        }
        for (int32_t slot : slots_) rows_.push_back(row_at(far.ranks[slot]));
        ask_for(call_.k);
        if (shortlist > call_.near) {
            exact_.resize(shortlist);
            multiply(shortlist, exact_.data());
            order_.resize(shortlist);
            for (int64_t at = 0; at < shortlist; at++) {
                order_[at] = static_cast<int32_t>(at);
                if (std::isnan(exact_[at])) exact_[at] = INFINITY;
            }
            std::nth_element(order_.begin(), order_.begin() + call_.near, order_.end(), [&](int32_t x, int32_t y) {
                return exact_[x] != exact_[y] ? exact_[x] > exact_[y] : far.ranks[slots_[x]] < far.ranks[slots_[y]];
            });
            order_.resize(call_.near);
            rows_.clear();
            for (int32_t& at : order_) {
                at = slots_[at];
                rows_.push_back(row_at(far.ranks[at]));
            }
            slots_.swap(order_);
        }
        ask_for(call_.v);
        for (int32_t slot : slots_) left_[far.seen_of(slot)]--;
    }

    // `rows_` of keys or values lie anywhere: they come while others are worked with.
    void ask_for(const Rows& from) {
        for (int64_t first = 0; first < static_cast<int64_t>(rows_.size()); first += kBlock) {
            int64_t here = std::min<int64_t>(kBlock, static_cast<int64_t>(rows_.size()) - first);
            prefetch_.clear();
            prefetch_.add(from, b_, head_, rows_.data() + first, here);
            prefetch_.pace(1);
            prefetch_.some();
        }
    }

    // What the codes say of the keys that are held, relative to the same number for all.
    void score(const FarKeys& far) {
        std::copy_n(query_.data(), query_.size(), likely_.data());
        for (float& each : likely_) each *= call_.scale;
        zero_wild(likely_.data(), call_.k.dim);
        code_.set(likely_.data(), call_.k.dim);
        scores_.resize(padded(far.held) + kLanes);
        const Vec most = splat(FLT_MAX), least = splat(-FLT_MAX);
        int64_t bh = b_ * call_.k.heads + head_, last = -1, slot = 0;
        int64_t size = code_quads(call_.k.dim) * kLanes * kQuad;
        const uint8_t* codes = call_.codes + bh * (call_.places / kLanes) * size;
        const uint16_t* tops = call_.tops + bh * call_.places;
        float products[kLanes];
        auto count = static_cast<int64_t>(far.chosen.size());
        for (int64_t i = 0; i < count; i++) {
            if (i + kAhead < count) {
                const FarKeys::Held& next = far.chosen[i + kAhead];
                int64_t begin = next.first_place / kLanes, end = (next.first_place + far.sizes[next.node]) / kLanes + 1;
                touch(codes + begin * size, (std::min(end, call_.places / kLanes) - begin) * size);
                touch(tops + next.first_place, 2 * far.sizes[next.node]);
            }
            const FarKeys::Held& each = far.chosen[i];
            const float own = far.like(each.node, sharer_);
            const Vec like = splat(std::isfinite(own) ? own : 0);
            const int64_t stop = each.first_place + far.sizes[each.node];
            for (int64_t place = each.first_place; place < stop;) {
                int64_t panel = place / kLanes, first = place % kLanes;
                int64_t count = std::min<int64_t>(kLanes - first, stop - place);
                if (panel != last) store(products, code_.products(codes + panel * size, tops + panel * kLanes));
                last = panel;
                float sums[2 * kLanes] = {0};
                store(sums, min(max(load(products) + like, least), most));  // NaN becomes the least
                store(scores_.data() + slot, load(sums + first));  // the next ones write over what is behind these
                slot += count, place += count;
            }
        }
        std::fill(scores_.begin() + far.held, scores_.end(), -INFINITY);
    }

    // Products of the query with the keys of `rows_`.
    void multiply(int64_t count, float* to) {
        for (int64_t first = 0; first < count; first += kBlock) {
            int64_t here = std::min(kBlock, count - first);
            fetch_block(call_.k, first, here);
            dot_products(query_.data(), block_.data(), here, call_.k.dim, call_.scale, to + first);
        }
    }

    // One softmax over the rows that are met exactly and the means of what is left.
    void meet(const FarKeys& far, float* out) {
        auto exact = static_cast<int64_t>(rows_.size()), clusters = static_cast<int64_t>(left_.size());
        weights_.resize(exact + clusters + kSums);
        float* weights = weights_.data();
        multiply(exact, weights);
        for (int64_t c = 0; c < clusters; c++)
            weights[exact + c] = left_[c] > 0 ? far.like(c, sharer_) + log_of(left_[c]) : -INFINITY;
        float total = to_weights(weights, exact + clusters);
        for (int64_t first = 0; first < exact; first += kBlock) {
            int64_t here = std::min(kBlock, exact - first);
            fetch_block(call_.v, first, here);
            add_weighted(block_.data(), weights + first, here, out);
        }
        add_means(far, weights + exact, out);
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

    // The same for the mean values of the clusters that are seen.
    void add_means(const FarKeys& far, float* weights, float* out) {
        const int64_t dim = call_.v.dim, wide = padded(dim), count = far.seen;
        for (int64_t c = 0; c < count; c++)
            if (left_[c] > 0) weights[c] *= far.value_steps[c];
        sums_.assign(wide, 0.0f);
        std::copy_n(out, dim, sums_.data());
        for (int64_t d = 0; d < wide; d += 4 * kLanes) {
            int64_t columns = std::min<int64_t>(4, (wide - d) / kLanes);
            if (columns == 4)
                add_columns<4>(far.values.data(), d, weights, count, sums_.data() + d);
            else
                for (int64_t j = 0; j < columns; j++)
                    add_columns<1>(far.values.data(), d + j * kLanes, weights, count, sums_.data() + d + j * kLanes);
        }
        std::copy_n(sums_.data(), dim, out);
    }

    template <int Columns>
    static void add_columns(const int16_t* const* means, int64_t d, const float* weights, int64_t count, float* to) {
        Vec sums[Columns];
        for (int j = 0; j < Columns; j++) sums[j] = load(to + j * kLanes);
        for (int64_t c = 0; c < count; c++) {
            Vec weight = splat(weights[c]);
            for (int j = 0; j < Columns; j++) sums[j] = fma(weight, load_shorts(means[c] + d + j * kLanes), sums[j]);
        }
        for (int j = 0; j < Columns; j++) store(to + j * kLanes, sums[j]);
    }

    static constexpr int64_t kBlock = 64, kAhead = 2;  // clusters whose codes are asked for before they are read
    static constexpr int64_t kShortlist = 2;  // as `SHORTLIST` in Python
    const DecodeCall& call_;
    int64_t b_ = 0, head_ = 0, sharer_ = 0;  // a key head, and which of those that share it
    const int32_t* real_ = nullptr;
    std::vector<float> query_, likely_, scores_, exact_, weights_, scratch_, sums_;
    std::vector<int32_t> rows_, left_, slots_, order_;
    std::vector<const float*> block_;
    QueryCode code_;
    Prefetch prefetch_;
    Chooser chooser_;
};

inline void decode(const DecodeCall& call) {
    const int64_t heads = call.k.heads, share = call.q.heads / heads, queries = call.q.rows;
    double met = double(call.shown) * double(call.per) + double(call.reach) + double(call.sinks) + double(call.chunk);
    met = std::min(met, double(call.k.rows));
    int threads = threads_for(call.q.numbers() * met, call.threads);
    std::vector<FarKeys> far(call.k.batch * heads * queries);
    parallel_for(call.k.batch * heads * queries, threads, [&](int64_t task, int) {
        int64_t bh = task / queries;
        far[task].look(call, bh / heads, bh % heads, task % queries);
    });
    std::vector<std::unique_ptr<DecodeWorker>> workers(threads);
    parallel_for(call.q.batch * call.q.heads * queries, threads, [&](int64_t task, int who) {
        if (!workers[who]) workers[who] = std::make_unique<DecodeWorker>(call);
        int64_t bh = task / queries, b = bh / call.q.heads, h = bh % call.q.heads, i = task % queries;
        workers[who]->answer(b, h, i, far[(b * heads + h / share) * queries + i]);
    });
}

}  // namespace coterie::COTERIE_ISA
