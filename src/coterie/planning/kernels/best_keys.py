"""The best keys of groups of queries, in the clusters that each has chosen: scores are made where they are counted.

A program takes some groups of a chunk, and goes through the keys of all clusters that any of them has chosen: for each
digit of the least score that is still among the best, and once more to write those down. No score is ever in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.planning.kernels.ranks import edges_of, longer, rank_of


@triton.jit
def last_upto(starts, count, levels, at):
    """The last of `count` ascending numbers that is not above each `at`; the first one is 0."""
    found = tl.zeros_like(at)
    for level in range(levels - 1, -1, -1):
        further = found + (1 << level)
        reached = tl.load(starts + further, mask=further < count, other=2**31 - 1) <= at
        found = tl.where(reached, further, found)
    return found


@triton.jit
def some_ranks(queries, called, begin, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """From the key `begin` on: ranks of products (keys, rows), which of them count, the keys, and their clusters."""
    keys, scale, order, first, listed, starts, ranges, levels, total, chosen, used = called
    at = begin + tl.arange(0, KEYS)
    inside = at < total
    which = last_upto(starts, ranges, levels, at)
    place = tl.load(listed + which, mask=inside, other=0)
    slot = tl.load(first + place, mask=inside, other=0) + at - tl.load(starts + which, mask=inside, other=0)
    key = tl.load(order + slot, mask=inside, other=0)
    rows = keys + key.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    products = tl.dot(tl.load(rows, mask=inside[:, None], other=0), queries)
    scores = products.to(tl.float32) * tl.load(scale + key, mask=inside, other=0.0)[:, None]
    there = inside[:, None] & used[None, :]
    there = there & (tl.load(chosen[None, :] + place[:, None], mask=there, other=0) != 0)
    return rank_of(scores), there, key, place


@triton.jit
def late(key):
    """A rank that grows the earlier a key comes."""
    return (~key).to(tl.uint32, bitcast=True)[:, None]


@triton.jit
def count_reached(
    queries, called, total, edges, lowest, TIES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """How many keys reach each edge, (ROWS, 16); TIES: of those whose score is `lowest`, by how early they come."""
    reached = tl.zeros([ROWS, 16], dtype=tl.int32)
    for begin in range(0, total, KEYS):
        rank, there, key, _ = some_ranks(queries, called, begin, BLOCK, KEYS)
        if TIES:
            there = there & (rank == lowest[None, :])
            rank = late(key) + tl.zeros_like(rank)
        above = (rank[:, :, None] >= edges[None, :, :]) & there[:, :, None]
        reached += tl.sum(above.to(tl.int32), 0)
    return reached


@triton.jit
def best_keys(
    queries,
    keys,
    scale,
    order,
    first,
    listed,
    starts,
    ranges,
    totals,
    chosen,
    picks,
    places,
    heads,
    share,
    groups,
    chunks,
    tiles,
    width,
    levels,
    num_keys,
    slots,
    near,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The `near` keys of each group with the largest scores, ties to the first key, and the place of its cluster.

    queries (B·H, C, groups, BLOCK) and keys (B·Hk, num_keys, BLOCK) are bytes. A group has chosen the clusters where
    `chosen` (B·H, C, groups, width) is not 0, and a tile of groups those that `listed` (B·H, C, tiles, width) begins
    with, `ranges` of them. One that is at `first` (B·H, C, width) in an order (B·Hk, slots) of keys comes at `starts`
    among the `totals` keys of a tile.
    """
    tile, chunk = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    head, entry = chunk // chunks, chunk * tiles + tile
    key_head = head // heads * (heads // share) + head % heads // share
    group = tile * ROWS + tl.arange(0, ROWS)
    used, row = group < groups, chunk * groups + group
    mine = tl.load(queries + row[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None], mask=used[None, :], other=0)
    total = tl.load(totals + entry)
    called = (
        keys + key_head * num_keys * BLOCK, scale + key_head * num_keys, order + key_head * slots,
        first + chunk * width, listed + entry * width, starts + entry * width, tl.load(ranges + entry), levels, total,
        chosen + row * width, used,
    )  # fmt: skip
    lowest, earliest = tl.zeros([ROWS], dtype=tl.uint32), tl.zeros([ROWS], dtype=tl.uint32)
    wanted, above = tl.zeros([ROWS], dtype=tl.int32), tl.zeros([ROWS], dtype=tl.int32)
    ties = tl.zeros([ROWS], dtype=tl.int32)
    for bits in range(28, -1, -4):
        reached = count_reached(mine, called, total, edges_of(lowest, bits), lowest, False, BLOCK, ROWS, KEYS)
        wanted = tl.minimum(tl.max(reached, 1), near) if bits == 28 else wanted  # all that may be picked reach 0
        enough = reached >= wanted[:, None]
        lowest = longer(lowest, bits, reached, wanted)
        above = tl.maximum(above, tl.max(tl.where(enough, 0, reached), 1))
        ties = tl.min(tl.where(enough, reached, 2**31 - 1), 1) - above
    wanted -= above
    start = tl.where(tl.max(ties - wanted, 0) > 0, 28, -4)  # most often, all that tie are wanted
    for bits in range(start, -1, -4):
        reached = count_reached(mine, called, total, edges_of(earliest, bits), lowest, True, BLOCK, ROWS, KEYS)
        earliest = longer(earliest, bits, reached, wanted)
    done = tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, total, KEYS):
        rank, there, key, place = some_ranks(mine, called, begin, BLOCK, KEYS)
        tied = (rank == lowest[None, :]) & (late(key) >= earliest[None, :])
        taken = (there & ((rank > lowest[None, :]) | tied)).to(tl.int32)
        to = (row * near)[None, :] + done[None, :] + tl.cumsum(taken, 0) - 1
        tl.store(picks + to, key[:, None] + tl.zeros_like(taken), mask=taken != 0)
        tl.store(places + to, place[:, None] + tl.zeros_like(taken), mask=taken != 0)
        done += tl.sum(taken, 0)
