"""The largest scores of each row, without sorting: their threshold is found four bits at a time."""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.planning.kernels.ranks import edges_of, longer, rank_of

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def ranks(scores, score_row, seen, seen_row, keys, used, here):
    """The ranks of scores (rows, keys), and which of them may be picked."""
    there = used[:, None] & here[None, :]
    found = tl.load(scores + score_row[:, None] + keys[None, :], mask=there, other=0.0).to(tl.float32)
    found = tl.where(found == found, found, _LARGEST)
    found = tl.minimum(tl.maximum(found, -_LARGEST), _LARGEST)
    there = there & (tl.load(seen + seen_row[:, None] + keys[None, :], mask=there, other=0) != 0)
    return rank_of(found), there


@triton.jit
def largest(
    scores,
    seen,
    seen_strides,
    heads,
    members,
    keys,
    rows,
    picks,
    counts,
    count,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The positions of the `count` largest scores of each row, ascending, ties to the first; and how many there are.

    scores (B, H, members, keys) lie one behind the other; `seen` (B, members, keys) has strides.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    seen_row = row // members // heads * seen_strides[0] + row % members * seen_strides[1]
    column = tl.arange(0, KEYS)
    lowest = tl.zeros([ROWS], dtype=tl.uint32)
    wanted = tl.zeros([ROWS], dtype=tl.int32)
    for bits in range(28, -1, -4):
        reached = tl.zeros([ROWS, 16], dtype=tl.int32)
        edges = edges_of(lowest, bits)
        for begin in range(0, keys, KEYS):
            at = begin + column
            rank, there = ranks(scores, row * keys, seen, seen_row, at, used, at < keys)
            above = (rank[:, :, None] >= edges[:, None, :]) & there[:, :, None]
            reached += tl.sum(above.to(tl.int32), 1)
        wanted = tl.minimum(tl.max(reached, 1), count) if bits == 28 else wanted  # all that may be picked reach 0
        lowest = longer(lowest, bits, reached, wanted)
    above = tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, keys, KEYS):
        at = begin + column
        rank, there = ranks(scores, row * keys, seen, seen_row, at, used, at < keys)
        above += tl.sum(((rank > lowest[:, None]) & there).to(tl.int32), 1)
    tied, done = wanted - above, tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, keys, KEYS):
        at = begin + column
        rank, there = ranks(scores, row * keys, seen, seen_row, at, used, at < keys)
        ties = ((rank == lowest[:, None]) & there).to(tl.int32)
        taken = (ties != 0) & (tl.cumsum(ties, 1) <= tied[:, None])
        taken = taken | ((rank > lowest[:, None]) & there)
        place = done[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
        tl.store(picks + (row * count)[:, None] + place, at[None, :] + tl.zeros_like(place), mask=taken)
        tied -= tl.sum(ties, 1)
        done += tl.sum(taken.to(tl.int32), 1)
    tl.store(counts + row, done, mask=used)
