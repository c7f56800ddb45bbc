"""Longformer: a window, and a few global tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.checks import expect_int
from coterie.mechanisms.base import PerQuery, register
from coterie.mechanisms.local import window_of, windowed
from coterie.plan import Plan, Round
from coterie.planning.orders import compact
from coterie.planning.tokens import Tokens


@register("longformer")
@dataclass(frozen=True)
class Longformer(PerQuery):
    """A window as in Local, and global tokens (Beltagy et al., 2020): the first `global_tokens` real keys are met by
    every query, and the queries at those positions meet every key. Each pair meets at most once.

    O(N·(window + global_tokens)). Causality: `strict`.

    Args:
        window: as in Local.
        global_tokens: how many of the first real tokens are global.

    Example:
        >>> import coterie, torch
        >>> q = torch.randn(1, 1, 6, 4)
        >>> coterie.Longformer(window=1, global_tokens=1).plan(q, q).to_dense()[0, 0].tolist()[:3]
        [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]
    """

    size_field = "window"

    window: int = 256
    global_tokens: int = 1

    def check(self) -> None:
        expect_int("window", self.window, at_least=1)
        expect_int("global_tokens", self.global_tokens, at_least=0)

    def build(self, tokens: Tokens) -> Plan:
        keys = tokens.sizes.keys
        global_keys = tokens.key_mask & (tokens.key_mask.cumsum(-1) <= self.global_tokens)
        position = tokens.query_positions
        inside = (position >= 0) & (position < keys)
        if keys:
            inside = inside & global_keys.gather(-1, position.clamp(0, keys - 1).long())
        global_queries = tokens.query_mask & inside
        near = windowed(
            tokens,
            window_of(self.window, tokens.causal),
            tokens.query_mask & ~global_queries,
            tokens.key_mask & ~global_keys,
        )
        return tokens.plan((near, self._everyone(tokens, global_queries, global_keys.sum(-1))))

    @staticmethod
    def _everyone(tokens: Tokens, global_queries: torch.Tensor, num_global: torch.Tensor) -> Round:
        """Two groups: the global queries meet all keys, the others the global keys, which are the first real ones."""
        ours, num_ours = compact(global_queries)
        others, num_others = compact(tokens.query_mask & ~global_queries)
        slots = torch.arange(tokens.sizes.queries, device=tokens.device).expand_as(ours)
        behind = (slots - num_ours[:, None]).clamp(min=0)
        query_order = torch.where(slots < num_ours[:, None], ours, others.gather(-1, behind))
        keys, num_keys = tokens.real_keys
        zero = torch.zeros_like(num_keys)
        return Round(
            query_order=tokens.per_head(query_order),
            query_offsets=tokens.per_head(torch.stack([zero, num_ours, num_ours + num_others], -1)),
            key_order=tokens.per_head(keys),
            key_start=tokens.per_head(torch.stack([zero, zero], -1)),
            key_stop=tokens.per_head(torch.stack([num_keys, num_global], -1)),
        )
