"""Full: everybody meets everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coterie.mechanisms.base import PerQuery, register
from coterie.mechanisms.local import at_once
from coterie.plan import Plan, Round
from coterie.planning import whole
from coterie.planning.tokens import Tokens


@register("full")
@dataclass(frozen=True)
class Full(PerQuery):
    """Dense attention, softmax(scale·q·kᵀ)·v, through the same engine: every query meets every key. O(Nq·Nk).

    Example:
        >>> import coterie, torch
        >>> q = torch.randn(1, 2, 9, 4)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        >>> torch.allclose(coterie.attention(q, q, q, coterie.Full()), dense, atol=1e-6)
        True
    """

    def build(self, tokens: Tokens) -> Plan:
        if whole.possible(tokens.call):
            one, all_keys = max(1, tokens.sizes.queries), 2**32
            found = whole.neighbours(tokens.query_mask, tokens.key_mask, tokens.offset, 1, one, all_keys, all_keys)
            return tokens.plan((at_once(tokens, found),), sound=True)
        queries, num_queries = tokens.real_queries
        keys, num_keys = tokens.real_keys
        zero = torch.zeros_like(num_queries)
        everyone = Round(
            query_order=tokens.per_head(queries),
            query_offsets=tokens.per_head(torch.stack([zero, num_queries], -1)),
            key_order=tokens.per_head(keys),
            key_start=tokens.per_head(zero[:, None]),
            key_stop=tokens.per_head(num_keys[:, None]),
        )
        return tokens.plan((everyone,))
