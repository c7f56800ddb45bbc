"""A plan cut into tiles: batches of small, equally padded blocks of queries × keys.

This is the one place that decides, in plain PyTorch, whether a planned pair really meets: range, `skip`, a bias of
−inf, a count of 0, window and causality. The reference engine computes on these tiles, and a plan counts its pairs
with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.plan.plan import Means, Plan, Round

QUERY_BLOCK = 128
KEY_BLOCK = 512
BUDGET = 1 << 20  # scores, and gathered numbers per side, in one tile batch


@dataclass(frozen=True)
class Tile:
    """T blocks of Q query rows × K key rows, no query row twice."""

    heads: Tensor  # (T,) b * H + h
    rows: Tensor  # (T, Q); an unused slot holds row 0
    keys: Tensor  # (T, K); an unused slot holds key 0
    row_used: Tensor  # (T, Q)
    key_used: Tensor  # (T, K)
    meets: Tensor  # (T, Q, K)
    bias: Tensor | None = None  # (T, 1, K)


class PlanTiles:
    """The tiles of a plan, and where its rows sit."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._placed = plan.causal or any(each.window is not None for each in plan.rounds)
        if self._placed:
            no_offset = torch.zeros_like(plan.offset)
            self._query_positions = _positions(plan.num_queries, plan.heads, plan.offset, plan.query_means)
            self._key_positions = _positions(plan.num_keys, plan.key_heads, no_offset, plan.key_means)

    def __call__(self, width: int = 1) -> Iterator[Tile]:
        """Every tile of every round. `width`: numbers gathered for each row, to bound the memory of a batch."""
        for each in self.plan.rounds:
            yield from self._round(each, width)

    def of_selves(self, lonely: Tensor) -> Iterator[Tile]:
        """One-pair tiles: each query where `lonely` (B, H, Nq) holds, with its self key if it has one."""
        plan = self.plan
        if plan.self_keys is None:
            return
        keys = plan.self_keys[:, None, :].expand(-1, plan.heads, -1).flatten(0, 1).long()
        heads, rows = (lonely.reshape(keys.shape) & (keys >= 0)).nonzero(as_tuple=True)
        for part in torch.arange(heads.numel(), device=plan.device).split(BUDGET // 64):
            h, i = heads[part], rows[part, None]
            real = torch.ones_like(i, dtype=torch.bool)
            yield Tile(h, i, keys[h, rows[part], None], real, real, real[..., None])

    def _round(self, each: Round, width: int) -> Iterator[Tile]:
        plan, device = self.plan, self.plan.device
        lead = plan.batch * plan.heads
        if lead == 0 or each.groups == 0:
            return
        query_stop = each.query_offsets[..., 1:].reshape(-1).long()
        query_start = each.query_offsets[..., :-1].reshape(-1).long()
        key_start, key_stop = each.key_start.reshape(-1).long(), each.key_stop.reshape(-1).long()
        query_sizes, key_sizes = query_stop - query_start, key_stop - key_start
        groups = ((query_sizes > 0) & (key_sizes > 0)).nonzero().squeeze(-1)
        if groups.numel() == 0:
            return
        query_block = min(QUERY_BLOCK, int(query_sizes[groups].max()))
        key_block = min(KEY_BLOCK, int(key_sizes[groups].max()))
        blocks = (query_sizes[groups] + query_block - 1) // query_block
        group = groups.repeat_interleave(blocks)
        first = torch.arange(group.numel(), device=device) - (blocks.cumsum(0) - blocks).repeat_interleave(blocks)
        start = query_start[group] + first * query_block
        size = max(1, min(BUDGET // (query_block * key_block), 4 * BUDGET // (width * (query_block + key_block))))
        query_order = each.query_order.flatten(0, 1)
        key_order = each.key_order.flatten(0, 1)
        bias = None if each.bias is None else each.bias.flatten(0, 1)
        skip = None if each.skip is None else each.skip.flatten(0, 1)
        counts = None if each.counts is None else each.counts.flatten(0, 2)
        query_steps = torch.arange(query_block, device=device)
        key_steps = torch.arange(key_block, device=device)
        for shift in range(0, int(key_sizes[groups].max()), key_block):
            pending = (key_sizes[group] > shift).nonzero().squeeze(-1)
            for part in pending.split(size):
                g = group[part]
                head = g // each.groups
                row_slots = start[part, None] + query_steps
                row_used = row_slots < query_stop[g, None]
                row_slots = torch.where(row_used, row_slots, query_start[g, None])
                rows = torch.where(row_used, query_order[head[:, None], row_slots].long(), 0)
                key_slots = key_start[g, None] + shift + key_steps
                key_used = key_slots < key_stop[g, None]
                key_slots = torch.where(key_used, key_slots, key_start[g, None])
                keys = torch.where(key_used, key_order[head[:, None], key_slots].long(), 0)
                meets = row_used[:, :, None] & key_used[:, None, :]
                meets &= self.predicate(each.window, head[:, None, None], rows[:, :, None], keys[:, None, :])
                if skip is not None:
                    meets &= ~_listed(skip[head[:, None], row_slots], keys)
                slot_bias = None if bias is None else bias[head[:, None], key_slots][:, None, :]
                if counts is not None:
                    logs = counts[g[:, None], key_slots - key_start[g, None]].double().log()[:, None, :]
                    slot_bias = logs if slot_bias is None else slot_bias + logs
                if slot_bias is not None:
                    meets &= slot_bias != float("-inf")
                yield Tile(head, rows, keys, row_used, key_used, meets, slot_bias)

    def predicate(self, window: tuple[int, int] | None, heads: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        """Causality and window for broadcastable (head, query row, key row)."""
        if not (self.plan.causal or window is not None):
            return torch.ones((), dtype=torch.bool, device=self.plan.device)
        key_heads = heads // (self.plan.heads // self.plan.key_heads)
        ahead = self._query_positions[heads, rows] - self._key_positions[key_heads, keys]
        allowed = ahead >= 0 if self.plan.causal else torch.ones_like(ahead, dtype=torch.bool)
        if window is not None:
            allowed = allowed & (ahead >= window[0]) & (ahead <= window[1])
        return allowed


def _positions(length: int, heads: int, offset: Tensor, means: Means | None) -> Tensor:
    """Where each row of each head sits, (B * heads, rows)."""
    real = torch.arange(length, device=offset.device) + offset[:, None]
    table = real[:, None, :].expand(-1, heads, -1)
    if means is not None and means.positions is not None:
        table = torch.cat([table, means.positions.to(table.dtype)], -1)
    return table.flatten(0, 1)


def _listed(lists: Tensor, keys: Tensor) -> Tensor:
    """Whether each key (T, K) is in each row's ascending list (T, Q, E): (T, Q, K)."""
    wanted = keys[:, None, :].expand(-1, lists.shape[1], -1).to(lists.dtype).contiguous()
    lists = lists.contiguous()
    if lists.shape[-1] == 0:
        return torch.zeros_like(wanted, dtype=torch.bool)
    slot = torch.searchsorted(lists, wanted).clamp_(max=lists.shape[-1] - 1)
    return lists.gather(-1, slot) == wanted


class Multiplicity:
    """How often a pair meets over all rounds, for `duplicates="once"`; a bias of −inf and a count of 0 hide a slot.

    Each round's (group, key) entries are sorted once, so that a pair is counted by two binary searches.
    """

    def __init__(self, tiles: PlanTiles) -> None:
        self._tiles = tiles
        self._rounds = [(each, *self._index(each)) for each in tiles.plan.rounds]

    def _index(self, each: Round) -> tuple[Tensor, Tensor]:
        plan = self._tiles.plan
        device = plan.device
        sizes = each.key_sizes.reshape(-1).long()
        group = torch.arange(sizes.numel(), device=device).repeat_interleave(sizes)
        within = torch.arange(group.numel(), device=device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        slot = each.key_start.reshape(-1).long()[group] + within
        keys = each.key_order.flatten(0, 1)[group // max(1, each.groups), slot].long()
        codes = group * plan.key_rows + keys
        if each.bias is not None:
            hidden = each.bias.flatten(0, 1)[group // max(1, each.groups), slot] == float("-inf")
            codes = torch.where(hidden, -1, codes)
        if each.counts is not None:
            codes = torch.where(each.counts.flatten(0, 2)[group, within] == 0, -1, codes)
        entries = codes.sort().values

        slots = torch.arange(each.query_order.shape[-1], device=device)
        slots = slots.expand(plan.batch, plan.heads, -1).contiguous()
        used = slots < each.query_offsets[..., -1:]
        at_row = torch.where(used, each.query_order, plan.query_rows).long()
        row_slots = torch.full((plan.batch, plan.heads, plan.query_rows + 1), -1, device=device)
        row_slots.scatter_(-1, at_row, slots)
        return entries, row_slots[..., :-1].flatten(0, 1)

    def __call__(self, tile: Tile) -> Tensor:
        """(T, Q, K) int64: over all rounds, for the pairs of a tile."""
        total = torch.zeros_like(tile.meets, dtype=torch.int64)
        heads, rows, keys = tile.heads[:, None, None], tile.rows[:, :, None], tile.keys[:, None, :]
        for each, entries, row_slots in self._rounds:
            if each.query_order.shape[-1] == 0:
                continue
            slot = row_slots[tile.heads[:, None], tile.rows]
            offsets = each.query_offsets.flatten(0, 1)[tile.heads].contiguous()
            group = torch.searchsorted(offsets, slot.to(offsets.dtype).contiguous(), right=True) - 1
            member = (slot >= 0) & (group < each.groups)
            code = (tile.heads[:, None] * each.groups + group)[:, :, None] * self._tiles.plan.key_rows + keys
            count = torch.searchsorted(entries, code, right=True) - torch.searchsorted(entries, code)
            met = member[:, :, None] & self._tiles.predicate(each.window, heads, rows, keys)
            if each.skip is not None:
                lists = each.skip.flatten(0, 1)
                met = met & ~_listed(lists[tile.heads[:, None], slot.clamp(min=0)], tile.keys)
            total += torch.where(met, count, 0)
        return total


def count_pairs(plan: Plan) -> Tensor:
    """How often each pair of rows meets, virtual rows apart: (B, H, query rows, key rows) int32."""
    counts = torch.zeros(plan.batch * plan.heads, plan.query_rows, plan.key_rows, dtype=torch.int32, device=plan.device)
    tiles = PlanTiles(plan)

    def add(tile: Tile) -> None:
        where = (tile.heads[:, None, None], tile.rows[:, :, None], tile.keys[:, None, :])
        counts.index_put_(where, tile.meets.int(), accumulate=True)

    for tile in tiles():
        add(tile)
    shaped = counts.view(plan.batch, plan.heads, plan.query_rows, plan.key_rows)
    for tile in tiles.of_selves((shaped == 0).all(-1)[..., : plan.num_queries]):
        add(tile)
    return shaped


def fold_means(plan: Plan, counts: Tensor) -> Tensor:
    """Counts between real rows: a mean stands for its members."""
    if plan.key_means is not None:
        groups = plan.heads // plan.key_heads
        members = _membership(plan.key_means, plan.num_keys).repeat_interleave(groups, 1)
        through = counts[..., plan.num_keys :].double() @ members.double()
        counts = counts[..., : plan.num_keys] + through.to(counts.dtype)
    real = counts[:, :, : plan.num_queries]
    if plan.answer is None:
        return real
    answers = plan.answer.clamp(min=0).long()[..., None].expand(-1, -1, -1, counts.shape[-1])
    return real + torch.where(plan.answer[..., None] >= 0, counts.gather(2, answers), 0)


def _membership(means: Means, rows: int) -> Tensor:
    """How often each row is in each segment, (B, heads, S, rows)."""
    slots = torch.arange(means.order.shape[-1], device=means.order.device)
    inside = (slots >= means.start[..., None]) & (slots < means.stop[..., None])
    members = torch.zeros(*means.start.shape, rows, dtype=torch.int32, device=slots.device)
    order = means.order.clamp(0, max(0, rows - 1)).long()[:, :, None, :].expand_as(inside)
    return members.scatter_add_(-1, order, inside.int())


def pairs_met(plan: Plan) -> Tensor:
    """Scores for each head, (B, H) int64."""
    totals = torch.zeros(plan.batch * plan.heads, dtype=torch.int64, device=plan.device)
    lonely = torch.ones(plan.batch * plan.heads, plan.query_rows, dtype=torch.bool, device=plan.device)
    tiles = PlanTiles(plan)
    for tile in tiles():
        totals.index_add_(0, tile.heads, tile.meets.sum((-2, -1)))
        met = tile.meets.any(-1)
        heads = tile.heads[:, None].expand_as(tile.rows)
        lonely[heads[met], tile.rows[met]] = False
    lonely = lonely[:, : plan.num_queries].view(plan.batch, plan.heads, plan.num_queries)
    for tile in tiles.of_selves(lonely):
        totals.index_add_(0, tile.heads, tile.meets.sum((-2, -1)))
    return totals.view(plan.batch, plan.heads)
