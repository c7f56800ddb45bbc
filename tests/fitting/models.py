"""A small model and inputs for it."""

from __future__ import annotations

import torch


def encoder(layers: int = 2) -> torch.nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


def batches(count: int = 3, length: int = 80) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, length, 32, generator=generator) for _ in range(count)]
