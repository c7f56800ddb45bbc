"""Small models that call SDPA in the ways that models do."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Self-attention by one call of SDPA; `settings` are passed on to it."""

    def __init__(self, dim: int = 16, heads: int = 2, **settings: Any) -> None:
        super().__init__()
        self.heads, self.settings = heads, settings
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x: Tensor) -> list[Tensor]:
        """q, k and v, (B, H, N, D)."""
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, N, dim)"""
        q, k, v = self.split(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, **self.settings).transpose(1, 2).flatten(2))


class Twice(Attention):
    """Two calls in one forward: everybody, and the past."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, N, dim)"""
        q, k, v = self.split(x)
        both = F.scaled_dot_product_attention(q, k, v) + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(both.transpose(1, 2).flatten(2))


class Inline(Attention):
    """A call inside of a checkpoint that holds no module, between two others."""

    reentrant: bool | None = None  # without a checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, dim) → (B, N, dim)"""
        q, k, v = self.split(x)
        first = F.scaled_dot_product_attention(q, k, v)
        if self.reentrant is None:
            second = F.scaled_dot_product_attention(first, k, v)
        else:
            second = checkpoint(F.scaled_dot_product_attention, first, k, v, use_reentrant=self.reentrant)
        third = F.scaled_dot_product_attention(second, k, v)
        return self.out(third.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Blocks in a row, and PyTorch's own attention at the end if asked for; `reentrant` checkpoints the blocks."""

    def __init__(self, *blocks: nn.Module, torchs: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) if torchs else nn.Identity()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, 16) → (B, N, 16)"""
        for block in self.blocks:
            more = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + more
        return self.last(x)

    def encode(self, x: Tensor) -> Tensor:
        """A way in that is not the forward."""
        return self.blocks[0](x)


def model(*kinds: type[Attention], torchs: bool = False, reentrant: bool | None = None, **settings: Any) -> Model:
    """One block of each kind, in float64, with weights that matter."""
    torch.manual_seed(3)
    made = Model(*(kind(**settings) for kind in kinds), torchs=torchs, reentrant=reentrant).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made


def tokens(batch: int = 2, length: int = 41) -> Tensor:
    """An input, with a gradient."""
    return torch.randn(batch, length, 16, dtype=torch.float64, requires_grad=True)


def gradients(model: nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    """Of everything there is, by a fixed loss."""
    torch.manual_seed(9)
    return list(torch.autograd.grad(out, [x, *model.parameters()], torch.randn_like(out)))
