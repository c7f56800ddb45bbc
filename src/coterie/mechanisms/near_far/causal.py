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
    """Similar queries of a chunk, and the query that picks for them."""
    count = _count(options, tokens.sizes.queries)
    labels, queries = (_learnt_before if options.strict else _together)(options, tokens, chunks, count)
    order, offsets = tokens.steps.group_by(labels, chunks.placed[:, None], queries.shape[2])
    return Groups(order, offsets, queries.mul_(tokens.scale))


def _count(options: NearFar, length: int) -> Count:
    """The groups of a chunk."""
    if not isinstance(options.query_clusters, str):
        return Fixed(options.query_clusters)
    return Rate(1, tokens=_PER_GROUP, block=options.chunk, longest=length)


def _together(options: NearFar, tokens: Tokens, chunks: Chunks, count: Count) -> tuple[Tensor, Tensor]:
    """Queries by k-means inside their chunk, (B, H, Nq), and the mean query of each group, (B, H, G, D)."""
    labels = _kmeans(options, tokens, chunks, count)[0]
    labels = labels + (chunks.of_query * count.room)[:, None]
    total = chunks.place.shape[1] * count.room
    inside = torch.where(chunks.placed[:, None], labels, 0)
    return labels, tokens.steps.cluster_means(tokens, inside, total, mask=chunks.placed)


def _learnt_before(options: NearFar, tokens: Tokens, chunks: Chunks, count: Count) -> tuple[Tensor, Tensor]:
    """Queries by the nearest centroid of the chunk before, and these centroids: what comes later changes nothing."""
    _, centroids = _kmeans(options, tokens, chunks, count)
    counts = count.of(chunks.num_queries)
    if tokens.sizes.queries:
        first = _first_query(tokens, chunks).expand(-1, -1, count.room, -1)
        centroids = torch.cat([first, centroids[:, :, : -count.room]], 2)
        counts = torch.cat([torch.ones_like(counts[:, :1]), counts[:, :-1]], 1)
    same = draws(tokens, options.seed)
    labels, _ = tokens.steps.kmeans(
        tokens.raw_q, chunks.queries, count.room, 0, counts=counts, centroids=centroids, **same
    )
    return labels + (chunks.of_query * count.room)[:, None], centroids


def _kmeans(options: NearFar, tokens: Tokens, chunks: Chunks, count: Count) -> tuple[Tensor, Tensor]:
    """The cluster of each query in its chunk, and the centroids of all chunks."""
    counts, same = count.of(chunks.num_queries), draws(tokens, options.seed)
    return tokens.steps.kmeans(tokens.raw_q, chunks.queries, count.room, options.iterations, counts=counts, **same)


def _first_query(tokens: Tokens, chunks: Chunks) -> Tensor:
    """The first query, (B, H, 1, D), which stands for the first chunk, as there is none before."""
    index = chunks.order[:, :1].long()[:, None, :, None].expand(-1, tokens.sizes.heads, -1, tokens.raw_q.shape[-1])
    first = tokens.raw_q.gather(2, index).to(torch.float64)
    return torch.where(first.isfinite(), first, 0)
