"""The recogniser: two convolutions, a transformer encoder, and the probability of each symbol at each token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import coterie
from coterie import Mechanism, as_mechanism

DENSE = "dense"
STRIDES = {1: (1, 1), 2: (2, 1), 4: (2, 2)}  # of the two convolutions, by how many frames make a token
_WIDTH = 7  # of the convolutions, odd; in one look at one seed, 3 learned digits more slowly
_POSITIONS = 4096  # in training, a sequence begins at a random one below this


@dataclass(frozen=True)
class Config:
    """The size of a recogniser.

    Attributes:
        channels: of the features.
        symbols: that it writes, CTC's blank not counted.
        stride: frames that make a token: 1, 2 or 4.
    """

    channels: int
    symbols: int
    layers: int = 3
    dim: int = 128
    heads: int = 4
    stride: int = 2
    dropout: float = 0.1

    def tokens(self, frames: Any) -> Any:
        """How many tokens so many frames make; of a number or a tensor."""
        return -(-frames // self.stride)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Heard(NamedTuple):
    """Log probabilities (B, tokens, symbols + 1), the blank first, and how many tokens of each row are real."""

    log_probabilities: Tensor
    lengths: Tensor


class Recogniser(nn.Module):
    """Features → probabilities of symbols. Layers are pre-norm; positions are sinusoids.

    In training each sequence begins at a random position, so that short sequences teach what long ones need.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        first, second = STRIDES[config.stride]
        self.conv1 = nn.Conv1d(config.channels, config.dim, _WIDTH, stride=first, padding=_WIDTH // 2)
        self.conv2 = nn.Conv1d(config.dim, config.dim, _WIDTH, stride=second, padding=_WIDTH // 2)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.symbols + 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, features: Tensor, lengths: Tensor) -> Heard:
        """(B, frames, channels), and how many frames of each row are real; what is behind them has no influence."""
        x, lengths = self._convolved(features, lengths)
        x = self.dropout(x + self._positions(x))
        mask = _real(lengths, x.shape[1])
        padded = None if bool(mask.all()) else mask
        for layer in self.layers:
            x = layer(x, padded)
        return Heard(self.out(self.norm(x)).float().log_softmax(-1), lengths)

    def _convolved(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features
        for conv in (self.conv1, self.conv2):
            x = x * _real(lengths, x.shape[1])[..., None]  # as the zeros that stand behind a sequence of its own
            x = F.gelu(conv(x.mT)).mT
            lengths = -(-lengths // conv.stride[0])
        return x.float(), lengths  # what layers add up stays in float32

    def _positions(self, x: Tensor) -> Tensor:
        """sin and cos of a position's multiples."""
        at = torch.arange(x.shape[1], dtype=torch.float32)[None]
        if self.training:
            at = at + torch.randint(_POSITIONS, (len(x), 1))
        half = self.config.dim // 2
        angles = at[..., None] * torch.exp(-math.log(10000) * torch.arange(half) / half)
        return torch.cat([angles.sin(), angles.cos()], -1).to(x)


class Layer(nn.Module):
    """x + attention(norm(x)), and then x + feed-forward(norm(x))."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.attention = SelfAttention(config.dim, config.heads, index)
        self.inner, self.outer = nn.Linear(config.dim, 4 * config.dim), nn.Linear(4 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, tokens, dim); the mask is True for real tokens, None if all are."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.outer(self.dropout(F.gelu(self.inner(self.norm2(x))))))


class SelfAttention(nn.Module):
    """Attention in which a mechanism, or "dense", says who meets whom; it has no parameters of its own, so that the
    same weights run with any."""

    mechanism: Mechanism | str

    def __init__(self, dim: int, heads: int, index: int) -> None:
        super().__init__()
        self.heads, self.index, self.mechanism = heads, index, DENSE
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"mechanism={str(self.mechanism)!r}"

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(B, tokens, dim)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if isinstance(self.mechanism, str):
            found = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
        else:
            found = coterie.attention(q, k, v, self.mechanism, key_mask=mask, layer=self.index)
        return self.out(found.transpose(1, 2).flatten(2))


def _real(lengths: Tensor, room: int) -> Tensor:
    """(B, room), True for real places."""
    return torch.arange(room, device=lengths.device) < lengths[:, None]


def attentions(model: nn.Module) -> Iterator[SelfAttention]:
    """The attention of each layer."""
    return (module for module in model.modules() if isinstance(module, SelfAttention))


def attend_by(model: Recogniser, mechanism: str | Mechanism) -> Recogniser:
    """Let every layer run a mechanism, or "dense": PyTorch's own attention."""
    chosen = DENSE if mechanism == DENSE else as_mechanism(mechanism)
    for attention in attentions(model):
        attention.mechanism = chosen
    return model
