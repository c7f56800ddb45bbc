"""The command line of a recipe: the options that all of them have, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import disable_progress_bars
from transformers.utils import logging

import coterie
from coterie.cli.inputs import UserError
from coterie.cli.sentences import run_command

Mechanisms = Annotated[
    list[str] | None, typer.Option("--mechanism", help="Any mechanism's string, or 'dense'; several make one table.")
]
Model = Annotated[str, typer.Option(help="A folder, a hub name, or 'demo': all-MiniLM-L6-v2, from a package on PyPI.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds: mean and standard error; more can be added later.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small one, to see that it runs: no figures to rely on.")]
Out = Annotated[Path | None, typer.Option(help="The study's folder; one in out/recipes by default. It goes on there.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start anew in --out instead of going on.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Bf16 = Annotated[
    bool | None,
    typer.Option(
        "--bf16/--no-bf16",
        help="Train and test under autocast to bfloat16; by default where the machine multiplies bfloat16 itself.",
        show_default=False,
    ),
]


def run(name: str, main: Callable[..., Any]) -> None:
    """Make a command of a recipe's function, and run it."""
    disable_progress_bars()  # those of `datasets`: there is one around them
    if "--debug" not in sys.argv:
        logging.set_verbosity_error()  # a new head is what was asked for, and no news
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command(help=main.__doc__)(main)
    run_command(app, f"python -m recipes.{name}", memory="try a smaller --batch, or fewer tokens")


def checked(mechanisms: list[str]) -> list[str]:
    """The strings of mechanisms as Coterie writes them, "dense" first, each once."""
    found = ["dense"]
    for spec in mechanisms:
        if spec in ("dense", "full"):
            continue
        try:
            found.append(str(coterie.as_mechanism(spec)))
        except (ValueError, TypeError) as error:
            raise UserError(f"--mechanism {spec}: {error}") from error
    return list(dict.fromkeys(found))
