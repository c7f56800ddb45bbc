"""TopK: the oracle, each query's own best keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.checks import expect_int
from coterie.mechanisms.base import PerQuery, register
from coterie.plan import Plan, Round
from coterie.planning.tokens import Tokens


@register("topk")
@dataclass(frozen=True)
class TopK(PerQuery):
    """The oracle of the supplement's §16.2: query i meets the k keys with the largest scale·q_i·k_j that it may see.

    Finding them takes every score, so this measures what a mechanism could reach; it is not fast. O(Nq·Nk).
    Causality: `strict`.

    Example:
        >>> import coterie, torch
        >>> q, k = torch.randn(2, 1, 1, 50, 8).unbind(0)
        >>> met = coterie.TopK(k=3).plan(q, k).to_dense()[0, 0]
        >>> bool(met[7, (q @ k.mT)[0, 0, 7].argmax()])
        True
    """

    size_field = "k"

    k: int = 32

    def check(self) -> None:
        expect_int("k", self.k, at_least=1)

    def build(self, tokens: Tokens) -> Plan:
        sizes = tokens.sizes
        width = min(self.k, sizes.keys)
        top = tokens.steps.top_keys(tokens, tokens.scale * tokens.q, width, causal=tokens.causal)
        # How many real keys a query sees: all of them, or those up to its position.
        so_far = torch.nn.functional.pad(tokens.key_mask.cumsum(-1), (1, 0))
        reach = tokens.query_positions + 1 if tokens.causal else torch.full_like(tokens.query_positions, sizes.keys)
        seen = so_far.gather(-1, reach.clamp(0, sizes.keys).long())
        count = torch.where(tokens.query_mask, seen, 0).clamp(max=width)
        start = (torch.arange(sizes.queries, device=tokens.device) * width).expand(sizes.batch, -1)
        each = torch.arange(sizes.queries + 1, device=tokens.device).expand(sizes.batch, -1)
        # A masked query keeps its group, which has no keys.
        return tokens.plan(
            (
                Round(
                    query_order=tokens.per_head(each[:, :-1]),
                    query_offsets=tokens.per_head(each),
                    key_order=top.flatten(-2).to(torch.int32),
                    key_start=tokens.per_head(start),
                    key_stop=tokens.per_head(start + count),
                ),
            )
        )
