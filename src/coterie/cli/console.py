"""What the commands print with: tables, progress, and the options that all of them share."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.cells import cell_len, chop_cells
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text as RichText

from coterie.files import plain, shown
from coterie.progress import Progress, terminal_bars

# Into a file or a pipe nothing is cut off.
out, err = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)

_LEAST = 12  # columns that a word has at least, where there are as many

Model = Annotated[str, typer.Argument(help="A folder, a hub name, a folder with a GGUF file, or 'demo'.")]
Text = Annotated[list[Path] | None, typer.Option("--text", help="UTF-8 text; Python's documentation by default.")]
Extend = Annotated[
    bool, typer.Option("--extend-positions", help="Interpolate a table of learned positions for longer inputs.")
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model; without it such are refused.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


class Name:
    """A cell whose words are never cut: what does not fit goes on below, after a comma, colon or dot if it can."""

    def __init__(self, text: str) -> None:
        self.text = text

    def lines(self, width: int) -> list[str]:
        """The text in lines of this width.

        Example:
            >>> Name("smyrf:rounds=2,cluster_size=64").lines(20)
            ['smyrf:rounds=2,', 'cluster_size=64']
            >>> Name("smyrf:rounds=2,cluster_size=64").lines(9)
            ['smyrf:', 'rounds=2,', 'cluster_s', 'ize=64']
        """
        found = [""]
        for part in re.findall(r"[^ ,:.@]*[ ,:.@]|[^ ,:.@]+", self.text):
            if found[-1] and cell_len(found[-1] + part.rstrip()) > width:
                found.append("")
            found[-1] += part
        return [piece for line in found for piece in chop_cells(line.rstrip(), width) or [""]]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(cell_len(self.text), _LEAST), cell_len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield RichText("\n".join(self.lines(options.max_width)))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: tuple[int, ...] = (0,)
) -> None:
    """A table some of whose columns are words, the first by default, and the others numbers.

    Nothing is cut where the terminal is narrow: titles of numbers are wrapped first, then words go on below.
    """
    table = Table(title=escape(shown(title)))
    rows = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    narrow = sum(widths) + 3 * len(columns) + 1 > out.width
    for index, column in enumerate(columns):
        if index in words:
            table.add_column(column, overflow="fold")
        else:
            numbers = max(map(cell_len, (*column.split(), *(row[index] for row in rows))))
            table.add_column(column, justify="right", overflow="fold", max_width=numbers if narrow else None)
    for row in rows:
        table.add_row(*(Name(cell) if index in words else escape(cell) for index, cell in enumerate(row)))
    out.print(table)


def print_json(found: Any) -> None:
    """JSON on one line; numbers that are not finite, which JSON does not know, become null."""
    print(json.dumps(plain(found), allow_nan=False))


def wrote(path: Path) -> None:
    """Say where to look."""
    out.print(f"wrote {shown(str(path))}", markup=False, soft_wrap=True)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """For what takes a while and cannot say how long."""
    with err.status(escape(shown(what))):
        yield


def bars() -> AbstractContextManager[Progress]:
    """A function (what, done, total) that draws a bar for each what."""
    return terminal_bars(err)
