"""Files of data sets. What is wrong with one is said in a sentence that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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
    """A text in UTF-8, without the mark that some editors put before it."""
    with _named(file):
        return file.read_text(encoding="utf-8-sig")


class Line(NamedTuple):
    """A line of a file, counted from 1, and its cells."""

    number: int
    cells: list[str]


def read_tabs(file: Path) -> list[Line]:
    """The lines of a file whose cells stand between tabs; quotes belong to the text, empty lines are passed over."""
    with _named(file), file.open(encoding="utf-8-sig", newline="") as stream:
        lines = stream.read().replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [Line(number, line.split("\t")) for number, line in enumerate(lines, start=1) if line]


def read_data(file: Path) -> Any:
    """What a JSON file holds."""
    try:
        with _named(file):
            return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not JSON.") from error


def expect_encodable(text: str, where: str) -> str:
    """The text; half a character, as JSON's escapes can make it, is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: character {error.start} is half of one (a lone surrogate).") from error
    return text


def similarity(text: str, where: str) -> float:
    """How alike two sentences are, from 0 to 5, as STS-B writes it.

    >>> similarity("2.5", "line 1")
    2.5
    """
    try:
        found = float(text)
    except ValueError as error:
        raise UserError(f"{where}: expected a number, got {text!r}.") from error
    if not 0 <= found <= 5:
        raise UserError(f"{where}: expected a number from 0 to 5, got {text!r}.")
    return found
