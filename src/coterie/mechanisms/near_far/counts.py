"""How many clusters there are: as many as were asked for, or what "auto" stands for at this length.

Each kind has `room`, the clusters of the longest sequence or block, `of(lengths)`, those of each, and `numbers`, what
native/layout.h makes the same of.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.planning.orders import ceil_div


class Fixed(NamedTuple):
    """The same number at every length."""

    room: int

    def of(self, lengths: Tensor) -> Tensor:
        return torch.full_like(lengths, self.room)

    @property
    def numbers(self) -> list[int]:
        return [0, 0, 0, self.room]


class Root(NamedTuple):
    """√(share·N) clusters of N tokens."""

    share: int
    room: int

    @staticmethod
    def upto(longest: int, share: int) -> Root:
        """For sequences that have at most `longest` tokens."""
        return Root(share, max(1, math.ceil(math.sqrt(share * longest))))

    def of(self, lengths: Tensor) -> Tensor:
        return (self.share * lengths.double()).sqrt().ceil().long().clamp(min=1)

    @property
    def numbers(self) -> list[int]:
        return [self.share, 0, 0, self.room]


class Rate(NamedTuple):
    """`clusters` to every `tokens`, rounded up."""

    clusters: int
    tokens: int
    room: int

    @staticmethod
    def upto(longest: int, block: int, clusters: int, tokens: int) -> Rate:
        """For blocks of `block` tokens; a block may be longer than the sequence, which has at most `longest`."""
        in_block, in_all = ceil_div(block * clusters, tokens), ceil_div(longest * clusters, tokens)
        return Rate(clusters, tokens, min(in_block, max(2, in_all)))  # 1 would be a graph of its own

    def of(self, lengths: Tensor) -> Tensor:
        return ((lengths * self.clusters + self.tokens - 1) // self.tokens).clamp(1, self.room)

    @property
    def numbers(self) -> list[int]:
        return [0, self.clusters, self.tokens, self.room]


Count = Fixed | Root | Rate
