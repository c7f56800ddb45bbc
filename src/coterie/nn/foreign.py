"""Adapters for attention that well-known models write out by hand."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from coterie.nn.adapters import adapter, source


def _is_biggan(module: nn.Module) -> bool:
    """BigGAN-PyTorch's `layers.Attention` and its copies: the names of its parts, and keys that are max-pooled."""
    parts = all(isinstance(getattr(module, name, None), nn.Module) for name in ("theta", "phi", "g", "o"))
    return parts and isinstance(getattr(module, "gamma", None), Tensor) and "max_pool2d" in source(type(module).forward)


@adapter(_is_biggan)
def biggan(module: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
    """BigGAN's self-attention: γ · o(softmax(θ φᵀ) g) + x, with φ and g max-pooled 2 × 2, and no scale.

    The class y, which blocks of BigGAN may be called with, has no part in it.
    """
    return _pooled(x, module.theta(x), module.phi(x), module.g(x), module.o, module.gamma)


@adapter("pytorch_pretrained_biggan.model.SelfAttn")
def pretrained_biggan(module: Any, x: Tensor) -> Tensor:
    """The same in pytorch-pretrained-biggan, under other names."""
    theta, phi, g = (getattr(module, f"snconv1x1_{name}")(x) for name in ("theta", "phi", "g"))
    return _pooled(x, theta, phi, g, module.snconv1x1_o_conv, module.gamma)


def _pooled(x: Tensor, theta: Tensor, phi: Tensor, g: Tensor, last: nn.Module, gamma: Tensor) -> Tensor:
    """Pixels are tokens, (B, C, H, W) → (B, 1, H·W, C)."""
    q, k, v = (y.flatten(2).mT[:, None] for y in (theta, F.max_pool2d(phi, 2), F.max_pool2d(g, 2)))
    out = F.scaled_dot_product_attention(q, k, v, scale=1.0)
    return x + gamma * last(out[:, 0].mT.unflatten(2, x.shape[2:]))
