"""The STS Benchmark: pairs of sentences, and how alike people found them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from coterie.cli.inputs import UserError
from recipes.common.reading import read_tabs

FILE = "sts-test.csv"
_SCORE, _FIRST, _SECOND = 4, 5, 6  # columns: genre, file, year, id, score, two sentences, and sometimes their sources


class Pairs(NamedTuple):
    """Pairs of sentences and their scores."""

    first: list[str]
    second: list[str]
    scores: list[float]


def load(folder: Path) -> Pairs:
    """The test set, as the benchmark's own archive has it."""
    file = folder / FILE
    if not file.exists():
        raise UserError(f"--stsb {folder} has no {FILE}: expected the folder of the STS Benchmark.")
    rows = read_tabs(file)
    pairs = Pairs([], [], [])
    for line, row in enumerate(rows, start=1):
        if len(row) <= _SECOND:
            raise UserError(f"{file}, line {line}: expected 7 columns separated by tabs, got {len(row)}.")
        try:
            pairs.scores.append(float(row[_SCORE]))
        except ValueError as error:
            raise UserError(f"{file}, line {line}: expected a number, got {row[_SCORE]!r}.") from error
        pairs.first.append(row[_FIRST])
        pairs.second.append(row[_SECOND])
    if len(pairs.scores) < 2:
        raise UserError(f"{file} has fewer than two pairs.")
    return pairs
