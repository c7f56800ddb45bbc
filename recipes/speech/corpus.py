"""Spoken utterances and what was said: to train on, and to test on."""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from coterie.cli.inputs import UserError

_Any = TypeVar("_Any")


class Utterance(NamedTuple):
    """Features (frames, channels), what was said, and where each part of that ends, in frames, if it is known."""

    name: str
    features: Tensor
    text: str
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Corpus(ABC):
    """Utterances of one kind.

    Attributes:
        unit: what errors are counted in, "digit" or "character".
        symbols: all that can be written, one character each; symbols[i] has the label i + 1, and 0 is CTC's blank.
        test: utterances that no training sees, the same for every seed.
        left_out: what could not be used, and why; it is told, and the run goes on without it.
        epochs: how long a training takes if nothing else is said.
    """

    name: str
    unit: str
    symbols: str
    test: list[Utterance]
    left_out: list[str]
    epochs: int

    @abstractmethod
    def train(self, seed: int, epoch: int, epochs: int) -> list[Utterance]:
        """The utterances of an epoch; seed and epoch alone decide."""

    @abstractmethod
    def digest(self) -> str:
        """A few letters that stand for all of it."""

    @property
    def channels(self) -> int:
        """Of the features."""
        return self.test[0].features.shape[1]

    def labels(self, text: str) -> list[int]:
        """Numbers from 1; only texts of the training set have them all."""
        return [self.symbols.index(symbol) + 1 for symbol in text]

    def text(self, labels: Iterable[int]) -> str:
        """What labels say."""
        return "".join(self.symbols[label - 1] for label in labels)


@dataclass(frozen=True)
class Fixed(Corpus):
    """The same utterances in every epoch."""

    utterances: list[Utterance]

    def train(self, seed: int, epoch: int, epochs: int) -> list[Utterance]:
        return self.utterances

    def digest(self) -> str:
        return digest_of([*self.utterances, *self.test])


def fixed(name: str, train: list[Utterance], test: list[Utterance], left_out: list[str], epochs: int) -> Fixed:
    """A corpus of texts that were read aloud; their characters are the symbols."""
    for part, found in (("to train on", train), ("to test on", test)):
        if not found:
            why = f" The first that was left out: {left_out[0]}" if left_out else ""
            raise UserError(f"{name} has no utterance {part}.{why}")
    symbols = "".join(sorted({symbol for utterance in train for symbol in utterance.text}))
    return Fixed(name, "character", symbols, test, left_out, epochs, train)


def collected(
    where: str, sources: Iterable[tuple[str, str, Callable[[], Tensor]]], left_out: list[str]
) -> list[Utterance]:
    """The utterances of some sources: name, what was said, and what reads the features. One that says nothing or cannot
    be read is left out, and why is added to `left_out`."""
    found = []
    for name, said, read in sources:
        text = " ".join(said.upper().split())
        if not text:
            left_out.append(f"{where}: the transcript of {name} is empty.")
            continue
        try:
            found.append(Utterance(name, read(), text))
        except UserError as error:
            left_out.append(str(error))
    return found


def some(found: Sequence[_Any], count: int | None) -> list[_Any]:
    """So many of a list, always the same; all if there are not more."""
    if count is None or count >= len(found):
        return list(found)
    return [found[i] for i in sorted(random.Random(0).sample(range(len(found)), count))]


def digest_of(utterances: Iterable[Utterance]) -> str:
    """A few letters that stand for features and texts."""
    found = hashlib.sha256()
    for utterance in utterances:
        found.update(utterance.text.encode())
        found.update(utterance.features.numpy().tobytes())
    return found.hexdigest()[:12]
