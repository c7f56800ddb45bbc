"""Strided: a window, and every stride-th key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.checks import expect_choice, expect_int
from coterie.mechanisms.base import PerQuery, register
from coterie.mechanisms.factors import FACTORS, shared_out
from coterie.mechanisms.local import windowed
from coterie.plan import Plan, Round
from coterie.planning.tokens import Tokens


@register("strided")
@dataclass(frozen=True)
class Strided(PerQuery):
    """Strided attention of the Sparse Transformer (Child et al., 2019), for data with rows, as images or music have:

        A¹_i = {j : 0 ≤ i − j ≤ stride},   A²_i = {j : (i − j) mod stride = 0}

    Causal, as in the paper, j ≤ i in both. Without `is_causal` both reach as far ahead as they reach back: at most
    `stride` keys, and every stride-th key, on either side. Two steps lead from any token to any other.

    Positions are indices, padding counted. With Nq ≠ Nk, query i sits at key position i + causal_offset, also when not
    causal; the default is Nk − Nq. O(N·(stride + N/stride)), so the stride should be near √N. Causality: `strict`.

    Args:
        stride: of the second pattern, and how far the first one reaches.
        factors: "merged": every query meets the union, each pair once; "heads": A¹ in even heads and A² in odd ones;
            "layers": A¹ in even layers and A² in odd ones, by the `layer` of the call.

    Example:
        >>> import coterie, torch
        >>> q = torch.randn(1, 1, 8, 4)
        >>> plan = coterie.Strided(stride=3).plan(q, q, is_causal=True)
        >>> plan.to_dense()[0, 0, 7].tolist()
        [0, 1, 0, 0, 1, 1, 1, 1]
    """

    stride: int = 128
    factors: str = "merged"

    def check(self) -> None:
        expect_int("stride", self.stride, at_least=1)
        expect_choice("factors", self.factors, FACTORS)

    def build(self, tokens: Tokens) -> Plan:
        # In the union the key at the very end of the window is one of the second pattern already.
        reach = self.stride - (self.factors == "merged")
        window = (0 if tokens.causal else -reach, reach)
        rounds = shared_out(
            self.factors,
            tokens,
            lambda: windowed(tokens, window, tokens.query_mask, tokens.key_mask),
            lambda apart: self._strides(tokens, apart),
        )
        return tokens.plan(tuple(rounds))

    def _strides(self, tokens: Tokens, apart: bool) -> Round:
        """A group for each remainder of positions by the stride; `apart`: without the query's own position."""
        keys = tokens.sizes.keys
        groups = max(2, min(self.stride, keys))  # a remainder that no key has needs no group; 1 would be another graph
        position = tokens.query_positions
        remainder = position % self.stride
        among = tokens.query_mask & (remainder < groups)
        query_order, query_offsets = tokens.steps.group_by(remainder.clamp(max=groups - 1), among, groups)
        place = torch.arange(keys, device=tokens.device).expand_as(tokens.key_mask)
        key_order, key_offsets = tokens.steps.group_by(place % self.stride, tokens.key_mask, groups)
        own = torch.where((position >= 0) & (position < keys), position, -1)
        skip = tokens.per_head(own.gather(-1, query_order.long())[..., None]) if apart else None
        return Round(
            query_order=tokens.per_head(query_order),
            query_offsets=tokens.per_head(query_offsets),
            key_order=tokens.per_head(key_order),
            key_start=tokens.per_head(key_offsets[:, :-1]),
            key_stop=tokens.per_head(key_offsets[:, 1:]),
            skip=skip,
        )
