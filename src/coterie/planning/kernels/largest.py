"""The largest scores of each row, without sorting: their threshold is found four bits at a time."""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def ranks(scores, score_row, seen, seen_row, places, place_row, chosen, chosen_row, scale, scale_row, keys, used, here):
    """Scores as numbers that grow with them, (rows, keys) uint32, and which of them may be picked.

    A score counts where `seen` says so, or where the place of its key is `chosen`; it may have a scale for each key.
    """
    there = used[:, None] & here[None, :]
    found = tl.load(scores + score_row[:, None] + keys[None, :], mask=there, other=0.0).to(tl.float32)
    if scale is not None:
        found = found * tl.load(scale + scale_row[:, None] + keys[None, :], mask=there, other=0.0)
    found = tl.where(found == found, found, _LARGEST)
    found = tl.minimum(tl.maximum(found, -_LARGEST), _LARGEST)
    if seen is not None:
        there = there & (tl.load(seen + seen_row[:, None] + keys[None, :], mask=there, other=0) != 0)
    if places is not None:
        place = tl.load(places + place_row[:, None] + keys[None, :], mask=there, other=-1)
        there = there & (place >= 0)
        there = there & (tl.load(chosen + chosen_row[:, None] + place, mask=there, other=0) != 0)
    bits = tl.where(found == 0.0, 0.0, found).to(tl.int32, bitcast=True)  # −0 and 0 are one number
    return tl.where(bits < 0, ~bits, bits ^ -(2**31)).to(tl.uint32, bitcast=True), there


@triton.jit
def largest(
    scores,
    seen,
    seen_strides,
    places,
    chosen,
    width,
    scale,
    heads,
    parts,
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

    scores (B, H, parts, members, keys), a row of them for each member of a part. `seen` (B, parts, members, keys) has
    strides; places (B, H, parts, keys), chosen (B, H, parts, members, width) and scale (B, H, keys) have none.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    used = row < rows
    part, member = row // members, row % members
    head = part // parts
    seen_row = row
    if seen is not None:
        sample = head // heads * seen_strides[0] + part % parts * seen_strides[1]
        seen_row = sample + member * seen_strides[2]
    place_row, chosen_row, scale_row = part * keys, row * width, head * keys
    column, digits = tl.arange(0, KEYS), tl.arange(0, 16).to(tl.uint32)
    lowest = tl.zeros([ROWS], dtype=tl.uint32)
    wanted = tl.zeros([ROWS], dtype=tl.int32)
    for bits in range(
        28, -1, -4
    ):  # the largest prefix that at least `count` scores reach, four bits longer in each step
        shift = tl.cast(bits, tl.uint32)
        reached = tl.zeros([ROWS, 16], dtype=tl.int32)
        edges = lowest[:, None] | (digits[None, :] << shift)
        for begin in range(0, keys, KEYS):
            at = begin + column
            rank, there = ranks(
                scores, row * keys, seen, seen_row, places, place_row, chosen, chosen_row, scale, scale_row,
                at, used, at < keys,
            )  # fmt: skip
            above = (rank[:, :, None] >= edges[:, None, :]) & there[:, :, None]
            reached += tl.sum(above.to(tl.int32), 1)
        wanted = tl.minimum(tl.max(reached, 1), count) if bits == 28 else wanted  # all that may be picked reach 0
        digit = tl.sum((reached >= wanted[:, None]).to(tl.int32), 1) - 1
        lowest = lowest | (digit.to(tl.uint32) << shift)
    above = tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, keys, KEYS):
        at = begin + column
        rank, there = ranks(
            scores, row * keys, seen, seen_row, places, place_row, chosen, chosen_row, scale, scale_row,
            at, used, at < keys,
        )  # fmt: skip
        above += tl.sum(((rank > lowest[:, None]) & there).to(tl.int32), 1)
    tied, done = wanted - above, tl.zeros([ROWS], dtype=tl.int32)
    for begin in range(0, keys, KEYS):
        at = begin + column
        rank, there = ranks(
            scores, row * keys, seen, seen_row, places, place_row, chosen, chosen_row, scale, scale_row,
            at, used, at < keys,
        )  # fmt: skip
        ties = ((rank == lowest[:, None]) & there).to(tl.int32)
        taken = (ties != 0) & (tl.cumsum(ties, 1) <= tied[:, None])
        taken = taken | ((rank > lowest[:, None]) & there)
        place = done[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
        tl.store(picks + (row * count)[:, None] + place, at[None, :] + tl.zeros_like(place), mask=taken)
        tied -= tl.sum(ties, 1)
        done += tl.sum(taken.to(tl.int32), 1)
    tl.store(counts + row, done, mask=used)
