"""The best keys of small groups of queries, in plain PyTorch: `Steps.near_keys` says what it gives."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.plan import Means
from coterie.planning.bytes import Bytes
from coterie.planning.orders import rounded, top_indices
from coterie.planning.picking import Shown, pick
from coterie.planning.steps import NearSearch, Seen

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_BUDGET = 1 << 22  # scores in memory at a time


def near_keys(
    tokens: Tokens, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    sizes, (chunks, width) = tokens.sizes, seen.clusters.shape[1:]
    share = sizes.heads // sizes.key_heads
    start, stop = (x.repeat_interleave(share, 1).long() for x in (clusters.start, clusters.stop))
    order = clusters.order.repeat_interleave(share, 1).long()
    groups = queries.shape[2] // max(1, chunks)
    means, outliers = (Bytes.of_keys(x) for x in _means_and_outliers(tokens.k, order, start, stop))
    keys = Bytes.of_keys(tokens.k)
    queries = queries.unflatten(2, (chunks, groups))
    exists = torch.arange(groups, device=tokens.device) < seen.groups[:, None, :, None]
    some = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * sizes.keys * groups))
    picks, left = [], []
    for part in torch.arange(chunks, device=tokens.device).split(some):
        count, mine = part.numel(), Bytes.of_queries(queries[:, :, part])
        used = torch.arange(width, device=tokens.device) < seen.shown[:, part, None]
        which = torch.where(used, seen.clusters[:, part].long(), 0)[:, None].expand(-1, sizes.heads, -1, -1)
        first, last = (x[:, :, None].expand(-1, -1, count, -1).gather(-1, which) for x in (start, stop))
        members = torch.where(used[:, None], last - first, 0)
        slot = _slot_of_key(order, first, members, sizes.keys)
        shown = Shown(which, used[:, None], members, exists[:, :, part], seen.together[:, part], seen.room)
        found = pick(mine, means, outliers, shown, search, partial(_best_keys, mine, keys, slot, search.near))
        picks.append(found[0])
        left.append(found[1])
    return torch.cat(picks, 2).flatten(2), torch.cat(left, 2)


def _best_keys(mine: Bytes, keys: Bytes, slot: Tensor, near: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """As `coterie.planning.picking.Best` has it. slot (B, H, C, Nk): the place of a key's cluster, −1 for none."""
    slot = slot[..., None, :].expand(*chosen.shape[:-1], -1)
    place = slot.clamp(min=0)
    scores = mine.products(Bytes(keys.whole[:, :, None], keys.scale[:, :, None]))
    top = top_indices(scores, chosen.gather(-1, place) & (slot >= 0), near)
    return top, place.gather(-1, top)


def _means_and_outliers(x: Tensor, order: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each segment of rows and the row that is farthest from it, (B, H, S, D) each; 0 if it is empty."""
    shape = (*x.shape[:2], start.shape[-1])
    batch, heads, _, slot, segment = _expand(start[:, :, None], (stop - start)[:, :, None])
    row = order[batch, heads, slot]
    members = x[batch, heads, row]
    sums = x.new_zeros(*shape, x.shape[-1]).index_put_((batch, heads, segment), members, accumulate=True)
    means = sums / (stop - start).clamp(min=1)[..., None]
    distance = rounded((members - means[batch, heads, segment]).square().sum(-1))
    flat = (batch * shape[1] + heads) * shape[2] + segment
    farthest = distance.new_zeros(means[..., 0].numel()).scatter_reduce(0, flat, distance, "amax")
    first = torch.where(distance == farthest[flat], slot, order.shape[-1])
    chosen = torch.full_like(farthest, order.shape[-1], dtype=torch.int64).scatter_reduce(0, flat, first, "amin")
    chosen = chosen.view(shape).clamp(max=max(0, order.shape[-1] - 1))
    outliers = x.gather(2, order.gather(-1, chosen)[..., None].expand_as(means)) if x.shape[2] else means
    return means, torch.where((stop > start)[..., None], outliers, 0)


def _slot_of_key(order: Tensor, first: Tensor, members: Tensor, keys: int) -> Tensor:
    """For each group, the visible cluster that a key belongs to, (B, H, G, Nk); −1 for those it does not see."""
    batch, heads, group, row, slot = _expand(first, members)
    found = torch.full((*first.shape[:3], keys), -1, dtype=torch.int64, device=order.device)
    found[batch, heads, group, order[batch, heads, row]] = slot
    return found


def _expand(first: Tensor, members: Tensor) -> tuple[Tensor, ...]:
    """Indices (b, h, g, row, v) of every member: rows first … first + members of each entry of (B, H, G, V)."""
    flat = members.reshape(-1)
    entry = torch.arange(flat.numel(), device=flat.device).repeat_interleave(flat)
    within = torch.arange(entry.numel(), device=flat.device) - (flat.cumsum(0) - flat).repeat_interleave(flat)
    b, h, g, v = torch.unravel_index(entry, members.shape)
    return b, h, g, first.reshape(-1)[entry] + within, v
