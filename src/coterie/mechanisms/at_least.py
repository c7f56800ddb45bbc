"""AtLeast: a mechanism for long inputs alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from torch import Tensor

from coterie.call import Call, readable
from coterie.checks import expect_int, expect_type
from coterie.mechanisms.base import Mechanism, plan_call
from coterie.mechanisms.full import Full
from coterie.plan import Plan
from coterie.plan.mixing import by_sample
from coterie.planning.tokens import Tokens


class Around(Mechanism):
    """A mechanism around another one, in the place of which it declares what that declares."""

    inner: Mechanism

    @property
    def causality(self) -> str:  # type: ignore[override]
        """That of the inner mechanism."""
        return self.inner.causality

    @property
    def per_query(self) -> bool:  # type: ignore[override]
        """That of the inner mechanism; dense attention is."""
        return self.inner.per_query

    @property
    def resample(self) -> bool:
        """Whether the inner mechanism draws anew at every call."""
        return bool(getattr(self.inner, "resample", False))

    def refuse_causality(self) -> NoReturn:
        self.inner.refuse_causality()


@dataclass(frozen=True)
class AtLeast(Around):
    """A mechanism that runs from `length` keys on. Shorter inputs stay dense, because dense is faster there.

    Written "near-far:near=64@1024" in strings. Each sample of a padded batch counts its own keys, so that it gets what
    it would get alone. Where all are below, Hugging Face models run PyTorch's own attention.

    Attributes:
        length: in real keys.
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

    def _plan(self, call: Call) -> Plan:
        """As in `Mechanism`; what does not run need not be able to do what is asked."""
        if call.sizes.keys < self.length:
            return Full()._plan(call)
        if call.key_mask is None:
            return plan_call(self.inner, call)
        all_short = readable(call.key_mask) and not bool(long_enough(call.key_mask, self.length).any())
        return Full()._plan(call) if all_short else super()._plan(call)

    def build(self, tokens: Tokens) -> Plan:
        long = long_enough(tokens.key_mask, self.length)
        return by_sample(long, lambda: self.inner.build(tokens), lambda: Full().build(tokens))

    def to_dict(self) -> dict[str, Any]:
        return {**self.inner.to_dict(), "at_least": self.length}

    def __str__(self) -> str:
        return f"{self.inner}@{self.length}"


def long_enough(key_mask: Tensor, length: int) -> Tensor:
    """Samples with at least so many real keys, (B,) bool."""
    return key_mask.sum(-1) >= length


def at_least(length: int, mechanism: Mechanism) -> Mechanism:
    """The mechanism from this many keys on, or from where it says itself if that is more; 0 changes nothing.

    >>> import coterie
    >>> str(at_least(100, coterie.Local(window=8))), str(at_least(100, coterie.as_mechanism("local:window=8@200")))
    ('local:window=8@100', 'local:window=8@200')
    """
    if length == 0:
        return mechanism
    if isinstance(mechanism, AtLeast):
        return AtLeast(max(length, mechanism.length), mechanism.inner)
    return AtLeast(length, mechanism)
