"""Triton's interpreter, in less time.

It looks through its whole language and replaces what it finds, anew for every function that a kernel calls, every time:
that takes longer than what the kernel does. Here it does so once in each launch.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


class _Nothing:
    def restore(self) -> None:
        """Nothing was changed."""


class Once:
    """In the place of the interpreter's `_patch_lang`: what a launch has replaced stays so until its end."""

    def __init__(self, patch: Any, languages: tuple[Any, ...]) -> None:
        self._patch = patch
        self._languages = languages
        self._scopes: list[Any] = []
        self._done: set[int] = set()

    def __call__(self, function: FunctionType) -> Any:
        """Replace what this function can see and nobody has replaced yet."""
        seen = {id(x) for x in function.__globals__.values() if any(x is each for each in self._languages)}
        if self._scopes and seen <= self._done:
            return _Nothing()
        self._done |= seen
        self._scopes.append(self._patch(function))
        return self if len(self._scopes) == 1 else _Nothing()

    def restore(self) -> None:
        """At the end of a launch: the last first."""
        while self._scopes:
            self._scopes.pop().restore()
        self._done.clear()


def speed_up() -> None:
    """Where Triton is installed."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if not isinstance(interpreter._patch_lang, Once):
        interpreter._patch_lang = Once(interpreter._patch_lang, (tl, tl.core))
