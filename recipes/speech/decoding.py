"""What a recogniser wrote, from its probabilities: number 0 is the blank of CTC (Graves et al. 2006).

A path names a symbol or the blank at each token. Its labelling is what is left when repeats are merged, and then blanks
removed. The probability of a labelling is the sum over all of its paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import NamedTuple

from torch import Tensor

BLANK = 0


class Hypothesis(NamedTuple):
    """A labelling, and the logarithm of its probability, as far as it was summed."""

    labels: tuple[int, ...]
    log_probability: float


def collapsed(path: Iterable[int]) -> tuple[int, ...]:
    """The labelling of a path.

    >>> collapsed([0, 1, 1, 0, 1, 2, 2, 0])
    (1, 1, 2)
    """
    return tuple(symbol for symbol, _ in groupby(path) if symbol != BLANK)


def tokens_needed(labels: list[int]) -> int:
    """Tokens of the shortest path: one for each label, and a blank between two that are equal.

    >>> tokens_needed([1, 1, 2]), tokens_needed([])
    (4, 0)
    """
    return len(labels) + sum(a == b for a, b in pairwise(labels))


def greedy(log_probabilities: Tensor) -> tuple[int, ...]:
    """The labelling of the most probable path: (tokens, symbols) → labels.

    >>> import torch
    >>> greedy(torch.tensor([[0.1, 0.9], [0.1, 0.9], [0.8, 0.2]]).log())
    (1,)
    """
    return collapsed(log_probabilities.argmax(-1).tolist())


def prefix_beam(log_probabilities: Tensor, width: int | None = None, floor: float = 0.0) -> list[Hypothesis]:
    """The most probable labellings, best first, by prefix search (Hannun et al. 2014).

    For each prefix two sums are kept, over its paths that end in a blank and over those that end in its last symbol:
    only after a blank the same symbol can follow again as another label.

    Args:
        log_probabilities: (tokens, symbols).
        width: how many prefixes are kept at each token; None keeps all, and then the sums are exact.
        floor: symbols that are less probable than this at a token are passed over there.

    >>> import torch
    >>> best = prefix_beam(torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log())[0]  # the best path is (0, 0), with 0.36
    >>> best.labels, round(math.exp(best.log_probability), 6)
    ((1,), 0.64)
    """
    if width is not None and width < 1:
        raise ValueError(f"width: expected at least 1, got {width}")
    least = math.log(floor) if floor else -math.inf
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -math.inf)}
    for row in log_probabilities.double().tolist():
        likely = [(symbol, p) for symbol, p in enumerate(row) if symbol != BLANK and p > least]
        grown: dict[tuple[int, ...], tuple[float, float]] = {}
        for prefix, (blank, symbol_last) in beam.items():
            both = _added(blank, symbol_last)
            again = symbol_last + row[prefix[-1]] if prefix else -math.inf
            _grow(grown, prefix, both + row[BLANK], again)
            for symbol, p in likely:
                before = blank if prefix and prefix[-1] == symbol else both
                _grow(grown, (*prefix, symbol), -math.inf, before + p)
        kept = sorted(grown, key=lambda prefix: -_added(*grown[prefix]))[:width]
        beam = {prefix: grown[prefix] for prefix in kept}
    return [Hypothesis(prefix, _added(*ends)) for prefix, ends in beam.items()]


def _grow(
    grown: dict[tuple[int, ...], tuple[float, float]], prefix: tuple[int, ...], blank: float, last: float
) -> None:
    before = grown.get(prefix, (-math.inf, -math.inf))
    grown[prefix] = _added(before[0], blank), _added(before[1], last)


def _added(a: float, b: float) -> float:
    """log(eᵃ + eᵇ)."""
    if a < b:
        a, b = b, a
    return a if b == -math.inf else a + math.log1p(math.exp(b - a))
