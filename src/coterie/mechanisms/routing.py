"""Routing: k-means over queries and keys, top keys per centroid."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.checks import expect_int, expect_seed
from coterie.mechanisms.base import Mechanism, register
from coterie.plan import Plan, Round
from coterie.planning.tokens import Tokens


@register("routing")
@dataclass(frozen=True)
class Routing(Mechanism):
    """Routing attention (Roy et al., 2021) without training: spherical k-means over queries and keys together gives the
    centroids μ_c that the paper learns; a query goes to its nearest centroid, and meets the `window` keys k with the
    largest μ_c·k/‖k‖.

    Where the paper also lets centroids choose their queries, and leaves those that nobody chose without an answer,
    here each query chooses, so that each gets one. O(N·C·D + N·window·D). Causality: `mask`.

    Args:
        clusters: C, at most the number of real tokens.
        window: keys of a centroid.
        iterations: of Lloyd's algorithm.
        seed: of the random draws.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> coterie.attention(q, k, v, coterie.Routing(clusters=8, window=50)).shape
        torch.Size([1, 4, 200, 16])
    """

    size_field = "window"

    clusters: int = 16
    window: int = 128
    iterations: int = 5
    seed: int = 0

    def check(self) -> None:
        expect_int("clusters", self.clusters, at_least=1)
        expect_int("window", self.window, at_least=1)
        expect_int("iterations", self.iterations, at_least=0)
        expect_seed(self.seed)

    def build(self, tokens: Tokens) -> Plan:
        centroids, labels = tokens.steps.routing_centroids(tokens, self.clusters, self.iterations, self.seed)
        query_order, query_offsets = tokens.steps.group_by(labels, tokens.query_mask[:, None], self.clusters)
        width = min(self.window, tokens.sizes.keys)
        top = tokens.steps.top_keys(tokens, centroids, width, unit=True)
        count = tokens.key_mask.sum(-1).clamp(max=width)[:, None]
        start = (torch.arange(self.clusters, device=tokens.device) * width).expand(tokens.sizes.batch, -1)
        return tokens.plan(
            (
                Round(
                    query_order=query_order,
                    query_offsets=query_offsets,
                    key_order=top.flatten(-2).to(torch.int32),
                    key_start=tokens.per_head(start),
                    key_stop=tokens.per_head(start + count),
                ),
            )
        )
