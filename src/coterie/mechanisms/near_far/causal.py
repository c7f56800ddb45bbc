"""Causal near–far attention: two chunks exactly, and older ones through near keys and the means of their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coterie.call import Sizes
from coterie.mechanisms.near_far.chunks import Chunks
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.groups import Groups, cluster, draws
from coterie.mechanisms.near_far.levels import finished_chunks
from coterie.mechanisms.near_far.meeting import meet
from coterie.mechanisms.near_far.strict import Judges
from coterie.plan import Plan
from coterie.planning.orders import ceil_div, rounded
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
    """Similar queries of a chunk, and what picks for them: their mean query, or with `strict` an older one."""
    count, parts = count_groups(options, tokens.sizes), chunks.queries
    looked_at = options.search.looked_at(options.near, tokens.sizes.keys, causal=True)
    alike = options.search.together(looked_at, chunks.num_keys, count.room)
    exist = count.of(parts.sizes)
    # So few queries to a centroid change little after they were first assigned to it.
    steps = min(options.iterations, 1)
    labels, centroids = cluster(
        tokens, tokens.raw_q, parts, chunks.of_query, exist, count.room, alike, steps, options.seed
    )
    total, together = centroids.shape[2], alike[:, None].expand_as(exist)
    if options.strict and tokens.sizes.queries:
        judges = Judges.of(tokens, chunks, centroids, exist, _in_chunk(options))
        centroids, exist, same = judges.centroids, judges.exist, draws(tokens, options.seed)
        labels, _ = tokens.steps.kmeans(tokens.raw_q, parts, count.room, 0, counts=exist, centroids=centroids, **same)
        labels = judges.seat(chunks, labels) + (chunks.of_query * count.room)[:, None]
        together = torch.where(judges.founders > 0, 1, together)  # in a party, later founders would lead earlier ones
    order, offsets = tokens.steps.group_by(labels, chunks.placed[:, None], total)
    if not options.strict:
        del centroids  # as large as the means
        labels = torch.where(chunks.placed[:, None], labels, 0)
        centroids = tokens.steps.cluster_means(tokens, labels, total, mask=chunks.placed)
    return Groups(order, offsets, rounded(centroids.mul_(tokens.scale)), exist, together)


def _in_chunk(options: NearFar) -> int:
    """The groups of a full chunk."""
    if not isinstance(options.query_clusters, str):
        return options.query_clusters
    return ceil_div(options.chunk, options.search.leaf)


def count_groups(options: NearFar, sizes: Sizes) -> Count:
    """The groups of a chunk."""
    if not isinstance(options.query_clusters, str):
        fixed = options.query_clusters
        # With `strict`, a part of a chunk has a part of them, and founders of the next chunk make up for the rest.
        return Rate(fixed, options.chunk, fixed) if options.strict else Fixed(fixed)
    rate = Rate.upto(sizes.queries, options.chunk, clusters=1, tokens=options.search.leaf)
    if not options.strict:
        return rate
    # Behind a cache, each of a few queries may found a group. Where there is none, no shape needs to change.
    founders = min(sizes.queries, sizes.keys - sizes.queries)
    return Rate(rate.clusters, rate.tokens, min(_in_chunk(options), max(rate.room, founders)))
