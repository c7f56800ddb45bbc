"""What the commands print with: tables, progress, and the options that all of them share."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie.files import plain, shown
from coterie.progress import Progress, terminal_bars

# Into a file or a pipe nothing is cut off.
out, err = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)

Model = Annotated[str, typer.Argument(help="A folder, a hub name, a folder with a GGUF file, or 'demo'.")]
Text = Annotated[list[Path] | None, typer.Option("--text", help="UTF-8 text; Python's documentation by default.")]
Extend = Annotated[
    bool, typer.Option("--extend-positions", help="Interpolate a table of learned positions for longer inputs.")
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model; without it such are refused.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], words: tuple[int, ...] = (0,)
) -> None:
    """A table some of whose columns are words, the first by default, and the others numbers."""
    table = Table(title=escape(shown(title)))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index in words else "right")
    for row in rows:
        table.add_row(*(escape(shown(cell)) for cell in row))
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
