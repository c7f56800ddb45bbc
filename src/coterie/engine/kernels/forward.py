"""Forward: an online softmax over the rounds of a plan.

A program takes some query rows of a group and streams the keys and values that the group meets. What it has found goes
on top of what the rounds before left in `out` (not yet divided), `top` and `total`; `finish` divides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.engine.kernels.pairs import (
    LN2,
    LOG2E,
    gather,
    head_of,
    keep,
    key_rows,
    place_in_grid,
    products,
    query_tile,
    reach,
    scatter,
    settle,
)

_NONE = tl.constexpr(float("-inf"))


@triton.jit
def round_forward(
    q,
    k,
    v,
    wild,
    out,
    top,
    total,
    tiles,
    call,
    each,
    others,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    POOL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One round. POOL: so many query heads with the same plan and the same keys share a tile, row by row."""
    here, head = place_in_grid(tiles.number)
    bh = head * POOL
    b, kh = bh // call.heads, bh % call.heads // (call.heads // call.key_heads)
    tile = head.to(tl.int64) * tiles.number + here
    group = tl.load(tiles.group + tile)
    if group < 0:
        return
    slots, heads, rows, used, at, queries, place = query_tile(
        q, call, each, tiles, tile, group, bh, b, ROWS, POOL, DIM, BLOCK
    )
    first, last = reach(call, each.low, each.high, b, heads, rows, used)
    best = tl.load(top + place, mask=used, other=_NONE)
    mass = tl.load(total + place, mask=used, other=0.0)
    found = gather(out, place * VALUE_DIM, used, VALUE_DIM, VALUE_BLOCK)
    entry = bh.to(tl.int64) * each.groups + group
    start, stop = tl.load(each.key_start + entry), tl.load(each.key_stop + entry)
    q_batch, k_head, v_head = q.data + b.to(tl.int64) * q.batch, head_of(k, b, kh), head_of(v, b, kh)
    wild_head = wild + (b * call.key_heads + kh).to(tl.int64) * call.key_rows
    for begin in range(start, stop, KEYS):
        key_slots = begin + tl.arange(0, KEYS)
        keys, key_used = key_rows(call, each, b, bh, key_slots, key_slots < stop)
        key_at = keys.to(tl.int64) * k.row
        each_key = gather(k_head, key_at, key_used, DIM, BLOCK)
        scores = products(
            queries, q_batch, at, used, each_key, k_head, key_at, key_used, call.dim, DIM, BLOCK, PRECISION
        )
        scores = scores * (scale * LOG2E)
        scores, meets = settle(
            scores, call, each, others, b, bh, kh, heads % call.heads, rows, used, slots, first, last,
            keys, key_used, key_slots, start,
        )  # fmt: skip
        new = tl.maximum(best, tl.max(scores, 1))
        base = tl.where(new == _NONE, 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(best - base)
        mass = mass * fade + tl.sum(weights, 1)
        best = new
        if call.seed is not None:
            weights = weights * keep(call, heads, rows, keys)
        poison = tl.load(wild_head + keys, mask=key_used, other=0.0)
        weights = tl.where(meets, weights + poison[None, :], 0.0)
        values = gather(v_head, keys.to(tl.int64) * v.row, key_used, VALUE_DIM, VALUE_BLOCK)
        found = found * fade[:, None]
        found = tl.dot(weights.to(values.dtype), values, found, input_precision=PRECISION)
    tl.store(top + place, best, mask=used)
    tl.store(total + place, mass, mask=used)
    scatter(out, place * VALUE_DIM, used, found, VALUE_DIM, VALUE_BLOCK)


@triton.jit
def self_score(q, k, call, bh, rows, keys, used, scale, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The score of each row with one key of its own, in base 2, −inf where a mask hides it; and both rows."""
    b, h = bh // call.heads, bh % call.heads
    kh = h // (call.heads // call.key_heads)
    if call.key_mask is not None:
        used = used & (tl.load(call.key_mask + b * call.num_keys + keys, mask=used, other=0) != 0)
    if call.query_mask is not None:
        used = used & (tl.load(call.query_mask + b * call.num_queries + rows, mask=used, other=0) != 0)
    query = gather(head_of(q, b, h), rows.to(tl.int64) * q.row, used, DIM, BLOCK).to(tl.float32)
    key = gather(head_of(k, b, kh), keys.to(tl.int64) * k.row, used, DIM, BLOCK).to(tl.float32)
    score = tl.sum(query * key, 1) * (scale * LOG2E)
    if call.mask is not None:
        at = b.to(tl.int64) * call.mask_strides[0] + h.to(tl.int64) * call.mask_strides[1]
        at = at + rows.to(tl.int64) * call.mask_strides[2] + keys.to(tl.int64) * call.mask_strides[3]
        if call.added is not None:
            add = tl.load(call.mask + at, mask=used, other=0.0).to(tl.float32)
            score = score + add * LOG2E
            used = used & (add != _NONE)
        else:
            used = used & (tl.load(call.mask + at, mask=used, other=0) != 0)
    return tl.where(used, score, _NONE), used, query, key


@triton.jit
def self_keep(call, bh, rows, keys):
    """Dropout's factor of each row with its own key."""
    zero = tl.zeros(rows.shape, dtype=tl.uint32)
    word, _, _, _ = tl.philox(
        call.seed, keys.to(tl.uint32), rows.to(tl.uint32), zero + bh.to(tl.uint32), zero + 6
    )  # fmt: skip
    return tl.where(word.to(tl.uint32) >= tl.cast(call.limit, tl.uint32), call.kept, 0.0)


@triton.jit
def finish(
    q,
    k,
    v,
    wild,
    out,
    top,
    total,
    alone,
    self_keys,
    call,
    scale,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums become means, and `top` becomes lse; a query that met nobody meets its self key, if it has one."""
    here, bh = place_in_grid(tl.cdiv(call.query_rows, ROWS))
    b = bh // call.heads
    rows = here * ROWS + tl.arange(0, ROWS)
    used = rows < call.query_rows
    place = bh.to(tl.int64) * call.query_rows + rows
    best = tl.load(top + place, mask=used, other=_NONE)
    mass = tl.load(total + place, mask=used, other=0.0)
    found = gather(out, place * VALUE_DIM, used, VALUE_DIM, VALUE_BLOCK)
    if self_keys is not None:
        real = rows < call.num_queries
        lonely = real & (mass == 0.0)
        keys = tl.load(self_keys + b * call.num_queries + rows, mask=real, other=-1)
        score, met, _, _ = self_score(q, k, call, bh, rows, keys, lonely & (keys >= 0), scale, DIM, BLOCK)
        kh = bh % call.heads // (call.heads // call.key_heads)
        values = gather(head_of(v, b, kh), keys.to(tl.int64) * v.row, met, VALUE_DIM, VALUE_BLOCK).to(tl.float32)
        poison = tl.load(wild + (b * call.key_heads + kh).to(tl.int64) * call.key_rows + keys, mask=met, other=0.0)
        factor = 1.0 + poison
        if call.seed is not None:
            factor = self_keep(call, bh, rows, keys) + poison
        mass = tl.where(met, 1.0, mass)
        best = tl.where(met, score, best)
        found = tl.where(met[:, None], values * factor[:, None], found)
        tl.store(alone + bh.to(tl.int64) * call.num_queries + rows, lonely.to(tl.uint8), mask=real)
    heard = mass != 0.0
    safe = tl.where(heard, mass, 1.0)
    lse = tl.where(heard, (best + tl.log2(safe)) * LN2, _NONE)
    tl.store(top + place, lse, mask=used)
    mean = tl.where(heard[:, None], found / safe[:, None], 0.0)
    scatter(out, place * VALUE_DIM, used, mean, VALUE_DIM, VALUE_BLOCK)
