"""Batch norms of the generator: with one gain and bias, and with those of a class."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.biggan.recompute import recomputing
from recipes.biggan.spectral import SpectralLinear

EPS = 1e-5
_MOMENTUM = 0.1


class _BatchNorm(nn.Module):
    """(x − mean) / √(var + ε): of the batch in training, of the past in eval."""

    stored_mean: Tensor
    stored_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(channels))
        self.register_buffer("stored_var", torch.ones(channels))

    def standardised(self, x: Tensor) -> Tensor:
        """Without gain and bias. A recomputation does not count in what is stored."""
        mean, var = self.stored_mean, self.stored_var
        if recomputing():
            mean, var = mean.clone(), var.clone()
        return F.batch_norm(x, mean, var, training=self.training, momentum=_MOMENTUM, eps=EPS)


class BatchNorm(_BatchNorm):
    """A gain and a bias for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gain = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """gain · x̂ + bias."""
        return _shifted(self.standardised(x), self.gain[None], self.bias[None])


class ClassBatchNorm(_BatchNorm):
    """Gain and bias from the class, and from a part of z if it is hierarchical.

    Args:
        inputs: how many numbers describe the class, or how many classes there are if y is the class itself.
        shared: y is a vector, and gain and bias are linear in it; otherwise they are embeddings of it.
    """

    def __init__(self, channels: int, inputs: int, *, shared: bool) -> None:
        super().__init__(channels)
        self.gain, self.bias = (
            SpectralLinear(inputs, channels, bias=False) if shared else nn.Embedding(inputs, channels) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(1 + gain(y)) · x̂ + bias(y)."""
        return _shifted(self.standardised(x), 1 + self.gain(y), self.bias(y))


def _shifted(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return x * gain[:, :, None, None].to(x.dtype) + bias[:, :, None, None].to(x.dtype)
