"""Images from a generator: by seed, truncated, between two others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.biggan.deep import DeepGenerator
from recipes.biggan.draws import truncated
from recipes.biggan.images import Images
from recipes.biggan.sheets import to_bytes
from recipes.common.draws import generator as drawing

_DEEP_CUT = 2.0  # z of BigGAN-deep is a normal distribution cut at ±2, times the truncation


def draw_z(model: Any, count: int, truncation: float | None, seed: int) -> Tensor:
    """So many z (count, dim_z).

    Args:
        truncation: draw numbers beyond ± this anew; None takes all. BigGAN-deep multiplies instead, by ≤ 1.
    """
    drawn, dim = drawing(seed, "z"), model.config.dim_z
    if isinstance(model, DeepGenerator):
        return (truncation or 1.0) * truncated(count, dim, _DEEP_CUT, drawn)
    if truncation is None:
        return torch.randn(count, dim, generator=drawn)
    return truncated(count, dim, truncation, drawn)


def draw_y(model: Any, count: int, seed: int, only: int | None = None) -> Tensor:
    """So many classes: random ones, or one."""
    if only is not None:
        return torch.full((count,), only)
    return torch.randint(model.config.classes, (count,), generator=drawing(seed, "y"))


@torch.no_grad()
def generate(model: Any, z: Tensor, y: Tensor, *, truncation: float | None = None, batch: int = 64) -> Tensor:
    """Images in [−1, 1] on the CPU, in eval mode; the model goes back to the mode that it was in."""
    before = model.training
    model.eval()
    device = next(model.parameters()).device
    more = {"truncation": truncation or 1.0} if isinstance(model, DeepGenerator) else {}
    try:
        made = [
            model(some_z.to(device), some_y.to(device), **more).cpu()
            for some_z, some_y in zip(z.split(batch), y.split(batch), strict=True)
        ]
    finally:
        model.train(before)
    return torch.cat(made)


def sample(model: Any, count: int, seed: int, batch: int = 64) -> Images:
    """So many images as a set, in bytes."""
    y = draw_y(model, count, seed)
    return Images(to_bytes(generate(model, draw_z(model, count, None, seed), y, batch=batch)), y, [])


def between(ends: Tensor, steps: int) -> Tensor:
    """From each z to the next but one: rows of `steps` z on the straight line, (pairs · steps, dim_z).

    Args:
        ends: (2 · pairs, dim_z).
    """
    share = torch.linspace(0, 1, steps)[None, :, None]
    first, last = ends[::2, None], ends[1::2, None]
    return (first + (last - first) * share).flatten(0, 1)
