// The whole plan of clustered attention, plain or improved, and the merge of the answers that its queries borrow: what
// coterie/mechanisms/clustered.py, improved_clustered.py and coterie/engine/api.py make of single steps.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "layout.h"
#include "pages.h"
#include "threads.h"

namespace coterie {

struct ClusteredCall {
    Rows q, k;
    const uint8_t *query_mask, *key_mask;
    int64_t clusters, iterations;
    int64_t bits;  // 0: Euclidean
    int64_t top;  // keys of a cluster that are met exactly; 0 if none are
    double scale;
    Draws draws;
    int threads;
};

// C clusters of the queries of each head. What is behind `answer` is there if keys are met exactly.
struct ClusteredPlan {
    int32_t *far_order, *far_offsets;  // (batch, heads, C) mean queries, (batch, heads, 2)
    int32_t *keys, *key_start, *key_stop;  // (batch, Nk), (batch, 1)
    int32_t *members, *start, *stop;  // (batch, heads, Nq), (batch, heads, C · copies)
    int32_t* answer;  // (batch, heads, Nq)
    int32_t *mass, *skip;  // (batch, heads, Nq), (batch, heads, C, top)
    int32_t *near_order, *near_offsets;  // (batch, heads, Nq + C), (batch, heads, C + 1)
    int32_t *near_keys, *near_start, *near_stop;  // (batch, heads, C · top), (batch, heads, C)
};

class Clustered {
public:
    Clustered(const ClusteredCall& call, const ClusteredPlan& plan)
        : call_(call), plan_(plan), labels_(call.q.batch * call.q.heads * call.q.rows) {
        for (int64_t b = 0; b < call.q.batch; b++) {
            queries_.emplace_back(call.query_mask + b * call.q.rows, call.q.rows);
            keys_.emplace_back(call.key_mask + b * call.k.rows, call.k.rows);
        }
    }

    void run() {
        cluster();
        if (call_.top) find_top();
        for (int64_t b = 0; b < call_.q.batch; b++) {
            keys_[b].list(plan_.keys + b * call_.k.rows);
            plan_.key_start[b] = 0;
            plan_.key_stop[b] = static_cast<int32_t>(keys_[b].count());
        }
        int64_t heads = call_.q.batch * call_.q.heads;
        parallel_for(heads, threads_for(16 * double(labels_.size()), call_.threads),
                     [&](int64_t bh, int) { write(bh, bh / call_.q.heads); });
    }

private:
    void cluster() {
        if (call_.bits) {
            HammingCall hashing{
                .x = call_.q,
                .clusters = call_.clusters,
                .iterations = call_.iterations,
                .bits = call_.bits,
                .mask = call_.query_mask,
                .draws = call_.draws,
                .threads = call_.threads,
            };
            kernels().planning.hamming_kmeans(hashing, labels_.data());
            return;
        }
        std::vector<int32_t> order(call_.q.batch * call_.q.rows), start(call_.q.batch, 0), stop(call_.q.batch);
        for (int64_t b = 0; b < call_.q.batch; b++) {
            queries_[b].list(order.data() + b * call_.q.rows);
            stop[b] = static_cast<int32_t>(queries_[b].count());
        }
        KmeansCall clustering{
            .x = call_.q,
            .parts =
                {.slots = call_.q.rows, .count = 1, .order = order.data(), .start = start.data(), .stop = stop.data()},
            .clusters = call_.clusters,
            .iterations = call_.iterations,
            .sample = 0,
            .counts = nullptr,
            .given = nullptr,
            .unit = false,
            .per_head = true,
            .draws = call_.draws,
            .threads = call_.threads,
        };
        Pages<double> centroids(call_.q.batch * call_.q.heads * call_.clusters * call_.q.dim);
        kernels().planning.kmeans(clustering, labels_.data(), centroids.data());
    }

    void find_top() {
        int64_t lists = call_.q.batch * call_.q.heads * call_.clusters;
        Pages<double> means(lists * call_.q.dim);
        top_.resize(lists * call_.top);
        MeansCall averaging{
            .x = call_.q, .clusters = call_.clusters, .mask = call_.query_mask, .threads = call_.threads};
        kernels().planning.cluster_means(averaging, labels_.data(), means.data());
        for (double& x : means) x *= call_.scale;
        TopCall looking{
            .k = call_.k,
            .heads = call_.q.heads,
            .queries = call_.clusters,
            .count = call_.top,
            .mask = call_.key_mask,
            .limits = nullptr,
            .unit = false,
            .threads = call_.threads,
        };
        kernels().planning.top_keys(looking, means.data(), top_.data());
    }

    // One head's part.
    void write(int64_t bh, int64_t b) {
        int64_t rows = call_.q.rows, clusters = call_.clusters;
        const int64_t* label = labels_.data() + bh * rows;
        std::vector<int32_t> next(clusters + 2, 0);
        auto of = [&](int64_t i) { return queries_[b].at(i) ? label[i] : clusters; };
        for (int64_t i = 0; i < rows; i++) next[of(i) + 1]++;
        for (int64_t c = 0; c <= clusters; c++) next[c + 1] += next[c];
        std::vector<int32_t> edges(next.begin(), next.begin() + clusters + 1);
        for (int64_t i = 0; i < rows; i++) plan_.members[bh * rows + next[of(i)]++] = static_cast<int32_t>(i);
        for (int64_t copy = 0, copies = call_.top ? 2 : 1; copy < copies; copy++) {
            int64_t at = (bh * copies + copy) * clusters;
            std::copy_n(edges.begin(), clusters, plan_.start + at);
            std::copy_n(edges.begin() + 1, clusters, plan_.stop + at);
        }
        for (int64_t i = 0; i < rows; i++) {
            bool real = queries_[b].at(i);
            plan_.answer[bh * rows + i] = real ? static_cast<int32_t>(rows + label[i]) : -1;
            if (call_.top) plan_.mass[bh * rows + i] = real ? static_cast<int32_t>(rows + clusters + label[i]) : -1;
        }
        std::vector<uint8_t> occupied(clusters);
        for (int64_t c = 0; c < clusters; c++) occupied[c] = edges[c + 1] > edges[c];
        Real used(occupied.data(), clusters);
        int32_t* means = plan_.far_order + bh * clusters;
        used.list(means);
        plan_.far_offsets[2 * bh] = 0;
        plan_.far_offsets[2 * bh + 1] = static_cast<int32_t>(used.count());
        if (call_.top) meet_top(bh, b, means, edges, used);
        for (int64_t c = 0; c < clusters; c++) means[c] += static_cast<int32_t>(rows);
    }

    // The means leave out what their members meet; a mean joins the group of its members, that of nobody stays out.
    void meet_top(int64_t bh, int64_t b, const int32_t* means, const std::vector<int32_t>& edges, const Real& used) {
        int64_t rows = call_.q.rows, clusters = call_.clusters, top = call_.top;
        int64_t real = std::min(keys_[b].count(), top);
        for (int64_t c = 0; c < clusters; c++) {
            const int64_t* best = top_.data() + (bh * clusters + means[c]) * top;
            int32_t* skip = plan_.skip + (bh * clusters + c) * top;
            int32_t last = -1;
            for (int64_t t = 0; t < top; t++) {
                if (t < real) last = std::max(last, static_cast<int32_t>(best[t]));
                skip[t] = last;
            }
        }
        int32_t *order = plan_.near_order + bh * (rows + clusters), *offsets = plan_.near_offsets + bh * (clusters + 1);
        const int32_t* members = plan_.members + bh * rows;
        int64_t slot = 0;
        for (int64_t c = 0; c < clusters; c++) {
            offsets[c] = static_cast<int32_t>(slot);
            for (int64_t i = edges[c]; i < edges[c + 1]; i++) order[slot++] = members[i];
            if (used.at(c)) order[slot++] = static_cast<int32_t>(rows + clusters + c);
            int64_t at = bh * clusters + c;
            plan_.near_start[at] = static_cast<int32_t>(c * top);
            plan_.near_stop[at] = static_cast<int32_t>(c * top + real);
            for (int64_t t = 0; t < top; t++) plan_.near_keys[at * top + t] = static_cast<int32_t>(top_[at * top + t]);
        }
        offsets[clusters] = static_cast<int32_t>(slot);
        for (int64_t i = edges[clusters]; i < rows; i++) order[slot++] = members[i];
        for (int64_t c = 0; c < clusters; c++)
            if (!used.at(c)) order[slot++] = static_cast<int32_t>(rows + clusters + c);
    }

    const ClusteredCall& call_;
    const ClusteredPlan& plan_;
    std::vector<Real> queries_, keys_;
    Pages<int64_t> labels_, top_;  // (batch, heads, Nq), (batch, heads, C, top)
};

struct BorrowCall {
    int64_t heads, queries, rows, dim;  // rows of out and lse, the first of which are the queries' own
    const float *out, *lse;  // (heads, rows, dim), (heads, rows)
    const int32_t *answer, *mass;  // (heads, queries): −1 is none; mass may be null
    int threads;
};

// Each query's own answer merged with that of the row that it borrows from, by softmax mass.
inline void borrow(const BorrowCall& call, float* merged, float* masses) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    double numbers = 2 * double(call.heads) * double(call.queries) * double(call.dim + 16);
    parallel_for(call.heads, threads_for(numbers, call.threads), [&](int64_t h, int) {
        for (int64_t i = 0; i < call.queries; i++) {
            if (i % 1024 == 0) breathe();
            int64_t at = h * call.queries + i, first = h * call.rows;
            int32_t answer = call.answer[at], mass = call.mass ? call.mass[at] : -1;
            float own = call.lse[first + i], other = answer >= 0 ? call.lse[first + answer] : kNone;
            if (mass >= 0 && own != kNone) own = call.lse[first + mass];
            float top = std::max(own, other), base = top == kNone ? 0 : top;
            float mine = std::exp(own - base), borrowed = std::exp(other - base), total = mine + borrowed;
            bool heard = total != 0;
            float share = 1 - borrowed / (heard ? total : 1);
            const float* one = call.out + (first + i) * call.dim;
            const float* two = answer >= 0 ? call.out + (first + answer) * call.dim : one;
            float* to = merged + at * call.dim;
            if (call.mass && !heard)  // some may have an answer of their own and no mass
                std::fill_n(to, call.dim, 0.0f);
            else if (share < 0.5f)
                for (int64_t d = 0; d < call.dim; d++) to[d] = two[d] + share * (one[d] - two[d]);
            else
                for (int64_t d = 0; d < call.dim; d++) to[d] = one[d] - (one[d] - two[d]) * (1 - share);
            masses[at] = heard ? base + std::log(total) : kNone;
        }
    });
}

}  // namespace coterie
