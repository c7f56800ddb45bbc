"""k-means: who is nearest to which centroid, the sums of each one's members, and small parts from first to last."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def closest(values, centroids, half_norms, there):
    """The least ‖c‖²/2 − x·c of each row, and which centroid has it, ties to the first; there: whether one exists."""
    distance = half_norms[None, :] - tl.dot(values, tl.trans(centroids), input_precision="ieee")
    distance = tl.where(there[None, :], distance, float("inf"))
    return tl.min(distance, 1), tl.argmin(distance, 1, tie_break_left=True)


@triton.jit
def listed_rows(x, x_row, order, slots, used, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The rows that sit in the slots of an order, padded with zeros from DIM to BLOCK; zeros where not used."""
    row = tl.load(order + slots, mask=used, other=0)
    column = tl.arange(0, BLOCK)
    at = x + row.to(tl.int64)[:, None] * x_row + column[None, :]
    return tl.load(at, mask=used[:, None] & (column < DIM)[None, :], other=0.0)


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
    tile, head = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    sample = head // heads
    part = tl.load(tile_part + sample * tiles + tile)
    if part < 0:
        return
    slots = tl.load(tile_slot + sample * tiles + tile) + tl.arange(0, ROWS)
    used = slots < tl.load(stop + sample * parts + part)
    values = listed_rows(x + head * x_head, x_row, order + head * order_head, slots, used, DIM, BLOCK)
    column = tl.arange(0, BLOCK)
    wide = (column < DIM)[None, :]
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
        least, here = closest(values, centroid, half, there)
        closer = least < best
        label = tl.where(closer, begin + here, label)
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
    blocks = tl.cdiv(clusters, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    cluster = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    used = cluster < clusters
    begin = tl.load(first + head * (clusters + 1) + cluster, mask=used, other=0)
    end = tl.load(first + head * (clusters + 1) + cluster + 1, mask=used, other=0)
    column = tl.arange(0, BLOCK)
    wide = (column < DIM)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float64)
    for e in range(tl.max(end - begin, 0)):
        there = begin + e < end
        slot = tl.load(members + head * slots + begin + e, mask=there, other=0)
        member = listed_rows(x + head * x_head, x_row, order + head * order_head, slot, there, DIM, BLOCK)
        total += member.to(tl.float64)
    at = sums + (head * clusters + cluster)[:, None] * DIM + column[None, :]
    tl.store(at, total, mask=used[:, None] & wide)


@triton.jit
def label_rows(x, x_row, order, slots, used, centroids, inside, half, there, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The rows in some slots, and the nearest centroid of each; centroids are read where they lie."""
    values = listed_rows(x, x_row, order, slots, used, DIM, BLOCK)
    centroid = tl.load(centroids, mask=inside, other=0.0)
    return values, closest(values, centroid, half, there)[1]


@triton.jit
def half_norms(centroids, inside):
    """‖c‖²/2 of each centroid."""
    centroid = tl.load(centroids, mask=inside, other=0.0)
    return tl.sum(centroid * centroid, 1) / 2


@triton.jit
def cluster_parts(
    x,
    x_head,
    x_row,
    trained,
    trained_head,
    trained_start,
    trained_stop,
    order,
    order_head,
    start,
    stop,
    counts,
    centroids,
    labels,
    heads,
    parts,
    clusters,
    rows,
    iterations,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CENTROIDS: tl.constexpr,
):
    """All iterations of a small part, and the labels of its rows. An empty cluster keeps its centroid.

    Centroids are trained on the slots of one order, and label those of another. Nobody but this program reads or
    writes the ones of its part; held in registers, they would spill.
    """
    part, head = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    entry = head // heads * parts + part
    mine, column = tl.arange(0, CENTROIDS), tl.arange(0, BLOCK)
    place = centroids + ((head * parts + part) * clusters + mine)[:, None] * DIM + column[None, :]
    inside = (mine < clusters)[:, None] & (column < DIM)[None, :]
    there = mine < tl.load(counts + entry)
    x_rows = x + head * x_head
    order_rows = trained + head * trained_head
    begin, end = tl.load(trained_start + entry), tl.load(trained_stop + entry)
    for _ in range(iterations):
        half = half_norms(place, inside)
        sums = tl.zeros([CENTROIDS, BLOCK], dtype=tl.float32)
        sizes = tl.zeros([CENTROIDS], dtype=tl.float32)
        for first in range(begin, end, ROWS):
            slots = first + tl.arange(0, ROWS)
            used = slots < end
            values, label = label_rows(x_rows, x_row, order_rows, slots, used, place, inside, half, there, DIM, BLOCK)
            member = ((label[:, None] == mine[None, :]) & used[:, None]).to(tl.float32)
            sums = tl.dot(tl.trans(member), values, sums, input_precision="ieee")
            sizes += tl.sum(member, 0)
        means = tl.div_rn(sums, tl.broadcast_to(tl.maximum(sizes, 1.0)[:, None], sums.shape))
        tl.debug_barrier()  # all threads have read the old ones
        tl.store(place, means, mask=inside & (sizes[:, None] > 0))
        tl.debug_barrier()  # and see the new ones
    half = half_norms(place, inside)
    order_rows = order + head * order_head
    begin, end = tl.load(start + entry), tl.load(stop + entry)
    for first in range(begin, end, ROWS):
        slots = first + tl.arange(0, ROWS)
        used = slots < end
        values, label = label_rows(x_rows, x_row, order_rows, slots, used, place, inside, half, there, DIM, BLOCK)
        tl.store(labels + head * rows + slots, label, mask=used)
