"""Batches of texts of about the same length: little of them is padding.

The Trainer has such an order too, but draws it from PyTorch's global generator, whose state at the start of an epoch is
unknown to a run that goes on in the middle of it. Here the seed and the epoch decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

_STRETCH = 50  # batches that are sorted together; the whole would always make the same batches


class ByLength(Sampler[int]):
    """A random order in which each `batch` examples that follow each other are about as long.

    Args:
        epoch: says which one it is; each has its own order.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int, epoch: Callable[[], int] = lambda: 0) -> None:
        self.lengths, self.batch, self.seed, self.epoch = lengths, batch, seed, epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 2**20 + self.epoch())
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        whole = len(order) - len(order) % self.batch
        batches = []
        for start in range(0, whole, _STRETCH * self.batch):
            stretch = sorted(order[start : min(whole, start + _STRETCH * self.batch)], key=lambda i: self.lengths[i])
            batches += [stretch[i : i + self.batch] for i in range(0, len(stretch), self.batch)]
        for i in torch.randperm(len(batches), generator=generator).tolist():
            yield from batches[i]
        yield from order[whole:]  # a batch that is not full must be the last
