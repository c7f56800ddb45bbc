"""The self-attention block of SAGAN (Zhang et al. 2019), as BigGAN has it, dense or clustered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coterie
from coterie import Mechanism, as_mechanism

DENSE = "dense"
WRITTEN_OUT = "written-out"  # dense attention as BigGAN writes it, whose whole map is in memory


class SelfAttention(nn.Module):
    """x + γ · o(softmax(θ(x)ᵀ φ(x)) g(x)): every pixel asks, and every square of 2×2 pixels answers.

    θ, φ, g and o are 1×1 convolutions; φ and g are max-pooled, so that there are 4 times as many queries as keys; the
    scale is 1; γ starts at 0. The mechanism has no parameters: the same weights run with any.

    Args:
        conv: what makes a convolution: with spectral norm, or without.

    Attributes:
        mechanism: who meets whom; "dense" is PyTorch's own attention, "written-out" the two products around a softmax.
    """

    mechanism: Mechanism | str

    def __init__(self, channels: int, conv: Callable[..., nn.Module] = nn.Conv2d) -> None:
        super().__init__()
        self.theta = conv(channels, channels // 8, 1, bias=False)
        self.phi = conv(channels, channels // 8, 1, bias=False)
        self.g = conv(channels, channels // 2, 1, bias=False)
        self.o = conv(channels // 2, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor(0.0))
        self.mechanism = DENSE

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"mechanism={str(self.mechanism)!r}"

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) → (B, C, H, W), with H and W even."""
        batch, _, height, width = x.shape
        q = _rows(self.theta(x))
        k, v = (_rows(F.max_pool2d(each(x), 2)) for each in (self.phi, self.g))
        out = self.attend(q, k, v).squeeze(1).transpose(1, 2).reshape(batch, -1, height, width)
        return x + self.gamma.to(x.dtype) * self.o(out)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One head: (B, 1, N, D) each."""
        mechanism = self.mechanism
        if mechanism == WRITTEN_OUT:
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        if isinstance(mechanism, str):
            # PyTorch forms no map only where keys are as long as values; zeros change no score.
            more = (0, v.shape[-1] - q.shape[-1])
            return F.scaled_dot_product_attention(F.pad(q, more), F.pad(k, more), v, scale=1.0)
        if not self.training and getattr(mechanism, "resample", False):
            mechanism = as_mechanism({**mechanism.to_dict(), "resample": False})  # the same image at every look
        return coterie.attention(q, k, v, mechanism, scale=1.0)


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) → (B, 1, HW, C)."""
    return x.flatten(2).transpose(1, 2)[:, None].contiguous()


def blocks(model: nn.Module) -> Iterator[SelfAttention]:
    """The attention blocks of a network."""
    return (module for module in model.modules() if isinstance(module, SelfAttention))


def attend_by(model: Any, mechanism: str | Mechanism) -> Any:
    """Let every block of a network run a mechanism, "dense", or "written-out"."""
    chosen = mechanism if mechanism in (DENSE, WRITTEN_OUT) else as_mechanism(mechanism)
    for block in blocks(model):
        block.mechanism = chosen
    return model
