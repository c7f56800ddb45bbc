"""Groups of queries, the clusters that stand for far keys, and the round in which they meet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.plan import Means, Round
from coterie.planning.kmeans import Draws
from coterie.planning.tokens import Tokens


class Groups(NamedTuple):
    """Groups of queries, and what stands for each when near keys are picked."""

    order: Tensor  # (B, H, Nq) int32
    offsets: Tensor  # (B, H, G + 1) int32
    queries: Tensor  # (B, H, G, D) float64


class Far(NamedTuple):
    """Clusters of keys, and which of them the queries of a chunk see: the last `seen` (B, C) of `visible` (B, C, V).

    `keys` (B, C): how many keys these hold.
    """

    clusters: Means
    visible: Tensor
    seen: Tensor
    keys: Tensor


def draws(tokens: Tokens, seed: int) -> Draws:
    """Heads share their draws, so that heads with the same keys have the same clusters."""
    return {"seed": seed, "layer": tokens.layer, "per_head": False}


def meet(tokens: Tokens, groups: Groups, far: Far, met: Tensor, bias: Tensor) -> Round:
    """The round of groups that meet the clusters they see and their near keys: `met` (B, H, G, V + near)."""
    count, width = groups.queries.shape[2], far.visible.shape[-1]
    near, share = met.shape[-1] - width, count // far.visible.shape[1]
    seen, keys = (x.repeat_interleave(share, 1) for x in (far.seen, far.keys))
    first = torch.arange(count, device=tokens.device) * met.shape[-1]
    return Round(
        query_order=groups.order,
        query_offsets=groups.offsets,
        key_order=met.flatten(2),
        key_start=tokens.per_head(first + width - seen),
        key_stop=tokens.per_head(first + width + keys.clamp(max=near)),
        bias=bias.flatten(2),
    )
