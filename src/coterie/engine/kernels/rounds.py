"""Rounds as the kernels read them, made on the device: nothing here waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from coterie.engine.flat import Inputs
from coterie.engine.kernels.arguments import Call, Met, Round, Tiles
from coterie.engine.kernels.rows import list_tiles
from coterie.launching import launch

_FAR = 2**33  # beyond every distance between two positions
_SMALL = 32  # groups of at most so many queries are pooled over heads


@dataclass(frozen=True)
class Given:
    """A round of a plan, unpacked from `Inputs`."""

    query_order: Tensor
    query_offsets: Tensor
    key_order: Tensor
    key_start: Tensor
    key_stop: Tensor
    bias: Tensor | None
    skip: Tensor | None
    counts: Tensor | None
    window: tuple[int, int] | None

    @property
    def slots(self) -> int:
        """Query slots of a group, on average: what shapes say about the size of groups."""
        return -(-self.query_order.shape[-1] // max(1, self.key_start.shape[-1]))

    def shared_by_heads(self) -> bool:
        """Whether all heads have the same round: an index that was expanded has no stride."""
        tensors = (self.query_order, self.query_offsets, self.key_order, self.key_start, self.key_stop)
        return all(x.stride(1) == 0 for x in tensors) and self.bias is None and self.skip is None


def given_rounds(given: Inputs) -> list[Given]:
    """The rounds of a call that can have anything in them."""
    biases, skips, counts = iter(given.biases), iter(given.skips), iter(given.counts)
    found = []
    for r in range(len(given.rounds) // 5):
        biased, skipping, counted, windowed, low, high = given.layout[6 * r : 6 * r + 6]
        query_order, query_offsets, key_order, key_start, key_stop = given.rounds[5 * r : 5 * r + 5]
        found.append(
            Given(
                query_order=query_order,
                query_offsets=query_offsets,
                key_order=key_order,
                key_start=key_start,
                key_stop=key_stop,
                bias=next(biases) if biased else None,
                skip=next(skips) if skipping else None,
                counts=next(counts) if counted else None,
                window=(max(-_FAR, low), min(_FAR, high)) if windowed else None,
            )
        )
    return found


def is_empty(each: Given) -> bool:
    """Whether nobody can meet in it, whatever its values."""
    return 0 in (each.query_order.numel(), each.key_order.numel(), each.key_start.numel())


def as_round(each: Given) -> Round:
    """With contiguous indices; counted groups that share their keys are taken together, so that they fill tiles."""
    first, last = (x.contiguous() for x in (each.query_offsets[..., :-1], each.query_offsets[..., 1:]))
    group_of = None
    if each.counts is not None:
        slots = torch.arange(each.query_order.shape[-1], device=first.device, dtype=torch.int32)
        slots = slots.expand(each.query_order.shape).contiguous()
        group_of = torch.searchsorted(last, slots, right=True).clamp_(max=first.shape[-1] - 1).to(torch.int32)
        first, last = _merged(first, last, each.key_start, each.key_stop)
    low, high = each.window if each.window is not None else (None, 0)
    return Round(
        query_order=each.query_order.contiguous(),
        first=first,
        last=last,
        key_order=each.key_order.contiguous(),
        key_start=each.key_start.contiguous(),
        key_stop=each.key_stop.contiguous(),
        query_slots=each.query_order.shape[-1],
        key_slots=each.key_order.shape[-1],
        groups=each.key_start.shape[-1],
        bias=None if each.bias is None else each.bias.contiguous(),
        skip=None if each.skip is None else each.skip.contiguous(),
        skips=0 if each.skip is None else each.skip.shape[-1],
        counts=None if each.counts is None else each.counts.contiguous(),
        width=0 if each.counts is None else each.counts.shape[-1],
        group_of=group_of,
        low=low,
        high=high,
    )


def _merged(first: Tensor, last: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """Query slots of the first of several groups in a row that have the same keys; the others have none left."""
    leads = torch.ones_like(start, dtype=torch.bool)
    leads[..., 1:] = (start[..., 1:] != start[..., :-1]) | (stop[..., 1:] != stop[..., :-1])
    groups = start.shape[-1]
    index = torch.arange(groups, device=start.device)
    here = torch.where(leads, index, groups)
    next_lead = here.flip(-1).cummin(-1).values.flip(-1)  # at or behind each group
    behind = torch.nn.functional.pad(next_lead[..., 1:], (0, 1), value=groups) - 1  # the last group of each run
    return first, torch.where(leads, last.gather(-1, behind), first)


def pooled_heads(each: Given, call: Call, *, once: bool) -> int:
    """How many query heads share a tile: those of a key head, if they have one plan and their groups are small."""
    share = call.heads // call.key_heads
    fits = share > 1 and share & (share - 1) == 0 and share <= 16 and each.slots <= _SMALL
    return share if fits and not once and each.counts is None and each.shared_by_heads() else 1


def query_tiles(each: Round, size: int, pool: int) -> Tiles:
    """The query slots of each group in tiles of `size`; with a pool, of the first of its heads."""
    first, last = (x.flatten(0, 1)[::pool].contiguous() for x in (each.first, each.last))
    return _tiles(first, last, size, -(-each.query_slots // size) + each.groups)


def _tiles(first: Tensor, last: Tensor, size: int, count: int) -> Tiles:
    heads, groups = first.shape
    group = torch.full((heads, count), -1, dtype=torch.int32, device=first.device)
    slot = torch.zeros_like(group)
    block = min(1024, max(16, triton.next_power_of_2(groups)))
    launch(list_tiles, (heads,), first, last, group, slot, groups, count, SIZE=size, BLOCK=block, num_warps=4)
    return Tiles(group, slot, count)


class KeyTiles(NamedTuple):
    """Key slots cut wherever a group's range begins or ends, so that a group meets all of a tile or nothing of it."""

    tiles: Tiles
    last: Tensor  # (B·H, 2G − 1): where each piece ends
    by_start: Tensor  # (B·H, G): groups by the start of their range
    low: Tensor  # (B·H, count): the groups that meet a tile are among by_start[low … high)
    high: Tensor
    covered: Tensor  # (B·H, slots): whether any group meets a slot


class Intervals(NamedTuple):
    """Ranges [start, stop) of slots, sorted by their start, and how far those up to each one reach."""

    by_start: Tensor  # (heads, G) int32
    starts: Tensor  # (heads, G)
    reached: Tensor  # (heads, G)

    @staticmethod
    def of(start: Tensor, stop: Tensor, slots: int, empty: Tensor) -> Intervals:
        """Empty ranges come last, and begin behind all slots."""
        starts, by_start = torch.where(empty, slots + 1, start).sort(dim=-1, stable=True)
        reached = torch.where(empty, 0, stop).gather(-1, by_start).cummax(-1).values
        return Intervals(by_start.to(torch.int32), starts, reached)

    def around(self, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Between which places, by start, the ranges are that hold each slot (heads, N)."""
        slot = slot.contiguous()
        low, high = (torch.searchsorted(x, slot, right=True, out_int32=True) for x in (self.reached, self.starts))
        return low, high


def key_tiles(each: Round, size: int, first_slot: int, slots: int) -> KeyTiles:
    """The tiles of `slots` key slots, from `first_slot` on."""
    start, stop, first, last = (x.flatten(0, 1) for x in (each.key_start, each.key_stop, each.first, each.last))
    intervals = Intervals.of(start, stop, each.key_slots, (last <= first) | (stop <= start))
    edges = torch.cat([start, stop], -1).clamp(first_slot, first_slot + slots).sort(-1).values
    ends = edges[:, 1:].contiguous()
    tiles = _tiles(edges[:, :-1].contiguous(), ends, size, -(-slots // size) + 2 * each.groups)
    low, high = intervals.around(tiles.slot)
    here = torch.arange(first_slot, first_slot + slots, device=start.device, dtype=torch.int32)
    before, upto = intervals.around(here.expand(start.shape[0], -1))
    return KeyTiles(tiles, ends, intervals.by_start, low, high, before < upto)


def lists_by_row(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slots by the row (heads, slots) that sits in them, stable; and where each row's begin, (heads, count + 1)."""
    ordered, slots = rows.sort(dim=-1, stable=True)
    edges = torch.arange(count + 1, device=rows.device, dtype=rows.dtype).expand(rows.shape[0], -1).contiguous()
    return slots.to(torch.int32), torch.searchsorted(ordered, edges, out_int32=True)


def as_met(each: Given, call: Call) -> Met:
    """A round for looking up how often a pair meets in it."""
    lead, slots = each.query_order.shape[:2], each.query_order.shape[-1]
    index = torch.arange(slots, device=each.query_order.device, dtype=torch.int32).expand(*lead, -1).contiguous()
    used = index < each.query_offsets[..., -1:]
    group = torch.searchsorted(each.query_offsets[..., 1:].contiguous(), index, right=True, out_int32=True)
    at = torch.where(used, each.query_order, call.query_rows).long()  # unused slots write behind the end
    slot_of = index.new_full((*lead, call.query_rows + 1), -1).scatter_(-1, at, index)[..., :-1]
    group_of = torch.zeros_like(index).new_zeros((*lead, call.query_rows + 1)).scatter_(-1, at, group)[..., :-1]
    start, stop = each.key_start.flatten(0, 1), each.key_stop.flatten(0, 1)
    intervals = Intervals.of(start, stop, each.key_order.shape[-1], stop <= start)
    here = torch.arange(each.key_order.shape[-1], device=index.device, dtype=torch.int32).expand(start.shape[0], -1)
    before, upto = intervals.around(here)
    hidden = before >= upto
    if each.bias is not None:
        hidden = hidden | (each.bias.flatten(0, 1) == float("-inf"))
    listed, first = lists_by_row(torch.where(hidden, call.key_rows, each.key_order.flatten(0, 1)), call.key_rows)
    low, high = each.window if each.window is not None else (None, 0)
    return Met(
        slot_of=slot_of.contiguous(),
        group_of=group_of.contiguous(),
        key_start=each.key_start.contiguous(),
        key_stop=each.key_stop.contiguous(),
        groups=each.key_start.shape[-1],
        listed=listed,
        first=first,
        key_slots=each.key_order.shape[-1],
        query_slots=slots,
        skip=None if each.skip is None else each.skip.contiguous(),
        skips=0 if each.skip is None else each.skip.shape[-1],
        counts=None if each.counts is None else each.counts.contiguous(),
        width=0 if each.counts is None else each.counts.shape[-1],
        low=low,
        high=high,
    )
