"""Near–far attention where everybody sees everybody: one k-means on each side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.mechanisms.near_far.counts import Count, Fixed, Root
from coterie.mechanisms.near_far.meeting import Far, Groups, draws, meet
from coterie.plan import Means, Plan
from coterie.planning.orders import Parts
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

_QUERIES, _KEYS = 4, 2  # "auto": √(4N) groups of queries, √(2N) clusters of keys
_SAMPLE = 16  # tokens a cluster that centroids are trained on


class Clusters(NamedTuple):
    """The clusters of one side."""

    labels: Tensor  # (B, heads, N)
    order: Tensor  # (B, heads, N) int32, members cluster by cluster
    offsets: Tensor  # (B, heads, room + 1) int32
    used: Tensor  # (B, 1): how many clusters a sample has
    rows: Tensor  # (B, 1): how many real rows

    @property
    def room(self) -> int:
        """How many clusters there is room for."""
        return self.offsets.shape[-1] - 1


def everyone(options: NearFar, tokens: Tokens) -> Plan:
    """The plan of a call that is not causal."""
    sizes = tokens.sizes
    query_count = _count(options.query_clusters, _QUERIES, sizes.queries)
    key_count = _count(options.key_clusters, _KEYS, sizes.keys)
    groups = _groups(tokens, _cluster(options, tokens, tokens.raw_q, tokens.query_mask, query_count))
    keys = _cluster(options, tokens, tokens.raw_k, tokens.key_mask, key_count)
    far = _far(tokens, keys)
    met, bias = _near_keys(options, tokens, groups, far, keys.labels)
    return tokens.plan((meet(tokens, groups, far, met, bias),), key_means=far.clusters)


def _count(wanted: int | str, share: int, length: int) -> Count:
    return Root.upto(length, share) if isinstance(wanted, str) else Fixed(wanted)


def _cluster(options: NearFar, tokens: Tokens, x: Tensor, mask: Tensor, count: Count) -> Clusters:
    parts = Parts.whole(mask)
    rows = parts.stop.long()
    used = count.of(rows)
    labels, _ = tokens.steps.kmeans(
        x, parts, count.room, options.iterations, counts=used, sample=_SAMPLE, **draws(tokens, options.seed)
    )
    return Clusters(labels, *tokens.steps.group_by(labels, mask[:, None], count.room), used, rows)


def _groups(tokens: Tokens, queries: Clusters) -> Groups:
    """Each cluster of queries is a group, and its mean query picks."""
    means = tokens.steps.cluster_means(tokens, queries.labels, queries.room)
    return Groups(queries.order, queries.offsets, means.mul_(tokens.scale))


def _far(tokens: Tokens, keys: Clusters) -> Far:
    """All clusters that a sample has, seen by every group."""
    visible = torch.arange(keys.room, device=tokens.device) - (keys.room - keys.used)
    means = Means(keys.order, keys.offsets[..., :-1], keys.offsets[..., 1:])
    return Far(means, visible.clamp(min=0)[:, None], keys.used, keys.rows)


def _near_keys(options: NearFar, tokens: Tokens, groups: Groups, far: Far, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What each group meets, (B, H, G, V + near): all clusters, and its near keys; and their biases."""
    near, width = min(options.near, tokens.sizes.keys), far.visible.shape[-1]
    share = tokens.sizes.heads // tokens.sizes.key_heads
    picks = tokens.steps.top_keys(tokens, groups.queries, near)
    real = torch.arange(near, device=tokens.device) < far.keys[..., None, None]
    clusters = labels.repeat_interleave(share, 1)[:, :, None].expand(-1, -1, picks.shape[2], -1).gather(-1, picks)
    sizes = (far.clusters.stop - far.clusters.start).long().repeat_interleave(share, 1)[:, :, None]
    left = sizes.expand(-1, -1, picks.shape[2], -1).scatter_add(-1, clusters, -real.long().expand_as(clusters))
    shown = far.visible[:, None].expand(-1, left.shape[1], left.shape[2], width)
    met = torch.cat([shown + tokens.sizes.keys, picks], -1).to(torch.int32)
    bias = left.gather(-1, shown).double().log().to(torch.float32)
    return met, torch.nn.functional.pad(bias, (0, near))
