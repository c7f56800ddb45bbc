// The gradient of grouped attention: scores are computed again, and the final lse makes them weights.
#pragma once

#include <memory>

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

    void gather(const Rows& from, int64_t head, const Group& group, int64_t first, int64_t count, float* rows,
                float* transposed) {
        for (int64_t j = 0; j < count; j++) {
            int64_t key = group.keys[first + j];
            read_row(from.row(group.batch, head, key), from.kind_at(key), from.dim, rows + j * from.dim);
            pointers[j] = rows + j * from.dim;
        }
        transpose_to_panels(pointers.data(), count, from.dim, transposed);
    }

    void run(const Group& group) {
        if (!group.row_count || !group.key_count) return;
        int64_t bh = group.batch * call.heads + group.head;
        if (multiplicity) multiplicity->enter(bh);
        bool gathered = false;
        for (int64_t first_row = 0; first_row < group.row_count; first_row += kRowBlock) {
            int64_t row_count = std::min(kRowBlock, group.row_count - first_row);
            float shifts[kRowBlock], lses[kRowBlock];
            bool wild_grad = load_rows(group, first_row, row_count, shifts, lses);
            for (int64_t first_key = 0; first_key < group.key_count; first_key += kKeyBlock) {
                breathe();
                int64_t key_count = std::min(kKeyBlock, group.key_count - first_key);
                if (!gathered || group.key_count > kKeyBlock) {
                    gather(call.k, group.key_head, group, first_key, key_count, key_rows, keys_transposed);
                    gather(call.v, group.key_head, group, first_key, key_count, value_rows, values_transposed);
                    if (!all_finite(key_rows, key_count * dim)) zero_wild(key_rows, key_count * dim);
                    for (int64_t j = 0; j < key_count; j++) row_to_panels(key_rows + j * dim, dim, j, kKeyBlock, keys);
                    gathered = true;
                }
                multiply(row_count, key_count, dim, Scattered{query_rows.data()}, keys_transposed, dim, raw, kKeyBlock,
                         call.scale);
                settle_scores(call, group, first_row, row_count, first_key, key_count, raw, kKeyBlock,
                              multiplicity.get());
                multiply(row_count, key_count, value_dim, Strided{grad, value_dim, 1}, values_transposed, value_dim,
                         grad_weights, kKeyBlock);
                differentiate(group, first_row, row_count, first_key, key_count, shifts, lses);
                spread(group, first_row, row_count, first_key, key_count, wild_grad);
            }
        }
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
            const float* out = result.out + at * value_dim;
            double dot = 0;  // what is left of p·(dp − dot) is small, so dot must be good
            for (int64_t d = 0; d < value_dim; d++) dot += double(g[d]) * out[d];
            shifts[i] = static_cast<float>(result.grad_lse[at] - dot);
            lses[i] = result.lse[at] == kNone ? 0.0f : result.lse[at];
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
    void differentiate(const Group& group, int64_t first_row, int64_t row_count, int64_t first_key, int64_t key_count,
                       const float* shifts, const float* lses) {
        int64_t bh = group.batch * call.heads + group.head, columns = padded(key_count);
        for (int64_t i = 0; i < row_count; i++) {
            float *s = raw + i * kKeyBlock, *p = weights + i * kKeyBlock, *ds = grad_weights + i * kKeyBlock;
            if (call.dropout_p > 0) {
                for (int64_t j = 0; j < key_count; j++) {
                    bool met = s[j] != kNone;
                    float weight = met ? std::exp(s[j] - lses[i]) : 0.0f;
                    float factor = met ? keep(call, bh, group.rows[first_row + i], group.keys[first_key + j]) : 0.0f;
                    p[j] = weight * factor;
                    ds[j] = met ? weight * (ds[j] * factor + shifts[i]) : 0.0f;
                }
                continue;
            }
            Vec lse = splat(lses[i]), shift = splat(shifts[i]);
            for (int64_t j = 0; j < columns; j += kLanes) {
                Vec score = load(s + j), weight = where_met(score, exp(score - lse));
                store(p + j, weight);
                store(ds + j, where_met(score, weight * (load(ds + j) + shift)));
            }
        }
    }

    void spread(const Group& group, int64_t first_row, int64_t row_count, int64_t first_key, int64_t key_count,
                bool wild_grad) {
        int64_t bh = group.batch * call.heads + group.head, bk = group.batch * call.key_heads + group.key_head;
        multiply(row_count, dim, key_count, Strided{grad_weights, kKeyBlock, 1}, keys, kKeyBlock, sums, width);
        for (int64_t i = 0; i < row_count; i++) {
            float* to = result.q.row(bh, group.rows[first_row + i]);
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[i * width + d];
        }
        multiply(key_count, dim, row_count, Strided{grad_weights, 1, kKeyBlock}, query_panels, kRowBlock, sums, width);
        for (int64_t j = 0; j < key_count; j++) {
            float* to = result.k.row(bk, group.keys[first_key + j]);
            for (int64_t d = 0; d < dim; d++) to[d] += call.scale * sums[j * width + d];
        }
        if (!wild_grad) {
            multiply(key_count, value_dim, row_count, Strided{weights, 1, kKeyBlock}, grad_panels, kRowBlock, sums,
                     value_width);
            for (int64_t j = 0; j < key_count; j++) {
                float* to = result.v.row(bk, group.keys[first_key + j]);
                for (int64_t d = 0; d < value_dim; d++) to[d] += sums[j * value_width + d];
            }
        } else {
            for (int64_t j = 0; j < key_count; j++) {
                float* to = result.v.row(bk, group.keys[first_key + j]);
                for (int64_t i = 0; i < row_count; i++)
                    if (raw[i * kKeyBlock + j] != kNone)
                        for (int64_t d = 0; d < value_dim; d++)
                            to[d] += weights[i * kKeyBlock + j] * grad[i * value_dim + d];
            }
        }
        if (result.grad_mask) {
            const int64_t* strides = result.grad_mask_strides;
            for (int64_t i = 0; i < row_count; i++)
                for (int64_t j = 0; j < key_count; j++)
                    result.grad_mask[group.batch * strides[0] + group.head * strides[1] +
                                     (strides[2] ? group.rows[first_row + i] * strides[2] : 0) +
                                     (strides[3] ? group.keys[first_key + j] * strides[3] : 0)] +=
                        grad_weights[i * kKeyBlock + j];
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
                for (int64_t g = 0; g < round.groups(); g++) worker.run(group_at(call, round, bh, g));
            if (!call.self_keys) continue;
            for (int64_t i = 0; i < call.num_queries; i++) {
                int32_t row = static_cast<int32_t>(i), key = call.self_keys[(bh / call.heads) * call.num_queries + i];
                if (!result.alone[bh * call.num_queries + i] || key < 0) continue;
                Group group{bh / call.heads, bh % call.heads, bk % call.key_heads, nullptr, &row, 1, 0, &key, 1, 0};
                worker.run(group);
            }
        }
    });
}

}  // namespace coterie::COTERIE_ISA
