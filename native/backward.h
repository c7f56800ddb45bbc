// The gradient of grouped attention: scores are computed again, and the final lse makes them weights.
#pragma once

#include <memory>

#include "dropout.h"
#include "matrix.h"
#include "pairs.h"
#include "threads.h"

namespace coterie::COTERIE_ISA {

struct BackwardWorker {
    const Call& call;
    Backward& result;
    int64_t dim, width, value_dim, value_width;
    Buffer query, query_panels, grad, grad_panels, key_rows, keys, keys_transposed, value_rows, values_transposed;
    Buffer weights, grad_weights, raw, sums;
    std::vector<const float*> pointers, query_rows;
    std::unique_ptr<Multiplicity> multiplicity;

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

    void run(const Group& group) {
        if (!group.row_count || !group.key_count) return;
        if (multiplicity) multiplicity->enter(group.batch * call.heads + group.head);
        bool gathered = false;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += kRowBlock) {
            int64_t rows = std::min(kRowBlock, group.row_count - first_row);
            float shifts[kRowBlock], lses[kRowBlock];
            bool wild_grad = load_rows(group, first_row, rows, shifts, lses);
            for (int64_t first_key = 0; first_key < group.key_count; first_key += kKeyBlock) {
                breathe();
                Block block{
                    .group = group,
                    .first_row = first_row,
                    .rows = rows,
                    .first_key = first_key,
                    .keys = std::min(kKeyBlock, group.key_count - first_key),
                };
                if (!gathered || group.key_count > kKeyBlock) load_keys(block);
                gathered = true;
                multiply(rows, block.keys, dim, Scattered{query_rows.data()}, keys_transposed, dim, raw, kKeyBlock,
                         call.scale);
                settle_scores(call, block, raw, multiplicity.get());
                multiply(rows, block.keys, value_dim, Strided{grad, value_dim, 1}, values_transposed, value_dim,
                         grad_weights, kKeyBlock);
                differentiate(block, shifts, lses);
                spread_to_queries_and_keys(block);
                spread_to_values(block, wild_grad);
                if (result.grad_mask) spread_to_mask(block);
            }
        }
    }

    void load_keys(const Block& block) {
        gather(call.k, block, key_rows, keys_transposed);
        gather(call.v, block, value_rows, values_transposed);
        if (!all_finite(key_rows, block.keys * dim)) zero_wild(key_rows, block.keys * dim);
        for (int64_t j = 0; j < block.keys; j++) row_to_panels(key_rows + j * dim, dim, j, kKeyBlock, keys);
    }

    // Queries and upstream gradients of a block of rows; shift = dlse − out · dout. Returns whether some
    // gradient is inf or NaN.
    bool load_rows(const Group& group, int64_t first_row, int64_t row_count, float* shifts, float* lses) {
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
            shifts[i] = static_cast<float>(result.grad_lse[at] - dot);
            lses[i] = result.forward.lse[at] == kNone ? 0.0f : result.forward.lse[at];
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
        return !all_finite(grad, row_count * value_dim);
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

    void spread_to_queries_and_keys(const Block& block) {
        int64_t bh = block.group.batch * call.heads + block.group.head, bk = key_head_of(block.group);
        multiply(block.rows, dim, block.keys, Strided{grad_weights, kKeyBlock, 1}, keys, kKeyBlock, sums, width);
        for (int64_t i = 0; i < block.rows; i++) {
            float* to = result.q.row(bh, block.query(i));
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[i * width + d];
        }
        multiply(block.keys, dim, block.rows, Strided{grad_weights, 1, kKeyBlock}, query_panels, kRowBlock, sums,
                 width);
        for (int64_t j = 0; j < block.keys; j++) {
            float* to = result.k.row(bk, block.key(j));
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[j * width + d];
        }
    }

    // Where some upstream gradient is inf or NaN, a pair that does not meet must contribute nothing.
    void spread_to_values(const Block& block, bool wild_grad) {
        int64_t bk = key_head_of(block.group);
        if (!wild_grad)
            multiply(block.keys, value_dim, block.rows, Strided{weights, 1, kKeyBlock}, grad_panels, kRowBlock, sums,
                     value_width);
        for (int64_t j = 0; j < block.keys; j++) {
            float* to = result.v.row(bk, block.key(j));
            if (!wild_grad) {
                for (int64_t d = 0; d < value_dim; d++) to[d] += sums[j * value_width + d];
                continue;
            }
            for (int64_t i = 0; i < block.rows; i++) {
                if (raw[i * kKeyBlock + j] == kNone) continue;
                float weight = weights[i * kKeyBlock + j];
                for (int64_t d = 0; d < value_dim; d++) to[d] += weight * grad[i * value_dim + d];
            }
        }
    }

    void spread_to_mask(const Block& block) {
        const int64_t* strides = result.grad_mask_strides;
        float* head = result.grad_mask + block.group.batch * strides[0] + block.group.head * strides[1];
        for (int64_t i = 0; i < block.rows; i++) {
            float* row = head + (strides[2] ? block.query(i) * strides[2] : 0);
            for (int64_t j = 0; j < block.keys; j++)
                row[strides[3] ? block.key(j) * strides[3] : 0] += grad_weights[i * kKeyBlock + j];
        }
    }
};

// Heads that share keys are one task, so that every sum is made in one order. A mask is shared by all.
inline void backward(const Call& call, Backward& result) {
    int64_t shared = call.heads / call.key_heads;
    int threads = result.grad_mask ? 1 : call.threads;
    std::vector<std::unique_ptr<BackwardWorker>> workers(std::max(1, threads));
    parallel_for(call.batch * call.key_heads, threads, [&](int64_t bk, int who) {
        if (!workers[who]) workers[who] = std::make_unique<BackwardWorker>(call, result);
        BackwardWorker& worker = *workers[who];
        for (int64_t bh = bk * shared; bh < (bk + 1) * shared; bh++) {
            for (auto& round : call.rounds)
                for (int64_t g = 0; g < round.groups();) {
                    Group group = group_at(call, round, bh, g);
                    g = group.stop;
                    worker.run(group);
                }
            if (!call.self_keys) continue;
            for (int64_t i = 0; i < call.num_queries; i++) {
                int32_t row = static_cast<int32_t>(i), key = call.self_keys[(bh / call.heads) * call.num_queries + i];
                if (!result.forward.alone[bh * call.num_queries + i] || key < 0) continue;
                worker.run(alone_with(call, bh, row, key));
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
