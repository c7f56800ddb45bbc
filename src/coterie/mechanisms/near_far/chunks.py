"""Chunks: real keys cut into pieces of equal length, and the queries that belong to each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.plan import Round
from coterie.planning.orders import Parts, ceil_div, compact
from coterie.planning.tokens import Tokens


class Chunks(NamedTuple):
    """Real keys cut into chunks, and the queries of each chunk.

    Chunk c of the queries is the one whose last visible key is in chunk `place` of the keys. A query that sees no key
    has no place.
    """

    size: int  # keys of a chunk
    keys: Tensor  # (B, Nk) int32, real keys in order
    num_keys: Tensor  # (B,)
    rank_of_key: Tensor  # (B, Nk): how many real keys come before
    order: Tensor  # (B, Nq) int32, queries that have a place, in order
    offsets: Tensor  # (B, chunks + 1) int32
    place: Tensor  # (B, chunks)
    of_query: Tensor  # (B, Nq): which of these chunks
    placed: Tensor  # (B, Nq) bool

    @staticmethod
    def of(tokens: Tokens, size: int) -> Chunks:
        """The chunks of these tokens."""
        keys, num_keys = tokens.real_keys
        upto = torch.nn.functional.pad(tokens.key_mask.cumsum(-1), (1, 0))
        last = (tokens.query_positions + 1).clamp(0, tokens.sizes.keys).long()
        rank = upto.gather(-1, last) - 1
        placed = tokens.query_mask & (rank >= 0)
        order, _ = compact(placed)
        capacity = ceil_div(tokens.sizes.queries, size) + 1
        absolute = rank.clamp(min=0) // size
        first = torch.where(placed, absolute, torch.iinfo(torch.int64).max)
        first = first.amin(-1, keepdim=True) if tokens.sizes.queries else absolute.new_zeros(tokens.sizes.batch, 1)
        first = torch.where(placed.any(-1, keepdim=True), first, 0)
        of_query = torch.where(placed, absolute - first, 0)
        counts = torch.zeros(tokens.sizes.batch, capacity, dtype=torch.int64, device=tokens.device)
        counts.scatter_add_(-1, of_query, placed.long())
        offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).to(torch.int32)
        place = first + torch.arange(capacity, device=tokens.device)
        return Chunks(size, keys, num_keys, upto[:, :-1], order, offsets, place, of_query, placed)

    @property
    def queries(self) -> Parts:
        """The queries of each chunk."""
        return Parts(self.order, self.offsets[:, :-1], self.offsets[:, 1:])

    def older(self) -> Tensor:
        """(B, chunks): how many chunks come before the previous one; none where there is no query to see them."""
        return torch.where(self.offsets[:, 1:] > self.offsets[:, :-1], self.place - 1, 0).clamp(min=0)

    def own_and_previous(self, tokens: Tokens) -> Round:
        """The round in which the queries of a chunk meet its keys and those of the chunk before."""
        stop = torch.minimum((self.place + 1) * self.size, self.num_keys[:, None])
        return Round(
            query_order=tokens.per_head(self.order),
            query_offsets=tokens.per_head(self.offsets),
            key_order=tokens.per_head(self.keys),
            key_start=tokens.per_head(torch.minimum((self.place - 1).clamp(min=0) * self.size, stop)),
            key_stop=tokens.per_head(stop),
        )
