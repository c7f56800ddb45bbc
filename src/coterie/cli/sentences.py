"""Errors in one sentence, and exit codes that scripts can use."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rich.markup import escape

from coterie.cli.console import err
from coterie.cli.inputs import UserError
from coterie.files import shown


def run_command(app: Callable[..., Any], name: str, memory: str) -> None:
    """Run a typer command; what goes wrong is said in one sentence, unless --debug asks for the traceback.

    Args:
        name: what the command is called in its own help.
        memory: what to try where there is not enough memory.
    """
    debug = "--debug" in sys.argv
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # which may know neither "≥" nor the bytes of a file's name
            stream.reconfigure(errors="backslashreplace")
    if not debug and "transformers" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        app(prog_name=name, standalone_mode=True)
    except Exception as error:
        if debug:
            raise
        _fail(_sentence(error, memory))


def _sentence(error: Exception, memory: str) -> str:
    said = str(error).splitlines()
    short = "not enough memory" in str(error) or "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and short):
        return f"there is not enough memory for this: {memory}."
    if isinstance(error, UserError | RuntimeError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | TypeError | OSError | ImportError) and said:
        return said[0]
    return f"{type(error).__name__}: {said[0] if said else 'no message'}"


def _fail(sentence: str) -> NoReturn:
    err.print(f"[red]error:[/] {escape(shown(sentence))}", soft_wrap=True, highlight=False)
    raise SystemExit(1)
