"""BigGAN's generator (Brock et al. 2019, appendix B)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.biggan.attention import SelfAttention
from recipes.biggan.config import BOTTOM, Config
from recipes.biggan.norms import BatchNorm, ClassBatchNorm
from recipes.biggan.recompute import maybe
from recipes.biggan.spectral import SpectralConv2d, SpectralLinear, iterate, orthogonal


class UpBlock(nn.Module):
    """A residual block that doubles the resolution: norm, ReLU, up, convolution, norm, ReLU, convolution."""

    def __init__(self, inputs: int, outputs: int, config: Config) -> None:
        super().__init__()
        shared = config.shared_dim > 0
        about = config.shared_dim + config.chunk * config.hierarchical if shared else config.classes
        self.conv1 = SpectralConv2d(inputs, outputs, 3, padding=1)
        self.conv2 = SpectralConv2d(outputs, outputs, 3, padding=1)
        self.conv_sc = SpectralConv2d(inputs, outputs, 1)
        self.bn1 = ClassBatchNorm(inputs, about, shared=shared)
        self.bn2 = ClassBatchNorm(outputs, about, shared=shared)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C′, 2H, 2W)."""
        h = self.conv1(_doubled(F.relu(self.bn1(x, y))))
        h = self.conv2(F.relu(self.bn2(h, y)))
        return h + _doubled(self.conv_sc(x))  # a 1×1 convolution, so that it may come first: a quarter of the work


class Generator(nn.Module):
    """z, y → images in [−1, 1].

    Attributes:
        recompute: forget what blocks computed, and compute it again in the backward pass.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.shared = nn.Embedding(config.classes, config.shared_dim) if config.shared_dim else nn.Identity()
        widths = config.widths
        self.linear = SpectralLinear(config.chunk, widths[0] * BOTTOM**2)
        self.blocks = nn.ModuleList()
        for inputs, outputs, resolution in zip(widths, widths[1:], config.up_resolutions, strict=False):
            block = [UpBlock(inputs, outputs, config)]
            attention = [SelfAttention(outputs, SpectralConv2d)] if resolution in config.attention else []
            self.blocks.append(nn.ModuleList([*block, *attention]))
        self.output_layer = nn.Sequential(BatchNorm(widths[-1]), nn.ReLU(), SpectralConv2d(widths[-1], 3, 3, padding=1))
        orthogonal(self)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        """(B, dim_z) and classes (B,), or vectors in their place (B, shared_dim) → (B, 3, resolution, resolution)."""
        if self.training:
            iterate(self)
        if y is None:
            y = torch.zeros(len(z), dtype=torch.long, device=z.device)
        about = y if y.is_floating_point() else self.shared(y)
        parts = z.split(self.config.chunk, 1)
        first, each = parts[0], [about] * len(self.blocks)
        if self.config.hierarchical:
            each = [torch.cat([about, part], 1) for part in parts[1:]]
        h = self.linear(first).unflatten(1, (-1, BOTTOM, BOTTOM))
        pieces: Any = self.blocks
        for (block, *attention), own in zip(pieces, each, strict=True):
            h = maybe(block, h, own, recompute=self.recompute)
            for attend in attention:
                h = maybe(attend, h, recompute=self.recompute)
        return maybe(self.output_layer, h, recompute=self.recompute).float().tanh()


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")
