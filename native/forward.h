// Grouped attention, fused per group: gather, scores, online softmax over rounds, output.
// Nothing of the size of all scores is ever stored.
#pragma once

#include <memory>

#include "dropout.h"
#include "matrix.h"
#include "pairs.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

struct ForwardWorker {
    const Call& call;
    const Forward& result;
    int64_t dim, value_dim, value_width;
    Buffer rows, query, keys, values, scores, partial, row_memory;
    std::vector<const float*> key_rows, value_rows, query_rows;
    int64_t checked_head = -1;
    bool head_finite = false;  // of the values of checked_head
    Prefetch prefetch;
    std::unique_ptr<Multiplicity> multiplicity;
    float* totals;  // (batch * heads * query rows): running sum; result.lse holds the running maximum

    ForwardWorker(const Call& call, const Forward& result, float* totals)
        : call(call),
          result(result),
          dim(call.q.dim),
          value_dim(call.v.dim),
          value_width(padded(call.v.dim)),
          rows(kKeyBlock * std::max(dim, value_width), Buffer::kUnset),
          query(kRowBlock * dim, Buffer::kUnset),
          keys(kKeyBlock * dim, Buffer::kUnset),
          values(kKeyBlock * value_width, Buffer::kUnset),
          scores(kRowBlock * kKeyBlock, Buffer::kUnset),
          partial(kRowBlock * value_width, Buffer::kUnset),
          row_memory(value_width),
          key_rows(kKeyBlock),
          value_rows(kKeyBlock),
          query_rows(kRowBlock),
          multiplicity(call.once ? new Multiplicity(call) : nullptr),
          totals(totals) {}

    // Whether all values of a head are finite; if so, its tiles need not be looked at.
    bool values_finite(int64_t batch, int64_t key_head) {
        int64_t at = batch * call.key_heads + key_head;
        if (at == checked_head) return head_finite;
        checked_head = at;
        head_finite = true;
        for (int64_t j = 0; j < call.v.rows && head_finite; j++) {
            head_finite = all_finite(fetch(call.v, batch, key_head, j, row_memory), value_dim);
        }
        return head_finite;
    }

    void find_keys(const Group& group, int64_t first, int64_t count) {
        fetch_all(call.k, group.batch, group.key_head, group.keys + first, count, rows, key_rows.data());
    }

    void gather_keys(const Group& group, int64_t first, int64_t count) {
        find_keys(group, first, count);
        transpose_to_panels(key_rows.data(), count, dim, keys);
    }

    // Whether the keys and values of a group are used where they lie.
    bool few_rows(const Group& group) {
        return group.row_count <= kFewRows && dim % kLanes == 0 && value_dim % kLanes == 0 &&
               values_finite(group.batch, group.key_head);
    }

    void find_keys_and_values(const Group& group, int64_t first, int64_t count) {
        find_keys(group, first, count);
        std::fill(key_rows.begin() + count, key_rows.begin() + padded(count), key_rows[0]);
        fetch_all(call.v, group.batch, group.key_head, group.keys + first, count, values, value_rows.data());
    }

    // Returns whether all values are finite.
    bool gather_values(const Group& group, int64_t first, int64_t count) {
        for (int64_t j = 0; j < count; j++) {
            const float* row = fetch(call.v, group.batch, group.key_head, group.keys[first + j], row_memory);
            row_to_panels(row, value_dim, j, kKeyBlock, values);
        }
        if (values_finite(group.batch, group.key_head)) return true;
        for (int64_t c = 0; c < value_width; c += kLanes)
            if (!all_finite(values + c * kKeyBlock, count * kLanes)) return false;
        return true;
    }

    // Rounds first … stop of one head, which have the same groups of queries: some groups go through all of these
    // rounds before the next, so that their queries and sums are still near.
    void run_rounds(int64_t bh, size_t first, size_t stop) {
        int64_t groups = call.rounds[first].groups(), step = stop - first > 1 ? kTogether : groups;
        for (int64_t begin = 0; begin < groups; begin += step)
            for (size_t r = first; r < stop; r++) {
                const Round& round = call.rounds[r];
                for (int64_t g = begin, end = std::min(groups, begin + step); g < end;) {
                    Group group = group_at(call, round, bh, g);
                    g = group.stop;
                    Group next = group_at(call, round, bh, std::min(g, groups - 1));
                    run(group, &next);
                }
            }
    }

    // Whether rows and keys are real and stand in the order of their positions.
    bool in_order(const Group& group) const {
        return group.rows[group.row_count - 1] < call.num_queries && group.keys[group.key_count - 1] < call.num_keys &&
               std::is_sorted(group.rows, group.rows + group.row_count) &&
               std::is_sorted(group.keys, group.keys + group.key_count);
    }

    int64_t visible_keys(const Group& group, int64_t row) const {
        int64_t position = row + call.offset[group.batch];
        return std::upper_bound(group.keys, group.keys + group.key_count, position) - group.keys;
    }

    void run(const Group& group, const Group* next = nullptr) {
        if (!group.row_count || !group.key_count) return;
        if (multiplicity) multiplicity->enter(group.batch * call.heads + group.head);
        bool gathered = false, finite = true, few = few_rows(group), ordered = call.causal && in_order(group);
        int64_t most = ordered ? kRowBlock / 4 : kRowBlock;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += most) {
            int64_t row_count = std::min(most, group.row_count - first_row);
            for (int64_t i = 0; i < row_count; i++) {
                query_rows[i] = fetch(call.q, group.batch, group.head, group.rows[first_row + i], query + i * dim);
            }
            // Keys behind the last of these rows are hidden from all of them.
            int64_t seen = ordered ? visible_keys(group, group.rows[first_row + row_count - 1]) : group.key_count;
            for (int64_t first_key = 0; first_key < seen; first_key += kKeyBlock) {
                breathe();
                int64_t key_count = std::min(kKeyBlock, group.key_count - first_key);
                Block block{
                    .group = group,
                    .first_row = first_row,
                    .rows = row_count,
                    .first_key = first_key,
                    .keys = std::min(key_count, seen - first_key),
                };
                if (few) {
                    find_keys_and_values(group, first_key, key_count);
                } else if (!gathered || group.key_count > kKeyBlock) {
                    gather_keys(group, first_key, key_count);
                    finite = gather_values(group, first_key, key_count);
                    gathered = true;
                }
                expect_soon(next, row_count, block.keys, few);
                if (few)
                    multiply_few(row_count, block.keys, dim, query_rows.data(), key_rows.data(), scores, kKeyBlock,
                                 call.scale, prefetch);
                else
                    multiply(row_count, block.keys, dim, Scattered{query_rows.data()}, keys, dim, scores, kKeyBlock,
                             call.scale, &prefetch);
                settle_scores(call, block, scores, multiplicity.get());
                accumulate(block, finite, few);
                next = nullptr;
            }
        }
    }

    // List what the next group will read: keys, values, queries, and the sums so far.
    void expect_soon(const Group* next, int64_t rows, int64_t keys, bool few) {
        if (!next) return;
        prefetch.clear();
        prefetch.add(call.k, next->batch, next->key_head, next->keys, next->key_count);
        prefetch.add(call.v, next->batch, next->key_head, next->keys, next->key_count);
        prefetch.add(call.q, next->batch, next->head, next->rows, next->row_count);
        int64_t head_size = call.q.rows * value_dim;
        Rows sums{
            .data = result.out,
            .batch_stride = call.heads * head_size,
            .head_stride = head_size,
            .row_stride = value_dim,
            .rows = call.q.rows,
            .dim = value_dim,
        };
        prefetch.add(sums, next->batch, next->head, next->rows, next->row_count);
        prefetch.pace(few ? rows * keys / kSums + keys / 4
                          : (padded(keys) + value_width) / kLanes * ((rows + kMicro - 1) / kMicro));
    }

    // Softmax weights of a block of settled scores, added to the rows' running sums.
    void accumulate(const Block& block, bool finite, bool few) {
        int64_t width = padded(block.keys), bh = block.group.batch * call.heads + block.group.head;
        const int32_t* key = block.key_list();
        float fades[kRowBlock];
        Dropout dropout(call);
        alignas(64) float factors[kKeyBlock];
        for (int64_t i = 0; i < block.rows; i++) {
            float* row = scores + i * kKeyBlock;
            int64_t query_row = block.query(i), at = bh * call.q.rows + query_row;
            Vec top = splat(kNone);
            for (int64_t j = 0; j < width; j += kLanes) top = max(load(row + j), top);
            // A row that has met nobody yet has total 0 (one that met NaN has not).
            bool fresh = totals[at] == 0;
            float best = std::max(result.lse[at], highest(top)), base = best == kNone ? 0.0f : best;
            float fade = fades[i] = fresh ? 0.0f : std::exp(result.lse[at] - base);
            float mass = finite ? weigh(row, width, base) : spread_wild(block, i, base, fade);
            result.lse[at] = best;
            totals[at] = (fresh ? 0.0f : totals[at] * fade) + mass;
            if (dropout.any() && finite) {
                dropout.draw(bh, query_row, key, block.keys, factors);
                for (int64_t j = 0; j < width; j += kLanes) store(row + j, load(row + j) * load(factors + j));
            }
        }
        if (finite) add_values(block, fades, few);
    }

    // Scores ← exp(score − base); returns their sum.
    static float weigh(float* row, int64_t width, float base) {
        Vec total = splat(0);
        for (int64_t j = 0; j < width; j += kLanes) {
            Vec weight = exp(load(row + j) - splat(base));
            total = total + weight;
            store(row + j, weight);
        }
        return sum(total);
    }

    // out ← out · fade + weights · values.
    void add_values(const Block& block, const float* fades, bool few) {
        if (few)
            combine_few(block.rows, value_dim, block.keys, scores, kKeyBlock, value_rows.data(), partial, value_width,
                        prefetch);
        else
            multiply(block.rows, value_dim, block.keys, Strided{scores, kKeyBlock, 1}, values, kKeyBlock, partial,
                     value_width, 1.0f, &prefetch);
        int64_t first = (block.group.batch * call.heads + block.group.head) * call.q.rows;
        for (int64_t i = 0; i < block.rows; i++) {
            float* out = result.out + (first + block.query(i)) * value_dim;
            const float* add = partial + i * value_width;
            float fade = fades[i];
            if (fade == 0)
                for (int64_t d = 0; d < value_dim; d++) out[d] = add[d];
            else
                for (int64_t d = 0; d < value_dim; d++) out[d] = out[d] * fade + add[d];
        }
    }

    // Both for one row where some value is inf or NaN: a pair that does not meet contributes nothing.
    float spread_wild(const Block& block, int64_t i, float base, float fade) {
        int64_t bh = block.group.batch * call.heads + block.group.head, query_row = block.query(i);
        float* out = result.out + (bh * call.q.rows + query_row) * value_dim;
        const float* row = scores + i * kKeyBlock;
        for (int64_t d = 0; d < value_dim; d++) out[d] = fade == 0 ? 0.0f : out[d] * fade;
        float mass = 0;
        Dropout dropout(call);
        for (int64_t j = 0; j < block.keys; j++) {
            if (row[j] == kNone) continue;
            float weight = std::exp(row[j] - base);
            mass += weight;
            if (dropout.any()) weight *= dropout.factor(bh, query_row, block.key(j));
            for (int64_t d = 0; d < value_dim; d++)
                out[d] += weight * values[(d / kLanes) * kLanes * kKeyBlock + j * kLanes + d % kLanes];
        }
        return mass;
    }

    // Once all rounds are in: queries that met nobody meet their self key, and sums become means.
    void finish(int64_t bh) {
        if (call.self_keys)
            for (int64_t i = 0; i < call.num_queries; i++) {
                bool lonely = totals[bh * call.q.rows + i] == 0;
                result.alone[bh * call.num_queries + i] = lonely;
                if (lonely) fall_back(bh, i);
            }
        for (int64_t at = bh * call.q.rows; at < (bh + 1) * call.q.rows; at++) {
            float* out = result.out + at * value_dim;
            float total = totals[at];
            if (total == 0) {
                std::fill(out, out + value_dim, 0.0f);
                result.lse[at] = kNone;
                continue;
            }
            float share = 1.0f / total;
            for (int64_t d = 0; d < value_dim; d++) out[d] *= share;
            result.lse[at] += std::log(total);
        }
    }

    // One query with its self key alone.
    void fall_back(int64_t bh, int64_t row) {
        int32_t query_row = static_cast<int32_t>(row);
        int32_t key = call.self_keys[(bh / call.heads) * call.num_queries + row];
        if (key >= 0) run(alone_with(call, bh, query_row, key));
    }
};

// The end of the rounds from `first` on that have its groups of queries.
inline size_t same_queries(const Call& call, size_t first) {
    const Round& one = call.rounds[first];
    size_t stop = first + 1;
    for (; stop < call.rounds.size(); stop++) {
        const Round& other = call.rounds[stop];
        if (!one.query_order.same(other.query_order) || !one.query_offsets.same(other.query_offsets)) break;
    }
    return stop;
}

inline void forward(const Call& call, const Forward& result) {
    int64_t heads = call.batch * call.heads, rows = heads * call.q.rows;
    std::fill(result.lse, result.lse + rows, kNone);
    std::unique_ptr<float[]> totals(new float[rows]());
    // No out row is read before it is written; those that meet nobody are zeroed at the end.
    int threads = threads_for(pairs_at_most(call) * double(call.q.dim + call.v.dim), call.threads);
    std::vector<std::unique_ptr<ForwardWorker>> workers(threads);
    auto worker_at = [&](int worker) -> ForwardWorker& {
        if (!workers[worker]) workers[worker] = std::make_unique<ForwardWorker>(call, result, totals.get());
        return *workers[worker];
    };
    if (heads >= threads) {
        parallel_for(heads, threads, [&](int64_t bh, int who) {
            ForwardWorker& worker = worker_at(who);
            for (size_t first = 0, stop; first < call.rounds.size(); first = stop) {
                stop = same_queries(call, first);
                worker.run_rounds(bh, first, stop);
            }
            worker.finish(bh);
        });
        return;
    }
    // Few heads: share out the groups of a round, which have no query in common.
    for (auto& round : call.rounds) {
        int64_t chunk = std::max<int64_t>(1, round.groups() / (8 * threads));
        int64_t chunks = (round.groups() + chunk - 1) / chunk;
        parallel_for(heads * chunks, threads, [&](int64_t task, int who) {
            int64_t bh = task / chunks, g = task % chunks * chunk, end = std::min(g + chunk, round.groups());
            if (g) g = group_at(call, round, bh, g - 1).stop;  // groups that go with one before are not of this chunk
            while (g < end) {
                Group group = group_at(call, round, bh, g);
                g = group.stop;
                worker_at(who).run(group);
            }
        });
    }
    parallel_for(heads, threads_for(double(rows) * double(call.v.dim), threads),
                 [&](int64_t bh, int who) { worker_at(who).finish(bh); });
}

}  // namespace coterie::COTERIE_ISA
