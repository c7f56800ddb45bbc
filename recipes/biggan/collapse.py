"""Early warning of mode collapse: generated images that resemble each other far more than real ones do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 0.3  # of the real images' spread
_COARSE = 8  # pixels: noise must not count as variety


def spread(images: Tensor) -> float:
    """The mean distance of two of the images (count, 3, H, W), which are made coarse first.

    >>> spread(torch.ones(5, 3, 16, 16))
    0.0
    """
    coarse = F.adaptive_avg_pool2d(images.double(), _COARSE).flatten(1)
    return float(torch.pdist(coarse).mean())


def warning(step: int, variety: float) -> str | None:
    """A sentence if the spread is a small share of that of real images."""
    if variety >= LIMIT:
        return None
    return (
        f"step {step}: generated images vary {variety:.0%} as much as real ones, which looks like mode collapse. "
        "Other rates (--ttur), a larger --batch or more rounds may help."
    )
