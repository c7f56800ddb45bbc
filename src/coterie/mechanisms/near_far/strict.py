"""Strict groups: what picks for a query comes before it, or is the query itself."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from coterie.mechanisms.near_far.chunks import Chunks
from coterie.planning.tokens import Tokens


class Judges(NamedTuple):
    """What picks for the queries of each chunk: centroids of an older one, and behind them queries of its own."""

    centroids: Tensor  # (B, H, C · room, D) float64
    exist: Tensor  # (B, C): how many there are
    inherited: Tensor  # (B, C): how many of them are older than the chunk
    founders: Tensor  # (B, C): so many first queries of the chunk pick for themselves, and for who joins them

    @staticmethod
    def of(tokens: Tokens, chunks: Chunks, centroids: Tensor, exist: Tensor, most: int) -> Judges:
        """The centroids of the chunk before, or of the one before that, if it has more. Where they are fewer than a
        full chunk has, since their chunk has few queries in this call, the first queries of the chunk found the rest:
        a centroid that stands for all is a bad judge.

        None of this depends on later tokens: when a chunk has a query, the chunks before have all of theirs.

        Args:
            centroids, exist: (B, H, C · room, D) and (B, C), those of each chunk.
            most: groups of a full chunk.
        """
        sizes, sees, room = chunks.queries.sizes, chunks.older() > 0, centroids.shape[2] // exist.shape[1]
        have = torch.where(sizes > 0, exist, 0)
        last, other = (pad(have, (back, -back)) for back in (1, 2))
        skip = sees & (other > last)
        inherited = torch.where(skip, other, last)
        # Who sees no old keys picks none.
        founders = torch.where(sees, torch.minimum(sizes, most - inherited), 0)
        slot = torch.arange(room, device=tokens.device) - inherited[..., None]
        last, other = (pad(centroids, (0, 0, back * room, -back * room)) for back in (1, 2))
        older = torch.where(_each(skip, room), other, last)
        own = _first_queries(tokens, chunks, slot.clamp(min=0))
        judges = torch.where((slot < 0).flatten(1)[:, None, :, None], older, own)
        return Judges(judges, (inherited + founders).clamp(min=1), inherited, founders)

    def seat(self, chunks: Chunks, nearest: Tensor) -> Tensor:
        """The group of each query, (B, H, Nq): that of the nearest judge, but founders stay in their own."""
        rank = chunks.placed.cumsum(-1) - 1 - chunks.offsets.gather(-1, chunks.of_query)
        inherited, founders = (x.gather(-1, chunks.of_query) for x in (self.inherited, self.founders))
        founds = chunks.placed & (rank < founders)
        return torch.where(founds[:, None], (inherited + rank)[:, None], nearest)


def _each(chunk: Tensor, room: int) -> Tensor:
    """What holds for a chunk (B, C), for each of its groups: (B, 1, C · room, 1)."""
    return chunk.repeat_interleave(room, 1)[:, None, :, None]


def _first_queries(tokens: Tokens, chunks: Chunks, rank: Tensor) -> Tensor:
    """The queries of these ranks (B, C, room) in their chunks, (B, H, C · room, D) float64; any if there is none."""
    slot = (chunks.offsets[:, :-1, None] + rank).clamp(max=tokens.sizes.queries - 1).flatten(1)
    rows = chunks.order.long().gather(-1, slot)[:, None, :, None]
    first = tokens.raw_q.gather(2, rows.expand(-1, tokens.sizes.heads, -1, tokens.raw_q.shape[-1])).to(torch.float64)
    return torch.where(first.isfinite(), first, 0)
