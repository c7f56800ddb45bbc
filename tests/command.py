"""The `coterie` command as tests run it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest


def run(*arguments: object, fails: int = 0, stdin: str = "") -> str:
    """What the command says, in this process, as to start one takes seconds; stdin answers whatever is asked."""
    from coterie.cli import main

    said, complained, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(complained):
        patch.setattr(sys, "argv", ["coterie", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    assert code == fails, complained.getvalue()
    return said.getvalue() if fails == 0 else complained.getvalue()
