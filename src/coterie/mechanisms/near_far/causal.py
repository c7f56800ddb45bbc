"""Causal near–far attention: two chunks exactly, and older ones through near keys and the means of their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.mechanisms.near_far.chunks import Chunks
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.levels import finished_chunks
from coterie.mechanisms.near_far.meeting import Far, Groups, draws, meet
from coterie.plan import Plan
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

_PER_GROUP = 12  # queries of a chunk that share a group
_REACH = 12  # the clusters that are searched hold so many times the keys that are wanted


def causal(options: NearFar, tokens: Tokens) -> Plan:
    """The plan of a causal call."""
    chunks = Chunks.of(tokens, options.chunk)
    groups = _groups(options, tokens, chunks)
    far = finished_chunks(options, tokens, chunks)
    met, bias = _near_keys(options, tokens, groups, far)
    rounds = chunks.own_and_previous(tokens), meet(tokens, groups, far, met, bias)
    return tokens.plan(rounds, key_means=far.clusters)


def _near_keys(options: NearFar, tokens: Tokens, groups: Groups, far: Far) -> tuple[Tensor, Tensor]:
    """What each group meets, (B, H, G, V + near): the clusters that it sees, and its near keys; and their biases."""
    near = min(options.near, tokens.sizes.keys)
    reach = max(1, near * _REACH)
    visible = far.visible.to(torch.int32)
    return tokens.steps.near_keys(tokens, groups.queries, far.clusters, visible, far.seen, near, reach)


def _groups(options: NearFar, tokens: Tokens, chunks: Chunks) -> Groups:
    """Similar queries of a chunk, and what picks for them: their mean query, or with `strict` an older centroid."""
    count, same = _count(options, tokens.sizes.queries), draws(tokens, options.seed)
    parts, kmeans = chunks.queries, tokens.steps.kmeans
    counts = count.of(parts.sizes)
    total = counts.shape[1] * count.room
    labels, centroids = kmeans(tokens.raw_q, parts, count.room, options.iterations, counts=counts, **same)
    if options.strict:
        centroids, counts = _before(tokens, chunks, centroids, counts, count.room)
        labels, _ = kmeans(tokens.raw_q, parts, count.room, 0, counts=counts, centroids=centroids, **same)
    labels = labels + (chunks.of_query * count.room)[:, None]
    order, offsets = tokens.steps.group_by(labels, chunks.placed[:, None], total)
    if not options.strict:
        del centroids  # as large as the means
        labels = torch.where(chunks.placed[:, None], labels, 0)
        centroids = tokens.steps.cluster_means(tokens, labels, total, mask=chunks.placed)
    return Groups(order, offsets, centroids.mul_(tokens.scale))


def _count(options: NearFar, length: int) -> Count:
    """The groups of a chunk."""
    if not isinstance(options.query_clusters, str):
        return Fixed(options.query_clusters)
    return Rate.upto(length, options.chunk, clusters=1, tokens=_PER_GROUP)


def _before(tokens: Tokens, chunks: Chunks, centroids: Tensor, counts: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The centroids of the chunk before each, so that what comes later changes nothing.

    The first chunk has none before, and its first query stands for it.
    """
    if tokens.sizes.queries == 0:
        return centroids, counts
    first = _first_query(tokens, chunks).expand(-1, -1, room, -1)
    return (
        torch.cat([first, centroids[:, :, :-room]], 2),
        torch.cat([torch.ones_like(counts[:, :1]), counts[:, :-1]], 1),
    )


def _first_query(tokens: Tokens, chunks: Chunks) -> Tensor:
    """The first query that has a place, (B, H, 1, D) float64."""
    index = chunks.order[:, :1].long()[:, None, :, None].expand(-1, tokens.sizes.heads, -1, tokens.raw_q.shape[-1])
    first = tokens.raw_q.gather(2, index).to(torch.float64)
    return torch.where(first.isfinite(), first, 0)
