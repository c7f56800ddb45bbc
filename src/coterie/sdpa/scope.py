"""A scope: within it calls of attention are caught, given a name, and answered by the mechanism of that name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

from coterie.checks import expect
from coterie.mechanisms import Mechanism, as_mechanism
from coterie.sdpa.running import RUNNING, Frame

DENSE = "dense"


class Chosen:
    """What runs in which call: one mechanism in all of them, or those that a dict names.

    Example:
        >>> from coterie.sdpa.scope import Chosen
        >>> some = Chosen({"blocks.0.attn": "local:window=8", "blocks.1.attn#1": "dense"})
        >>> [some.names_call(name) for name in ("blocks.0.attn", "blocks.1.attn", "blocks.1.attn#1")]
        [True, False, True]
        >>> some.of("blocks.0.attn"), some.of("blocks.1.attn#1"), some.modules()
        (Local(window=8), None, ['blocks.0.attn', 'blocks.1.attn'])
    """

    def __init__(self, mechanism: Any) -> None:
        self._by_name: dict[str, Mechanism | None] | None = None
        self._all: Mechanism | None = None
        if isinstance(mechanism, Mapping) and "mechanism" not in mechanism:
            self._by_name = {name: _parse(spec) for name, spec in mechanism.items()}
        else:
            self._all = _parse(mechanism)

    @property
    def by_name(self) -> bool:
        """Whether calls are chosen by their names."""
        return self._by_name is not None

    @property
    def names(self) -> list[str]:
        """Those that were chosen by name."""
        return list(self._by_name or ())

    def modules(self) -> list[str]:
        """The modules that make the calls that were chosen by name."""
        return [module_of(name) for name in self.names]

    def names_call(self, name: str) -> bool:
        """Whether this scope decides on a call; if not, whatever is around it does."""
        return self._by_name is None or name in self._by_name

    def of(self, name: str) -> Mechanism | None:
        """What runs in a call that this scope decides on; None is dense attention."""
        return self._all if self._by_name is None else self._by_name[name]

    def clusters(self, module: str) -> bool:
        """Whether a mechanism was chosen for any call of a module."""
        if self._by_name is None:
            return self._all is not None
        return any(each is not None and module_of(name) == module for name, each in self._by_name.items())


def _parse(spec: Any) -> Mechanism | None:
    return None if spec is None or spec == DENSE else as_mechanism(spec)


def module_of(name: str) -> str:
    """The module that makes a call: "blocks.0.attn" of "blocks.0.attn#1"."""
    return re.sub(r"#\d+$", "", name)


def layer_of(name: str) -> int:
    """The number that a call draws its random numbers by: its own, the same in every run, and as good as any."""
    return crc32(name.encode()) % 2**24


class Caller(NamedTuple):
    """Who makes a call: the module that runs, and the call's name."""

    frame: Frame
    name: str

    @property
    def training(self) -> bool:
        """Whether the module is."""
        return self.frame.module is None or self.frame.module.training


class Scope:
    """What is chosen for the calls in it, and `calls`: what has run, by the name of the call.

    This one names calls as the modules are that were swapped; `coterie.sdpa.replacing` has another.
    """

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.calls: dict[str, str] = {}
        self.called = False  # a call was made, whoever decided on it
        self.active = True
        self.awaited: list[str] = []  # calls that were chosen by name, until it is known whether they come

    def caller(self) -> Caller | None:
        """Who makes the call that is being caught; None if that is nobody in this scope."""
        found = self.running_module()
        if found is None:
            return None
        if not RUNNING.passed_on:
            RUNNING.call += 1
        frame, module = found
        number = frame.count(RUNNING.call)
        return Caller(frame, f"{module}#{number}" if number else module)

    def running_module(self) -> tuple[Frame, str] | None:
        """The innermost module of this scope, and its name."""
        return next(((frame, frame.name) for frame in reversed(RUNNING.frames) if frame.scope is self), None)

    def check_came(self) -> None:
        """Warn, once, of calls that were chosen and did not come: the name may be that of a block around them."""
        missing = [name for name in self.awaited if name not in self.calls]
        self.awaited = []
        if missing:
            warnings.warn(
                f"mechanism: nothing was replaced in {missing}, as the model made no such calls of attention; "
                f"it made {list(self.calls)}",
                stacklevel=2,
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, whatever this scope needs to know of modules is known."""
        yield


def check_modules(chosen: Chosen, known: Mapping[str, object]) -> None:
    """Names must be those of modules in a model."""
    unknown = [name for name in chosen.names if module_of(name) not in known]
    expect(not unknown, "mechanism", f"names among {list(known)}", unknown)
