"""The generator: one step from noise to a map of heights, by a U-Net with attention in its coarse levels.

Written from the graph in the package's ONNX file. Modules carry the names of the weights there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coterie
from coterie.mechanisms import Mechanism

GROUPS = 32  # of channels that a norm takes together
HEAD = 32  # channels of a head
SIGMA_MIN, SIGMA_MAX, SIGMA_DATA = 0.002, 80.0, 0.5  # the noise it was trained with, and how much images vary


class Layout(NamedTuple):
    """How a U-Net is laid out.

    Attributes:
        widths: channels of each level, the finest first.
        attends: whether each level has attention.
        blocks: residual blocks of a level on the way down; one more on the way up.
        size: pixels along a side of the image.
    """

    widths: tuple[int, ...]
    attends: tuple[bool, ...]
    blocks: int
    size: int


class Residual(nn.Module):
    """Norm, convolution, norm scaled and shifted by what the network is told, convolution; added to the input.

    Args:
        resample: 2 doubles the sides of the image, 0.5 halves them.
    """

    def __init__(self, inside: int, outside: int, told: int, resample: float = 1) -> None:
        super().__init__()
        self.resample = resample
        self.in_layers = nn.Sequential(nn.GroupNorm(GROUPS, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, 1, 1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(told, 2 * outside))
        last = nn.Conv2d(outside, outside, 3, 1, 1)
        self.out_layers = nn.Sequential(nn.GroupNorm(GROUPS, outside), nn.SiLU(), nn.Identity(), last)
        self.skip_connection = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        h = self.in_layers[2](self._resampled(self.in_layers[:2](x)))
        scale, shift = self.emb_layers(told)[:, :, None, None].chunk(2, 1)
        h = self.out_layers[1:](self.out_layers[0](h) * (1 + scale) + shift)
        return self.skip_connection(self._resampled(x)) + h

    def _resampled(self, x: Tensor) -> Tensor:
        if self.resample == 1:
            return x
        return F.avg_pool2d(x, 2) if self.resample < 1 else F.interpolate(x, scale_factor=2, mode="nearest")


class Attention(nn.Module):
    """Every pixel attends to every pixel, or to those that a mechanism chooses.

    Attributes:
        mechanism: None is `scaled_dot_product_attention`.
        layer: the index of this block among all that attend.
    """

    mechanism: Mechanism | None = None
    layer = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(self.norm(x)).unflatten(1, (3, -1, HEAD)).flatten(-2).transpose(-1, -2)
        q, k, v = rows.unbind(1)  # each (B, H, pixels, HEAD)
        if self.mechanism is None:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = coterie.attention(q, k, v, self.mechanism, layer=self.layer)
        return x + self.proj_out(out.transpose(-1, -2).reshape(x.shape))


class Steps(nn.Sequential):
    """Blocks one after the other; residual ones are told what the network is told."""

    def forward(self, x: Tensor, told: Tensor) -> Tensor:  # type: ignore[override]
        for block in self:
            x = block(x, told) if isinstance(block, Residual) else block(x)
        return x


class UNet(nn.Module):
    """Down through the levels, up again, with what was seen on the way down beside it."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        width = self.width = layout.widths[0]
        told = 4 * width
        self.time_embed = nn.Sequential(nn.Linear(width, told), nn.SiLU(), nn.Linear(told, told))
        self.label_emb = nn.Sequential(nn.Linear(1, told), nn.SiLU(), nn.Linear(told, told))
        self.input_blocks = nn.ModuleList([Steps(nn.Conv2d(1, width, 3, 1, 1))])
        seen, last = [width], len(layout.widths) - 1
        for level, (wide, attends) in enumerate(zip(layout.widths, layout.attends, strict=True)):
            for _ in range(layout.blocks):
                self.input_blocks.append(Steps(Residual(width, wide, told), *([Attention(wide)] if attends else [])))
                width = wide
                seen.append(width)
            if level < last:
                self.input_blocks.append(Steps(Residual(width, width, told, 0.5)))
                seen.append(width)
        self.middle_block = Steps(Residual(width, width, told), Attention(width), Residual(width, width, told))
        self.output_blocks = nn.ModuleList()
        for level in range(last, -1, -1):
            wide = layout.widths[level]
            for index in range(layout.blocks + 1):
                parts: list[nn.Module] = [Residual(width + seen.pop(), wide, told)]
                width = wide
                parts += [Attention(wide)] if layout.attends[level] else []
                parts += [Residual(wide, wide, told, 2)] if level and index == layout.blocks else []
                self.output_blocks.append(Steps(*parts))
        self.out = nn.Sequential(nn.GroupNorm(GROUPS, width), nn.SiLU(), nn.Conv2d(width, 1, 3, 1, 1))

    def forward(self, x: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(-math.log(10_000) / half * torch.arange(half, dtype=x.dtype, device=x.device))
        angles = 250 * sigma.log()[:, None] * frequencies
        told = self.time_embed(torch.cat([angles.cos(), angles.sin()], -1)) + self.label_emb(difficulty[:, None])
        seen = []
        for steps in self.input_blocks:
            x = steps(x, told)
            seen.append(x)
        x = self.middle_block(x, told)
        for steps in self.output_blocks:
            x = steps(torch.cat([x, seen.pop()], 1), told)
        return self.out(x)


class Generator(nn.Module):
    """Heights from noise, in one step: a consistency model (Song et al., 2023).

    Example:
        >>> import torch
        >>> from recipes.terrain.network import Generator, Layout
        >>> model = Generator(Layout((32, 32), (False, True), 1, 16))
        >>> list(model.attentions())
        ['input_blocks.3.1', 'middle_block.1', 'output_blocks.0.1', 'output_blocks.1.1']
        >>> model(80 * torch.randn(2, 1, 16, 16), torch.full((2,), 80.0), torch.rand(2)).shape
        torch.Size([2, 1, 16, 16])
    """

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.network = UNet(layout)
        for index, block in enumerate(self.attentions().values()):
            block.layer = index

    def attentions(self) -> dict[str, Attention]:
        """Every block that attends, by name, in the order in which they run."""
        return {name: each for name, each in self.network.named_modules() if isinstance(each, Attention)}

    def forward(self, noisy: Tensor, sigma: Tensor, difficulty: Tensor) -> Tensor:
        """An image with values from −1 to 1.

        Args:
            noisy: (B, 1, size, size): noise times sigma.
            sigma: (B,) how strong the noise is.
            difficulty: (B,) how rough the terrain is to be, from 0 to 1.
        """
        beyond, total = (sigma - SIGMA_MIN)[:, None, None, None], (sigma**2 + SIGMA_DATA**2)[:, None, None, None]
        kept = SIGMA_DATA**2 / (beyond**2 + SIGMA_DATA**2)
        found = self.network(noisy / total.sqrt(), sigma, difficulty)
        return (beyond * SIGMA_DATA / total.sqrt() * found + kept * noisy).clamp(-1, 1)
