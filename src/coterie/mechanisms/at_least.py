"""AtLeast: a mechanism for long inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from coterie.errors import expect_int, expect_type
from coterie.mechanisms.base import Mechanism, Tokens
from coterie.mechanisms.full import Full
from coterie.plan import Plan


@dataclass(frozen=True)
class AtLeast(Mechanism):
    """Another mechanism where there are at least `length` keys, every pair below: short inputs are faster dense.

    Written "near-far:near=64@1024" in strings. Below, Hugging Face models run PyTorch's own attention.

    Attributes:
        length: in keys, padding included.
        inner: what runs from there on.

    Example:
        >>> import coterie, torch
        >>> mechanism = coterie.as_mechanism("local:window=8@100")
        >>> str(mechanism), mechanism.inner
        ('local:window=8@100', Local(window=8))
        >>> [int(mechanism.plan(q, q).pairs_met().sum()) for q in (torch.randn(1, 1, n, 4) for n in (99, 100))]
        [9801, 880]
    """

    length: int
    inner: Mechanism

    name: ClassVar[str] = "at-least"

    def check(self) -> None:
        expect_int("length", self.length, at_least=1)
        expect_type(isinstance(self.inner, Mechanism), "inner", "a Mechanism", type(self.inner).__name__)
        expect_type(not isinstance(self.inner, AtLeast), "inner", "one that is not an AtLeast itself", self.inner)

    @property
    def causality(self) -> str:  # type: ignore[override]
        """That of the inner mechanism."""
        return self.inner.causality

    @property
    def resample(self) -> bool:
        """Whether the inner mechanism draws anew at every call."""
        return bool(getattr(self.inner, "resample", False))

    def runs(self, keys: int) -> Mechanism:
        """What runs with so many keys."""
        return self.inner if keys >= self.length else Full()

    def plan(self, q: Tensor, k: Tensor, **settings: Any) -> Plan:
        """As in `Mechanism`; what does not run need not be able to do what is asked."""
        return self.runs(k.shape[2] if k.ndim == 4 else 0).plan(q, k, **settings)

    def build(self, tokens: Tokens) -> Plan:
        return self.runs(tokens.sizes.keys).build(tokens)

    def to_dict(self) -> dict[str, Any]:
        return {**self.inner.to_dict(), "at_least": self.length}

    def __str__(self) -> str:
        return f"{self.inner}@{self.length}"
