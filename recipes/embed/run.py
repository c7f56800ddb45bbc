"""Embed long documents densely and clustered: what is found in them, how fast, and how near to dense it stays."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import coterie
from coterie.cli.inputs import Loaded, UserError, encode, parse_numbers
from coterie.cli.inputs import cut as cut_batches
from coterie.hf.wrapped import model_inside
from recipes.common import command
from recipes.common.digest import digest
from recipes.common.models import out_folder
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.study import Result, Study
from recipes.embed import loading, tables
from recipes.embed.measure import FITTED, Clock, Material, Ways, at_length
from recipes.embed.sections import Cut, chapters, cut, pack
from recipes.embed.stsb import load as load_pairs

MECHANISMS = ["near-far", "smyrf:rounds=2,cluster_size=64"]
QUICK: list[list[str]] = [[]]
_SEQUENCES = 5  # to fit on: one to search, and four that certify


def main(
    model: command.Model = "demo",
    mechanism: command.Mechanisms = None,
    lengths: Annotated[str, typer.Option(help="Tokens of a document, separated by commas.")] = "512,2048,8192",
    fit: Annotated[float, typer.Option(min=0, max=1, help="The fidelity of a fitted model; 0: none is fitted.")] = 0.99,
    fit_seconds: Annotated[float, typer.Option(min=1, help="How long to fit at each length.")] = 120,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file whose headings are underlined, a chapter; several. Python's documentation by default."
        ),
    ] = None,
    stsb: Annotated[Path | None, typer.Option(help="The STS Benchmark's folder, for its Spearman correlation.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of chapters, and of what is fitted.")] = 0,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Embed long documents densely, with mechanisms and fitted: how well sections are found by their headings, each
    embedded alone or by late chunking; documents a second; the cosine with dense embeddings."""
    mechanisms = command.checked(mechanism or (MECHANISMS[:1] if quick else MECHANISMS))
    wanted = parse_numbers("--lengths", lengths)
    if quick:
        wanted, fit_seconds = [256, 1024] if max(wanted) > 1024 else wanted, min(fit_seconds, 10)
    book = [section for chapter in chapters(text or [], seed) for section in chapter]
    pairs = None if stsb is None else load_pairs(stsb)
    bare = loading.load(model)
    loading.check(model, bare, mechanisms, wanted[-1])
    short = _cut(book, bare.tokenizer, wanted[0])
    if quick:
        short = short._replace(sections=short.sections[:30], tokens=short.tokens[:30])
    if fit:
        _check_rest(short.rest, Loaded(model, model_inside(bare), bare.tokenizer), wanted[-1])
    settings = {
        "recipe": "embed",
        "model": model,
        "mechanisms": mechanisms,
        "lengths": wanted,
        "fit": fit,
        "fit seconds": fit_seconds,
        "text": None if not text else [str(file) for file in text],
        "python": platform.python_version(),  # the documentation is that of this version
        "sections": len(short.sections),
        "data digest": digest(short.sections),
        "stsb": None if stsb is None else str(stsb),
        "seed": seed,
    }
    study = Study.open(out_folder(out, "embed", quick), settings, fresh=fresh)
    found: dict[int, Result] = {}
    fits: dict[int, Result] = {}
    with bar(len(wanted) * (2 if fit else 1)) as shown:
        for length in wanted:
            ready = loading.load(model, length)
            ways: Ways = {name: name for name in mechanisms}
            if fit:
                fits[length] = study.run(
                    f"fit-{length}", partial(_fit, ready, short.rest, length, fit, fit_seconds, seed, shown)
                )
                ways = {**ways, FITTED: fits[length]["modules"]}
                shown.done()
            material = Material(short.sections, pack(short.tokens, length - _special(ready.tokenizer)), pairs)
            make = partial(at_length, ready, material, length, ways, Clock(2, 2048) if quick else Clock(3, 8192), shown)
            found[length] = study.run(f"length-{length}", make)
            shown.done()
    limit = loading.positions(bare)
    finish(
        study.folder,
        [
            tables.retrieval(found, "alone", f"{model}: sections found, each embedded alone", limit),
            tables.retrieval(found, "late", f"{model}: sections found, late chunking", limit),
            tables.speed(found, limit),
        ],
        {"found": found, "fits": fits},
        partial(tables.draw, found=found),
        tables.words(found, fits, limit, _said(short, wanted, bool(fit))),
        panels=2,
    )


def _special(tokenizer: Any) -> int:
    return int(tokenizer.num_special_tokens_to_add())


def _cut(book: list[Any], tokenizer: Any, shortest: int) -> Cut:
    most = shortest - _special(tokenizer)
    if most < 1:
        raise UserError(f"--lengths must be more than the {shortest - most} special tokens of the model.")
    return cut(book, tokenizer, most)


def _check_rest(rest: str, loaded: Loaded, longest: int) -> None:
    """A model is fitted on what was cut off: text that nothing is tested on."""
    there, needed = len(encode(loaded, rest)) if rest else 0, _SEQUENCES * longest
    if there < needed:
        raise UserError(
            f"what is cut off long sections has {there:,} tokens, and a fit at {longest:,} needs {needed:,} on which "
            "nothing is tested: give more text, shorter --lengths, or --fit 0."
        )


def _fit(
    model: Any, rest: str, length: int, fidelity: float, seconds: float, seed: int, shown: Bar, folder: Path
) -> Result:
    shown.begin(f"{length} tokens: fit")
    loaded = Loaded("the model", model_inside(model), model.tokenizer)
    batches, held_out = cut_batches(loaded, rest, [length], _SEQUENCES)
    on = [[{k: v.to(model.device) for k, v in batch.items()} for batch in part] for part in (batches, held_out)]
    found = coterie.fit(model, on[0], fidelity, held_out=on[1], seconds=seconds, seed=seed)
    return found.to_dict()


def _said(short: Cut, lengths: list[int], fitted: bool) -> str:
    rest = ", and models are fitted on what is cut off" if fitted else ""
    count, tokens = len(short.sections), sum(short.tokens)
    return f"{count} sections of up to {lengths[0]:,} tokens, {tokens:,} in all; longer ones are cut there{rest}."
