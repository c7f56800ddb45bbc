"""Random draws of a training: each step's own, so that a run that goes on draws what it would have drawn."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor


def begin_step(seed: int, step: int, process: int = 0) -> None:
    """All that is drawn from PyTorch's generator from here on depends on these numbers alone."""
    torch.manual_seed(random.Random(f"{seed} {step} {process}").getrandbits(63))


def generator(seed: int, what: str) -> torch.Generator:
    """One of its own, for what must be the same at any time."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {what}").getrandbits(63))


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
