// A decoding step over all keys: few new queries, and the keys of a cache, which are read once for all heads that share
// them.
#pragma once

#include <memory>

#include "few_queries.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

// Some keys of one key head, for the queries of all heads that share it. What is kept of them for a query with scores
// s_j: the largest one m, Σ e^(s_j − m), and Σ e^(s_j − m) v_j.
class AllKeysWorker {
public:
    static constexpr int64_t kPiece = 512;  // keys of a task: as many for any number of threads
    static constexpr int64_t kBlock = 64;  // keys whose rows stay in the first cache

    explicit AllKeysWorker(const AllKeysCall& call)
        : call_(call),
          share_(call.q.heads / call.k.heads),
          step_(kept(call)),
          queries_(share_ * call.q.rows * padded(call.q.dim)),
          scores_(share_ * call.q.rows * kBlock),
          scratch_(kBlock * std::max(call.k.dim, call.v.dim)),
          visible_(call.q.rows),
          keys_(kBlock),
          values_(kBlock) {}

    // Numbers that are kept for a query.
    static int64_t kept(const AllKeysCall& call) { return kLanes + padded(call.v.dim); }

    // `to`: (Nq, share, kept).
    void answer(int64_t b, int64_t head, int64_t piece, float* to) {
        const int32_t* seen = call_.seen + b * call_.q.rows;
        const uint8_t* real = call_.real ? call_.real + b * call_.k.rows : nullptr;
        for (int64_t at = 0; at < share_ * call_.q.rows; at++) {
            std::fill_n(to + at * step_, step_, 0.0f);
            to[at * step_] = kNone;
        }
        int64_t next = piece * kPiece;
        int64_t stop = std::min<int64_t>(next + kPiece, *std::max_element(seen, seen + call_.q.rows));
        read_queries(b, head);
        while (next < stop) {
            breathe();
            int32_t block[kBlock];
            int64_t found = 0;
            for (; next < stop && found < kBlock; next++)
                if (!real || real[next]) block[found++] = static_cast<int32_t>(next);
            for (int64_t i = 0; i < call_.q.rows; i++)
                visible_[i] = std::lower_bound(block, block + found, seen[i]) - block;
            if (found) meet(b, head, block, found, to);
        }
    }

private:
    void read_queries(int64_t b, int64_t head) {
        int64_t dim = call_.q.dim, step = padded(dim);
        for (int64_t i = 0; i < call_.q.rows; i++)
            for (int64_t h = 0; h < share_; h++) {
                float* to = queries_.data() + (i * share_ + h) * step;
                read_row(call_.q.row(b, head * share_ + h, i), call_.q.kind, dim, to);
                std::fill(to + dim, to + step, 0.0f);
            }
    }

    void meet(int64_t b, int64_t head, const int32_t* block, int64_t found, float* to) {
        fetch_all(call_.k, b, head, block, found, scratch_.data(), keys_.data());
        ask_for(call_.v, b, head, block[0], found);
        each_few([&](auto few, int64_t first, int64_t count) {
            few_dots<few>(queries_.data() + first * padded(call_.q.dim), keys_.data(), count, call_.k.dim, call_.scale,
                          scores_.data() + first * kBlock, kBlock, prefetch_);
        });
        fetch_all(call_.v, b, head, block, found, scratch_.data(), values_.data());
        ask_for(call_.k, b, head, block[found - 1] + 1, kBlock);
        each_few([&](auto few, int64_t first, int64_t count) {
            float *scores = scores_.data() + first * kBlock, *kept = to + first * step_;
            for (int r = 0; r < few; r++) weigh(scores + r * kBlock, count, kept + r * step_);
            few_sums<few>(scores, kBlock, values_.data(), count, call_.v.dim, kept + kLanes, step_, prefetch_);
        });
    }

    // So many rows will be read next: they come while the others are computed with.
    void ask_for(const Rows& rows, int64_t b, int64_t head, int64_t first, int64_t count) {
        int32_t next[kBlock];
        count = std::min(count, rows.rows - first);
        for (int64_t j = 0; j < count; j++) next[j] = static_cast<int32_t>(first + j);
        prefetch_.clear();
        prefetch_.add(rows, b, head, next, count);
        prefetch_.pace(kBlock / 4);
    }

    // Call work(how many, the first, how many keys they see) for queries that see the same keys, a few at a time.
    template <class Work>
    void each_few(Work&& work) {
        for (int64_t i = 0; i < call_.q.rows; i++)
            for (int64_t h = 0; visible_[i] && h < share_; h += kFewQueries)
                few_of<kFewQueries>(share_ - h, [&](auto few) { work(few, i * share_ + h, visible_[i]); });
    }

    template <int Few, class Work>
    static void few_of(int64_t count, Work&& work) {
        if (count >= Few)
            work(std::integral_constant<int, Few>());
        else if constexpr (Few > 1)
            few_of<Few - 1>(count, work);
    }

    // Scores become weights, beside what is kept of the keys before.
    void weigh(float* scores, int64_t count, float* kept) const {
        std::fill(scores + count, scores + padded(count), kNone);
        Vec top = splat(kept[0]);
        for (int64_t j = 0; j < count; j += kLanes) top = max(load(scores + j), top);
        float most = highest(top), base = most == kNone ? 0 : most, before = std::exp(kept[0] - base);
        Vec sums = splat(0);
        for (int64_t j = 0; j < count; j += kLanes) {
            Vec each = exp(load(scores + j) - splat(base));
            store(scores + j, each);
            sums = sums + each;
        }
        kept[0] = most;
        kept[1] = kept[1] * before + sum(sums);
        for (int64_t d = kLanes; before != 1 && d < step_; d += kLanes) store(kept + d, load(kept + d) * splat(before));
    }

    const AllKeysCall& call_;
    const int64_t share_, step_;
    std::vector<float> queries_, scores_, scratch_;
    std::vector<int64_t> visible_;  // how many keys of a block each query sees
    std::vector<const float*> keys_, values_;
    PrefetchTo<3> prefetch_;
};

// What is kept of the pieces of a query, `step` apart, becomes its answer, in the order of the keys. The logarithm of
// what its weights were divided by is not asked for.
inline void join(const float* parts, int64_t pieces, int64_t step, int64_t dim, float* out) {
    float most = kNone, total = 0;
    for (int64_t p = 0; p < pieces; p++) most = std::max(most, parts[p * step]);
    std::fill_n(out, dim, 0.0f);
    for (int64_t p = 0; p < pieces; p++) {
        const float* part = parts + p * step;
        float share = most == kNone ? 1 : std::exp(part[0] - most);
        total += share * part[1];
        for (int64_t d = 0; d < dim; d++) out[d] += share * part[kLanes + d];
    }
    for (int64_t d = 0; total != 0 && d < dim; d++) out[d] /= total;  // 0 of who sees nobody
}

inline void decode_all(const AllKeysCall& call) {
    using Worker = AllKeysWorker;
    const int64_t heads = call.k.heads, share = call.q.heads / heads, asking = share * call.q.rows;
    const int64_t pieces = std::max<int64_t>(1, (call.k.rows + Worker::kPiece - 1) / Worker::kPiece);
    const int64_t size = Worker::kept(call), step = asking * size;
    int threads = threads_for(call.k.numbers() * double(asking), call.threads);
    std::unique_ptr<float[]> parts(new float[call.k.batch * heads * pieces * step]);
    std::vector<std::unique_ptr<Worker>> workers(threads);
    parallel_for(call.k.batch * heads * pieces, threads, [&](int64_t task, int who) {
        if (!workers[who]) workers[who] = std::make_unique<Worker>(call);
        int64_t bh = task / pieces;
        workers[who]->answer(bh / heads, bh % heads, task % pieces, parts.get() + task * step);
    });
    for (int64_t bh = 0; bh < call.k.batch * heads; bh++)
        for (int64_t at = 0; at < asking; at++) {
            int64_t i = at / share, head = bh % heads * share + at % share;
            float* out = call.out + ((bh / heads * call.q.heads + head) * call.q.rows + i) * call.v.dim;
            join(parts.get() + bh * pieces * step + at * size, pieces, step, call.v.dim, out);
        }
}

}  // namespace coterie::COTERIE_ISA
