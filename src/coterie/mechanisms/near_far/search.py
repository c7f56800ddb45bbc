"""How near keys are searched for. `python -m benchmarks.search` measures what other numbers would give and cost."""

from __future__ import annotations

from typing import NamedTuple

import torch

from coterie.planning.steps import NearSearch


class Search(NamedTuple):
    """Few queries pick together, since a mean query is a good judge for a few similar ones only. More of them search
    together: they look at the same clusters of keys, so that these are read once for all of them."""

    leaf: int = 4  # queries that pick together, if causal
    party: int = 8  # leaves that search together
    reach: int = 12  # they look at so many times the keys that each picks; 0: at all
    groups: int = 57  # √(groups·N) leaves, if not causal: of 3 queries at 512 tokens, of 12 at 8,192

    def of(self, near: int, keys: int, *, largest: int) -> NearSearch:
        """For `near` keys of `keys`, in clusters of at most `largest`."""
        picked = min(near, keys)
        looked_at = picked * self.reach if self.reach else keys
        return NearSearch(picked, max(1, picked, looked_at), largest > torch.iinfo(torch.int16).max)
