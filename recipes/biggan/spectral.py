"""Layers whose weight is divided by its largest singular value, found by power iteration (Miyato et al. 2018).

    v = u₀W / ‖u₀W‖,  u = vWᵀ / ‖vWᵀ‖,  σ = v Wᵀ uᵀ,  W̄ = W / σ

The buffers `u0` and `sv0` are those of the published checkpoints. A forward reads u₀ and leaves it alone; `iterate`
moves it on. PyTorch's own parametrization moves it in every forward, so that the recomputation of activation
checkpointing would see other weights than the forward did.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6  # of the published configuration


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """Without autocast, which tensors without data do not know."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


class _Spectral(nn.Module):
    """What such layers share: a weight whose first dimension is the outputs, and its power iteration."""

    weight: Tensor
    u0: Tensor
    sv0: Tensor
    eps: float = EPS

    def _begin(self) -> None:
        self.register_buffer("u0", F.normalize(torch.randn(1, self.weight.shape[0])))
        self.register_buffer("sv0", torch.ones(1))

    def _step(self) -> tuple[Tensor, Tensor]:
        """The next u, and σ, through which gradients reach the weight."""
        matrix = self.weight.flatten(1)
        with torch.no_grad():
            v = F.normalize(self.u0 @ matrix, eps=self.eps)
            u = F.normalize(v @ matrix.T, eps=self.eps)
        return u, (v @ matrix.T @ u.T).squeeze()

    def normalised(self) -> Tensor:
        """W / σ, in the weight's own precision whatever autocast says."""
        with full_precision(self.weight):
            return self.weight / self._step()[1]

    @torch.no_grad()
    def iterate(self) -> None:
        """One power iteration."""
        u, sigma = self._step()
        self.u0.copy_(u)
        self.sv0.fill_(sigma)


class SpectralConv2d(nn.Conv2d, _Spectral):
    """A convolution."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        nn.Conv2d.__init__(self, *arguments, **settings)
        self._begin()

    def forward(self, x: Tensor) -> Tensor:
        """W̄ ∗ x + b."""
        return F.conv2d(x, self.normalised(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class SpectralLinear(nn.Linear, _Spectral):
    """A linear layer."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        nn.Linear.__init__(self, *arguments, **settings)
        self._begin()

    def forward(self, x: Tensor) -> Tensor:
        """W̄ x + b."""
        return F.linear(x, self.normalised(), self.bias)


class SpectralEmbedding(nn.Embedding, _Spectral):
    """An embedding."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        nn.Embedding.__init__(self, *arguments, **settings)
        self._begin()

    def forward(self, y: Tensor) -> Tensor:
        """Rows of W̄."""
        return F.embedding(y, self.normalised())


def iterate(model: nn.Module) -> None:
    """One power iteration in every layer; networks do this at the start of each forward in training."""
    for module in model.modules():
        if isinstance(module, _Spectral):
            module.iterate()


def orthogonal(model: nn.Module) -> None:
    """Orthogonal weights (Saxe et al. 2014) and biases of 0 in every convolution, linear layer and embedding."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.Embedding):
            nn.init.orthogonal_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
