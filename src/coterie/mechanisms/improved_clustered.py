"""ImprovedClustered: clustered attention with the top keys of each cluster recomputed exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.checks import expect_int
from coterie.mechanisms.base import register
from coterie.mechanisms.clustered import QueryClustering, QueryClusters
from coterie.plan import Plan, Round
from coterie.planning import whole
from coterie.planning.tokens import Tokens


@register("improved-clustered")
@dataclass(frozen=True)
class ImprovedClustered(QueryClustering):
    """Improved clustered attention (Vyas et al., 2020): as Clustered, but the k keys T that the mean query q_c likes
    best are attended to by each member itself, with the mass m that the mean query gives to them:

        A_c = softmax(scale·q_c·Kᵀ),   m = Σ_{j∈T} A_c[j]
        out_i = m · softmax_{j∈T}(scale·q_i·k_j)·V_T + Σ_{j∉T} A_c[j]·v_j

    The gradient flows through everything, m included. O(N·(C+k)·D). Refuses `is_causal`. lse is the centroid's.

    Args:
        clusters, iterations, space, bits, seed: as in Clustered.
        topk: k; at least Nk makes it dense attention.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> all_keys = coterie.ImprovedClustered(clusters=10, topk=200)
        >>> torch.allclose(coterie.attention(q, k, v, all_keys), dense, atol=1e-5)
        True
    """

    size_field = "topk"

    clusters: int = 100
    topk: int = 32
    iterations: int = 10
    space: str = "hamming"
    bits: int = 63
    seed: int = 0

    def check(self) -> None:
        super().check()
        expect_int("topk", self.topk, at_least=1)

    def build(self, tokens: Tokens) -> Plan:
        if tokens.sizes.keys and whole.possible(tokens.call):
            return self._whole(tokens, min(self.topk, tokens.sizes.keys))
        found = self._cluster(tokens)
        top, num_top = self._top_keys(tokens, found)
        real = torch.arange(top.shape[-1], device=top.device) < num_top
        skip = torch.where(real, top, -1).cummax(-1).values  # ascending to the end: the last one over again
        far = found.meet_everyone(tokens, skip.to(torch.int32))
        near = self._near(tokens, found, top, num_top)
        first = tokens.sizes.queries
        return tokens.plan(
            (far, near),
            query_means=found.means(2),  # one copy meets the far keys, the other weighs the near ones
            answer=found.row_of_members(tokens, first),
            mass=found.row_of_members(tokens, first + found.clusters),
        )

    def _top_keys(self, tokens: Tokens, found: QueryClusters) -> tuple[Tensor, Tensor]:
        """T of each cluster, (B, H, C, k) by position, and how many of them are real, (B, 1, 1, 1)."""
        sizes = tokens.sizes
        centroids = tokens.steps.cluster_means(tokens, found.labels, found.clusters)
        width = min(self.topk, sizes.keys)
        top = tokens.steps.top_keys(tokens, tokens.scale * centroids, width)
        return top, tokens.key_mask.sum(-1).clamp(max=width)[:, None, None, None]

    @staticmethod
    def _near(tokens: Tokens, found: QueryClusters, top: Tensor, num_top: Tensor) -> Round:
        """Each cluster's members, and its mean, meet the cluster's top keys."""
        clusters, width, queries = found.clusters, top.shape[-1], tokens.sizes.queries
        occupied = found.offsets[..., 1:] > found.offsets[..., :-1]
        cluster = torch.arange(clusters, device=top.device).expand_as(occupied)
        # The mean joins the group of its members; that of an empty cluster stays out.
        order, offsets = tokens.steps.group_by(
            torch.cat([found.labels, cluster], -1),
            torch.cat([tokens.query_mask[:, None].expand_as(found.labels), occupied], -1),
            clusters,
        )
        start = (cluster * width).to(torch.int32)
        return Round(
            query_order=torch.where(order < queries, order, order + clusters),
            query_offsets=offsets,
            key_order=top.flatten(-2).to(torch.int32),
            key_start=start,
            key_stop=start + num_top[..., 0].to(torch.int32),
        )
