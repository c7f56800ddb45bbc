"""Clustered: queries are clustered, and a cluster's mean query attends for its members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.checks import expect_choice, expect_int, expect_seed
from coterie.mechanisms.base import Causality, Mechanism, register
from coterie.plan import Means, Plan, Round
from coterie.planning import whole
from coterie.planning.orders import Parts, compact
from coterie.planning.tokens import Tokens


@dataclass(frozen=True)
class QueryClusters:
    """The clusters of a head's queries, and the round in which their means meet every key."""

    labels: Tensor  # (B, H, Nq); only real queries count
    order: Tensor  # (B, H, Nq) members, cluster by cluster
    offsets: Tensor  # (B, H, C + 1)

    @property
    def clusters(self) -> int:
        """How many clusters there is room for."""
        return self.offsets.shape[-1] - 1

    def means(self, copies: int) -> Means:
        """The mean query of each cluster, `copies` times over."""
        start, stop = self.offsets[..., :-1], self.offsets[..., 1:]
        return Means(self.order, torch.cat([start] * copies, -1), torch.cat([stop] * copies, -1))

    def row_of_members(self, tokens: Tokens, first: int) -> Tensor:
        """For each real query, the virtual row of its cluster if those start at `first`; −1 for padding."""
        return torch.where(tokens.query_mask[:, None], self.labels + first, -1).to(torch.int32)

    def meet_everyone(self, tokens: Tokens, skip: Tensor | None = None) -> Round:
        """One group: the mean queries of all clusters that have members, and all real keys.

        `skip` (B, H, C, E): keys that a cluster's mean leaves out.
        """
        occupied, count = compact(self.offsets[..., 1:] > self.offsets[..., :-1])
        keys, num_keys = tokens.real_keys
        zero = torch.zeros_like(count)
        if skip is not None:
            skip = skip.gather(2, occupied[..., None].expand_as(skip).long())
        return Round(
            query_order=occupied + tokens.sizes.queries,
            query_offsets=torch.stack([zero, count], -1).to(torch.int32),
            key_order=tokens.per_head(keys),
            key_start=tokens.per_head(torch.zeros_like(num_keys)[:, None]),
            key_stop=tokens.per_head(num_keys[:, None]),
            skip=skip,
        )


class QueryClustering(Mechanism):
    """The k-means of queries that Clustered and ImprovedClustered share.

    Both have these fields, each in its own order.
    """

    clusters: int
    iterations: int
    space: str
    bits: int
    seed: int

    causality: ClassVar[str] = Causality.NONE

    def check(self) -> None:
        expect_int("clusters", self.clusters, at_least=1)
        expect_int("iterations", self.iterations, at_least=0)
        expect_choice("space", self.space, ("hamming", "euclidean"))
        expect_int("bits", self.bits, at_least=1)
        expect_seed(self.seed)

    def _whole(self, tokens: Tokens, top: int) -> Plan:
        """The plan in one native call; members meet the `top` keys of their cluster themselves."""
        far, near = whole.clustered(
            tokens.call,
            tokens.query_mask,
            tokens.key_mask,
            clusters=self.clusters,
            iterations=self.iterations,
            bits=self.bits if self.space == "hamming" else 0,
            top=top,
            seed=self.seed,
        )
        keys, start, stop = (tokens.per_head(x) for x in (far.keys, far.key_start, far.key_stop))
        everyone = Round(far.far_order, far.far_offsets, keys, start, stop, skip=None if near is None else near.skip)
        means = Means(far.members, far.start, far.stop)
        if near is None:
            return tokens.plan((everyone,), query_means=means, answer=far.answer, sound=True)
        some = Round(near.order, near.offsets, near.keys, near.start, near.stop)
        return tokens.plan((everyone, some), query_means=means, answer=far.answer, mass=near.mass, sound=True)

    def _cluster(self, tokens: Tokens) -> QueryClusters:
        if self.space == "hamming":
            labels = tokens.steps.hamming_clusters(tokens, self.clusters, self.iterations, self.bits, self.seed)
        else:
            parts = Parts.whole(tokens.query_mask)
            labels, _ = tokens.steps.kmeans(
                tokens.raw_q, parts, self.clusters, self.iterations, seed=self.seed, layer=tokens.layer
            )
        order, offsets = tokens.steps.group_by(labels, tokens.query_mask[:, None], self.clusters)
        return QueryClusters(labels, order, offsets)


@register("clustered")
@dataclass(frozen=True)
class Clustered(QueryClustering):
    """Clustered attention (Vyas et al., 2020): the mean query q_c of each cluster attends to all keys, and its members
    share the answer:

        out_i = softmax(scale·q_c·Kᵀ)·V   for every member i of cluster c

    The mean is differentiable: each member's gradient is its share of the centroid's. O(N·C·D). Refuses `is_causal`,
    because a mean query mixes the future in. lse is the centroid's.

    Args:
        clusters: C, the same at every length; more than there are queries is fine.
        iterations: of Lloyd's algorithm.
        space: "hamming" clusters the signs of random projections, "euclidean" the queries themselves.
        bits: random projections in Hamming space.
        seed: of the random draws.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> out = coterie.attention(q, k, v, coterie.Clustered(clusters=10))
        >>> out[0, 0].unique(dim=0).shape[0] <= 10
        True
    """

    size_field = "clusters"

    clusters: int = 100
    iterations: int = 10
    space: str = "hamming"
    bits: int = 63
    seed: int = 0

    def build(self, tokens: Tokens) -> Plan:
        if whole.possible(tokens.call):
            return self._whole(tokens, 0)
        found = self._cluster(tokens)
        answer = found.row_of_members(tokens, tokens.sizes.queries)
        return tokens.plan((found.meet_everyone(tokens),), query_means=found.means(1), answer=answer)
