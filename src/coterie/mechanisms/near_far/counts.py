"""How many clusters there are: as many as were asked for, or what "auto" stands for at this length.

Each kind has `room`, the clusters of the longest sequence or block, and `of(lengths)`, those of each.
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


class Root(NamedTuple):
    """√(share·N) clusters of N tokens; there are at most `longest`."""

    share: int
    longest: int

    @property
    def room(self) -> int:
        return max(1, math.ceil(math.sqrt(self.share * self.longest)))

    def of(self, lengths: Tensor) -> Tensor:
        return (self.share * lengths.double()).sqrt().ceil().long().clamp(min=1)


class Rate(NamedTuple):
    """`clusters` to every `tokens`; blocks hold `block` tokens, a sequence at most `longest`."""

    clusters: int
    tokens: int
    block: int
    longest: int

    @property
    def room(self) -> int:
        in_block, in_all = (ceil_div(length * self.clusters, self.tokens) for length in (self.block, self.longest))
        return min(in_block, max(2, in_all))  # 1 would be a graph of its own

    def of(self, lengths: Tensor) -> Tensor:
        return ((lengths * self.clusters + self.tokens - 1) // self.tokens).clamp(1, self.room)


Count = Fixed | Root | Rate
