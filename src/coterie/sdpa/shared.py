"""Things of the whole process, such as hooks on all modules, that are in place only while some thread needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Shared:
    """`put` puts something in place and returns what takes it away; the first user calls the one, the last the other.

    Example:
        >>> from coterie.sdpa.shared import Shared
        >>> seen = []
        >>> thing = Shared(lambda: (seen.append("put"), lambda: seen.append("taken"))[1])
        >>> with thing.held(), thing.held():
        ...     print(seen)
        ['put']
        >>> seen
        ['put', 'taken']
    """

    def __init__(self, put: Callable[[], Callable[[], object]]) -> None:
        self._put, self._lock, self._users = put, threading.Lock(), 0
        self._take: Callable[[], object] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, it is there."""
        with self._lock:
            if self._users == 0:
                self._take = self._put()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0 and self._take is not None:
                    self._take()
                    self._take = None
