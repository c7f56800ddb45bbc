"""Few bits: how wide the kernels like rows to be, and how means and the scales of codes are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.planning.orders import ceil_div

PANEL = 16  # keys whose codes lie side by side
LEAST, MOST = 1e-30, 1e28  # of what codes are multiplied with
_SHORT = 32767  # means are whole numbers of 16 bits


def padded(size: int) -> int:
    """The next multiple of what a panel has."""
    return ceil_div(size, PANEL) * PANEL


def wide(x: Tensor, filling: int) -> Tensor:
    """Rows that are padded."""
    return torch.nn.functional.pad(x, (0, padded(x.shape[-1]) - x.shape[-1]), value=filling)


def whole(means: Tensor) -> tuple[Tensor, Tensor]:
    """Means (float64) as whole numbers of 16 bits, and what each is to be multiplied with: NaN if one is not finite."""
    finite = (means.abs() <= torch.finfo(torch.float32).max).all(-1)
    step = means.abs().amax(-1).to(torch.float32).clamp(min=LEAST) / _SHORT
    rounded = torch.where(finite[..., None], (means / step.to(torch.float64)[..., None]).round(), 0)
    return wide(rounded, 0).to(torch.int16), torch.where(finite, step, torch.nan)


def above(x: Tensor) -> Tensor:
    """The least numbers of bfloat16 that are not below x > 0."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
