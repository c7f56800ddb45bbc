"""Reformer (LSH-X): cross-polytope buckets, sorted, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.checks import check_flag, expect_int, expect_seed
from coterie.mechanisms.base import Mechanism, StrictIfAsked, register
from coterie.plan import Plan, Round
from coterie.planning.orders import balanced_offsets, ceil_div
from coterie.planning.tokens import Tokens


@register("reformer")
@dataclass(frozen=True)
class Reformer(Mechanism):
    """LSH attention of the Reformer (Kitaev et al., 2020), for shared and for separate queries and keys.

    Queries and keys are hashed to the nearest of ± random axes, h(u) = argmax [uR; −uR], by the same rotation R; both
    are sorted by (bucket, position) and cut into the same number of chunks; a chunk of queries meets its own chunk of
    keys and the one before. With q = k this is the paper's shared-QK scheme, except that a token always meets itself.
    A pair met in several rounds counts each time. O(rounds·N·(log N + chunk_size)).

    Causality: `mask`. With `strict=True` chunks are counted inside each bucket, from its first key: a query meets the
    keys of its bucket that are in the last chunk begun at its position, and in the chunk before. That depends on
    earlier tokens (and the number of keys, which sets that of buckets) alone. Without `is_causal` it changes nothing.

    Args:
        rounds: hashing rounds.
        chunk_size: tokens in a chunk; there are about as many buckets as chunks.
        strict: leave earlier rows alone when later tokens change.
        seed: of the random draws.

    Example:
        >>> import coterie, torch
        >>> qk, v = torch.randn(2, 1, 4, 200, 16).unbind(0)
        >>> coterie.attention(qk, qk, v, coterie.Reformer(rounds=2), is_causal=True).shape
        torch.Size([1, 4, 200, 16])
    """

    size_field = "chunk_size"

    rounds: int = 4
    chunk_size: int = 64
    strict: bool = False
    seed: int = 0

    causality = StrictIfAsked()

    def check(self) -> None:
        expect_int("rounds", self.rounds, at_least=1)
        expect_int("chunk_size", self.chunk_size, at_least=1)
        check_flag("strict", self.strict)
        expect_seed(self.seed)

    def build(self, tokens: Tokens) -> Plan:
        chunks = ((tokens.key_mask.sum(-1) + self.chunk_size - 1) // self.chunk_size).clamp(min=1)
        capacity = max(2, ceil_div(tokens.sizes.keys, self.chunk_size))  # 1 would be a graph of its own
        columns, most = (chunks + 1) // 2, (capacity + 1) // 2
        query_buckets, key_buckets = tokens.steps.buckets(tokens, columns, most, self.rounds, "none", self.seed)
        rounds = []
        for r in range(self.rounds):
            sides = query_buckets[:, :, r], key_buckets[:, :, r]
            if self.strict and tokens.causal:
                rounds.append(self._inside_buckets(tokens, *sides, 2 * most, capacity))
            else:
                rounds.append(self._across_buckets(tokens, *sides, chunks, capacity))
        return tokens.plan(tuple(rounds))

    @staticmethod
    def _across_buckets(
        tokens: Tokens, query_buckets: Tensor, key_buckets: Tensor, chunks: Tensor, capacity: int
    ) -> Round:
        """Sorted by bucket, cut evenly; each chunk also meets the chunk of keys before it."""
        num_queries, num_keys = tokens.query_mask.sum(-1), tokens.key_mask.sum(-1)
        key_offsets = balanced_offsets(num_keys, chunks, capacity)
        before = key_offsets[:, (torch.arange(capacity, device=tokens.device) - 1).clamp(min=0)]
        return Round(
            query_order=tokens.steps.order_by(query_buckets, tokens.query_mask[:, None]),
            query_offsets=tokens.per_head(balanced_offsets(num_queries, chunks, capacity)),
            key_order=tokens.steps.order_by(key_buckets, tokens.key_mask[:, None]),
            key_start=tokens.per_head(before),
            key_stop=tokens.per_head(key_offsets[:, 1:]),
        )

    def _inside_buckets(
        self, tokens: Tokens, query_buckets: Tensor, key_buckets: Tensor, buckets: int, capacity: int
    ) -> Round:
        """Chunks counted inside each bucket; a query's chunk is that of the last key of its bucket not after it."""
        key_mask = tokens.key_mask[:, None].expand_as(key_buckets)
        key_order, bucket_offsets = tokens.steps.group_by(key_buckets, key_mask, buckets)
        bucket_offsets = bucket_offsets.long()
        bucket_start, bucket_stop = bucket_offsets[..., :-1], bucket_offsets[..., 1:]
        chunks = (bucket_stop - bucket_start + self.chunk_size - 1) // self.chunk_size
        chunks = chunks.clamp(min=1)  # an empty bucket has one too, for its queries
        first_group = chunks.cumsum(-1) - chunks
        groups = capacity + buckets
        seen = self._keys_so_far(tokens, query_buckets, key_buckets, buckets)
        chunk = (seen - 1).clamp(min=0) // self.chunk_size
        group = first_group.gather(-1, query_buckets) + chunk
        query_order, query_offsets = tokens.steps.group_by(group, tokens.query_mask[:, None].expand_as(group), groups)

        index = torch.arange(groups, device=tokens.device).expand(*first_group.shape[:2], -1)
        bucket = torch.searchsorted(first_group, index.contiguous(), right=True) - 1
        start, stop = bucket_start.gather(-1, bucket), bucket_stop.gather(-1, bucket)
        own = index - first_group.gather(-1, bucket)
        begin = start + (own - 1).clamp(min=0) * self.chunk_size
        end = start + (own + 1) * self.chunk_size
        return Round(
            query_order=query_order,
            query_offsets=query_offsets,
            key_order=key_order,
            key_start=torch.minimum(begin, stop).to(torch.int32),
            key_stop=torch.minimum(end, stop).to(torch.int32),
        )

    @staticmethod
    def _keys_so_far(tokens: Tokens, query_buckets: Tensor, key_buckets: Tensor, buckets: int) -> Tensor:
        """(B, H, Nq): how many real keys of a query's bucket are not after it.

        One sort of (bucket, position) codes, and a binary search for each query.
        """
        keys = tokens.sizes.keys
        span = keys + 1
        codes = torch.where(
            tokens.key_mask[:, None],
            key_buckets * span + torch.arange(keys, device=tokens.device),
            buckets * span,
        )
        codes = codes.sort(-1).values
        position = tokens.query_positions.clamp(-1, keys - 1)[:, None]
        wanted = query_buckets * span + position
        upto = torch.searchsorted(codes, wanted.contiguous(), right=True)
        below = torch.searchsorted(codes, (query_buckets * span).contiguous())
        return upto - below
