"""Which pairs of a tile meet, and with what score, in base 2.

A tile is some query rows of a group × some of the keys that it meets. `settle` turns products into scores:

    s_ij = (scale·q_i·k_j + bias_j + log count_j + mask_ij − log multiplicity_ij) · log2 e

and −inf where a pair does not meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_NONE = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_DROPOUT = tl.constexpr(6)  # coterie.draws.Stream.DROPOUT


@triton.jit
def place_in_grid(count):
    """Which of `count` blocks of a head a program takes, and of which head.

    A grid has 2³¹ programs along its first axis and 65,535 along the others: there may be more heads of samples.
    """
    return tl.program_id(0) % count, tl.program_id(0) // count


@triton.jit
def gather(data, at, used, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows that begin `at` (N,) behind data, padded with zeros from DIM to BLOCK; zeros where not used."""
    column = tl.arange(0, BLOCK)
    where = used[:, None]
    if DIM < BLOCK:
        where = where & (column < DIM)[None, :]
    return tl.load(data + at[:, None] + column[None, :], mask=where, other=0.0)


@triton.jit
def scatter(data, at, used, values, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows where `gather` would read them."""
    column = tl.arange(0, BLOCK)
    where = used[:, None]
    if DIM < BLOCK:
        where = where & (column < DIM)[None, :]
    tl.store(data + at[:, None] + column[None, :], values.to(data.dtype.element_ty), mask=where)


@triton.jit
def products(
    a, a_rows, a_at, a_used, b, b_rows, b_at, b_used, width,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a·bᵀ of gathered rows. In full float32 without a and b: columns are read again, some at a time.

    There are no tensor cores for these, and all columns that are multiplied at a time are held in registers. `width` is
    WIDTH, unknown to the compiler: a loop of so few steps would be unrolled, and all columns held at once.
    """
    if (a.dtype != tl.float32) | (PRECISION != "ieee") | (BLOCK <= 32):
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)
    total = tl.zeros([a.shape[0], b.shape[0]], dtype=tl.float32)
    for first in range(0, width, 16):
        column = first + tl.arange(0, 16)
        a_there, b_there = a_used[:, None], b_used[:, None]
        if WIDTH < BLOCK:
            inside = (column < WIDTH)[None, :]
            a_there, b_there = a_there & inside, b_there & inside
        x = tl.load(a_rows + a_at[:, None] + column[None, :], mask=a_there, other=0.0)
        y = tl.load(b_rows + b_at[:, None] + column[None, :], mask=b_there, other=0.0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    return total


@triton.jit
def head_of(x, b, head):
    """Where the rows of a head begin."""
    return x.data + b.to(tl.int64) * x.batch + head.to(tl.int64) * x.head


@triton.jit
def query_rows(call, each, b, bh, slots, inside):
    """The query rows of slots, and which of them are real ones."""
    rows = tl.load(each.query_order + bh.to(tl.int64) * each.query_slots + slots, mask=inside, other=0)
    if call.query_mask is not None:
        real = inside & (rows < call.num_queries)
        seen = tl.load(call.query_mask + b * call.num_queries + rows, mask=real, other=1)
        inside = inside & (seen != 0)
    return rows, inside


@triton.jit
def query_tile(
    q, call, each, tiles, tile, group, bh, b,
    ROWS: tl.constexpr, POOL: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of query rows: (slots, heads, rows, which are real, where they lie, numbers, places among all rows)."""
    row = tl.arange(0, ROWS)
    slots = tl.load(tiles.slot + tile) + row // POOL
    heads = bh + row % POOL
    stop = tl.load(each.last + bh.to(tl.int64) * each.groups + group)
    rows, used = query_rows(call, each, b, bh, slots, slots < stop)
    at = heads % call.heads * tl.cast(q.head, tl.int64) + rows.to(tl.int64) * q.row
    queries = gather(q.data + b.to(tl.int64) * q.batch, at, used, DIM, BLOCK)
    return slots, heads, rows, used, at, queries, heads.to(tl.int64) * call.query_rows + rows


@triton.jit
def key_rows(call, each, b, bh, slots, inside):
    """The key rows of slots, and which of them may be read."""
    keys = tl.load(each.key_order + bh.to(tl.int64) * each.key_slots + slots, mask=inside, other=0)
    if call.key_mask is not None:
        real = inside & (keys < call.num_keys)
        seen = tl.load(call.key_mask + b * call.num_keys + keys, mask=real, other=1)
        inside = inside & (seen != 0)
    return keys, inside


@triton.jit
def reach(call, low, high, b, bh, rows, used):
    """Between which key positions the keys lie that causality and the window leave to each row: two (N,) int32."""
    place = rows.to(tl.int64) + tl.load(call.offset + b)
    if call.query_places is not None:
        virtual = rows - call.num_queries
        at = call.query_places + bh.to(tl.int64) * (call.query_rows - call.num_queries) + virtual
        place = tl.where(virtual < 0, place, tl.load(at, mask=used & (virtual >= 0), other=0))
    first = tl.full(rows.shape, _LOWEST, tl.int64)
    last = tl.full(rows.shape, _HIGHEST, tl.int64)
    if low is not None:
        first = place - high
        last = place - low
    if call.causal is not None:
        last = tl.minimum(last, place)
    none = (first > _HIGHEST) | (last < _LOWEST)
    first = tl.where(none, _HIGHEST, tl.maximum(first, _LOWEST))
    last = tl.where(none, _LOWEST, tl.minimum(last, _HIGHEST))
    return first.to(tl.int32), last.to(tl.int32)


@triton.jit
def key_places(call, b, kh, keys, used):
    """Where keys sit."""
    place = keys
    if call.key_places is not None:
        virtual = keys - call.num_keys
        at = call.key_places + (b * call.key_heads + kh).to(tl.int64) * (call.key_rows - call.num_keys) + virtual
        place = tl.where(virtual < 0, keys, tl.load(at, mask=used & (virtual >= 0), other=0))
    return place


@triton.jit
def listed(skip, skips, slots, used, keys):
    """Whether a key is in the list of a row that sits in a slot: (rows, keys)."""
    found = used[:, None] & (keys < 0)[None, :]
    for e in range(skips):
        hidden = tl.load(skip + slots.to(tl.int64) * skips + e, mask=used, other=-1)
        found = found | (keys[None, :] == hidden[:, None])
    return found


@triton.jit
def multiplicity(call, others, b, bh, kh, rows, used, keys, key_used):
    """How often each pair meets over all rounds, at least once."""
    total = tl.zeros([rows.shape[0], keys.shape[0]], dtype=tl.int32)
    head = bh.to(tl.int64)
    for r in tl.static_range(len(others)):
        each = others[r]
        slot = tl.load(each.slot_of + head * call.query_rows + rows, mask=used, other=-1)
        member = slot >= 0
        group = tl.load(each.group_of + head * call.query_rows + rows, mask=member, other=0)
        start = tl.load(each.key_start + head * each.groups + group, mask=member, other=0)
        stop = tl.load(each.key_stop + head * each.groups + group, mask=member, other=0)
        begin = tl.load(each.first + head * (call.key_rows + 1) + keys, mask=key_used, other=0)
        end = tl.load(each.first + head * (call.key_rows + 1) + keys + 1, mask=key_used, other=0)
        count = tl.zeros([rows.shape[0], keys.shape[0]], dtype=tl.int32)
        for e in range(tl.max(end - begin, 0)):
            at = tl.load(each.listed + head * each.key_slots + begin + e, mask=begin + e < end, other=-1)
            inside = (at[None, :] >= start[:, None]) & (at[None, :] < stop[:, None])
            if each.counts is not None:
                entry = (head * each.groups + group)[:, None] * each.width + (at[None, :] - start[:, None])
                inside = inside & (tl.load(each.counts + entry, mask=inside, other=0) != 0)
            count += inside.to(tl.int32)
        met = member[:, None] & key_used[None, :]
        if (call.causal is not None) | (each.low is not None):
            first, last = reach(call, each.low, each.high, b, bh, rows, used)
            place = key_places(call, b, kh, keys, key_used)
            met = met & (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
        if each.skip is not None:
            met = met & ~listed(each.skip, each.skips, head * each.query_slots + slot, member, keys)
        total += tl.where(met, count, 0)
    return tl.maximum(total, 1)


@triton.jit
def masked(call, scores, meets, b, heads, rows, keys):
    """Scores with a mask of pairs."""
    at = b.to(tl.int64) * call.mask_strides[0] + heads.to(tl.int64) * call.mask_strides[1]
    at = (at + rows.to(tl.int64) * call.mask_strides[2])[:, None] + keys.to(tl.int64)[None, :] * call.mask_strides[3]
    if call.added is not None:
        add = tl.load(call.mask + at, mask=meets, other=0.0).to(tl.float32)
        return scores + add * LOG2E, meets & (add != _NONE)
    return scores, meets & (tl.load(call.mask + at, mask=meets, other=0) != 0)


@triton.jit
def settle(
    scores, call, each, others, b, bh, kh, heads, rows, used, slots, first, last, keys, key_used, key_slots, start
):
    """The scores of a tile, −inf where a pair does not meet, and which pairs do."""
    meets = used[:, None] & key_used[None, :]
    if (call.causal is not None) | (each.low is not None):
        place = key_places(call, b, kh, keys, key_used)
        meets = meets & (place[None, :] >= first[:, None]) & (place[None, :] <= last[:, None])
    if each.bias is not None:
        bias = tl.load(each.bias + bh.to(tl.int64) * each.key_slots + key_slots, mask=key_used, other=0.0)
        scores = scores + (bias * LOG2E)[None, :]
        meets = meets & (bias != _NONE)[None, :]
    if each.counts is not None:
        group = tl.load(each.group_of + bh.to(tl.int64) * each.query_slots + slots, mask=used, other=0)
        entry = (bh.to(tl.int64) * each.groups + group) * each.width
        count = tl.load(each.counts + entry[:, None] + (key_slots - start)[None, :], mask=meets, other=0)
        meets = meets & (count != 0)
        scores = scores + tl.log2(tl.maximum(count.to(tl.float32), 1.0))
    if each.skip is not None:
        meets = meets & ~listed(each.skip, each.skips, bh.to(tl.int64) * each.query_slots + slots, used, keys)
    if call.mask is not None:
        scores, meets = masked(call, scores, meets, b, heads, rows, keys)
    if others is not None:
        times = multiplicity(call, others, b, bh, kh, rows, used, keys, key_used)
        scores = scores - tl.log2(times.to(tl.float32))
    return tl.where(meets, scores, _NONE), meets


@triton.jit
def keep(call, heads, rows, keys):
    """Dropout's factor of each pair, 0 or 1 / (1 − p): the draws of `coterie.draws.keep_pairs`."""
    zero = tl.zeros([rows.shape[0], keys.shape[0]], dtype=tl.uint32)
    word, _, _, _ = tl.philox(
        call.seed,
        keys.to(tl.uint32)[None, :] + zero,
        rows.to(tl.uint32)[:, None] + zero,
        heads.to(tl.uint32)[:, None] + zero,
        zero + _DROPOUT,
    )
    return tl.where(word.to(tl.uint32) >= tl.cast(call.limit, tl.uint32), call.kept, 0.0)
