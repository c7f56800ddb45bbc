"""Fixed: blocks, and the last keys of every block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.checks import expect, expect_choice, expect_int
from coterie.mechanisms.base import PerQuery, register
from coterie.mechanisms.factors import FACTORS, shared_out
from coterie.plan import Plan, Round
from coterie.planning.orders import ceil_div, compact
from coterie.planning.tokens import Tokens


@register("fixed")
@dataclass(frozen=True)
class Fixed(PerQuery):
    """Fixed attention of the Sparse Transformer (Child et al., 2019), for data without rows, as text:

        A¹_i = {j : ⌊j/stride⌋ = ⌊i/stride⌋},   A²_i = {j : j mod stride ≥ stride − summary}

    A query meets its own block, and the last keys of every block, which can sum it up. Causal, as in the paper, j ≤ i
    in both. Without `is_causal` a query meets its whole block, and the last keys of the blocks behind it too.

    Positions are counted in real keys, so padding changes nothing; a query's is the number of real keys before key
    position i + causal_offset, and the default offset is Nk − Nq. O(N·(stride + summary·N/stride)).
    Causality: `strict`.

    Args:
        stride: keys of a block.
        summary: how many of them, the last ones, everybody meets; the paper takes 8, 16 or 32 of 128 or 256.
        factors: as in Strided. Where A² stands alone and holds no key, a causal query attends to itself; if not causal,
            in sequences of at most stride − summary keys, its answer is 0.

    Example:
        >>> import coterie, torch
        >>> q = torch.randn(1, 1, 8, 4)
        >>> plan = coterie.Fixed(stride=3, summary=1).plan(q, q, is_causal=True)
        >>> plan.to_dense()[0, 0, 7].tolist()
        [0, 0, 1, 0, 0, 1, 1, 1]
    """

    stride: int = 128
    summary: int = 8
    factors: str = "merged"

    def check(self) -> None:
        expect_int("stride", self.stride, at_least=1)
        expect_int("summary", self.summary, at_least=1)
        expect(self.summary <= self.stride, "summary", f"at most the {self.stride} keys of a block", self.summary)
        expect_choice("factors", self.factors, FACTORS)

    def build(self, tokens: Tokens) -> Plan:
        queries = self._query_blocks(tokens)
        rounds = shared_out(
            self.factors, tokens, lambda: self._own(tokens, *queries), lambda apart: self._last(tokens, *queries, apart)
        )
        return tokens.plan(tuple(rounds))

    def _query_blocks(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of each block in order, (B, Nq), where each block begins, (B, G + 1), and which one it is."""
        block = self._block(tokens, tokens.query_positions)
        first = self._block(tokens, tokens.offset[:, None])
        groups = ceil_div(tokens.sizes.queries, self.stride) + 2
        order, offsets = tokens.steps.group_by(block - first, tokens.query_mask, groups)
        return order, offsets, first + torch.arange(groups, device=tokens.device)

    def _block(self, tokens: Tokens, position: Tensor) -> Tensor:
        """The block of a key position (B, …), which may be outside, counted in real keys."""
        inside = position.clamp(0, tokens.sizes.keys).long()
        before = torch.nn.functional.pad(tokens.key_mask.cumsum(-1), (1, 0))
        return torch.div(before.gather(-1, inside) + position - inside, self.stride, rounding_mode="floor")

    def _own(self, tokens: Tokens, order: Tensor, offsets: Tensor, block: Tensor) -> Round:
        """Each block of queries meets its block of keys."""
        keys, count = tokens.real_keys
        start, stop = self._before(count, block * self.stride), self._before(count, (block + 1) * self.stride)
        return self._round(tokens, order, offsets, keys, start, stop)

    def _last(self, tokens: Tokens, order: Tensor, offsets: Tensor, block: Tensor, apart: bool) -> Round:
        """Each block of queries meets the last keys of every block; `apart`: but for its own.

        The list is written twice, so that all blocks but one are a range: from the next around to the one before.
        """
        place = tokens.key_mask.cumsum(-1) - 1
        keys, count = compact(tokens.key_mask & (place % self.stride >= self.stride - self.summary))
        start, stop = self._before(count, block * self.summary), self._before(count, (block + 1) * self.summary)
        none, everyone = torch.zeros_like(start), count[:, None].expand_as(start)
        if tokens.causal:
            return self._round(tokens, order, offsets, keys, none, start if apart else stop)
        if not apart:
            return self._round(tokens, order, offsets, keys, none, everyone)
        slots = torch.arange(2 * keys.shape[-1], device=tokens.device)
        slots = torch.where(slots < count[:, None], slots, slots - count[:, None])
        twice = keys.gather(-1, slots.clamp(max=max(0, keys.shape[-1] - 1))) if keys.shape[-1] else keys
        return self._round(tokens, order, offsets, twice, stop, start + everyone)

    @staticmethod
    def _before(count: Tensor, place: Tensor) -> Tensor:
        """How many of `count` keys come before a place, which may be outside."""
        return torch.minimum(place.clamp(min=0), count[:, None])

    @staticmethod
    def _round(tokens: Tokens, order: Tensor, offsets: Tensor, keys: Tensor, start: Tensor, stop: Tensor) -> Round:
        return Round(
            query_order=tokens.per_head(order),
            query_offsets=tokens.per_head(offsets),
            key_order=tokens.per_head(keys),
            key_start=tokens.per_head(start),
            key_stop=tokens.per_head(stop),
        )
