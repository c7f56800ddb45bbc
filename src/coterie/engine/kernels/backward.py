"""Backward: scores are computed again, and the final lse makes weights of them.

    p_ij = exp(s_ij − lse_i),   ds_ij = p_ij (dout_i·v_j + dlse_i − dout_i·out_i)
    dq_i = scale Σ_j ds_ij k_j,   dk_j = scale Σ_i ds_ij q_i,   dv_j = Σ_i p_ij dout_i

`round_queries` is shaped like forward. `round_keys` takes some keys, runs over the query rows of every group that meets
them, and keeps its sums to itself until the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.engine.kernels.forward import self_keep, self_score
from coterie.engine.kernels.pairs import (
    LOG2E,
    gather,
    head_of,
    keep,
    key_rows,
    place_in_grid,
    products,
    query_rows,
    query_tile,
    reach,
    scatter,
    settle,
)

_NONE = tl.constexpr(float("-inf"))


@triton.jit
def differentiate(call, scores, meets, heads, rows, keys, grad_weights, lse, shift):
    """The weights of a tile, with dropout, and the gradient of its scores."""
    log_total = tl.where(lse == _NONE, 0.0, lse * LOG2E)
    weights = tl.exp2(scores - log_total[:, None])
    dropped = weights
    if call.seed is not None:
        factor = keep(call, heads, rows, keys)
        dropped = weights * factor
        grad_weights = grad_weights * factor
    return dropped, tl.where(meets, weights * (grad_weights + shift[:, None]), 0.0)


@triton.jit(do_not_specialize=["begin_head", "head_step"])
def round_queries(
    q,
    k,
    v,
    grad,
    lse,
    shift,
    grad_q,
    grad_mask,
    row_sums,
    tiles,
    call,
    each,
    others,
    scale,
    begin_head,
    head_step,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of queries in one round, added to `grad_q`; of a mask of pairs at the pairs, or summed over a row."""
    here, head = place_in_grid(tiles.number)
    index = begin_head + head * head_step
    bh = index * POOL
    b, kh = bh // call.heads, bh % call.heads // (call.heads // call.key_heads)
    tile = index.to(tl.int64) * tiles.number + here
    group = tl.load(tiles.group + tile)
    if group < 0:
        return
    slots, heads, rows, used, at, queries, place = query_tile(
        q, call, each, tiles, tile, group, bh, b, ROWS, POOL, DIM, BLOCK
    )
    first, last = reach(call, each.low, each.high, b, heads, rows, used)
    upstream = gather(grad, place * VALUE_DIM, used, VALUE_DIM, VALUE_BLOCK)
    row_lse = tl.load(lse + place, mask=used, other=_NONE)
    row_shift = tl.load(shift + place, mask=used, other=0.0)
    found = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    sums = tl.zeros([ROWS], dtype=tl.float32)
    entry = bh.to(tl.int64) * each.groups + group
    start, stop = tl.load(each.key_start + entry), tl.load(each.key_stop + entry)
    q_batch, k_head, v_head = q.data + b.to(tl.int64) * q.batch, head_of(k, b, kh), head_of(v, b, kh)
    for begin in range(start, stop, KEYS):
        key_slots = begin + tl.arange(0, KEYS)
        keys, key_used = key_rows(call, each, b, bh, key_slots, key_slots < stop)
        key_at, value_at = keys.to(tl.int64) * k.row, keys.to(tl.int64) * v.row
        each_key = gather(k_head, key_at, key_used, DIM, BLOCK)
        scores = products(
            queries, q_batch, at, used, each_key, k_head, key_at, key_used, call.dim, DIM, BLOCK, PRECISION
        )
        scores = scores * (scale * LOG2E)
        scores, meets = settle(
            scores, call, each, others, b, bh, kh, heads % call.heads, rows, used, slots, first, last,
            keys, key_used, key_slots, start,
        )  # fmt: skip
        values = gather(v_head, value_at, key_used, VALUE_DIM, VALUE_BLOCK)
        grad_weights = products(
            upstream, grad, place * VALUE_DIM, used, values, v_head, value_at, key_used,
            call.value_dim, VALUE_DIM, VALUE_BLOCK, PRECISION,
        )  # fmt: skip
        _, grad_scores = differentiate(call, scores, meets, heads, rows, keys, grad_weights, row_lse, row_shift)
        found = tl.dot(grad_scores.to(each_key.dtype), each_key, found, input_precision=PRECISION)
        if row_sums is not None:
            sums += tl.sum(grad_scores, 1)
        if grad_mask is not None:
            cell = b.to(tl.int64) * call.mask_strides[0] + heads % call.heads * tl.cast(call.mask_strides[1], tl.int64)
            cell = cell + rows.to(tl.int64) * call.mask_strides[2]
            cell = cell[:, None] + keys.to(tl.int64)[None, :] * call.mask_strides[3]
            tl.atomic_add(grad_mask + cell, grad_scores, mask=meets)  # no other program adds to these rows
    before = gather(grad_q, place * DIM, used, DIM, BLOCK)
    scatter(grad_q, place * DIM, used, before + found * scale, DIM, BLOCK)
    if row_sums is not None:
        tl.store(row_sums + place, tl.load(row_sums + place, mask=used, other=0.0) + sums, mask=used)


@triton.jit(do_not_specialize=["first_slot", "slots_here", "splits"])
def round_keys(
    q,
    k,
    v,
    grad,
    lse,
    shift,
    wild,
    slot_k,
    slot_v,
    slot_mask,
    tiles,
    tile_last,
    by_start,
    low,
    high,
    call,
    each,
    others,
    scale,
    first_slot,
    slots_here,
    splits,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of keys and values in one round: one row for each slot, or with ATOMIC added to the rows themselves.

    The groups that meet this tile are among by_start[low … high). So many programs as `splits` share their query rows.
    """
    here, bh = place_in_grid(tiles.number)
    b, kh = bh // call.heads, bh % call.heads // (call.heads // call.key_heads)
    head = bh.to(tl.int64)
    tile = head * tiles.number + here
    atom = tl.load(tiles.group + tile)
    lowest, highest = tl.load(low + tile), tl.load(high + tile)
    if (atom < 0) | (lowest >= highest):  # slots that nobody meets may hold anything
        return
    begin = tl.load(tiles.slot + tile)
    key_slots = begin + tl.arange(0, KEYS)
    inside = key_slots < tl.load(tile_last + head * (2 * each.groups - 1) + atom)
    keys, key_used = key_rows(call, each, b, bh, key_slots, inside)
    k_head, v_head = head_of(k, b, kh), head_of(v, b, kh)
    key_at, value_at = keys.to(tl.int64) * k.row, keys.to(tl.int64) * v.row
    each_key = gather(k_head, key_at, key_used, DIM, BLOCK)
    values = gather(v_head, value_at, key_used, VALUE_DIM, VALUE_BLOCK)
    found_k = tl.zeros([KEYS, BLOCK], dtype=tl.float32)
    found_v = tl.zeros([KEYS, VALUE_BLOCK], dtype=tl.float32)
    sums = tl.zeros([KEYS], dtype=tl.float32)
    q_head = head_of(q, b, bh % call.heads)
    split = tl.program_id(1)
    heads = bh + tl.zeros([ROWS], dtype=tl.int32)
    for g in range(lowest, highest):
        entry = head * each.groups + tl.load(by_start + head * each.groups + g)
        start = tl.load(each.key_start + entry)
        first_row, last_row = tl.load(each.first + entry), tl.load(each.last + entry)
        last_row = tl.where(tl.load(each.key_stop + entry) > begin, last_row, first_row)
        for row in range(first_row + (split + g) % splits * ROWS, last_row, ROWS * splits):
            slots = row + tl.arange(0, ROWS)
            rows, used = query_rows(call, each, b, bh, slots, slots < last_row)
            at = rows.to(tl.int64) * q.row
            queries = gather(q_head, at, used, DIM, BLOCK)
            first, last = reach(call, each.low, each.high, b, heads, rows, used)
            scores = products(
                queries, q_head, at, used, each_key, k_head, key_at, key_used, call.dim, DIM, BLOCK, PRECISION
            )
            scores = scores * (scale * LOG2E)
            scores, meets = settle(
                scores, call, each, others, b, bh, kh, heads % call.heads, rows, used, slots, first, last,
                keys, key_used, key_slots, start,
            )  # fmt: skip
            place = head * call.query_rows + rows
            upstream = gather(grad, place * VALUE_DIM, used, VALUE_DIM, VALUE_BLOCK)
            row_lse = tl.load(lse + place, mask=used, other=_NONE)
            row_shift = tl.load(shift + place, mask=used, other=0.0)
            poison = tl.load(wild + place, mask=used, other=0.0)
            grad_weights = products(
                upstream, grad, place * VALUE_DIM, used, values, v_head, value_at, key_used,
                call.value_dim, VALUE_DIM, VALUE_BLOCK, PRECISION,
            )  # fmt: skip
            weights, grad_scores = differentiate(
                call, scores, meets, heads, rows, keys, grad_weights, row_lse, row_shift
            )
            weights = tl.where(meets, weights + poison[:, None], 0.0).to(upstream.dtype)
            found_v = tl.dot(tl.trans(weights), upstream, found_v, input_precision=PRECISION)
            found_k = tl.dot(tl.trans(grad_scores.to(queries.dtype)), queries, found_k, input_precision=PRECISION)
            if slot_mask is not None:
                sums += tl.sum(grad_scores, 0)
    if ATOMIC:
        column, value_column = tl.arange(0, BLOCK), tl.arange(0, VALUE_BLOCK)
        where = inside[:, None] & (column < DIM)[None, :]
        value_where = inside[:, None] & (value_column < VALUE_DIM)[None, :]
        at = (b * call.key_heads + kh).to(tl.int64) * call.key_rows + keys
        tl.atomic_add(slot_k + (at * DIM)[:, None] + column[None, :], found_k * scale, mask=where)
        tl.atomic_add(slot_v + (at * VALUE_DIM)[:, None] + value_column[None, :], found_v, mask=value_where)
    else:
        at = (head * slots_here + key_slots - first_slot) * splits + split
        scatter(slot_k, at * DIM, inside, found_k * scale, DIM, BLOCK)
        scatter(slot_v, at * VALUE_DIM, inside, found_v, VALUE_DIM, VALUE_BLOCK)
    if slot_mask is not None:
        at = (head * slots_here + key_slots - first_slot) * splits + split
        tl.store(slot_mask + at, sums, mask=inside)


@triton.jit
def self_queries(
    q,
    k,
    v,
    grad,
    shift,
    wild,
    alone,
    self_keys,
    grad_q,
    grad_score,
    kept,
    call,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of queries that met nobody but their self key: their gradient, that of the score, and the factor of the value."""
    here, bh = place_in_grid(tl.cdiv(call.num_queries, ROWS))
    b = bh // call.heads
    rows = here * ROWS + tl.arange(0, ROWS)
    real = rows < call.num_queries
    at = bh.to(tl.int64) * call.num_queries + rows
    keys = tl.load(self_keys + b * call.num_queries + rows, mask=real, other=-1)
    lonely = real & (tl.load(alone + at, mask=real, other=0) != 0) & (keys >= 0)
    _, met, _, key = self_score(q, k, call, bh, rows, keys, lonely, scale, DIM, BLOCK)
    place = bh.to(tl.int64) * call.query_rows + rows
    kh = bh % call.heads // (call.heads // call.key_heads)
    value = gather(head_of(v, b, kh), keys.to(tl.int64) * v.row, met, VALUE_DIM, VALUE_BLOCK).to(tl.float32)
    upstream = gather(grad, place * VALUE_DIM, met, VALUE_DIM, VALUE_BLOCK).to(tl.float32)
    factor = tl.where(met, 1.0, 0.0)
    if call.seed is not None:
        factor = factor * self_keep(call, bh, rows, keys)
    slope = tl.sum(upstream * value, 1) * factor + tl.load(shift + place, mask=met, other=0.0)
    slope = tl.where(met, slope, 0.0)
    before = gather(grad_q, place * DIM, met, DIM, BLOCK)
    scatter(grad_q, place * DIM, met, before + slope[:, None] * key * scale, DIM, BLOCK)
    tl.store(grad_score + at, slope, mask=real)
    tl.store(kept + at, factor + tl.load(wild + place, mask=met, other=0.0), mask=real)


@triton.jit
def self_key_rows(
    q,
    grad,
    grad_score,
    kept,
    listed,
    first,
    grad_k,
    grad_v,
    call,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add to each key what the queries pass on that have it for their self key: listed[first_j … first_j+1)."""
    here, bkh = place_in_grid(tl.cdiv(call.num_keys, ROWS))
    b, kh = bkh // call.key_heads, bkh % call.key_heads
    keys = here * ROWS + tl.arange(0, ROWS)
    real = keys < call.num_keys
    begin = tl.load(first + b * (call.num_keys + 1) + keys, mask=real, other=0)
    end = tl.load(first + b * (call.num_keys + 1) + keys + 1, mask=real, other=0)
    found_k = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    found_v = tl.zeros([ROWS, VALUE_BLOCK], dtype=tl.float32)
    share = call.heads // call.key_heads
    q_batch = q.data + b.to(tl.int64) * q.batch
    for e in range(tl.max(end - begin, 0)):
        there = begin + e < end
        rows = tl.load(listed + b * call.num_queries + begin + e, mask=there, other=0)
        for h in range(kh * share, (kh + 1) * share):
            head = (b * call.heads + h).to(tl.int64)
            slope = tl.load(grad_score + head * call.num_queries + rows, mask=there, other=0.0)
            factor = tl.load(kept + head * call.num_queries + rows, mask=there, other=0.0)
            met = there & ((slope != 0.0) | (factor != 0.0))
            query = gather(q_batch + h * tl.cast(q.head, tl.int64), rows.to(tl.int64) * q.row, met, DIM, BLOCK)
            found_k += slope[:, None] * query.to(tl.float32)
            at = (head * call.query_rows + rows) * VALUE_DIM
            found_v += factor[:, None] * gather(grad, at, met, VALUE_DIM, VALUE_BLOCK).to(tl.float32)
    place = bkh.to(tl.int64) * call.key_rows + keys
    before = gather(grad_k, place * DIM, real, DIM, BLOCK)
    scatter(grad_k, place * DIM, real, before + found_k * scale, DIM, BLOCK)
    before = gather(grad_v, place * VALUE_DIM, real, VALUE_DIM, VALUE_BLOCK)
    scatter(grad_v, place * VALUE_DIM, real, before + found_v, VALUE_DIM, VALUE_BLOCK)
