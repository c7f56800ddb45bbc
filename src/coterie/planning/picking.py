"""Which keys small groups of queries pick: the best keys of the best clusters, whatever finds those on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.planning.bytes import Bytes
from coterie.planning.orders import top_indices
from coterie.planning.steps import NearSearch

# The keys with the largest products that each group finds where it searches, and the place of each one's cluster, both
# (B, H, C, G, near) int64. It searches where (B, H, C, G, V) is true. If there are fewer keys, the last mean none.
Best = Callable[[Tensor], tuple[Tensor, Tensor]]


class Shown(NamedTuple):
    """The clusters that groups of some chunks see, V in each chunk at most."""

    which: Tensor  # (B, H, C, V) int64
    used: Tensor  # (B, 1, C, V) bool: whether there are so many
    members: Tensor  # (B, H, C, V): how many keys, 0 where not used
    exists: Tensor  # (B, 1 | H, C, G) bool: whether there is such a group
    together: Tensor  # (B, C): groups of a party, which ranks clusters together
    room: int  # for counts of clusters


def pick(
    mine: Bytes,
    means: Bytes,
    outliers: Bytes,
    shown: Shown,
    search: NearSearch,
    best: Best,
) -> tuple[Tensor, Tensor]:
    """The picked keys of each group (B, H, C · G, near) int32, and what is left of each cluster (B, H, C · G, room)."""
    width = shown.which.shape[-1]
    likes = torch.maximum(*(mine.products(x.at(shown.which)) for x in (means, outliers)))
    each = shown.members[..., None, :].expand_as(likes)
    likes = _best_of_party(likes, mine.scale, each > 0, shown.exists, shown.together)
    ranked = top_indices(likes, each > 0, width)
    sizes = each.gather(-1, ranked)
    before = sizes.cumsum(-1) - sizes
    chosen = torch.zeros_like(each, dtype=torch.bool).scatter(-1, ranked, before < search.reach) & (each > 0)
    top, place = best(chosen & shown.exists[..., None])
    real = torch.arange(search.near, device=top.device) < each.sum(-1, keepdim=True)
    real = real & shown.exists[..., None]
    counts = torch.where(shown.used, shown.members, 1)[..., None, :].expand_as(each)
    counts = torch.nn.functional.pad(counts, (0, shown.room - width), value=1)
    counts = counts.scatter_add(-1, place, -real.long())
    counts = torch.where(shown.exists[..., None], counts, 0)
    picks = torch.where(real, top, 0).to(torch.int32).flatten(2, 3)
    return picks, counts.to(torch.int32 if search.wide else torch.int16).flatten(2, 3)


def _best_of_party(likes: Tensor, scale: Tensor, used: Tensor, exists: Tensor, together: Tensor) -> Tensor:
    """For each group (B, H, C, G, V), how much the party that it belongs to likes each cluster."""
    none = float("-inf")
    likes = likes.masked_fill(~used, none)
    relative = (likes - likes.amax(-1, keepdim=True)) * scale[..., None]
    relative = relative.masked_fill(~(used & exists[..., None]), none)
    party = torch.arange(likes.shape[3], device=likes.device) // together[..., None]
    party = party[:, None, :, :, None].expand_as(likes)
    best = torch.full_like(likes, none).scatter_reduce(3, party, relative, "amax")
    return best.gather(3, party)
