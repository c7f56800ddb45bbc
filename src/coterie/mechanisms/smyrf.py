"""Smyrf: asymmetric hashing, sorted and cut into balanced groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import draws, hashing
from coterie.errors import expect_choice, expect_int, expect_type
from coterie.grouping import balanced_offsets
from coterie.mechanisms.base import Mechanism, Tokens, register
from coterie.plan import Duplicates, Plan, Round


@register("smyrf")
@dataclass(frozen=True)
class Smyrf(Mechanism):
    """SMYRF: queries and keys are hashed by one random projection a round, sorted apart, and cut into the same number
    of groups (supplement §13).

        F(q) = [q; 0; √(M_Q²+M_K²−‖q‖²)],  G(k) = [k; √(M_Q²+M_K²−‖k‖²); 0],  h(u) = u·a,  a ~ N(0, 1)

    so that ‖F(q)−G(k)‖² = 2(M_Q²+M_K²−q·k) depends on the inner product alone. The L = ⌈Nq / cluster_size⌉ groups of a
    round have equal sizes, to within one, on both sides; rounds are merged by their softmax mass (Eq. 15).
    O(H·N·log N + H·N²/L). Causality: `mask`.

    Args:
        rounds: hashing rounds H.
        cluster_size: queries in a group; keys follow as Nk / L.
        transform: "smyrf", or an ablation: "none" (E2LSH), "l2-alsh", "xbox", "simple".
        hash: "projection", "e2lsh" (⌊(u·a+b)/r⌋, with r such that the hashes of a round span L buckets) or
            "cross-polytope" (the nearest of L random axes).
        duplicates: a pair met in several rounds counts each time ("count", the paper) or "once".
        seed: of the random draws.
        resample: draw new hashes at every call from PyTorch's generator; `coterie.nn` does so in training only.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> coterie.attention(q, k, v, coterie.Smyrf(rounds=2, cluster_size=32)).shape
        torch.Size([1, 4, 200, 16])
    """

    rounds: int = 4
    cluster_size: int = 64
    transform: str = "smyrf"
    hash: str = "projection"
    duplicates: Duplicates = "count"
    seed: int = 0
    resample: bool = False

    def check(self) -> None:
        expect_int("rounds", self.rounds, at_least=1)
        expect_int("cluster_size", self.cluster_size, at_least=1)
        expect_choice("transform", self.transform, hashing.TRANSFORMS)
        expect_choice("hash", self.hash, hashing.HASHES)
        expect_choice("duplicates", self.duplicates, ("count", "once"))
        expect_int("seed", self.seed, at_least=0, at_most=2**63 - 1)
        expect_type(isinstance(self.resample, bool), "resample", "a bool", type(self.resample).__name__)

    def build(self, tokens: Tokens) -> Plan:
        num_queries, num_keys = tokens.real_queries[1], tokens.real_keys[1]
        # Never more groups than keys, or some queries would meet nobody.
        groups = torch.minimum((num_queries + self.cluster_size - 1) // self.cluster_size, num_keys).clamp(min=1)
        capacity = max(1, -(-tokens.sizes.queries // self.cluster_size))
        query_orders, key_orders = self._orders(tokens, groups, capacity)
        query_offsets = tokens.per_head(balanced_offsets(num_queries, groups, capacity))
        key_offsets = tokens.per_head(balanced_offsets(num_keys, groups, capacity))
        rounds = tuple(
            Round(
                query_order=query_orders[:, :, r],
                query_offsets=query_offsets,
                key_order=key_orders[:, :, r],
                key_start=key_offsets[..., :-1],
                key_stop=key_offsets[..., 1:],
            )
            for r in range(self.rounds)
        )
        return tokens.plan(rounds, duplicates=self.duplicates)

    def _orders(self, tokens: Tokens, groups: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Queries and keys sorted by hash, (B, H, rounds, N) each."""
        seed = draws.fresh_seed().to(tokens.device) if self.resample else self.seed
        steps = tokens.steps
        if self.hash != "cross-polytope":
            return steps.smyrf_orders(tokens, groups, self.rounds, self.transform, self.hash, seed)
        # About as many buckets, two to an axis, as there are groups.
        columns, most = (groups + 1) // 2, (capacity + 1) // 2
        query_buckets, key_buckets = steps.buckets(tokens, columns, most, self.rounds, self.transform, seed)
        return (
            steps.order_by(query_buckets, tokens.query_mask[:, None, None]),
            steps.order_by(key_buckets, tokens.key_mask[:, None, None]),
        )
