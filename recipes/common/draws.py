"""Random draws of a training: each step's own, so that a run that goes on draws what it would have drawn."""

from __future__ import annotations

import random

import torch


def begin_step(seed: int, step: int, process: int = 0) -> None:
    """All that is drawn from PyTorch's generator from here on depends on these numbers alone."""
    torch.manual_seed(random.Random(f"{seed} {step} {process}").getrandbits(63))


def generator(seed: int, what: str) -> torch.Generator:
    """One of its own, for what must be the same at any time."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {what}").getrandbits(63))
