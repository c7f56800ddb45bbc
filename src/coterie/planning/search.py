"""Near–far's search on the device: `Steps.near_keys` says what it gives.

Products are those of `coterie.planning.bytes`: whole numbers below 2²⁴, which float32 adds up exactly. So the keys that
are found are those that the other backends find. A group's query is multiplied with the means of the clusters that it
sees, and then with the keys of those that it chooses: never with all keys.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.plan import Means
from coterie.planning.best_keys import best_keys_op, in_words
from coterie.planning.bytes import Bytes
from coterie.planning.lloyd import Listed
from coterie.planning.orders import rounded
from coterie.planning.picking import Shown, pick
from coterie.planning.steps import NearSearch, Seen

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_BUDGET = 1 << 24  # scores of clusters in memory at a time, however many chunks there are


class _Clusters(NamedTuple):
    """Clusters of keys: which slots of their order belong to which."""

    order: Tensor  # (B, Hk, M) int64
    of_slot: Tensor  # (B, Hk, M) int64: the cluster of a slot, S for none
    start: Tensor  # (B, Hk, S) int64
    stop: Tensor

    @staticmethod
    def of(clusters: Means) -> _Clusters:
        """One cluster lies behind the other."""
        order, start, stop = clusters.order, clusters.start, clusters.stop
        slots = torch.arange(order.shape[-1], device=order.device, dtype=stop.dtype).expand(order.shape).contiguous()
        found = torch.searchsorted(stop.contiguous(), slots, right=True)
        last = found.clamp(max=max(0, stop.shape[-1] - 1))
        inside = (found < stop.shape[-1]) & (start.gather(-1, last) <= slots)
        return _Clusters(order.long(), torch.where(inside, found, stop.shape[-1]), start.long(), stop.long())

    @property
    def sizes(self) -> Tensor:
        """(B, Hk, S)."""
        return self.stop - self.start

    def means_and_outliers(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each cluster and the key farthest from it, (B, Hk, S, D) float64 each; 0 if it is empty."""
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


def near_keys(
    tokens: Tokens, k: Tensor, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    """As `Steps.near_keys`; k (B, Hk, Nk, D) are the keys as they are planned with, float32."""
    sizes, (chunks, width) = tokens.sizes, seen.clusters.shape[1:]
    share, groups = sizes.heads // sizes.key_heads, queries.shape[2] // max(1, chunks)
    there, keys = _Clusters.of(clusters), Bytes.of_keys(k)
    means, outliers = (_per_head(Bytes.of_keys(x), share) for x in there.means_and_outliers(k))
    start, stop = (x.repeat_interleave(share, 1) for x in (clusters.start, clusters.stop))
    looked_at = in_words(keys), keys.scale.contiguous(), clusters.order.contiguous()
    queries = queries.unflatten(2, (chunks, groups))
    exists = torch.arange(groups, device=k.device) < seen.groups[:, None, :, None]
    some = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * width * max(groups, k.shape[-1])))
    picks, left = [], []
    for part in torch.arange(chunks, device=k.device).split(some):
        mine = Bytes.of_queries(queries[:, :, part])
        used = (torch.arange(width, device=k.device) < seen.shown[:, part, None])[:, None]
        which = torch.where(used[:, 0], seen.clusters[:, part].long(), 0)[:, None].expand(-1, sizes.heads, -1, -1)
        first, last = (x[:, :, None].expand(-1, -1, part.numel(), -1).gather(-1, which) for x in (start, stop))
        members = torch.where(used, last - first, 0)
        shown = Shown(which, used, members.long(), exists[:, :, part], seen.together[:, part], seen.room)
        best = partial(_best_keys, in_words(mine), *looked_at, first, members, near=search.near)
        found = pick(_single(mine), means, outliers, shown, search, best)
        picks.append(found[0])
        left.append(found[1])
    return torch.cat(picks, 2).flatten(2), torch.cat(left, 2)


def _best_keys(*inputs: Tensor, near: int) -> tuple[Tensor, Tensor]:
    picks, places = best_keys_op(*inputs, near)
    return picks.long(), places.long()


def _per_head(x: Bytes, share: int) -> Bytes:
    return _single(Bytes(*(each.repeat_interleave(share, 1) for each in x)))


def _single(x: Bytes) -> Bytes:
    return Bytes(x.whole.to(torch.float32), x.scale)
