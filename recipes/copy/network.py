"""The model that copies: an encoder of a few layers, with any attention, or with a module to compare it with."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

import coterie
from coterie.checks import expect
from recipes.common.dynamic_convolution import DynamicConvolutionLayer
from recipes.copy.sequences import TOKENS

DENSE = "dense"
# Modules that are no mechanisms: the field that each has, and what it is by default.
MODULES = {"isab": ("points", 32), "dynamic-conv": ("kernel", 31)}


class Shape(NamedTuple):
    """How large a model is."""

    layers: int = 4
    width: int = 64
    heads: int = 4

    @property
    def feedforward(self) -> int:
        """The inner width of a layer."""
        return 2 * self.width


def read(spec: str) -> str:
    """What a layer mixes tokens by, as it is written in tables; ValueError or TypeError if there is no such thing.

    >>> read("full"), read("isab"), read("dynamic-conv:kernel=9"), read("smyrf:rounds=4")
    ('dense', 'isab:points=32', 'dynamic-conv:kernel=9', 'smyrf')
    """
    if spec in (DENSE, "full"):
        return DENSE
    name, colon, rest = spec.partition(":")
    if name not in MODULES:
        return str(coterie.as_mechanism(spec))
    field, default = MODULES[name]
    given, _, number = rest.partition("=") if colon else (field, "", str(default))
    expect(given == field and number.isdecimal() and int(number) > 0, name, f"{field}=NUMBER", repr(rest))
    return f"{name}:{field}={int(number)}"


def layer(spec: str, index: int, shape: Shape) -> nn.Module:
    """One layer of an encoder, norms first; "dense" is PyTorch's own."""
    name, _, rest = spec.partition(":")
    if name == "isab":
        points = int(rest.partition("=")[2])
        return coterie.nn.InducedSetAttention(shape.width, shape.heads, points, shape.feedforward)
    if name == "dynamic-conv":
        kernel = int(rest.partition("=")[2])
        return DynamicConvolutionLayer(shape.width, shape.heads, shape.feedforward, kernel)
    settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    sizes = (shape.width, shape.heads, shape.feedforward)
    if spec == DENSE:
        return nn.TransformerEncoderLayer(*sizes, **settings)  # type: ignore[arg-type]
    return coterie.nn.TransformerEncoderLayer(*sizes, **settings, mechanism=spec, layer=index)


class Copier(nn.Module):
    """Symbols and learned positions, layers, and a score for each symbol.

    Args:
        spec: what its layers mix tokens by; see `read`.
        length: positions that it has.
        causal: whether a token sees only those before it.

    Example:
        >>> import torch
        >>> Copier("smyrf:cluster_size=8", 20, Shape(2, 16, 2))(torch.zeros(3, 20, dtype=torch.long)).shape
        torch.Size([3, 20, 12])
    """

    def __init__(self, spec: str, length: int, shape: Shape, *, causal: bool = False) -> None:
        super().__init__()
        self.causal, self.dense = causal, spec == DENSE
        self.symbols, self.positions = nn.Embedding(TOKENS, shape.width), nn.Embedding(length, shape.width)
        self.layers = nn.ModuleList(layer(spec, index, shape) for index in range(shape.layers))
        self.norm, self.out = nn.LayerNorm(shape.width), nn.Linear(shape.width, TOKENS)

    def forward(self, seen: Tensor) -> Tensor:
        """Scores (B, N, tokens) of the symbols at each place of `seen` (B, N)."""
        length = seen.shape[1]
        x = self.symbols(seen) + self.positions.weight[:length]
        told: dict[str, object] = {"is_causal": True} if self.causal else {}
        if self.causal and self.dense:  # PyTorch's own layers want the mask too
            told["src_mask"] = nn.Transformer.generate_square_subsequent_mask(length, x.device, x.dtype)
        for each in self.layers:
            x = each(x, **told)
        scores: Tensor = self.out(self.norm(x))
        return scores
