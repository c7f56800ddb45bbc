"""Near–far attention where everybody sees everybody: leaves of similar queries, clusters of similar keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.mechanisms.near_far.counts import Count, Fixed, Root
from coterie.mechanisms.near_far.groups import Groups, cluster, draws
from coterie.mechanisms.near_far.meeting import Far, meet
from coterie.plan import Means, Plan
from coterie.planning.orders import Parts, balanced_offsets, ceil_div, rounded
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

_KEYS = 2  # "auto": √(2N) clusters of keys
IN_PART = 86  # groups that are made at a time
SAMPLE = 16  # keys a cluster that centroids are trained on


def everyone(options: NearFar, tokens: Tokens) -> Plan:
    """The plan of a call that is not causal."""
    groups = _groups(options, tokens)
    far = _far(options, tokens, groups.exist.shape[1])
    rounds = meet(options, tokens, groups, far)
    return tokens.plan(rounds, key_means=far.clusters)


def _groups(options: NearFar, tokens: Tokens) -> Groups:
    """Similar queries; their mean picks for them. k-means makes them inside of parts, which halving makes."""
    whole, count = Parts.whole(tokens.query_mask), count_groups(options, tokens.sizes.queries)
    rows = whole.sizes[:, 0]
    groups = count.of(rows)
    pieces = (groups + IN_PART - 1) // IN_PART
    most = max(2, ceil_div(count.room, IN_PART))  # 1 would be a graph of its own
    halved = tokens.steps.halve(tokens.raw_q, whole, pieces[:, None], most, torch.ones_like(rows)).long()
    edges = balanced_offsets(rows, pieces, most)
    place = torch.arange(tokens.sizes.queries, device=tokens.device).expand(tokens.sizes.batch, -1)
    parts = Parts(place.to(torch.int32), edges[:, :-1], edges[:, 1:])
    of_place = torch.searchsorted(edges[:, 1:].contiguous(), place.to(torch.int32).contiguous(), right=True)
    of_place = of_place.clamp(max=most - 1)
    each = torch.where(parts.sizes > 0, (groups + pieces - 1)[:, None] // pieces[:, None], 0)
    x = _rows(tokens.raw_q, halved)
    room = min(count.room, IN_PART) if isinstance(count, Fixed) else IN_PART  # a length would be compared: two graphs
    looked_at = options.search.looked_at(options.near, tokens.sizes.keys, causal=False)
    together = options.search.together(looked_at, tokens.key_mask.sum(-1), room)
    labels, centroids = cluster(tokens, x, parts, of_place, each, room, together, options.iterations, options.seed)
    total = centroids.shape[2]
    del x, centroids
    order, offsets = tokens.steps.group_by(labels, (place < rows[:, None])[:, None], total)
    means = tokens.steps.cluster_means(tokens, torch.zeros_like(labels).scatter(-1, halved, labels), total)
    order = halved.gather(-1, order.long()).to(torch.int32)
    return Groups(order, offsets, rounded(means.mul_(tokens.scale)), each, together[:, None].expand_as(each))


def count_groups(options: NearFar, length: int) -> Count:
    """The groups of a sample."""
    if not isinstance(options.query_clusters, str):
        return Fixed(options.query_clusters)
    return Root.upto(length, options.search.groups)


def count_clusters(options: NearFar, length: int) -> Count:
    """The clusters of a sample's keys."""
    if not isinstance(options.key_clusters, str):
        return Fixed(options.key_clusters)
    return Root.upto(length, _KEYS)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, N, D) in the order of index (B, H, N)."""
    lead = torch.arange(x.shape[0] * x.shape[1], device=x.device).view(*x.shape[:2], 1) * x.shape[2]
    return x.flatten(0, 2).index_select(0, (lead + index).flatten()).view(x.shape)


def _far(options: NearFar, tokens: Tokens, parts_of_queries: int) -> Far:
    """The clusters of a sample's keys, seen by every group. No key is a sink: there it was measured not to help."""
    count = count_clusters(options, tokens.sizes.keys)
    parts = Parts.whole(tokens.key_mask)
    used = count.of(parts.sizes)
    labels, _ = tokens.steps.kmeans(
        tokens.raw_k,
        parts,
        count.room,
        options.iterations,
        counts=used,
        sample=SAMPLE,
        **draws(tokens, options.seed),
    )
    order, offsets = tokens.steps.group_by(labels, tokens.key_mask[:, None], count.room)
    visible = torch.arange(count.room, device=tokens.device).expand(tokens.sizes.batch, parts_of_queries, -1)
    seen, keys = (x.expand(-1, parts_of_queries) for x in (used, parts.sizes))
    means = Means(order, offsets[..., :-1], offsets[..., 1:])
    return Far(means, visible, seen, keys, order[:, 0, :0], torch.zeros_like(seen), tokens.sizes.keys)
