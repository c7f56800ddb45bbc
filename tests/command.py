"""The commands as tests run them: `coterie`, and those of the recipes."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module

import pytest


def run(*arguments: object, fails: int = 0, stdin: str = "") -> str:
    """What `coterie` says."""
    from coterie.cli import main

    return _said(main, "coterie", arguments, fails, stdin)


def run_recipe(name: str, *arguments: object, fails: int = 0) -> str:
    """What `python -m recipes.NAME` says."""
    from recipes.common import command

    main = import_module(f"recipes.{name}.run").main
    return _said(lambda: command.run(name, main), f"recipes.{name}", arguments, fails, "")


def _said(main: Callable[[], object], name: str, arguments: tuple[object, ...], fails: int, stdin: str) -> str:
    """What a command says, in this process, as to start one takes seconds; stdin answers whatever is asked."""
    said, complained, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    assert code == fails, complained.getvalue()
    return said.getvalue() if fails == 0 else complained.getvalue()
