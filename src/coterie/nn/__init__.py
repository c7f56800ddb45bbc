"""Attention modules with a mechanism, and `swap`, which puts mechanisms into models that you already have."""

from coterie.nn import foreign  # noqa: F401, registers its adapters
from coterie.nn.adapters import adapter
from coterie.nn.induced import InducedSetAttention
from coterie.nn.multihead import MultiheadAttention, TransformerEncoderLayer
from coterie.nn.swapping import Swap, swap

__all__ = ["InducedSetAttention", "MultiheadAttention", "Swap", "TransformerEncoderLayer", "adapter", "swap"]
