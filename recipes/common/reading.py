"""Files of data sets. What is wrong with one is said in a sentence that names it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.cli.inputs import UserError
from coterie.files import read_json


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text.") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error


def read_text(file: Path) -> str:
    """A text in UTF-8."""
    with _named(file):
        return file.read_text(encoding="utf-8")


def read_tabs(file: Path) -> list[list[str]]:
    """The rows of a file whose cells stand between tabs; quotes belong to the text, empty lines are passed over."""
    with _named(file), file.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.reader(stream, delimiter="\t", quoting=csv.QUOTE_NONE) if row]


def read_data(file: Path) -> Any:
    """What a JSON file holds."""
    try:
        with _named(file):
            return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not JSON.") from error
