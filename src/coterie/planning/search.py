"""Near–far's search on the device: `Steps.near_keys` says what it gives.

Products are those of `coterie.planning.bytes`: whole numbers below 2²⁴, which float32 adds up exactly. So the keys that
are found are those that the other backends find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.plan import Means
from coterie.planning.bytes import Bytes
from coterie.planning.largest import largest_chosen
from coterie.planning.lloyd import Listed
from coterie.planning.orders import rounded
from coterie.planning.picking import Shown, pick
from coterie.planning.steps import NearSearch, Seen

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_BUDGET = 1 << 24  # scores in memory at a time, however many groups there are


class _Clusters(NamedTuple):
    """Clusters of keys, for each query head: which slots of their order belong to which."""

    order: Tensor  # (B, H, M) int64
    of_slot: Tensor  # (B, H, M) int64: the cluster of a slot, S for none
    start: Tensor  # (B, H, S) int64
    stop: Tensor

    @staticmethod
    def of(clusters: Means, share: int) -> _Clusters:
        """One cluster lies behind the other."""
        order, start, stop = (x.repeat_interleave(share, 1) for x in (clusters.order, clusters.start, clusters.stop))
        slots = torch.arange(order.shape[-1], device=order.device, dtype=stop.dtype).expand(order.shape).contiguous()
        found = torch.searchsorted(stop.contiguous(), slots, right=True)
        last = found.clamp(max=max(0, stop.shape[-1] - 1))
        inside = (found < stop.shape[-1]) & (start.gather(-1, last) <= slots)
        return _Clusters(order.long(), torch.where(inside, found, stop.shape[-1]), start.long(), stop.long())

    @property
    def sizes(self) -> Tensor:
        """(B, H, S)."""
        return self.stop - self.start

    def means_and_outliers(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each cluster and the key farthest from it, (B, H, S, D) float64 each; 0 if it is empty."""
        count = self.start.shape[-1]
        listed = Listed(k, self.order.to(torch.int32), self.start[:, 0], self.stop[:, 0])
        sums, _ = listed.sums(torch.where(self.of_slot < count, self.of_slot, -1), count)
        means = sums / self.sizes.clamp(min=1)[..., None]
        padded = torch.nn.functional.pad(means, (0, 0, 0, 1))
        wide = (*self.order.shape, k.shape[-1])
        members = k.gather(2, self.order[..., None].expand(wide)).double()
        apart = rounded((members - padded.gather(2, self.of_slot[..., None].expand(wide))).square().sum(-1))
        farthest = apart.new_zeros(*self.start.shape[:2], count + 1).scatter_reduce(-1, self.of_slot, apart, "amax")
        slots = torch.arange(self.order.shape[-1], device=k.device)
        first = torch.where(apart == farthest.gather(-1, self.of_slot), slots, self.order.shape[-1])
        chosen = torch.full_like(farthest, self.order.shape[-1], dtype=torch.int64)
        chosen = chosen.scatter_reduce(-1, self.of_slot, first, "amin")[..., :-1].clamp(max=self.order.shape[-1] - 1)
        outliers = k.gather(2, self.order.gather(-1, chosen)[..., None].expand_as(means)).double()
        return means, torch.where((self.sizes > 0)[..., None], outliers, 0)

    def place_of_key(self, which: Tensor, used: Tensor, keys: int) -> Tensor:
        """The place of a key's cluster in the list `which` (B, H, C, V) of each chunk: (B, H, C, Nk), −1 for none."""
        shape, count = which.shape, self.start.shape[-1]
        place = torch.arange(shape[-1], device=which.device).expand(shape)
        of_cluster = torch.full((*shape[:3], count + 1), -1, dtype=torch.int64, device=which.device)
        of_cluster = of_cluster.scatter(-1, torch.where(used, which, count), place)
        of_cluster[..., count] = -1  # where places that are not used, and slots of no cluster, went
        wide = (*shape[:3], self.order.shape[-1])
        of_slot = of_cluster.gather(-1, self.of_slot[:, :, None].expand(wide))
        found = torch.full((*shape[:3], keys), -1, dtype=torch.int64, device=which.device)
        return found.scatter_reduce(-1, self.order[:, :, None].expand(wide), of_slot, "amax")


def near_keys(
    tokens: Tokens, k: Tensor, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    """As `Steps.near_keys`; k (B, H, Nk, D) are the keys as they are planned with, float32."""
    sizes, (chunks, width) = tokens.sizes, seen.clusters.shape[1:]
    there = _Clusters.of(clusters, sizes.heads // sizes.key_heads)
    groups = queries.shape[2] // max(1, chunks)
    means, outliers = (_single(Bytes.of_keys(x)) for x in there.means_and_outliers(k))
    keys = _single(Bytes.of_keys(k))
    queries = queries.unflatten(2, (chunks, groups))
    exists = torch.arange(groups, device=k.device) < seen.groups[:, None, :, None]
    some = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * sizes.keys * groups))
    picks, left = [], []
    for part in torch.arange(chunks, device=k.device).split(some):
        mine = _single(Bytes.of_queries(queries[:, :, part]))
        used = (torch.arange(width, device=k.device) < seen.shown[:, part, None])[:, None]
        which = torch.where(used[:, 0], seen.clusters[:, part].long(), 0)[:, None].expand(-1, sizes.heads, -1, -1)
        lead = there.sizes[:, :, None].expand(-1, -1, part.numel(), -1)
        members = torch.where(used, lead.gather(-1, which), 0)
        place = there.place_of_key(which, used.expand_as(which), sizes.keys)
        shown = Shown(which, used, members, place, exists[:, :, part], seen.together[:, part], seen.room)
        found = pick(mine, means, outliers, keys, shown, search, _best_keys)
        picks.append(found[0])
        left.append(found[1])
    return torch.cat(picks, 2).flatten(2), torch.cat(left, 2)


def _best_keys(mine: Bytes, keys: Bytes, shown: Shown, chosen: Tensor, near: int) -> Tensor:
    """As `coterie.planning.picking.best_keys`, by position; for some groups of each chunk at a time."""
    batch, heads, chunks, groups = chosen.shape[:4]
    some = max(1, _BUDGET // max(1, batch * heads * chunks * shown.slot.shape[-1]))
    found = []
    for first in range(0, groups, some):
        part = slice(first, first + some)
        scores = mine.whole[:, :, :, part] @ keys.whole[:, :, None].mT
        found.append(largest_chosen(scores, keys.scale, shown.slot, chosen[:, :, :, part], near))
    return torch.cat(found, 3) if found else chosen.new_zeros(*chosen.shape[:4], near, dtype=torch.int64)


def _single(x: Bytes) -> Bytes:
    return Bytes(x.whole.to(torch.float32), x.scale)
