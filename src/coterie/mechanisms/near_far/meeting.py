"""What groups of queries see of far keys, and the two rounds in which they meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.mechanisms.near_far.groups import Groups
from coterie.plan import Means, Round
from coterie.planning.steps import Seen
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar


class Far(NamedTuple):
    """Clusters of keys, and what the queries of a chunk see: the first `seen` (B, C) of `visible` (B, C, V), which hold
    `keys` (B, C) keys; and the first `sunk` (B, C) of the `sinks` (B, S), which are in no cluster."""

    clusters: Means
    visible: Tensor
    seen: Tensor
    keys: Tensor
    sinks: Tensor
    sunk: Tensor
    largest: int  # keys of a cluster, at most


def meet(options: NearFar, tokens: Tokens, groups: Groups, far: Far) -> tuple[Round, Round]:
    """Two rounds: every group meets the clusters that it sees, less what it picks, and the sinks; and what it picks."""
    count, chunks = groups.queries.shape[2], far.visible.shape[1]
    share, width = count // chunks, far.visible.shape[-1] + far.sinks.shape[-1]
    seen = Seen(far.visible, far.seen, groups.exist, groups.together, width)
    search = options.search.of(options.near, tokens.sizes.keys, causal=tokens.causal, largest=far.largest)
    picks, left = tokens.steps.near_keys(tokens, groups.queries, far.clusters, seen, search)
    shown, sunk, keys = (x.repeat_interleave(share, 1) for x in (far.seen, far.sunk, far.keys))
    group = torch.arange(count, device=tokens.device)
    first_far, first_near = group // share * width, group * search.near
    return (
        Round(
            query_order=groups.order,
            query_offsets=groups.offsets,
            key_order=tokens.per_head(_far_rows(tokens, far).flatten(1)),
            key_start=tokens.per_head(first_far.expand(tokens.sizes.batch, -1)),
            key_stop=tokens.per_head(first_far + shown + sunk),
            counts=left,
        ),
        Round(
            query_order=groups.order,
            query_offsets=groups.offsets,
            key_order=picks,
            key_start=tokens.per_head(first_near.expand(tokens.sizes.batch, -1)),
            key_stop=tokens.per_head(first_near + keys.clamp(max=search.near)),
        ),
    )


def _far_rows(tokens: Tokens, far: Far) -> Tensor:
    """(B, C, V + S) the key rows that a chunk meets: the clusters that it sees, and right behind them the sinks."""
    slot = torch.arange(far.visible.shape[-1] + far.sinks.shape[-1], device=tokens.device)
    behind = slot - far.seen[..., None]
    means = torch.nn.functional.pad(far.visible, (0, far.sinks.shape[-1])) + tokens.sizes.keys
    if far.sinks.shape[-1] == 0:
        return means
    sinks = far.sinks[:, None].expand(-1, behind.shape[1], -1).gather(-1, behind.clamp(0, far.sinks.shape[-1] - 1))
    return torch.where(behind < 0, means, sinks)
