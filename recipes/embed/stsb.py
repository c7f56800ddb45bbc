"""The STS Benchmark: pairs of sentences, and how alike people found them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from coterie.cli.inputs import UserError

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
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if row]
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text.") from error
    except FileNotFoundError as error:
        raise UserError(f"--stsb {folder} has no {FILE}: expected the folder of the STS Benchmark.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
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
