"""How far what was heard is from what was said: word, character and digit error rates."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def edit_distance(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    """The fewest insertions, deletions and substitutions of symbols that make one of the other (Levenshtein).

    A row of the usual table at a time: d[j] = min(d'[j] + 1, d'[j−1] + (a_i ≠ b_j), d[j−1] + 1). The last of the three
    is a running minimum of d[j] − j.

    >>> edit_distance("kitten", "sitting"), edit_distance(["a", "cat"], ["the", "cat", "sat"])
    (3, 2)
    """
    numbers: dict[Hashable, int] = {}
    rows, columns = (np.array([numbers.setdefault(s, len(numbers)) for s in part], dtype=np.int64) for part in (a, b))
    steps = np.arange(len(columns) + 1)
    row = steps
    for i, symbol in enumerate(rows, start=1):
        best = np.concatenate([[i], np.minimum(row[1:] + 1, row[:-1] + (columns != symbol))])
        row = np.minimum.accumulate(best - steps) + steps
    return int(row[-1])


def error_rate(references: Sequence[Sequence[Hashable]], hypotheses: Sequence[Sequence[Hashable]]) -> float:
    """Edit distances over all pairs, divided by the symbols of the references: of words if they are lists of words, of
    characters if they are strings. It may be more than 1.

    >>> error_rate(["one two".split(), ["three"]], [["one"], ["three"]])
    0.3333333333333333
    """
    total = sum(map(len, references))
    if not total:
        raise ValueError("references: expected at least one symbol, got none")
    return sum(edit_distance(a, b) for a, b in zip(references, hypotheses, strict=True)) / total
