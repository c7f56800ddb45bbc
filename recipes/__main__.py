"""Every recipe in its quick form, one after the other, and one table.

    python -m recipes --data FOLDER    # one that holds glue/, imdb/, hyperpartisan/, xquad/, stsb/ …: docs/results.md

A recipe whose data are not there is named, with what is missing.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import err, print_table
from coterie.cli.inputs import UserError
from coterie.cli.sentences import run_command
from coterie.files import read_json

_HERE = Path(__file__).parent


def names() -> list[str]:
    """Every recipe: a folder with a `run.py`."""
    return sorted(file.parent.name for file in _HERE.glob("*/run.py"))


def quick(name: str, data: Path) -> list[list[str]]:
    """What each quick run of a recipe takes; "{data}" in its `QUICK` stands for the folder with all data."""
    runs: list[list[str]] = importlib.import_module(f"recipes.{name}.run").QUICK
    return [[part.replace("{data}", str(data)) for part in run] for run in runs]


def run_one(name: str, arguments: list[str], data: Path, out: Path) -> list[str]:
    """A row: the recipe, how long it took, and what came out or why it did not run."""
    shown = " ".join([name, *arguments])
    missing = [part for part in arguments if part.startswith(f"{data}/") and not Path(part).exists()]
    if missing:
        return [shown, "–", f"not run: there is no {missing[0]}"]
    start = time.perf_counter()
    command = [sys.executable, "-m", f"recipes.{name}", *arguments, "--quick", "--fresh", "--out", str(out)]
    err.print(f"[bold]{shown}[/]", highlight=False)
    done = subprocess.run(command, cwd=_HERE.parent, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"{shown} --quick failed.")
    return [shown, f"{time.perf_counter() - start:.0f} s", str(read_json(out / "results.json")["words"])]


def main(
    data: Annotated[Path, typer.Option(help="The folder that holds the folders of all data sets.")] = Path("data"),
    out: Annotated[Path, typer.Option(help="Where their studies go.")] = Path("out/recipes/quick"),
    recipe: Annotated[list[str] | None, typer.Argument(help="Some of them; all by default.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run every recipe in its quick form, and print one table. Its figures show that recipes run, and nothing else."""
    unknown = set(recipe or ()) - set(names())
    if unknown:
        raise UserError(f"there is no recipe {sorted(unknown)[0]!r}: expected some of {', '.join(names())}.")
    rows = [
        run_one(name, arguments, data, (out / f"{name}-{number}").resolve())
        for name in recipe or names()
        for number, arguments in enumerate(quick(name, data.resolve()))
    ]
    print_table("every recipe, --quick", ["recipe", "time", "what came out"], rows, words=(0, 2))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    run_command(app, "python -m recipes", memory="close other programs")
