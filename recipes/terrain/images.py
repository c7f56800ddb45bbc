"""What the generator is given, and how far an image is from another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.terrain.network import SIGMA_MAX

DIFFICULTIES = 100


class Given(NamedTuple):
    """What a generator is called with, for one image."""

    noisy: Tensor
    sigma: Tensor
    difficulty: Tensor


def given(seed: int, size: int) -> Given:
    """Noise and a difficulty that a seed draws.

    >>> first = given(0, 16)
    >>> first.noisy.shape, first.sigma.tolist(), bool(torch.equal(first.noisy, given(0, 16).noisy))
    (torch.Size([1, 1, 16, 16]), [80.0], True)
    """
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, 1, size, size, generator=draw)
    level = torch.randint(DIFFICULTIES, (1,), generator=draw) / (DIFFICULTIES - 1)
    return Given(SIGMA_MAX * noise, torch.tensor([SIGMA_MAX]), level)


def relative_error(found: Tensor, exact: Tensor) -> float:
    """‖found − exact‖ / ‖exact‖, of values from −1 to 1.

    >>> relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0]))
    1.0
    """
    return float((found - exact).double().norm() / exact.double().norm().clamp(min=1e-300))


def shape_error(found: Tensor, exact: Tensor) -> float:
    """The same of both without their means: a terrain that is only higher has none, and the values' zero is no matter.

    >>> shape_error(torch.tensor([6.0, 4.0]), torch.tensor([5.0, 3.0]))
    0.0
    """
    return relative_error(found - found.mean(), exact - exact.mean())
