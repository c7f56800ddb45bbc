"""What is under way in a thread: the modules whose forward runs, and the scopes that catch their calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from coterie.sdpa.scope import Scope


class Frame:
    """A module's forward that is under way, and how many calls of attention it has made."""

    def __init__(self, module: nn.Module | None, scope: Scope | None = None, name: str = "") -> None:
        self.module = module
        self.scope = scope  # the one that the module was swapped in, which knows its name
        self.name = name
        self.calls = 0
        self._latest = 0

    def count(self, call: int) -> int:
        """How many calls this forward made before this one; a call that several scopes look at is counted once."""
        if call != self._latest:
            self.calls += 1
            self._latest = call
        return self.calls - 1

    def copy(self) -> Frame:
        """The same, to be counted on apart."""
        made = Frame(self.module, self.scope, self.name)
        made.calls, made._latest = self.calls, self._latest
        return made


class _Running(threading.local):
    """One for each thread, as PyTorch's stack of modes is."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []  # the innermost last
        self.scopes: list[Scope] = []  # that are open, the innermost last
        self.call = 0  # the number of the call that is looked at
        self.passed_on = False  # an inner scope has left this call to the outer ones
        self.settled = False  # a scope has decided on this call: whatever it does now is its own


RUNNING = _Running()


@contextmanager
def settled() -> Iterator[None]:
    """Inside, no scope catches anything: this is the answer to a call that was caught."""
    before, RUNNING.settled = RUNNING.settled, True
    try:
        yield
    finally:
        RUNNING.settled = before


@contextmanager
def passed_on() -> Iterator[None]:
    """Inside, the next scope looks at the same call."""
    before, RUNNING.passed_on = RUNNING.passed_on, True
    try:
        yield
    finally:
        RUNNING.passed_on = before


@contextmanager
def entered(frame: Frame) -> Iterator[None]:
    """Inside, this module runs."""
    depth = len(RUNNING.frames)
    RUNNING.frames.append(frame)
    try:
        yield
    finally:
        del RUNNING.frames[depth:]


class Moment(NamedTuple):
    """What was under way in a thread, to go on from later."""

    frames: list[Frame]
    scopes: list[Scope]

    @staticmethod
    def now() -> Moment:
        """This one."""
        return Moment([frame.copy() for frame in RUNNING.frames], list(RUNNING.scopes))
