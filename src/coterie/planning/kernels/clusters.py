"""The two halves of an iteration of k-means: who is nearest to which centroid, and the sums of each one's members."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nearest(
    x,
    x_head,
    x_row,
    order,
    order_head,
    tile_part,
    tile_slot,
    stop,
    counts,
    centroids,
    half_norms,
    labels,
    heads,
    tiles,
    parts,
    clusters,
    rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTROIDS: tl.constexpr,
):
    """The nearest centroid of each row of a tile, ties to the first: ‖x − c‖² is smallest where ‖c‖²/2 − x·c is.

    x is (B·heads, N, D), an order (B·heads, M) of its rows, of which a tile takes some that belong to one part.
    Labels go to where the rows are in the order.
    """
    head = tl.program_id(1).to(tl.int64)
    sample = head // heads
    part = tl.load(tile_part + sample * tiles + tl.program_id(0))
    if part < 0:
        return
    slots = tl.load(tile_slot + sample * tiles + tl.program_id(0)) + tl.arange(0, ROWS)
    used = slots < tl.load(stop + sample * parts + part)
    row = tl.load(order + head * order_head + slots, mask=used, other=0)
    column = tl.arange(0, BLOCK)
    wide = (column < DIM)[None, :]
    at = x + head * x_head + row.to(tl.int64)[:, None] * x_row + column[None, :]
    values = tl.load(at, mask=used[:, None] & wide, other=0.0)
    best = tl.full([ROWS], float("inf"), tl.float32)
    label = tl.zeros([ROWS], tl.int32)
    count = tl.load(counts + sample * parts + part)
    first = (head * parts + part) * clusters
    for begin in range(0, count, CENTROIDS):
        which = begin + tl.arange(0, CENTROIDS)
        there = which < count
        where = there[:, None] & wide
        centroid = tl.load(centroids + (first + which)[:, None] * DIM + column[None, :], mask=where, other=0.0)
        half = tl.load(half_norms + first + which, mask=there, other=float("inf"))
        distance = half[None, :] - tl.dot(values, tl.trans(centroid), input_precision="ieee")
        distance = tl.where(there[None, :], distance, float("inf"))
        least = tl.min(distance, 1)
        closer = least < best
        label = tl.where(closer, begin + tl.argmin(distance, 1, tie_break_left=True), label)
        best = tl.where(closer, least, best)
    tl.store(labels + head * rows + slots, label, mask=used)


@triton.jit
def member_sums(
    x,
    x_head,
    x_row,
    order,
    order_head,
    members,
    first,
    sums,
    clusters,
    slots,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The sum of the rows of each cluster, float64: those in the slots members[first_c … first_c+1) of the order."""
    head = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = cluster < clusters
    begin = tl.load(first + head * (clusters + 1) + cluster, mask=used, other=0)
    end = tl.load(first + head * (clusters + 1) + cluster + 1, mask=used, other=0)
    column = tl.arange(0, BLOCK)
    wide = (column < DIM)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float64)
    for e in range(tl.max(end - begin, 0)):
        there = begin + e < end
        slot = tl.load(members + head * slots + begin + e, mask=there, other=0)
        row = tl.load(order + head * order_head + slot, mask=there, other=0)
        at = x + head * x_head + row.to(tl.int64)[:, None] * x_row + column[None, :]
        total += tl.load(at, mask=there[:, None] & wide, other=0.0).to(tl.float64)
    at = sums + (head * clusters + cluster)[:, None] * DIM + column[None, :]
    tl.store(at, total, mask=used[:, None] & wide)
