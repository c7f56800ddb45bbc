"""The STS Benchmark: pairs of sentences, and how alike people found them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from coterie.cli.inputs import UserError
from recipes.common.reading import read_tabs, similarity

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
    pairs = Pairs([], [], [])
    for line, row in read_tabs(file):
        if len(row) <= _SECOND:
            raise UserError(f"{file}, line {line}: expected 7 columns separated by tabs, got {len(row)}.")
        pairs.scores.append(similarity(row[_SCORE], f"{file}, line {line}"))
        pairs.first.append(row[_FIRST])
        pairs.second.append(row[_SECOND])
    if len(pairs.scores) < 2:
        raise UserError(f"{file} has fewer than two pairs.")
    return pairs
