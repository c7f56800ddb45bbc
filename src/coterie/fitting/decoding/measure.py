"""What decoding costs in fidelity: the loss of what follows a text, each token given as the dense model gets it."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from coterie.fitting.decoding.prefixes import Prefixes
from coterie.fitting.decoding.writer import Writer, dense_up_to, mask_of
from coterie.fitting.measures import begins
from coterie.hosts import DENSE, HfHost
from coterie.mechanisms.by_sample import FEW_QUERIES

_MOST = 256  # tokens that are decoded of a document
_SHARE = 4  # one token in so many is, of short ones


def read_first(tokens: int) -> int:
    """How much of a document is read at once; the rest is decoded: a quarter, and no more than 256 tokens.

    >>> read_first(400), read_first(8192)
    (300, 7936)
    """
    return tokens - min(_MOST, tokens // _SHARE)


class Continued:
    """The loss of the next token while decoding: the dense model's over that of the model as it is.

    The beginning of a document is read into `coterie.hf.Cache`; what follows is decoded in calls of 16 tokens, which
    answer the same as single ones to rounding. The dense model reads and decodes densely.
    """

    name = "loss"
    lowest = 0.0  # that a ratio of losses can be

    def __init__(self, host: HfHost, batches: list[Any]) -> None:
        self.batches = batches
        self.writer = Writer(host, dict.fromkeys(host.names, DENSE))
        self._dense: dict[int, float] = {}
        self._prefixes = Prefixes()
        self.seconds: dict[int, float] = {}  # of the dense answers

    def after(self, prefill: Mapping[str, str]) -> Continued:
        """The same documents, read by another prefill; dense answers are shared, and caches if it is the same."""
        found = copy.copy(self)
        found.writer = Writer(self.writer.host, prefill)
        return found

    def remember(self, index: int) -> None:
        """The dense answer to a batch, if it is not known."""
        if index in self._dense:
            return
        dense, start = self.after(dict.fromkeys(self.writer.host.names, DENSE)), time.perf_counter()
        dense.writer.put({})
        self._dense[index] = dense.loss(index)
        self.seconds[index] = time.perf_counter() - start

    def length(self, index: int) -> int:
        """The tokens of a batch."""
        return int(self.batches[index]["input_ids"].shape[1])

    def score(self, index: int) -> float:
        """The fidelity of the model as it is now on a batch."""
        dense, found = self._dense[index], self.loss(index)
        return dense / found if found else float(dense == found)

    def exact(self, choices: Mapping[str, str], length: int) -> bool:
        """Whether everything is dense with so many tokens: the prefill, and decoding by these choices."""
        read = all(begins(spec) > read_first(length) for spec in self.writer.prefill.values())
        return read and self.decodes_densely(choices, length)

    @staticmethod
    def decodes_densely(choices: Mapping[str, str], length: int) -> bool:
        """Whether new tokens meet all others by these choices, up to so many tokens."""
        return all(dense_up_to(spec) >= length for spec in choices.values())

    def loss(self, index: int) -> float:
        """The mean loss of the tokens that are decoded, but for the first of them, which the prefill predicts."""
        batch = self.batches[index]
        ids, real = batch["input_ids"], mask_of(batch).bool()
        length, first = ids.shape[1], read_first(ids.shape[1])
        total, count = 0.0, 0
        with self._prefixes.of(self.writer.prefill, index, lambda: self._read(batch, first)) as cache:
            for start in range(first, length, FEW_QUERIES):
                stop = min(start + FEW_QUERIES, length)
                logits = self.writer.write(batch, start, stop, cache)
                targets, wanted = (x[:, start + 1 : stop + 1] for x in (ids, real))
                logits = logits[:, : targets.shape[1]][wanted]
                total += float(F.cross_entropy(logits.float(), targets[wanted], reduction="sum"))
                count += int(wanted.sum())
        return total / max(1, count)

    def _read(self, batch: Mapping[str, Tensor], tokens: int) -> Any:
        import coterie.hf

        cache = coterie.hf.Cache(self.writer.model)
        self.writer.read(batch, tokens, cache)
        return cache
