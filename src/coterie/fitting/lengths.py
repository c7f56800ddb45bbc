"""How long inputs are: as many tokens as attention meets, wherever in its arguments a model has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.fitting.dense import dense
from coterie.hosts import DENSE, Host
from coterie.mechanisms import Full
from coterie.observe import Seen, observing

_T = TypeVar("_T")


class Lengths:
    """The tokens of batches, seen when the first of each shape ran.

    Example:
        >>> import torch
        >>> from coterie.fitting.lengths import Lengths
        >>> from coterie.hosts import host_of
        >>> host = host_of(torch.nn.TransformerEncoderLayer(8, 2))  # its sequences come first
        >>> found, batch = Lengths(host), torch.randn(50, 1, 8)
        >>> found.answer(batch, lambda: host.run(batch).shape), found.of(batch)
        (torch.Size([50, 1, 8]), 50)
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._known: dict[Hashable, int] = {}

    def of(self, batch: Any) -> int:
        """Of a batch that was answered, or of another of that shape."""
        return self._known[shape_of(batch)]

    def answer(self, batch: Any, run: Callable[[], _T], *, untouched: bool = False) -> _T:
        """What a function that runs the batch returns while all attention is dense.

        Args:
            untouched: the model must be as it was made: it runs once more, to be looked at.
        """
        known = shape_of(batch) in self._known
        if not known and untouched:
            self._watched(batch, lambda: self.host.run(batch))
        elif not known:
            return self._watched(batch, run)
        self.host.put_everywhere(DENSE)
        return run()

    def _watched(self, batch: Any, run: Callable[[], _T]) -> _T:
        keys = 0

        def look(seen: Seen) -> Tensor | None:
            nonlocal keys
            keys = max(keys, seen.k.shape[2])
            full = isinstance(seen.mechanism, Full) or seen.mechanism == "full"
            return dense(seen).out if full else None

        self.host.put_everywhere("full")
        with torch.no_grad(), observing(look):
            found = run()
        self._known[shape_of(batch)] = keys or _longest(batch)
        return found


def shape_of(batch: Any) -> Hashable:
    """The shapes of all tensors in a batch, however they are nested.

    >>> import torch
    >>> shape_of((torch.zeros(2, 9), {"mask": None, "x": [torch.zeros(3)]}))
    ((2, 9), (('mask', None), ('x', ((3,),))))
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, Mapping):
        return tuple((name, shape_of(value)) for name, value in batch.items())
    return tuple(map(shape_of, batch)) if isinstance(batch, list | tuple) else None


def size_of(batch: Any) -> int:
    """Numbers in all tensors of a batch.

    >>> import torch
    >>> size_of({"x": torch.zeros(2, 9), "more": (torch.zeros(3), None)})
    21
    """
    if isinstance(batch, Tensor):
        return batch.numel()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(size_of, parts))


def _longest(batch: Any) -> int:
    """Where no attention was seen, as a few queries stay dense: the second dimension of any tensor, the largest."""
    if isinstance(batch, Tensor):
        return batch.shape[1] if batch.ndim >= 2 else math.prod(batch.shape)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return max(map(_longest, parts), default=0)
