"""Can a model copy what it saw far away? Masked copy, from 32 to 512 tokens."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.inputs import UserError, parse_numbers
from recipes.common import command
from recipes.common.models import out_folder
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.study import Result, Study
from recipes.copy import tables
from recipes.copy.cells import Cell, cells_of, check
from recipes.copy.costs import costs
from recipes.copy.learning import Learner, Schedule
from recipes.copy.network import Shape
from recipes.copy.sequences import SEEDS, STEPS, TASKS

MECHANISMS = [
    "dense",
    "clustered:clusters={clusters}",
    "improved-clustered:clusters={clusters}",
    "smyrf:rounds=4,cluster_size=16",
    "near-far:near=16",
    "local:window=32",
]
CAUSAL = ["dense", "smyrf:rounds=4,cluster_size=16", "near-far:near=16,chunk=16", "local:window=32"]
QUICK: list[list[str]] = [[], ["--task", "causal"]]
_QUICK = {"masked": ["dense", "improved-clustered:clusters={clusters}"], "causal": ["dense", "local:window=32"]}


def main(
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Any mechanism's string, with {clusters} in it if you like; 'dense', 'isab:points=32' or "
            "'dynamic-conv:kernel=31'. Several make one table."
        ),
    ] = None,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")] = "masked",
    lengths: Annotated[str, typer.Option(help="Tokens of a sequence; separated by commas.")] = "32,64,128",
    clusters: Annotated[str, typer.Option(help="What stands for {clusters}; separated by commas.")] = "15,30",
    seeds: command.Seeds = 1,
    steps: Annotated[int, typer.Option(min=1, max=STEPS, help="At most; it stops when it is solved.")] = 2000,
    tokens: Annotated[int, typer.Option(min=8, help="In a batch: long sequences come in small batches.")] = 2048,
    rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps over which the rate rises.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = 4,
    width: Annotated[int, typer.Option(min=2, help="Of its rows.")] = 64,
    heads: Annotated[int, typer.Option(min=1, help="Of each layer.")] = 4,
    tests: Annotated[int, typer.Option(min=1, help="Fresh sequences in a test.")] = 200,
    every: Annotated[int, typer.Option(min=1, help="Steps between two tests.")] = 50,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Train small models to copy: `0 w 0 w` with some symbols masked, or, causally, `w 0 w`. Who learns it, at which
    length, with how many clusters, after how many steps, and what does a step cost?"""
    if seeds > SEEDS:
        raise UserError(f"--seeds must be at most {SEEDS:,}, not {seeds:,}.")
    if not 0 < rate < math.inf:
        raise UserError(f"--rate must be above 0 and a number, not {rate:g}.")
    wanted, counts = parse_numbers("--lengths", lengths), parse_numbers("--clusters", clusters)
    chosen = mechanism or (CAUSAL if task == "causal" else MECHANISMS)
    shape = Shape(layers, width, heads)
    schedule = Schedule(steps, rate, warmup, tokens, tests, every)
    if quick:
        wanted, counts, chosen = wanted[:1], counts[:1], mechanism or _QUICK.get(task, chosen)
        schedule = schedule._replace(steps=min(steps, 100), tokens=min(tokens, 1024), tests=min(tests, 50))
    cells = cells_of(chosen, counts, wanted)
    check(cells, task, shape)
    settings = {
        "recipe": "copy",
        "task": task,
        "mechanisms": list(dict.fromkeys(cell.mechanism for cell in cells)),
        "lengths": wanted,
        "seeds": seeds,
        **shape._asdict(),
        **schedule._asdict(),
    }
    study = Study.open(out_folder(out, f"copy-{task}", quick), settings, fresh=fresh)
    with bar(seeds * len(cells) + len(wanted)) as shown:
        measured = [
            row for length in wanted for row in _costs(study, cells, task, length, shape, schedule, quick, shown)
        ]
        found = [_learn(study, cell, task, shape, schedule, seed, shown) for cell in cells for seed in range(seeds)]
    finish(
        study.folder,
        [tables.solved(found, task), tables.times(measured)],
        {"results": found, "costs": measured},
        partial(tables.draw, found=found),
        tables.words(found, task),
        len(tables.panels(found)),
    )


def _learn(study: Study, cell: Cell, task: str, shape: Shape, schedule: Schedule, seed: int, shown: Bar) -> Result:
    def make(folder: Path) -> Result:
        shown.begin(f"{cell.mechanism}, N = {cell.length}, seed {seed}", schedule.steps)
        return Learner(cell, task, shape, schedule, seed, folder).learn(shown)

    found = study.run(cell.name(seed), make)
    shown.done()
    return found


def _costs(
    study: Study, cells: list[Cell], task: str, length: int, shape: Shape, schedule: Schedule, quick: bool, shown: Bar
) -> list[Result]:
    mechanisms, repeats = [cell.mechanism for cell in cells if cell.length == length], 1 if quick else 5

    def make(_: Path) -> Result:
        shown.begin(f"time of a step, N = {length}", repeats + 1)
        return {"rows": costs(mechanisms, task, length, shape, schedule, repeats, shown.tick)}

    rows = study.run(f"costs-{length}", make)["rows"]
    shown.done()
    return list(rows)
