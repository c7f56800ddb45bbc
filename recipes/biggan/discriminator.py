"""BigGAN's discriminator (Brock et al. 2019, appendix B), and its hinge loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.biggan.attention import SelfAttention
from recipes.biggan.config import Config
from recipes.biggan.recompute import maybe
from recipes.biggan.spectral import (
    SpectralConv2d,
    SpectralEmbedding,
    SpectralLinear,
    full_precision,
    iterate,
    orthogonal,
)


class DownBlock(nn.Module):
    """A residual block: ReLU, convolution, ReLU, convolution, halved.

    Args:
        first: the block that sees the image, which no ReLU may touch.
        halve: whether it halves the resolution.
    """

    def __init__(self, inputs: int, outputs: int, *, first: bool, halve: bool) -> None:
        super().__init__()
        self.first, self.halve = first, halve
        self.conv1 = SpectralConv2d(inputs, outputs, 3, padding=1)
        self.conv2 = SpectralConv2d(outputs, outputs, 3, padding=1)
        if halve or inputs != outputs:
            self.conv_sc = SpectralConv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C′, H/2, W/2), or of the same size."""
        h = self.conv2(F.relu(self.conv1(x if self.first else F.relu(x))))
        if self.halve:
            h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)  # before the 1×1 convolution: the same, with less work
        return h + (self.conv_sc(x) if hasattr(self, "conv_sc") else x)


class Discriminator(nn.Module):
    """Images, y → one number each: large if they look real.

    Attributes:
        recompute: forget what blocks computed, and compute it again in the backward pass.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        widths, resolutions = config.down_widths, config.down_resolutions
        self.blocks = nn.ModuleList()
        before = config.resolution
        for i, (inputs, outputs, resolution) in enumerate(zip(widths, widths[1:], resolutions, strict=False)):
            block = [DownBlock(inputs, outputs, first=i == 0, halve=resolution < before)]
            placed = resolution in config.d_attention and resolution < before
            attention = [SelfAttention(outputs, SpectralConv2d)] if placed else []
            self.blocks.append(nn.ModuleList([*block, *attention]))
            before = resolution
        self.linear = SpectralLinear(widths[-1], 1)
        self.embed = SpectralEmbedding(config.classes, widths[-1])
        orthogonal(self)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """(B, 3, resolution, resolution) and classes (B,) → (B,)."""
        if self.training:
            iterate(self)
        if y is None:
            y = torch.zeros(len(x), dtype=torch.long, device=x.device)
        h = x
        pieces: Any = self.blocks
        for block, *attention in pieces:
            h = maybe(block, h, recompute=self.recompute)
            for attend in attention:
                h = maybe(attend, h, recompute=self.recompute)
        h = F.relu(h).float().sum((2, 3))
        with full_precision(h):
            return self.linear(h)[:, 0] + (self.embed(y) * h).sum(1)


def d_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Hinge: mean max(0, 1 − D(x)) + mean max(0, 1 + D(G(z)))."""
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def g_loss(fake: Tensor) -> Tensor:
    """−mean D(G(z))."""
    return -fake.mean()
