"""The order of images, and normal numbers that are cut off."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.common.draws import generator


class Order:
    """Every image once in an epoch, in another order in each."""

    def __init__(self, images: int, seed: int) -> None:
        self.images, self.seed = images, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def take(self, start: int, count: int) -> Tensor:
        """The images from the start-th on, counted over all epochs."""
        return torch.stack([self._at(position) for position in range(start, start + count)])

    def _at(self, position: int) -> Tensor:
        epoch, row = divmod(position, self.images)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = torch.randperm(self.images, generator=generator(self.seed, f"epoch {epoch}"))
        return self._order[row]


def truncated(count: int, dim: int, limit: float, drawn: torch.Generator) -> Tensor:
    """Normal numbers (count, dim), those beyond ±limit drawn anew, as the truncation trick wants them.

    >>> z = truncated(100, 8, 0.5, generator(0, "example"))
    >>> z.shape, bool(z.abs().max() <= 0.5)
    (torch.Size([100, 8]), True)
    """
    inside = math.erf(limit / math.sqrt(2))
    uniform = 2 * torch.rand(count, dim, generator=drawn, dtype=torch.float64) - 1
    return (math.sqrt(2) * torch.erfinv(uniform * inside)).clamp(-limit, limit).float()
