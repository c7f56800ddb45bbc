"""Rows made of other rows: sums over lists, means and their gradients, rows without wild numbers; and tile lists."""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.engine.kernels.pairs import gather, head_of, place_in_grid, scatter


@triton.jit
def list_tiles(first, last, group, slot, groups, count, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Cut the slots first … last of each group into tiles of SIZE, group after group; one program for each head."""
    head = tl.program_id(0).to(tl.int64)
    before = tl.zeros([], dtype=tl.int32)
    for begin in range(0, groups, BLOCK):
        g = begin + tl.arange(0, BLOCK)
        start = tl.load(first + head * groups + g, mask=g < groups, other=0)
        stop = tl.load(last + head * groups + g, mask=g < groups, other=0)
        tiles = tl.maximum(stop - start + SIZE - 1, 0) // SIZE
        at = before + tl.cumsum(tiles, 0) - tiles
        for t in range(tl.max(tiles, 0)):
            tl.store(group + head * count + at + t, g, mask=t < tiles)
            tl.store(slot + head * count + at + t, start + t * SIZE, mask=t < tiles)
        before += tl.sum(tiles, 0)


@triton.jit
def sum_lists(
    source,
    source_rows,
    index,
    slots,
    first,
    last,
    target,
    targets,
    offset,
    target_rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Row t of the target: the sum of the source rows index[first_t … last_t), added to it, or their MEAN.

    SPLIT: so many parts of a source row lie side by side. The target's rows begin at `offset`.
    """
    here, head = place_in_grid(tl.cdiv(targets, ROWS))
    head = head.to(tl.int64)
    t = here * ROWS + tl.arange(0, ROWS)
    used = t < targets
    begin = tl.load(first + head * targets + t, mask=used, other=0)
    end = tl.load(last + head * targets + t, mask=used, other=0)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for e in range(tl.max(end - begin, 0)):
        there = begin + e < end
        row = tl.load(index + head * slots + begin + e, mask=there, other=0)
        for part in tl.static_range(SPLIT):
            at = (head * source_rows + row) * (SPLIT * DIM) + part * DIM
            total += gather(source, at, there, DIM, BLOCK).to(tl.float32)
    at = (head * target_rows + offset + t) * DIM
    if MEAN:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
    else:
        total += gather(target, at, used, DIM, BLOCK)
    scatter(target, at, used, total, DIM, BLOCK)


@triton.jit
def spread_means(
    grad,
    target,
    listed,
    first,
    segments,
    start,
    stop,
    low,
    high,
    rows,
    slots,
    means,
    target_rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add to each row its share of the gradient of the means that it is in.

    Row t sits in the slots listed[first_t … first_t+1); a slot is in some of the segments[low … high) by their starts.
    """
    here, head = place_in_grid(tl.cdiv(rows, ROWS))
    head = head.to(tl.int64)
    t = here * ROWS + tl.arange(0, ROWS)
    used = t < rows
    begin = tl.load(first + head * (rows + 1) + t, mask=used, other=0)
    end = tl.load(first + head * (rows + 1) + t + 1, mask=used, other=0)
    at = (head * target_rows + t) * DIM
    total = gather(target, at, used, DIM, BLOCK)
    for e in range(tl.max(end - begin, 0)):
        there = begin + e < end
        slot = tl.load(listed + head * slots + begin + e, mask=there, other=0)
        lowest = tl.load(low + head * slots + slot, mask=there, other=0)
        highest = tl.load(high + head * slots + slot, mask=there, other=0)
        for s in range(tl.max(highest - lowest, 0)):
            among = lowest + s < highest
            segment = tl.load(segments + head * means + lowest + s, mask=among, other=0)
            begins = tl.load(start + head * means + segment, mask=among, other=0)
            ends = tl.load(stop + head * means + segment, mask=among, other=0)
            inside = among & (begins <= slot) & (slot < ends)
            share = gather(grad, (head * target_rows + rows + segment) * DIM, inside, DIM, BLOCK)
            total += share / tl.maximum(ends - begins, 1).to(tl.float32)[:, None]
    scatter(target, at, used, total, DIM, BLOCK)


@triton.jit
def clean_rows(
    x,
    target,
    wild,
    heads,
    rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A copy with zeros for inf and NaN, and NaN in `wild` for each row that had any, otherwise 0."""
    here, head = place_in_grid(tl.cdiv(rows, ROWS))
    head = head.to(tl.int64)
    t = here * ROWS + tl.arange(0, ROWS)
    used = t < rows
    values = gather(head_of(x, head // heads, head % heads), t.to(tl.int64) * x.row, used, DIM, BLOCK).to(tl.float32)
    fine = tl.abs(values) < float("inf")
    tl.store(wild + head * rows + t, tl.where(tl.min(fine.to(tl.int32), 1) == 1, 0.0, float("nan")), mask=used)
    scatter(target, (head * rows + t) * DIM, used, tl.where(fine, values, 0.0), DIM, BLOCK)


@triton.jit
def weigh_gradient(
    grad,
    grad_lse,
    out,
    shift,
    target,
    wild,
    rows,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """shift_i = dlse_i − dout_i·out_i; and the gradient of out without wild numbers, in the dtype of the products."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = t < rows
    at = t.to(tl.int64) * DIM
    upstream = gather(grad, at, used, DIM, BLOCK)
    answer = gather(out, at, used, DIM, BLOCK)
    tl.store(shift + t, tl.load(grad_lse + t, mask=used, other=0.0) - tl.sum(upstream * answer, 1), mask=used)
    fine = tl.abs(upstream) < float("inf")
    tl.store(wild + t, tl.where(tl.min(fine.to(tl.int32), 1) == 1, 0.0, float("nan")), mask=used)
    scatter(target, at, used, tl.where(fine, upstream, 0.0), DIM, BLOCK)
