"""Smyrf: asymmetric hashing, sorted and cut into balanced groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import draws, hashing
from coterie.draws import Stream
from coterie.errors import expect_choice, expect_int, expect_type
from coterie.grouping import balanced_offsets, order_by
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
        sizes = tokens.sizes
        num_queries, num_keys = tokens.real_queries[1], tokens.real_keys[1]
        # Never more groups than keys, or some queries would meet nobody.
        groups = torch.minimum((num_queries + self.cluster_size - 1) // self.cluster_size, num_keys).clamp(min=1)
        capacity = max(1, -(-sizes.queries // self.cluster_size))
        query_masks, key_masks = tokens.query_mask[:, None, None], tokens.key_mask[:, None, None]
        query_hashes, key_hashes = self._hashes(tokens, groups, capacity)
        query_orders, key_orders = order_by(query_hashes, query_masks), order_by(key_hashes, key_masks)
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

    def _hashes(self, tokens: Tokens, groups: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """(B, H, rounds, N) hashes of queries and keys."""
        seed = draws.fresh_seed().to(tokens.device) if self.resample else self.seed
        f, g = hashing.transform(
            self.transform, tokens.q, tokens.k, tokens.query_mask[:, None], tokens.key_mask[:, None]
        )
        heads, dim = tokens.sizes.heads, f.shape[-1]
        if self.hash == "cross-polytope":
            return self._axes(f, g, groups, capacity, seed, tokens.layer)
        shape = (heads, self.rounds, dim)
        directions = draws.normal(Stream.PROJECTION, shape, seed=seed, layer=tokens.layer, device=f.device)
        hashes = hashing.project(f, directions), hashing.project(g, directions)
        if self.hash == "projection":
            return hashes
        real = torch.cat([tokens.query_mask, tokens.key_mask], -1)[:, None, None]
        both = torch.cat(hashes, -1)
        if both.shape[-1] == 0:
            return hashes
        low = both.masked_fill(~real, float("inf")).amin(-1, keepdim=True)
        high = both.masked_fill(~real, float("-inf")).amax(-1, keepdim=True)
        width = ((high - low) / groups[:, None, None, None]).clamp(min=torch.finfo(torch.float32).tiny)
        shift = draws.uniform(Stream.OFFSET, shape[:2], seed=seed, layer=tokens.layer, device=f.device)[..., None]
        return tuple(torch.floor(h / width + shift) for h in hashes)  # type: ignore[return-value]

    def _axes(
        self, f: Tensor, g: Tensor, groups: Tensor, capacity: int, seed: int | Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Cross-polytope buckets: about as many as there are groups."""
        columns = (groups + 1) // 2
        size, dim, heads = (capacity + 1) // 2, f.shape[-1], f.shape[1]
        shape = (heads * self.rounds, dim, size)
        rotations = draws.normal(Stream.ROTATION, shape, seed=seed, layer=layer, device=f.device)
        rotations = rotations.view(self.rounds, heads, dim, size)
        buckets = [[hashing.cross_polytope(x, rotation, columns) for rotation in rotations] for x in (f, g)]
        return tuple(torch.stack(side, 2).to(torch.float64) for side in buckets)  # type: ignore[return-value]
