"""The `coterie` command and the recipes' commands as tests run them."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import pytest


def run(*arguments: object, fails: int = 0, stdin: str = "") -> str:
    """What the command says, in this process, as to start one takes seconds; stdin answers whatever is asked."""
    from coterie.cli import main

    return _said(main, arguments, fails, stdin)


def recipe(name: str, *arguments: object, fails: int = 0) -> str:
    """The same of `python -m recipes.NAME`."""
    from recipes.common import command

    main = importlib.import_module(f"recipes.{name}.run").main
    return _said(lambda: command.run(name, main), arguments, fails)


def _said(main: Callable[[], None], arguments: tuple[object, ...], fails: int, stdin: str = "") -> str:
    said, complained, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["command", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    assert code == fails, complained.getvalue()
    return said.getvalue() if fails == 0 else complained.getvalue()
