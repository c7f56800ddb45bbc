"""What a user should know of a run and would not ask for, on stderr."""

from __future__ import annotations

from rich.markup import escape

from coterie.cli.console import err
from coterie.files import readable
from recipes.common.processes import processes


def note(sentence: str) -> None:
    """Print a sentence; of several processes, the first does."""
    if processes().is_main_process:
        err.print(f"[yellow]note:[/] {escape(readable(sentence))}", highlight=False, soft_wrap=True)
