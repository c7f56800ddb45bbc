"""What one layer's attention is asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """What one layer's attention is asked for."""

    module: Any  # an nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    dropout: float
