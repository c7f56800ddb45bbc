"""Speech recognition with CTC: models trained with several mechanisms, each run with each."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from coterie.cli.console import err
from coterie.cli.inputs import UserError, parse_numbers
from coterie.files import shown as readable
from recipes.common import command
from recipes.common.models import out_folder
from recipes.common.precision import in_bf16
from recipes.common.processes import processes
from recipes.common.progress import bar
from recipes.common.results import finish
from recipes.common.study import Result, Study
from recipes.speech import loading, studying, tables
from recipes.speech.corpus import Corpus
from recipes.speech.digits import Digits, Range
from recipes.speech.network import STRIDES, Config
from recipes.speech.training import Settings

MECHANISMS = [
    "clustered:clusters=50",
    "improved-clustered:clusters=50",
    "near-far:near=32",
    "reformer:rounds=4,chunk_size=32",
    "smyrf:rounds=4,cluster_size=32",
]
QUICK = [["--data", "{data}/fsdd"], ["--data", "{data}/an4"]]
_SHOWN = 3  # sentences about what was left out
DIGITS, FIRST = "20-40", "1-3"  # in a string of the test, and at the beginning of training


class Targets(StrEnum):
    """How digits are written."""

    DIGITS = "digits"
    CHARACTERS = "characters"


def main(
    data: Annotated[
        str,
        typer.Option(
            help="A folder: recordings of digits or recordings.zip (FSDD), AN4 or an4.zip, LibriSpeech's layout; or a "
            "hub name, owner/name[:configuration]."
        ),
    ],
    mechanism: command.Mechanisms = None,
    also: Annotated[list[str] | None, typer.Option(help="A mechanism that models run with, and none trains.")] = None,
    layers: Annotated[
        str, typer.Option(help="Models of so many layers; several, separated by commas, make a curve.")
    ] = "3",
    seeds: command.Seeds = 1,
    digits: Annotated[
        str, typer.Option(help="FSDD: strings of so many, in the test and at the end of training.")
    ] = DIGITS,
    first: Annotated[str, typer.Option(help="FSDD: strings of so many at the beginning of training.")] = FIRST,
    held_out: Annotated[
        str, typer.Option(help="FSDD: 'recordings' (the first five of each), or speakers, separated by commas.")
    ] = "recordings",
    targets: Annotated[
        Targets, typer.Option(help="FSDD: write digits, or spell them out; others are spelled.")
    ] = Targets.DIGITS,
    utterances: Annotated[
        int | None, typer.Option(min=1, help="Train on so many, FSDD: recordings; all by default.")
    ] = None,
    tests: Annotated[int | None, typer.Option(min=1, help="Test on so many; all by default, FSDD: 60 strings.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="AN4 20, others 30 by default.")] = None,
    frames: Annotated[int, typer.Option(min=100, help="Of a batch, 100 a second, padding included.")] = Settings.frames,
    rate: Annotated[float, typer.Option(help="Of AdamW, at its highest.")] = Settings.rate,
    dim: Annotated[int, typer.Option(min=8, help="Width of the model.")] = Config.dim,
    heads: Annotated[int, typer.Option(min=1)] = Config.heads,
    stride: Annotated[int, typer.Option(help="Frames that make a token: 1, 2 or 4.")] = Config.stride,
    augment: Annotated[bool, typer.Option("--augment/--no-augment", help="SpecAugment.")] = True,
    beam: Annotated[int, typer.Option(min=0, help="Width of a beam search beside greedy decoding; 0: none.")] = 8,
    bf16: command.Bf16 = None,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Train recognisers with CTC and dense, clustered, improved clustered, near–far, Reformer's and SMYRF attention,
    run each with each, and set errors against milliseconds an utterance: inference under a fixed budget."""
    _check(dim, heads, stride, rate)
    mechanisms = command.checked(mechanism or MECHANISMS)
    others = [name for name in _also(also or []) if name not in mechanisms]
    depths = parse_numbers("--layers", layers)
    last, begins = digit_range("--digits", digits), digit_range("--first", first)
    if quick:
        last, begins, tests, epochs = Range(3, 6), Range(1, 3), min(tests or 6, 6), 2
        depths, dim, heads, utterances = [2], 32, 2, min(utterances or 120, 120)
    corpus = loading.load(
        data,
        first=begins,
        last=last,
        held_out=speakers(held_out),
        spelled=targets is Targets.CHARACTERS,
        utterances=utterances,
        tests=tests,
    )
    _check_meant(corpus, held_out, targets, (digits, first))
    _tell(corpus)
    settings = Settings(epochs or corpus.epochs, frames, rate, augment=augment, bf16=in_bf16(bf16))
    config = Config(corpus.channels, len(corpus.symbols), dim=dim, heads=heads, stride=stride)
    plan = studying.Plan(corpus, config, settings, mechanisms, others, depths, beam, 1 if quick else 5)
    studying.try_out(plan)
    about = {
        "recipe": "speech",
        "data": data,
        "data digest": corpus.digest(),
        "left out": len(corpus.left_out),
        "mechanisms": mechanisms,
        "also": others,
        "seeds": seeds,
        "digits": [str(begins), str(last), held_out, str(targets)] if isinstance(corpus, Digits) else None,
        "test utterances": len(corpus.test),
        **config.to_dict(),
        **settings.to_dict(),
        "layers": depths,
        "beam": beam,
    }
    study = Study.open(out_folder(out, "speech", quick), about, fresh=fresh)
    with bar(plan.runs(seeds)) as shown:
        results = studying.trained(plan, study, seeds, shown)
        costs = studying.costs(plan, study, shown)
    _tell_pathless(results)
    unit, found = corpus.unit, tables.points(results, costs, corpus.unit)
    finish(
        study.folder,
        [
            tables.trained_with(results, costs, unit, beam, corpus.name),
            tables.interchange(results, unit),
            tables.fixed_budget(found, unit),
        ],
        {"results": results, "costs": costs, "left_out": corpus.left_out},
        partial(tables.draw, found=found, results=results, unit=unit),
        tables.words(found, unit, corpus.name),
        panels=2,
    )


def _check(dim: int, heads: int, stride: int, rate: float) -> None:
    if stride not in STRIDES:
        raise UserError(f"--stride {stride}: expected one of {', '.join(map(str, STRIDES))}.")
    if dim % (2 * heads):
        raise UserError(f"--dim {dim} must be a multiple of 2 × --heads {heads}.")
    if not 0 < rate < math.inf:
        raise UserError(f"--rate {rate:g}: expected more than 0, and a number.")
    if processes().num_processes > 1:
        raise UserError("this recipe runs in one process: start it without accelerate launch or torchrun.")


def _also(specs: list[str]) -> list[str]:
    try:
        return command.checked(specs)[1:]
    except UserError as error:
        raise UserError(str(error).replace("--mechanism", "--also", 1)) from error


def digit_range(option: str, text: str) -> Range:
    """How many digits an option allows.

    >>> digit_range("--digits", "20-40")
    Range(low=20, high=40)
    """
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UserError(f"{option} {text}: expected two numbers of digits, such as 20-40, the smaller one first.")
    return Range(int(found[1]), int(found[2]))


def speakers(held_out: str) -> list[str]:
    """Who is held out; nobody if single recordings are."""
    return [] if held_out == "recordings" else [name.strip() for name in held_out.split(",")]


def _check_meant(corpus: Corpus, held_out: str, targets: Targets, counts: tuple[str, str]) -> None:
    """Refuse options that this corpus knows nothing of."""
    if isinstance(corpus, Digits):
        return
    if held_out != "recordings" or targets is not Targets.DIGITS:
        raise UserError(f"--held-out and --targets are for strings of digits, and {corpus.name} has its own texts.")
    if counts != (DIGITS, FIRST):
        raise UserError(f"--digits and --first are for strings of digits, and {corpus.name} has its own texts.")


def _tell_pathless(results: list[Result]) -> None:
    count = results[0]["pathless"]
    if count:
        err.print(
            f"[yellow]left out:[/] {count} utterances of all epochs have more symbols than tokens, and no path; a "
            "smaller --stride makes more tokens.",
            highlight=False,
        )


def _tell(corpus: Corpus) -> None:
    """What was left out; all of it is in results.json."""
    count = len(corpus.left_out)
    for sentence in corpus.left_out[:_SHOWN]:
        err.print(f"[yellow]left out:[/] {escape(readable(sentence))}", highlight=False)
    if count > _SHOWN:
        err.print(f"[yellow]left out:[/] {count - _SHOWN} more; results.json names them all.", highlight=False)
