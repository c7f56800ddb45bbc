"""Texts that were read, kept in their caches: several plans are decoded behind each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST = 1 << 30  # bytes of keys and values that are kept


class Prefixes:
    """The caches of as many texts as fit into a GiB, all read by the same prefill; others are read again."""

    def __init__(self) -> None:
        self._prefill: dict[str, str] = {}
        self._kept: dict[int, Any] = {}
        self._bytes = 0

    @contextmanager
    def of(self, prefill: Mapping[str, str], index: int, read: Callable[[], Any]) -> Iterator[Any]:
        """A cache that holds the beginning of a text; what is written behind it inside is taken off again.

        Args:
            prefill: what reads; if it is another than before, nothing that is kept is of use.
            index: of the text.
            read: makes the cache.
        """
        if self._prefill != prefill:
            self._prefill, self._kept, self._bytes = dict(prefill), {}, 0
        cache = self._kept.pop(index, None)  # if what follows fails, it is read again
        known = cache is not None
        cache = cache if known else read()
        tokens, size = cache.get_seq_length(), _bytes(cache)
        fits = size is not None and (known or self._bytes + size <= _MOST)
        yield cache
        if fits and size is not None:
            cache.crop(tokens - cache.get_seq_length())
            for layer in cache.layers:
                layer.forget()
            self._kept[index], self._bytes = cache, self._bytes + (0 if known else size)


def _bytes(cache: Any) -> int | None:
    """Of all keys and values; None if what is written cannot be taken off again, as where a window slides."""
    from coterie.hf.buffers import BufferedLayer

    if not all(isinstance(layer, BufferedLayer) for layer in cache.layers):
        return None
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
