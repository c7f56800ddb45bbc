"""Fine-tune on a task of GLUE with several mechanisms; run each model densely and clustered."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from recipes.common import command, comparison
from recipes.common.classification import FineTuning
from recipes.common.models import out_folder
from recipes.common.precision import in_bf16
from recipes.common.progress import bar
from recipes.common.results import finish
from recipes.common.study import Study
from recipes.common.training import Schedule
from recipes.common.tuning import Settings
from recipes.glue import tasks

DEFAULT = Settings(epochs=3, batch=16, rate=5e-5, length=128)  # SMYRF's supplement, §15.1.2

# About 64 scores a query: 2 rounds of clusters of 32, or 48 keys and √(2·128) = 16 means.
MECHANISMS = ["smyrf:rounds=2,cluster_size=32", "near-far:near=48"]
EXAMPLES, TESTS = 4000, 2000  # of the tasks that would take hours
LARGE = ", ".join(tasks.LARGE)
QUICK = [["--task", "rte", "--data", "{data}/glue"]]


def tuning(task: str, data: str, model: str, settings: Settings) -> FineTuning:
    """How a model is fine-tuned on a task."""
    found = tasks.load(task, data, settings.examples, settings.tests)
    schedule = Schedule(settings.epochs, settings.batch, settings.rate, warmup=0.1, by_length=True, bf16=settings.bf16)
    return FineTuning(found, model, settings.length, schedule)


def main(
    data: Annotated[str, typer.Option(help="A folder that holds GLUE's task folders, or a hub name (nyu-mll/glue).")],
    task: Annotated[str, typer.Option(help=f"One of {', '.join(tasks.TASKS)}.")] = "cola",
    model: command.Model = "demo",
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    epochs: Annotated[float, typer.Option(min=0.01)] = DEFAULT.epochs,
    batch: Annotated[int, typer.Option(min=1)] = DEFAULT.batch,
    rate: Annotated[float, typer.Option(help="The paper searched among 5e-5, 3e-5 and 2e-5.")] = DEFAULT.rate,
    length: Annotated[int, typer.Option(min=2, help="Tokens that longer texts are cut to.")] = DEFAULT.length,
    examples: Annotated[
        int | None,
        typer.Option(min=0, help=f"Train on so many, 0: all; by default all, of {LARGE} {EXAMPLES:,}."),
    ] = None,
    tests: Annotated[
        int | None, typer.Option(min=0, help=f"Test on so many, 0: all; by default all, of {LARGE} {TESTS:,}.")
    ] = None,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Fine-tune on a task of GLUE with several mechanisms, and run each model densely and clustered.

    Settings are those of SMYRF's supplement, §15.1.2: 128 tokens, batches of 16, 3 epochs, 10 % warm-up.
    """
    mechanisms = command.checked(mechanism or MECHANISMS)
    large = task in tasks.LARGE
    examples = (EXAMPLES if large else None) if examples is None else examples or None
    tests = (TESTS if large else None) if tests is None else tests or None
    if quick:
        examples, tests, epochs = min(examples or 48, 48), min(tests or 32, 32), 1
    tuned = tuning(task, data, model, Settings(epochs, batch, rate, length, examples, tests, in_bf16(bf16)))
    tuned.check(mechanisms)
    settings = {
        "recipe": "glue",
        "task": task,
        "data": data,
        "mechanisms": mechanisms,
        "seeds": seeds,
        **tuned.about(),
    }
    study = Study.open(out_folder(out, f"glue-{task}", quick), settings, fresh=fresh)
    with bar(seeds * len(mechanisms) + 1) as shown:
        results = tuned.run(study, mechanisms, range(seeds), shown)
        costs = tuned.costs(study, mechanisms, 1 if quick else 5, shown, texts=8 if quick else 32)
    title, columns, rows = comparison.trained_with(results, costs, tuned.score)
    finish(
        study.folder,
        [(f"{tuned.name}, {model}: {title}", columns, rows), comparison.interchange(results, tuned.score)],
        {"results": results, "costs": costs},
        partial(comparison.draw, results=results, costs=costs, score=tuned.score),
        comparison.summary(tuned.name, results, tuned.score),
    )
