"""Replace the attention of a fine-tuned model without training, and see what it keeps."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from coterie.cli.inputs import UserError, parse_numbers
from recipes.approximate import shown as showing
from recipes.approximate import sweep
from recipes.approximate.kept import dense, kept
from recipes.approximate.tasks import TASKS, tuning
from recipes.approximate.words import words
from recipes.common import command
from recipes.common.models import out_folder
from recipes.common.precision import in_bf16
from recipes.common.progress import bar
from recipes.common.results import finish
from recipes.common.study import Result, Study
from recipes.common.templates import Point, points_of
from recipes.common.tuning import DENSE, Tuning

CLUSTERS = "5,10,15,25,50,100"
TEMPLATES = [
    "clustered:clusters={clusters}",
    "improved-clustered:clusters={clusters},topk=32",
    "near-far:near={clusters}",
]
QUICK = [["--task", "qa", "--data", "{data}/xquad/xquad.en.json"]]
_QUICK_CLUSTERS = "5,25"
_QUICK_SETTINGS = {"examples": 48, "tests": 24, "epochs": 1.0}


def main(
    task: Annotated[str, typer.Option(help=f"One of {', '.join(TASKS)}.")],
    data: Annotated[str, typer.Option(help="As the task's own recipe takes it.")],
    model: Annotated[
        str,
        typer.Option(
            help="A model that is fine-tuned on the task; another one, or 'demo', is fine-tuned densely first."
        ),
    ] = "demo",
    clusters: Annotated[str | None, typer.Option(help=f"With commas between them; {CLUSTERS} by default.")] = None,
    mechanism: Annotated[
        list[str] | None, typer.Option(help="A mechanism's string with {clusters} in it; several make one table.")
    ] = None,
    seeds: command.Seeds = 1,
    epochs: Annotated[float | None, typer.Option(min=0.01, help="As in the task's recipe by default.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="As in the task's recipe by default.")] = None,
    rate: Annotated[float | None, typer.Option(help="As in the task's recipe by default.")] = None,
    length: Annotated[int | None, typer.Option(min=24, help="As in the task's recipe by default.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Train on so many examples; all by default.")] = None,
    tests: Annotated[int | None, typer.Option(min=1, help="Test on so many; all by default.")] = None,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Replace the attention of a fine-tuned model without training, and see how much of its score it keeps.

    Every mechanism runs with every number of clusters on the same test examples as dense attention.
    """
    points = points_of(
        mechanism or TEMPLATES, parse_numbers("--clusters", clusters or (_QUICK_CLUSTERS if quick else CLUSTERS))
    )
    asked = {"epochs": epochs, "batch": batch, "rate": rate, "length": length, "examples": examples, "tests": tests}
    if quick:
        asked |= {key: min(asked[key] or most, most) for key, most in _QUICK_SETTINGS.items()}
    tuned = tuning(task, data, model, bf16=in_bf16(bf16), **asked)
    mechanisms = list(dict.fromkeys([DENSE, *(point.mechanism for point in points)]))
    ready = _ready(tuned, seeds, mechanisms)
    settings = {
        "recipe": "approximate",
        "task": task,
        "data": data,
        "mechanisms": mechanisms,
        "seeds": seeds,
        **tuned.about(),
    }
    study = Study.open(out_folder(out, f"approximate-{task}", quick), settings, fresh=fresh)
    with bar((ready is None) * seeds + seeds * len(mechanisms) + 1) as shown:
        each = [ready] if ready else list(sweep.fine_tuned(tuned, study, seeds, shown))
        results = [result for one in each for result in sweep.scores(tuned, study, one, mechanisms, shown)]
        costs, short = sweep.costs(tuned, study, each[0], mechanisms, *((1, 8) if quick else (5, 32)), shown)
    _report(tuned, study, results, costs, short, points)


def _ready(tuned: Tuning, seeds: int, mechanisms: list[str]) -> sweep.Tuned | None:
    """The model, if it is fine-tuned already; one that cannot be used is refused before anything is written."""
    ready = sweep.given(tuned)
    if ready is None:
        tuned.check(mechanisms)
        return None
    if seeds > 1:
        raise UserError(f"{tuned.model} is fine-tuned already, so --seeds {seeds} has nothing to train.")
    tuned.check_kept(ready.name)
    tuned.check_model(tuned.fine_tuned(ready.name), ready.name, mechanisms)
    return ready


def _report(
    tuned: Tuning, study: Study, results: list[Result], costs: list[Result], short: float, points: list[Point]
) -> None:
    base, found = dense(results), kept(results, points)
    seeds = len({result["seed"] for result in results})
    title = (
        f"{tuned.name}, {tuned.model}: {tuned.score} × 100, {results[0]['examples']:,} test examples, {seeds} "
        f"seed{'s' * (seeds > 1)}, ± standard error over examples; no training with what is run"
    )
    figures = {
        "results": [{key: value for key, value in result.items() if key != "resampled"} for result in results],
        "dense": base._asdict(),
        "kept": [
            {
                **each.point._asdict(),
                "score": each.score._asdict(),
                "difference": each.difference._asdict(),
                "within one standard error": each.within,
            }
            for each in found
        ],
        "costs": costs,
        "share of short texts": short,
    }
    finish(
        study.folder,
        [showing.table(base, found, costs, title, tuned.score)],
        figures,
        partial(showing.draw, dense=base, found=found, score=tuned.score),
        words(base, found, costs, short, max(result["chance"] for result in results)),
    )
