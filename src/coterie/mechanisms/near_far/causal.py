"""Causal near–far attention: two chunks exactly, and older ones through near keys and the means of their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.mechanisms.near_far.chunks import Chunks
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.groups import Groups, cluster, draws
from coterie.mechanisms.near_far.levels import finished_chunks
from coterie.mechanisms.near_far.meeting import meet
from coterie.plan import Plan
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar


def causal(options: NearFar, tokens: Tokens) -> Plan:
    """The plan of a causal call."""
    chunks = Chunks.of(tokens, options.chunk)
    groups = _groups(options, tokens, chunks)
    far = finished_chunks(options, tokens, chunks)
    rounds = chunks.own_and_previous(tokens), *meet(options, tokens, groups, far)
    return tokens.plan(rounds, key_means=far.clusters)


def _groups(options: NearFar, tokens: Tokens, chunks: Chunks) -> Groups:
    """Similar queries of a chunk, and what picks for them: their mean query, or with `strict` an older centroid."""
    count, parts = _count(options, tokens.sizes.queries), chunks.queries
    looked_at = options.search.looked_at(options.near, tokens.sizes.keys, causal=True)
    together = options.search.together(looked_at, chunks.num_keys, count.room)
    exist = count.of(parts.sizes)
    # So few queries to a centroid change little after they were first assigned to it.
    steps = min(options.iterations, 1)
    labels, centroids = cluster(
        tokens, tokens.raw_q, parts, chunks.of_query, exist, count.room, together, steps, options.seed
    )
    total = centroids.shape[2]
    if options.strict:
        centroids, exist = _before(tokens, chunks, centroids, exist, count.room)
        same = draws(tokens, options.seed)
        labels, _ = tokens.steps.kmeans(tokens.raw_q, parts, count.room, 0, counts=exist, centroids=centroids, **same)
        labels = labels + (chunks.of_query * count.room)[:, None]
    order, offsets = tokens.steps.group_by(labels, chunks.placed[:, None], total)
    if not options.strict:
        del centroids  # as large as the means
        labels = torch.where(chunks.placed[:, None], labels, 0)
        centroids = tokens.steps.cluster_means(tokens, labels, total, mask=chunks.placed)
    return Groups(order, offsets, centroids.mul_(tokens.scale), exist, together)


def _count(options: NearFar, length: int) -> Count:
    """The groups of a chunk."""
    if not isinstance(options.query_clusters, str):
        return Fixed(options.query_clusters)
    return Rate.upto(length, options.chunk, clusters=1, tokens=options.search.leaf)


def _before(tokens: Tokens, chunks: Chunks, centroids: Tensor, exist: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The centroids of the chunk before each, so that what comes later changes nothing.

    The first chunk has none before, and its first query stands for it.
    """
    if tokens.sizes.queries == 0:
        return centroids, exist
    first = _first_query(tokens, chunks).expand(-1, -1, room, -1)
    return (
        torch.cat([first, centroids[:, :, :-room]], 2),
        torch.cat([torch.ones_like(exist[:, :1]), exist[:, :-1]], 1),
    )


def _first_query(tokens: Tokens, chunks: Chunks) -> Tensor:
    """The first query that has a place, (B, H, 1, D) float64."""
    index = chunks.order[:, :1].long()[:, None, :, None].expand(-1, tokens.sizes.heads, -1, tokens.raw_q.shape[-1])
    first = tokens.raw_q.gather(2, index).to(torch.float64)
    return torch.where(first.isfinite(), first, 0)
