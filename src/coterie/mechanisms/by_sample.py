"""What runs in each sample of a batch, by its own tokens: a sample must get what it would get alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coterie.mechanisms.at_least import Around, AtLeast, long_enough
from coterie.mechanisms.base import Mechanism
from coterie.mechanisms.full import Full
from coterie.mechanisms.local import Local
from coterie.plan import Plan
from coterie.plan.mixing import by_sample
from coterie.planning.tokens import Tokens

FEW_QUERIES = 16  # so few queries, as in decoding, are answered densely: there is nothing to group


@dataclass(frozen=True)
class BySample(Around):
    """A mechanism where it pays. Every pair in samples with fewer keys than `length` or at most `few` queries; the
    layer's own window, exactly, in samples that are longer than it reaches.

    Attributes:
        inner: the mechanism.
        length, few: in real tokens.
        window: as in `coterie.hf.masks.Rules`; 0 is none.
    """

    inner: Mechanism
    length: int
    few: int
    window: int

    name: ClassVar[str] = "by-sample"

    def too_small(self, queries: int, keys: int) -> bool:
        """Whether every pair meets in all samples of a batch with so many queries and keys."""
        return keys < self.length or queries <= self.few

    def dense(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Samples where every pair meets, (B,) bool, by the masks of their tokens."""
        return ~long_enough(keys, self.length) | (queries.sum(-1) <= self.few)

    def windowed(self, keys: Tensor, causal: bool) -> Tensor:
        """Samples whose last key is too far from their first one, (B,) bool."""
        if not self.window or keys.shape[1] == 0:
            return torch.zeros_like(keys.any(-1))
        place = torch.arange(keys.shape[1], device=keys.device)
        first = torch.where(keys, place, keys.shape[1]).amin(-1)
        last = torch.where(keys, place, -1).amax(-1)
        return last - first >= self.window + (0 if causal else 1)

    def local(self, causal: bool) -> Local:
        """The window as a mechanism."""
        return Local(window=self.window if causal else 2 * self.window)

    def build(self, tokens: Tokens) -> Plan:
        def inside() -> Plan:
            real = tokens.query_mask if tokens.guests is None else tokens.query_mask & ~tokens.guests
            dense = self.dense(real, tokens.key_mask)
            return by_sample(~dense, lambda: self.inner.build(tokens), lambda: Full().build(tokens))

        if not self.window:
            return inside()
        windowed = self.windowed(tokens.key_mask, tokens.causal)
        return by_sample(~windowed, inside, lambda: self.local(tokens.causal).build(tokens))

    def __str__(self) -> str:
        return str(self.inner)


def where_it_pays(
    mechanism: Mechanism, queries: Tensor, keys: Tensor, window: int = 0, causal: bool = False
) -> Mechanism | None:
    """What runs inside a model where a mechanism was chosen; None is PyTorch's own dense attention.

    Samples with fewer real keys than the mechanism asks for ("@1024"), or at most `FEW_QUERIES` real queries, stay
    dense. A sample counts its own tokens, so that its padding does not matter.

    Args:
        mechanism: the one that was chosen.
        queries, keys: (B, Nq), (B, Nk) bool, True for real tokens.
        window: of the layer itself; 0 is none.
        causal: whether the window, like all of the layer, looks back alone.
    """
    length, inner = (mechanism.length, mechanism.inner) if isinstance(mechanism, AtLeast) else (0, mechanism)
    mixed = BySample(inner, length, FEW_QUERIES, window)
    if mixed.too_small(queries.shape[1], keys.shape[1]):
        return None
    if torch.compiler.is_compiling():
        return mixed
    windowed, dense = mixed.windowed(keys, causal), mixed.dense(queries, keys)
    if bool((dense & ~windowed).all()):  # of no samples at all, too
        return None
    if bool(windowed.all()) or (bool(windowed.any()) and isinstance(inner, Full)):  # which is the same, guests included
        return mixed.local(causal)
    return mixed if bool((windowed | dense).any()) else inner
