"""Look at every attention of a model while it runs, and at what another mechanism would give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.call import Call
from coterie.engine.api import execute
from coterie.mechanisms import as_mechanism
from coterie.mechanisms.at_least import at_least
from coterie.mechanisms.base import plan_call


@dataclass(frozen=True, eq=False)
class Seen:
    """One call of `coterie.attention`.

    Attributes:
        call: the call, checked: its masks split and joined, its defaults filled in.
        mechanism: what it was called with.
        settings: its other arguments, as they came; `attend` passes them on.
        name: of the call, in a model that `coterie.nn.swap` or `coterie.replacing` has changed; elsewhere it is empty.
    """

    call: Call
    mechanism: Any
    settings: dict[str, Any]
    name: str = ""

    @property
    def q(self) -> Tensor:
        """(B, H, Nq, D)"""
        return self.call.q

    @property
    def k(self) -> Tensor:
        """(B, Hk, Nk, D)"""
        return self.call.k

    @property
    def v(self) -> Tensor:
        """(B, Hk, Nk, Dv)"""
        assert self.call.v is not None
        return self.call.v

    def attend(self, mechanism: Any) -> Tensor:
        """The same call with another mechanism; not observed."""
        settings = dict(self.settings)
        chosen = at_least(settings.pop("dense_below"), as_mechanism(mechanism))
        call = Call.of(self.q, self.k, self.v, **settings)
        return execute(call, plan_call(chosen, call)).out

    def some_heads(self, count: int) -> Seen:
        """The same call with so many of its key heads, evenly chosen, and the query heads that share them.

        >>> import coterie, torch
        >>> seen = []
        >>> with coterie.observing(seen.append):
        ...     _ = coterie.attention(torch.randn(1, 8, 50, 4), *torch.randn(2, 1, 4, 50, 4), "full", enable_gqa=True)
        >>> seen[0].some_heads(2).q.shape, seen[0].some_heads(2).k.shape
        (torch.Size([1, 4, 50, 4]), torch.Size([1, 2, 50, 4]))
        """
        heads, key_heads = self.call.sizes.heads, self.call.sizes.key_heads
        if count >= key_heads:
            return self
        shared = heads // key_heads
        keys = torch.arange(count) * key_heads // count
        queries = (keys[:, None] * shared + torch.arange(shared)).flatten()
        settings, mask = dict(self.settings), self.settings["attn_mask"]
        if mask is not None and mask.ndim >= 3 and mask.shape[-3] == heads > 1:
            settings["attn_mask"] = mask.index_select(-3, queries.to(mask.device))
        keys, queries = keys.to(self.q.device), queries.to(self.q.device)
        some = self.q.index_select(1, queries), self.k.index_select(1, keys), self.v.index_select(1, keys)
        checked = {name: value for name, value in settings.items() if name != "dense_below"}
        return Seen(Call.of(*some, **checked), self.mechanism, settings, self.name)

    def planning(self) -> dict[str, Any]:
        """Those of its arguments that a mechanism's `plan` takes; without guests, whom no other query depends on."""
        as_they_came = {name: self.settings[name] for name in ("scale", "backend")}
        return {**self.call.planning(), **as_they_came}


Observer = Callable[[Seen], Tensor | None]
_observer: ContextVar[Observer | None] = ContextVar("coterie_observer", default=None)
_name: ContextVar[str] = ContextVar("coterie_call_name", default="")


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    """Inside this context, `observer` sees every call of `coterie.attention` before it runs; None sees nothing.

    If it returns a tensor, that is taken for the output: whoever has computed it need not have it computed again.

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


@contextmanager
def called(name: str) -> Iterator[None]:
    """Inside, a call of `coterie.attention` goes by this name."""
    token = _name.set(name)
    try:
        yield
    finally:
        _name.reset(token)


def name() -> str:
    """What the call that runs is called."""
    return _name.get()
