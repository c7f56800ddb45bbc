"""The tables, the plot and the sentence of what was heard."""

from __future__ import annotations

import statistics
from typing import Any

from recipes.common.results import Table
from recipes.common.scores import shown
from recipes.common.study import Result
from recipes.whisper.fitted import Parts
from recipes.whisper.measure import DENSE

FITTED = "fitted"


def all_of(model: str, found: list[Result], fitted: Result | None, costs: Result, parts: Parts) -> list[Table]:
    """Every table there is."""
    made = [heard(model, found, costs)]
    return [*made, kept(found, parts), layers(fitted)] if fitted is not None else made


def heard(model: str, found: list[Result], costs: Result) -> Table:
    """Each way of attending: its word errors on all clips, its cosine and its time."""
    rows = []
    words = _words(_of(found, DENSE)[0])
    for name, cost in costs.items():
        runs = _of(found, name)
        errors = [_errors(run) for run in runs]
        cosines = [statistics.fmean(clip["cosine"] for clip in run["clips"]) for run in runs]
        rows.append(
            [
                name,
                f"{cost['scores']:.0f} of {cost['dense_scores']}",
                shown(errors, 1, 0 if len(errors) == 1 else 1),
                shown([each / words for each in errors]),
                "" if name == DENSE else shown(cosines, 1, 4),
                f"{1000 * cost['seconds']:.0f}",
                f"{cost['seconds'] / costs[DENSE]['seconds']:.2f}×",
            ]
        )
    columns = ["encoder's attention", "scores a query", "word errors", "%", "cosine", "ms a window", "to dense"]
    clips = len(found[0]["clips"])
    return f"{model}, {clips} clip{'s' * (clips > 1)}, {words} words, without training", columns, rows


def kept(found: list[Result], parts: Parts) -> Table:
    """The fitted encoder on the clips that it was fitted on, that chose among plans, and that it never met."""
    dense, mine = _of(found, DENSE)[0], _of(found, FITTED)[0]
    rows = []
    for title, clips in zip(("fitted on", "certified on", "held out"), parts, strict=True):
        names = {clip.name for clip in clips}
        rows.append([title, str(len(clips)), str(_words(dense, names))])
        rows[-1] += [str(_errors(dense, names)), str(_errors(mine, names))]
    columns = ["clips", "how many", "words", "word errors, dense", "word errors, fitted"]
    return "coterie.fit with word accuracy as its measure", columns, rows


def layers(fitted: Result) -> Table:
    """What runs in each module of the encoder."""
    rows = [[name, spec] for name, spec in fitted["modules"].items() if name.startswith("encoder.")]
    return f"what was fitted; {' '.join(fitted['notes']) or 'no notes'}", ["module", "mechanism"], rows


def words(found: list[Result], fitted: Result | None, costs: Result, parts: Parts) -> str:
    """What it says in a few words."""
    dense = _errors(_of(found, DENSE)[0])
    said = [f"of {_words(found[0])} words dense attention gets {dense} wrong"]
    for name, cost in costs.items():
        if name not in (DENSE, FITTED):
            errors = [float(_errors(run)) for run in _of(found, name)]
            ratio = costs[DENSE]["seconds"] / cost["seconds"]
            said.append(f"{name} {shown(errors, 1, 0 if len(errors) == 1 else 1)} ({ratio:.2f}× as fast)")
    if fitted is not None:
        names = {clip.name for clip in parts.held_out}
        mine, base = (_errors(_of(found, name)[0], names) for name in (FITTED, DENSE))
        ratio = costs[DENSE]["seconds"] / costs[FITTED]["seconds"]
        said.append(f"fitted, on held-out clips: {mine} where dense has {base} ({ratio:.2f}× as fast)")
    return "; ".join(said) + "."


def draw(axes: Any, *, found: list[Result], costs: Result) -> None:
    """Word errors by the encoder's time."""
    total = _words(found[0])
    for name, cost in costs.items():
        rate = 100 * statistics.fmean(_errors(run) for run in _of(found, name)) / total
        axes.plot(1000 * cost["seconds"], rate, "o", label=name)
    axes.axhline(100 * _errors(_of(found, DENSE)[0]) / total, color="grey", linestyle="--", linewidth=0.8)
    axes.set(xlabel="encoder, ms a window", ylabel="word error rate, %", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _of(found: list[Result], name: str) -> list[Result]:
    return [run for run in found if run["mechanism"] == name]


def _errors(run: Result, names: set[str] | None = None) -> int:
    return sum(clip["errors"] for clip in run["clips"] if names is None or clip["clip"] in names)


def _words(run: Result, names: set[str] | None = None) -> int:
    return sum(clip["words"] for clip in run["clips"] if names is None or clip["clip"] in names)
