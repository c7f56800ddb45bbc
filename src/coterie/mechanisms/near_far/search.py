"""How near keys are searched for. `python -m benchmarks.search` measures what other numbers would give and cost."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.planning.steps import NearSearch


class Search(NamedTuple):
    """Few queries pick together, since a mean query is a good judge for a few similar ones only. More of them search
    together: they look at the same clusters of keys, so that these are read once for all of them."""

    leaf: int = 4  # queries that pick together, if causal
    groups: int = 57  # √(groups·N) leaves, if not causal: of 3 queries at 512 tokens, of 12 at 8,192
    party: int = 8  # leaves that search together
    reach: int = 24  # they look at so many times the keys that each picks; 0: at all
    least: int = 6144  # and at so many keys at least, if causal: there clusters are small, and many; else at a third

    def looked_at(self, near: int, keys: int, *, causal: bool) -> int:
        """How many of `keys` keys are looked at, or a few more, for `near` picks."""
        if not self.reach:
            return max(1, keys)
        return max(1, min(near, keys) * self.reach, self.least if causal else self.least // 3)

    def together(self, looked_at: int, keys: Tensor, room: int) -> Tensor:
        """(B,) how many leaves search together, of at most `room` in a chunk that sees at most `keys` (B,) keys."""
        return torch.where(keys > looked_at, self.party, room)  # if they look at all, it does not matter who with

    def of(self, near: int, keys: int, *, causal: bool, largest: int) -> NearSearch:
        """For `near` keys of `keys`, in clusters of at most `largest`."""
        wide = largest > torch.iinfo(torch.int16).max
        return NearSearch(min(near, keys), self.looked_at(near, keys, causal=causal), wide)
