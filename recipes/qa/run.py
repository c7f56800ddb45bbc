"""Fine-tune a model to answer questions in SQuAD's format, densely and with the mechanisms asked for."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from recipes.common import command, comparison
from recipes.common.models import out_folder
from recipes.common.precision import in_bf16
from recipes.common.progress import bar
from recipes.common.results import finish
from recipes.common.study import Study
from recipes.common.training import Schedule
from recipes.common.tuning import Settings
from recipes.qa import squad
from recipes.qa.tuning import QuestionAnswering

# 380 tokens are the paper's. The others are for MiniLM on some 900 questions, where the usual two epochs teach nothing.
DEFAULT = Settings(epochs=8, batch=8, rate=1e-4, length=380)
STRIDE = 128
QUICK = [["--data", "{data}/xquad/xquad.en.json"]]


def tuning(task: str, data: str, model: str, settings: Settings, stride: int | None = None) -> QuestionAnswering:
    """How a model is fine-tuned; windows share STRIDE tokens, short ones half of theirs, unless a stride is given."""
    schedule = Schedule(settings.epochs, settings.batch, settings.rate, warmup=0.1, by_length=True, bf16=settings.bf16)
    stride = min(STRIDE, settings.length // 2) if stride is None else stride
    return QuestionAnswering(
        squad.load(data), model, settings.length, stride, schedule, settings.examples, settings.tests
    )


def main(
    data: Annotated[
        str,
        typer.Option(
            help="A JSON file in SQuAD v1.1's format, a folder with train*.json and dev*.json or with one file, "
            "or a hub name (rajpurkar/squad)."
        ),
    ],
    model: command.Model = "demo",
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    epochs: Annotated[float, typer.Option(min=0.01)] = DEFAULT.epochs,
    batch: Annotated[int, typer.Option(min=1)] = DEFAULT.batch,
    rate: Annotated[float, typer.Option()] = DEFAULT.rate,
    length: Annotated[int, typer.Option(min=24, help="Tokens of a window, question included.")] = DEFAULT.length,
    stride: Annotated[
        int | None, typer.Option(min=0, help="Tokens that two windows of a paragraph share; 128 by default.")
    ] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Train on so many questions; all by default.")] = None,
    tests: Annotated[int | None, typer.Option(min=1, help="Test on so many; all by default.")] = None,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Fine-tune a model to answer questions in SQuAD's format, densely and with each --mechanism.

    The models stay in the study's folder `models`, for python -m recipes.approximate. A file without a part for tests
    is split by paragraph; the seed draws the split.
    """
    mechanisms = command.checked(mechanism or [])
    if quick:
        examples, tests, epochs = min(examples or 48, 48), min(tests or 32, 32), 1
    tuned = tuning("qa", data, model, Settings(epochs, batch, rate, length, examples, tests, in_bf16(bf16)), stride)
    tuned.check(mechanisms)
    settings = {"recipe": "qa", "data": data, "mechanisms": mechanisms, "seeds": seeds, **tuned.about()}
    study = Study.open(out_folder(out, "qa", quick), settings, fresh=fresh)
    with bar(seeds * len(mechanisms) + 1) as shown:
        results = tuned.run(study, mechanisms, range(seeds), shown, keep_models=True)
        costs = tuned.costs(study, mechanisms, 1 if quick else 5, shown, texts=8 if quick else 32)
    title, columns, rows = comparison.trained_with(results, costs, tuned.score)
    tables = [(f"{data}, {model}: {title}", columns, rows)]
    if len(mechanisms) > 1:
        tables.append(comparison.interchange(results, tuned.score))
    finish(
        study.folder,
        tables,
        {"results": results, "costs": costs},
        partial(comparison.draw, results=results, costs=costs, score=tuned.score),
        f"{comparison.summary(tuned.name, results, tuned.score)} The models are in {study.folder / 'models'}.",
    )
