"""BigGAN-deep's generator (Brock et al. 2019, appendix B), as `pytorch-pretrained-biggan` runs it.

It is another architecture than `generator.Generator`: blocks with a bottleneck, z as a whole in every block, and batch
norms with statistics for 51 degrees of truncation. Weights come with their spectral norm divided out: it is made to run
and to be fine-tuned, not to be trained from nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.checks import expect
from recipes.biggan.attention import SelfAttention
from recipes.biggan.config import BOTTOM

_SQUEEZE = 4  # a block is so much narrower inside


@dataclass(frozen=True)
class DeepConfig:
    """A BigGAN-deep generator; the defaults are those of the published 128².

    Args:
        layers: of each block, whether it doubles the resolution, and its channels in and out in multiples of ch.
        attention_before: the attention block comes before this block.
    """

    resolution: int = 128
    ch: int = 128
    dim_z: int = 128
    classes: int = 1000
    layers: tuple[tuple[bool, int, int], ...] = (
        (False, 16, 16),
        (True, 16, 16),
        (False, 16, 16),
        (True, 16, 8),
        (False, 8, 8),
        (True, 8, 4),
        (False, 4, 4),
        (True, 4, 2),
        (False, 2, 2),
        (True, 2, 1),
    )
    attention_before: int = 8
    eps: float = 1e-4
    truncations: int = 51

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "layers": [list(layer) for layer in self.layers]}

    @staticmethod
    def from_dict(found: dict[str, Any]) -> DeepConfig:
        """From what `to_dict` gave."""
        return DeepConfig(**{**found, "layers": tuple(tuple(layer) for layer in found["layers"])})


class _TruncatedBatchNorm(nn.Module):
    """A batch norm whose statistics depend on the truncation of z."""

    running_means: Tensor
    running_vars: Tensor

    def __init__(self, channels: int, config: DeepConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.register_buffer("running_means", torch.zeros(config.truncations, channels))
        self.register_buffer("running_vars", torch.ones(config.truncations, channels))

    def standardised(self, x: Tensor, truncation: float) -> Tensor:
        """Between two stored truncations the package weighs them the wrong way round; outputs must equal its own."""
        share, low = math.modf(truncation / (1.0 / (len(self.running_means) - 1)))
        at = int(low)
        mean, var = self.running_means[at], self.running_vars[at]
        if share != 0.0:
            mean = mean * share + self.running_means[at + 1] * (1 - share)
            var = var * share + self.running_vars[at + 1] * (1 - share)
        return (x - mean[:, None, None]) / (var[:, None, None] + self.eps).sqrt()


class _PlainNorm(_TruncatedBatchNorm):
    def __init__(self, channels: int, config: DeepConfig) -> None:
        super().__init__(channels, config)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, truncation: float) -> Tensor:
        return self.standardised(x, truncation) * self.weight[:, None, None] + self.bias[:, None, None]


class _ConditionalNorm(_TruncatedBatchNorm):
    def __init__(self, channels: int, config: DeepConfig) -> None:
        super().__init__(channels, config)
        self.scale, self.offset = (nn.Linear(2 * config.dim_z, channels, bias=False) for _ in range(2))

    def forward(self, x: Tensor, about: Tensor, truncation: float) -> Tensor:
        gain, bias = 1 + self.scale(about), self.offset(about)
        return self.standardised(x, truncation) * gain[:, :, None, None] + bias[:, :, None, None]


class DeepBlock(nn.Module):
    """Four convolutions, the two inner ones on a quarter of the channels; the shortcut drops channels."""

    def __init__(self, inputs: int, outputs: int, config: DeepConfig, *, up: bool) -> None:
        super().__init__()
        self.up, self.outputs = up, outputs
        middle = inputs // _SQUEEZE
        self.bn_0, self.conv_0 = _ConditionalNorm(inputs, config), nn.Conv2d(inputs, middle, 1)
        self.bn_1, self.conv_1 = _ConditionalNorm(middle, config), nn.Conv2d(middle, middle, 3, padding=1)
        self.bn_2, self.conv_2 = _ConditionalNorm(middle, config), nn.Conv2d(middle, middle, 3, padding=1)
        self.bn_3, self.conv_3 = _ConditionalNorm(middle, config), nn.Conv2d(middle, outputs, 1)

    def forward(self, x: Tensor, about: Tensor, truncation: float) -> Tensor:
        """(B, C, H, W) → (B, C′, H, W), or twice the size."""
        h = self.conv_0(F.relu(self.bn_0(x, about, truncation)))
        h = self.conv_1(self._sized(F.relu(self.bn_1(h, about, truncation))))
        h = self.conv_2(F.relu(self.bn_2(h, about, truncation)))
        h = self.conv_3(F.relu(self.bn_3(h, about, truncation)))
        return h + self._sized(x[:, : self.outputs])

    def _sized(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="nearest") if self.up else x


class DeepGenerator(nn.Module):
    """z, y → images in [−1, 1]."""

    def __init__(self, config: DeepConfig) -> None:
        super().__init__()
        self.config = config
        ch = config.ch
        self.embeddings = nn.Linear(config.classes, config.dim_z, bias=False)
        self.gen_z = nn.Linear(2 * config.dim_z, BOTTOM**2 * 16 * ch)
        self.layers = nn.ModuleList()
        for i, (up, inputs, outputs) in enumerate(config.layers):
            if i == config.attention_before:
                self.layers.append(SelfAttention(ch * inputs))
            self.layers.append(DeepBlock(ch * inputs, ch * outputs, config, up=up))
        self.bn = _PlainNorm(ch, config)
        self.conv_to_rgb = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, z: Tensor, y: Tensor | None = None, truncation: float = 1.0) -> Tensor:
        """(B, dim_z) and classes (B,), or shares of classes (B, classes) → (B, 3, resolution, resolution).

        Args:
            truncation: that of z: in (0, 1], where 1 is a normal distribution cut at ±2.
        """
        expect(0 < truncation <= 1, "truncation", "a number in (0, 1]", truncation)
        if y is None:
            y = torch.zeros(len(z), dtype=torch.long, device=z.device)
        shares = y if y.is_floating_point() else F.one_hot(y, self.config.classes).to(z.dtype)
        about = torch.cat([z, self.embeddings(shares)], 1)
        h = self.gen_z(about).unflatten(1, (BOTTOM, BOTTOM, -1)).permute(0, 3, 1, 2).contiguous()
        for layer in self.layers:
            h = layer(h) if isinstance(layer, SelfAttention) else layer(h, about, truncation)
        return self.conv_to_rgb(F.relu(self.bn(h, truncation))).tanh()
