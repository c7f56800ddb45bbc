"""How long inputs are: as many tokens as attention meets, wherever in its arguments a model has them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
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
    """The shapes of all tensors in a batch, however they are nested; of one in which none are found, the batch itself.

    >>> import torch
    >>> shape_of((torch.zeros(2, 9), {"mask": None, "x": [torch.zeros(3)]}))
    ((2, 9), ((), ((3,),)))
    """
    return _shapes(batch) if size_of(batch) else id(batch)


def _shapes(batch: Any) -> Hashable:
    return tuple(batch.shape) if isinstance(batch, Tensor) else tuple(map(_shapes, _parts(batch)))


def size_of(batch: Any) -> int:
    """Numbers in all tensors of a batch.

    >>> import torch
    >>> size_of({"x": torch.zeros(2, 9), "more": (torch.zeros(3), None)})
    21
    """
    return batch.numel() if isinstance(batch, Tensor) else sum(map(size_of, _parts(batch)))


def same_as(batch: Any) -> Hashable:
    """Equal for batches that hold the same numbers.

    >>> import torch
    >>> same_as([torch.ones(2)]) == same_as([torch.ones(2)]), same_as(torch.ones(2)) == same_as(torch.zeros(2))
    (True, False)
    """
    if not size_of(batch):
        return id(batch)
    digest = hashlib.blake2b(repr(_shapes(batch)).encode())
    for tensor in _tensors(batch):
        digest.update(repr(tensor.dtype).encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    else:
        for part in _parts(batch):
            yield from _tensors(part)


def _parts(batch: Any) -> list[Any]:
    """What a batch is made of: a dict, a list or tuple, or an object with fields."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return list(vars(batch).values()) if hasattr(batch, "__dict__") and not isinstance(batch, type) else []


def _longest(batch: Any) -> int:
    """Where no attention was seen, as a few queries stay dense: the second dimension of any tensor, the largest."""
    if isinstance(batch, Tensor):
        return batch.shape[1] if batch.ndim >= 2 else math.prod(batch.shape)
    return max(map(_longest, _parts(batch)), default=0)
