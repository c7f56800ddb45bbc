"""TopK: the oracle, each query's own best keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.errors import expect_int
from coterie.grouping import top_indices
from coterie.mechanisms.base import Mechanism, Tokens, register
from coterie.plan import Plan, Round

_BUDGET = 1 << 22  # scores in memory at a time


@register("topk")
@dataclass(frozen=True)
class TopK(Mechanism):
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

    k: int = 32

    causality: ClassVar[str] = "strict"

    def check(self) -> None:
        expect_int("k", self.k, at_least=1)

    def build(self, tokens: Tokens) -> Plan:
        sizes = tokens.sizes
        width = min(self.k, sizes.keys)
        positions = torch.arange(sizes.keys, device=tokens.device)
        rows = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * sizes.keys))
        tops, counts = [], []
        for part in torch.arange(sizes.queries, device=tokens.device).split(rows):
            seen = tokens.key_mask[:, None, :] & tokens.query_mask[:, part, None]
            if tokens.causal:
                seen = seen & (positions <= tokens.query_positions[:, part, None])
            scores = tokens.scale * (tokens.q[:, :, part] @ tokens.k.mT)
            tops.append(top_indices(scores, seen[:, None], width))
            counts.append(seen.sum(-1).clamp(max=width))
        lead = (sizes.batch, sizes.heads)
        top = torch.cat(tops, 2) if tops else torch.zeros(*lead, 0, width, dtype=torch.int64, device=tokens.device)
        count = torch.cat(counts, 1) if counts else torch.zeros(sizes.batch, 0, device=tokens.device)
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
