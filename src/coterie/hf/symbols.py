"""What a mask function computes, found out by calling it with symbols for the positions.

Hugging Face describes a mask by a function of (batch, head, query position, key position). Called with the symbols q
and k, one that is made of comparisons such as k ≤ q and k > q − 128 gives a `Band`: bounds on q − k. One that does
anything else with them, or looks at the batch or the head, is no band. A call can be traced by torch.compile; what is
inside of a function can not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoBandError(Exception):
    """The function does something that is not a bound on q − k."""


def _refuse(*_: Any) -> Any:
    raise NoBandError


class _Unknown:
    """The batch or the head: whatever is asked of it, there is no answer."""

    __bool__ = __index__ = __int__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __getattr__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Band:
    """Pairs with low ≤ q − k ≤ high; None is no bound."""

    device = None  # mask functions bring their parts to one

    def __init__(self, low: int | None = None, high: int | None = None) -> None:
        self.low, self.high = low, high

    def to(self, device: Any) -> Band:
        """A device means nothing here."""
        return self

    def __and__(self, other: Any) -> Band:
        if not isinstance(other, Band):
            raise NoBandError
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Band(max(lows) if lows else None, min(highs) if highs else None)


class _Position:
    """queries·q + keys·k + shift, or its distance from 0. What it has no method for is no band."""

    def __init__(self, queries: int, keys: int, shift: int = 0, distance: bool = False) -> None:
        self.queries, self.keys, self.shift, self.distance = queries, keys, shift, distance

    def new_ones(self, *_: Any, **__: Any) -> Band:
        """Where an intersection starts: everybody."""
        return Band()

    __bool__ = __index__ = __int__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> _Position:
        return self._plus(other, 1)

    def __sub__(self, other: Any) -> _Position:
        return self._plus(other, -1)

    def __abs__(self) -> _Position:
        return _Position(self.queries, self.keys, self.shift, distance=True)

    def _plus(self, other: Any, sign: int) -> _Position:
        if self.distance:
            raise NoBandError
        if isinstance(other, _Position):
            if other.distance:
                raise NoBandError
            terms = (other.queries, other.keys, other.shift)
        elif isinstance(other, int):
            terms = (0, 0, other)
        else:
            raise NoBandError
        return _Position(self.queries + sign * terms[0], self.keys + sign * terms[1], self.shift + sign * terms[2])

    def __ge__(self, other: Any) -> Band:
        return (self - other)._at_least(0)

    def __gt__(self, other: Any) -> Band:
        return (self - other)._at_least(1)

    def __le__(self, other: Any) -> Band:
        return self._at_most(other, 0)

    def __lt__(self, other: Any) -> Band:
        return self._at_most(other, 1)

    def _at_most(self, other: Any, strictly: int) -> Band:
        if not self.distance:
            return (_Position(0, 0) - (self - other))._at_least(strictly)
        if (self.queries, self.keys, self.shift) not in ((1, -1, 0), (-1, 1, 0)) or not isinstance(other, int):
            raise NoBandError
        return Band(strictly - other, other - strictly)

    def _at_least(self, bound: int) -> Band:
        if (self.queries, self.keys) == (1, -1):
            return Band(low=bound - self.shift)
        if (self.queries, self.keys) == (-1, 1):
            return Band(high=self.shift - bound)
        if (self.queries, self.keys) in ((1, 0), (0, 1)) and self.shift >= bound:
            return Band()  # a position is not below 0
        raise NoBandError


def band_of(function: Callable[..., Any]) -> Band | None:
    """The band that a mask function computes; None if it is none that can be told."""
    try:
        found = function(_Unknown(), _Unknown(), _Position(1, 0), _Position(0, 1))
    except Exception:  # noqa: BLE001 — a tensor that was indexed by a symbol, say: whatever it was, it is no band
        return None
    return found if isinstance(found, Band) else None
