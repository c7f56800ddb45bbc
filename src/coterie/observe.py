"""Look at every attention of a model while it runs, and at what another mechanism would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of `coterie.attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mechanism: Any
    settings: dict[str, Any]  # its other arguments

    def attend(self, mechanism: Any) -> Tensor:
        """The same call with another mechanism; not observed."""
        from coterie.functional import attention

        with observing(None):
            out = attention(self.q, self.k, self.v, mechanism, **(self.settings | {"return_lse": False}))
        assert isinstance(out, Tensor)
        return out

    def planning(self) -> dict[str, Any]:
        """Those of its arguments that a mechanism's `plan` takes; without guests, whom no other query depends on."""
        names = ("key_mask", "query_mask", "is_causal", "causal_offset", "scale", "layer", "backend")
        return {name: self.settings[name] for name in names}


Observer = Callable[[Seen], None]
_observer: ContextVar[Observer | None] = ContextVar("coterie_observer", default=None)


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Inside this context, `observer` sees every call of `coterie.attention` before it runs; None sees nothing.

    >>> import coterie, torch
    >>> seen = []
    >>> with coterie.observing(seen.append):
    ...     _ = coterie.attention(*torch.randn(3, 1, 2, 50, 8), mechanism="full")
    >>> seen[0].q.shape, seen[0].attend("near-far").shape
    (torch.Size([1, 2, 50, 8]), torch.Size([1, 2, 50, 8]))
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def current() -> Observer | None:
    """Who is looking."""
    return _observer.get()
