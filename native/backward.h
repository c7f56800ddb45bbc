// The gradient of grouped attention: scores are computed again, and the final lse makes them weights.
#pragma once

#include <memory>

#include "dropout.h"
#include "matrix.h"
#include "pairs.h"
#include "threads.h"
#include "turns.h"

namespace coterie::COTERIE_ISA {

// What a block adds to the gradients, kept until it is its turn.
struct Share {
    Buffer queries, keys, values, mask;

    Share(int64_t width, int64_t value_width, bool masked)
        : queries(kRowBlock * width),
          keys(kKeyBlock * width),
          values(kKeyBlock * value_width),
          mask(masked ? kRowBlock * kKeyBlock : 0) {}
};

// The rows of a mask's gradient, to which every head may add: tasks go over its stripes one behind the other.
struct Stripes {
    int64_t rows;
    std::vector<Turns> turns;

    Stripes(const Call& call, const Backward& result)
        : rows(call.num_queries), turns(result.grad_mask_strides[2] ? std::clamp<int64_t>(rows, 1, 32) : 1) {}

    int64_t count() const { return static_cast<int64_t>(turns.size()); }
    int64_t of(int64_t row) const { return count() == 1 ? 0 : row * count() / rows; }
};

struct BackwardWorker {
    const Call& call;
    Backward& result;
    int64_t dim, width, value_dim, value_width;
    Buffer query, query_panels, grad, grad_panels, key_rows, keys, keys_transposed, value_rows, values_transposed;
    Buffer weights, grad_weights, raw, sums;
    std::vector<const float*> pointers, query_rows;
    std::unique_ptr<Multiplicity> multiplicity;
    std::vector<Share> shares;

    BackwardWorker(const Call& call, Backward& result)
        : call(call),
          result(result),
          dim(call.q.dim),
          width(padded(call.q.dim)),
          value_dim(call.v.dim),
          value_width(padded(call.v.dim)),
          query(kRowBlock * dim),
          query_panels(kRowBlock * width),
          grad(kRowBlock * value_dim),
          grad_panels(kRowBlock * value_width),
          key_rows(kKeyBlock * dim),
          keys(kKeyBlock * width),
          keys_transposed(kKeyBlock * dim),
          value_rows(kKeyBlock * value_dim),
          values_transposed(kKeyBlock * value_dim),
          weights(kRowBlock * kKeyBlock),
          grad_weights(kRowBlock * kKeyBlock),
          raw(kRowBlock * kKeyBlock),
          sums(std::max(kRowBlock, kKeyBlock) * std::max(width, value_width)),
          pointers(kKeyBlock),
          query_rows(kRowBlock),
          multiplicity(call.once ? new Multiplicity(call) : nullptr) {}

    void gather(const Rows& from, const Block& block, float* rows, float* transposed) {
        for (int64_t j = 0; j < block.keys; j++) {
            int64_t key = block.key(j);
            const char* at = from.row(block.group.batch, block.group.key_head, key);
            read_row(at, from.kind_at(key), from.dim, rows + j * from.dim);
            pointers[j] = rows + j * from.dim;
        }
        transpose_to_panels(pointers.data(), block.keys, from.dim, transposed);
    }

    // A group whose gradients nobody else adds to.
    void run(const Group& group) {
        if (!group.row_count || !group.key_count) return;
        if (multiplicity) multiplicity->enter(group.batch * call.heads + group.head);
        bool gathered = false;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += kRowBlock)
            for_each_block(group, first_row, [&](const Block& block, const Upstream& upstream) {
                if (!gathered || group.key_count > kKeyBlock) load_keys(block);
                gathered = true;
                compute(block, upstream);
                float* found = sums;
                weigh_keys(block, found);
                add_to_queries(block, found);
                weigh_queries(block, found);
                add_to_keys(block, found);
                weigh_gradients(block, upstream, found);
                add_to_values(block, found);
                for (int64_t i = 0; result.grad_mask && i < block.rows; i++) add_to_mask(block, i, grad_weights);
            });
    }

    // Some rows of a group, whose gradients are added when it is this task's turn.
    void run(const Group& group, int64_t first_row, Turn turn, Stripes& stripes, int64_t task) {
        if (multiplicity) multiplicity->enter(group.batch * call.heads + group.head);
        size_t count = 0;
        for_each_block(group, first_row, [&](const Block& block, const Upstream& upstream) {
            if (count == shares.size()) shares.emplace_back(width, value_width, result.grad_mask != nullptr);
            Share& share = shares[count++];
            load_keys(block);
            compute(block, upstream);
            weigh_keys(block, share.queries);
            weigh_queries(block, share.keys);
            weigh_gradients(block, upstream, share.values);
            for (int64_t i = 0; result.grad_mask && i < block.rows; i++)
                std::copy_n(grad_weights + i * kKeyBlock, block.keys, share.mask + i * kKeyBlock);
        });
        auto block_of = [&](size_t c) { return block_at(group, first_row, static_cast<int64_t>(c) * kKeyBlock); };
        turn.wait();
        for (size_t c = 0; c < count; c++) {
            Block block = block_of(c);
            add_to_queries(block, shares[c].queries);
            add_to_keys(block, shares[c].keys);
            add_to_values(block, shares[c].values);
        }
        turn.pass();
        if (!result.grad_mask) return;
        for (int64_t stripe = 0; stripe < stripes.count(); stripe++) {
            stripes.turns[stripe].wait_for(task);
            for (size_t c = 0; c < count; c++) {
                Block block = block_of(c);
                for (int64_t i = 0; i < block.rows; i++)
                    if (stripes.of(block.query(i)) == stripe) add_to_mask(block, i, shares[c].mask);
            }
            stripes.turns[stripe].pass(task);
        }
    }

    static Block block_at(const Group& group, int64_t first_row, int64_t first_key) {
        return {
            .group = group,
            .first_row = first_row,
            .rows = std::min(kRowBlock, group.row_count - first_row),
            .first_key = first_key,
            .keys = std::min(kKeyBlock, group.key_count - first_key),
        };
    }

    // Of a block of rows: shift = dlse − out · dout; and whether some gradient is inf or NaN.
    struct Upstream {
        float shifts[kRowBlock], lses[kRowBlock];
        bool wild = false;
    };

    template <class Task>
    void for_each_block(const Group& group, int64_t first_row, Task&& task) {
        Upstream upstream;
        load_rows(group, first_row, std::min(kRowBlock, group.row_count - first_row), upstream);
        for (int64_t first_key = 0; first_key < group.key_count; first_key += kKeyBlock) {
            breathe();
            task(block_at(group, first_row, first_key), upstream);
        }
    }

    // Weights and their gradients.
    void compute(const Block& block, const Upstream& upstream) {
        multiply(block.rows, block.keys, dim, Scattered{query_rows.data()}, keys_transposed, dim, raw, kKeyBlock,
                 call.scale);
        settle_scores(call, block, raw, multiplicity.get());
        multiply(block.rows, block.keys, value_dim, Strided{grad, value_dim, 1}, values_transposed, value_dim,
                 grad_weights, kKeyBlock);
        differentiate(block, upstream.shifts, upstream.lses);
    }

    void load_keys(const Block& block) {
        gather(call.k, block, key_rows, keys_transposed);
        gather(call.v, block, value_rows, values_transposed);
        if (!all_finite(key_rows, block.keys * dim)) zero_wild(key_rows, block.keys * dim);
        for (int64_t j = 0; j < block.keys; j++) row_to_panels(key_rows + j * dim, dim, j, kKeyBlock, keys);
    }

    // Queries and upstream gradients of a block of rows.
    void load_rows(const Group& group, int64_t first_row, int64_t row_count, Upstream& upstream) {
        for (int64_t i = 0; i < row_count; i++) {
            int64_t row = group.rows[first_row + i], at = (group.batch * call.heads + group.head) * call.q.rows + row;
            float* q = query + i * dim;
            read_row(call.q.row(group.batch, group.head, row), call.q.kind_at(row), dim, q);
            query_rows[i] = q;
            float* g = grad + i * value_dim;
            read_row(result.grad_out.row(group.batch, group.head, row), result.grad_out.kind, value_dim, g);
            const float* out = result.forward.out + at * value_dim;
            double dot = 0;  // what is left of p·(dp − dot) is small, so dot must be good
            for (int64_t d = 0; d < value_dim; d++) dot += double(g[d]) * out[d];
            upstream.shifts[i] = static_cast<float>(result.grad_lse[at] - dot);
            upstream.lses[i] = result.forward.lse[at] == kNone ? 0.0f : result.forward.lse[at];
            row_to_panels(g, value_dim, i, kRowBlock, grad_panels);
        }
        const float* q = query;
        bool wild_query = !all_finite(q, row_count * dim);
        for (int64_t i = 0; i < row_count; i++) {
            row_to_panels(query + i * dim, dim, i, kRowBlock, query_panels);
            if (wild_query)
                for (int64_t c = 0; c < width; c += kLanes)
                    zero_wild(query_panels + c * kRowBlock + i * kLanes, kLanes);
        }
        upstream.wild = !all_finite(grad, row_count * value_dim);
    }

    // weights ← p (dropped out), grad_weights ← ds = p (dp − out·dout + dlse); both 0 where a pair does not meet.
    void differentiate(const Block& block, const float* shifts, const float* lses) {
        int64_t bh = block.group.batch * call.heads + block.group.head, columns = padded(block.keys);
        const int32_t* key = block.key_list();
        Dropout dropout(call);
        alignas(64) float factors[kKeyBlock];
        for (int64_t i = 0; i < block.rows; i++) {
            float *s = raw + i * kKeyBlock, *p = weights + i * kKeyBlock, *ds = grad_weights + i * kKeyBlock;
            Vec lse = splat(lses[i]), shift = splat(shifts[i]);
            if (dropout.any()) {
                dropout.draw(bh, block.query(i), key, block.keys, factors);
                for (int64_t j = 0; j < columns; j += kLanes) {
                    Vec score = load(s + j), weight = where_met(score, exp(score - lse)), factor = load(factors + j);
                    store(p + j, weight * factor);
                    store(ds + j, where_met(score, weight * fma(load(ds + j), factor, shift)));
                }
                continue;
            }
            for (int64_t j = 0; j < columns; j += kLanes) {
                Vec score = load(s + j), weight = where_met(score, exp(score - lse));
                store(p + j, weight);
                store(ds + j, where_met(score, weight * (load(ds + j) + shift)));
            }
        }
    }

    int64_t key_head_of(const Group& group) const { return group.batch * call.key_heads + group.key_head; }

    void weigh_keys(const Block& block, float* found) {
        multiply(block.rows, dim, block.keys, Strided{grad_weights, kKeyBlock, 1}, keys, kKeyBlock, found, width);
    }

    void add_to_queries(const Block& block, const float* found) {
        int64_t bh = block.group.batch * call.heads + block.group.head;
        for (int64_t i = 0; i < block.rows; i++) {
            float* to = result.q.row(bh, block.query(i));
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * found[i * width + d];
        }
    }

    void weigh_queries(const Block& block, float* found) {
        multiply(block.keys, dim, block.rows, Strided{grad_weights, 1, kKeyBlock}, query_panels, kRowBlock, found,
                 width);
    }

    void add_to_keys(const Block& block, const float* found) {
        int64_t bk = key_head_of(block.group);
        for (int64_t j = 0; j < block.keys; j++) {
            float* to = result.k.row(bk, block.key(j));
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * found[j * width + d];
        }
    }

    // Where some upstream gradient is inf or NaN, a pair that does not meet must contribute nothing.
    void weigh_gradients(const Block& block, const Upstream& upstream, float* found) {
        if (!upstream.wild) {
            multiply(block.keys, value_dim, block.rows, Strided{weights, 1, kKeyBlock}, grad_panels, kRowBlock, found,
                     value_width);
            return;
        }
        for (int64_t j = 0; j < block.keys; j++) {
            float* to = found + j * value_width;
            std::fill_n(to, value_dim, 0.0f);
            for (int64_t i = 0; i < block.rows; i++) {
                if (raw[i * kKeyBlock + j] == kNone) continue;
                float weight = weights[i * kKeyBlock + j];
                for (int64_t d = 0; d < value_dim; d++) to[d] += weight * grad[i * value_dim + d];
            }
        }
    }

    void add_to_values(const Block& block, const float* found) {
        int64_t bk = key_head_of(block.group);
        for (int64_t j = 0; j < block.keys; j++) {
            float* to = result.v.row(bk, block.key(j));
            for (int64_t d = 0; d < value_dim; d++) to[d] += found[j * value_width + d];
        }
    }

    // One row of a block.
    void add_to_mask(const Block& block, int64_t i, const float* found) {
        const int64_t* strides = result.grad_mask_strides;
        float* row = result.grad_mask + block.group.batch * strides[0] + block.group.head * strides[1] +
                     (strides[2] ? block.query(i) * strides[2] : 0);
        for (int64_t j = 0; j < block.keys; j++)
            row[strides[3] ? block.key(j) * strides[3] : 0] += found[i * kKeyBlock + j];
    }
};

// A query that meets nobody but its own key.
inline void run_alone(const Call& call, const Backward& result, int64_t bh, BackwardWorker& worker) {
    for (int64_t i = 0; call.self_keys && i < call.num_queries; i++) {
        int32_t row = static_cast<int32_t>(i), key = call.self_keys[(bh / call.heads) * call.num_queries + i];
        if (!result.forward.alone[bh * call.num_queries + i] || key < 0) continue;
        worker.run(alone_with(call, bh, row, key));
    }
}

// Heads that share keys add to their gradient in one order. Where there are fewer such sets of heads than threads, or
// all add to the gradient of one mask, groups are shared out too, and each adds what it found when it is its turn: the
// sums are the same.
class SharedBackward {
public:
    SharedBackward(const Call& call, const Backward& result)
        : call_(call), turns_(call.batch * call.key_heads), stripes_(call, result) {
        int64_t heads = call.batch * call.heads, shared = call.heads / call.key_heads, place = 0;
        for (int64_t bh = 0; bh < heads; bh++) {
            if (bh % shared == 0) place = 0;
            for (auto& round : call.rounds)
                for (int64_t g = 0; g < round.groups();) {
                    Group group = group_at(call, round, bh, g);
                    g = group.stop;
                    if (!group.key_count) continue;
                    for (int64_t row = 0; row < group.row_count; row += kRowBlock)
                        parts_.push_back({bh / shared, place++, bh, &round, group.first, row});
                }
            if (call.self_keys) parts_.push_back({bh / shared, place++, bh, nullptr, 0, 0});
        }
    }

    void run(Backward& result, int threads) {
        std::vector<std::unique_ptr<BackwardWorker>> workers(threads);
        parallel_for(static_cast<int64_t>(parts_.size()), threads, [&](int64_t task, int who) {
            const Part& part = parts_[task];
            Turn turn{turns_[part.set], part.place};
            try {
                if (!workers[who]) workers[who] = std::make_unique<BackwardWorker>(call_, result);
                if (part.round) {
                    Group group = group_at(call_, *part.round, part.bh, part.group);
                    workers[who]->run(group, part.first_row, turn, stripes_, task);
                    return;
                }
                turn.wait();
                for (Turns& each : stripes_.turns)
                    if (result.grad_mask) each.wait_for(task);
                run_alone(call_, result, part.bh, *workers[who]);
                for (Turns& each : stripes_.turns) each.pass(task);
                turn.pass();
            } catch (...) {
                for (Turns& each : turns_) each.give_up();
                for (Turns& each : stripes_.turns) each.give_up();
                throw;
            }
        });
    }

private:
    struct Part {
        int64_t set, place, bh;
        const Round* round;  // null: the queries that fell back on themselves
        int64_t group, first_row;
    };

    const Call& call_;
    std::vector<Turns> turns_;
    Stripes stripes_;
    std::vector<Part> parts_;
};

inline void backward(const Call& call, Backward& result) {
    int64_t shared = call.heads / call.key_heads, sets = call.batch * call.key_heads;
    int threads = threads_for(pairs_at_most(call) * double(call.q.dim + call.v.dim), call.threads);
    if (threads > 1 && sets && (result.grad_mask || sets < threads)) {
        SharedBackward(call, result).run(result, threads);
        return;
    }
    std::vector<std::unique_ptr<BackwardWorker>> workers(threads);
    parallel_for(sets, threads, [&](int64_t bk, int who) {
        if (!workers[who]) workers[who] = std::make_unique<BackwardWorker>(call, result);
        for (int64_t bh = bk * shared; bh < (bk + 1) * shared; bh++) {
            for (auto& round : call.rounds)
                for (int64_t g = 0; g < round.groups();) {
                    Group group = group_at(call, round, bh, g);
                    g = group.stop;
                    workers[who]->run(group);
                }
            run_alone(call, result, bh, *workers[who]);
        }
    });
}

}  // namespace coterie::COTERIE_ISA
