"""The tables of models that were fine-tuned with several mechanisms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from recipes.common.results import Table
from recipes.common.scores import mean_and_error, of_seeds, shown
from recipes.common.study import Result
from recipes.common.tuning import DENSE


def trained_with(
    results: list[Result], costs: list[Result], score: str, *, base: str = DENSE, names: Mapping[str, str] | None = None
) -> Table:
    """Each mechanism, trained and run with: its score, others that the task has, and its score's difference to dense,
    that of the same seeds.

    Args:
        base: what others are compared with.
        names: what readers know mechanisms by; a column of its own.
    """
    dense = {r["seed"]: r["scores"][base] for r in results if r["trained"] == base}
    others = list(next(r["also"][base] for r in results if r["trained"] == base))
    rows = []
    first = next(cost for cost in costs if cost["mechanism"] == base)
    for cost in costs:
        name = cost["mechanism"]
        mine = [r for r in results if r["trained"] == name]
        scores = [r["scores"][name] for r in mine]
        apart = [r["scores"][name] - dense[r["seed"]] for r in mine]
        rows.append(
            [
                *([] if names is None else [names.get(name, "")]),
                name,
                f"{cost['scores']:.0f} of {cost['dense_scores']:.0f}",
                shown(scores),
                *(shown([r["also"][name][other] for r in mine]) for other in others),
                "" if name == base else shown(apart, sign="+"),
                f"{cost['step'] / first['step']:.2f}×",
                _ratio(cost["peak_bytes"], first["peak_bytes"]),
            ]
        )
    lengths = sorted({cost["tokens"] for cost in costs})
    tokens = " and ".join(f"{length:,}" for length in lengths)
    columns = [] if names is None else ["what it is"]
    columns += ["trained and run with", "scores a query", score, *others, f"to {base}", "step time", "step memory"]
    return f"{score} × 100, {of_seeds(len(dense))}; steps of {tokens} tokens", columns, rows


def interchange(results: list[Result], score: str) -> Table:
    """Trained densely or clustered, run densely or clustered."""
    rows = []
    for name in dict.fromkeys(r["trained"] for r in results):
        if name == DENSE:
            continue
        cells = [
            shown([r["scores"][running] for r in results if r["trained"] == trained])
            for trained in (DENSE, name)
            for running in (DENSE, name)
        ]
        rows.append([name, *cells])
    columns = ["mechanism", "dense → dense", "dense → clustered", "clustered → dense", "clustered → clustered"]
    return f"trained → run, {score} × 100", columns, rows


def summary(task: str, results: list[Result], score: str, base: str = DENSE) -> str:
    """In one line: what `base` got, how far the others are from it, and what one answer to everything would get."""
    dense = {r["seed"]: r["scores"][base] for r in results if r["trained"] == base}
    parts = [f"{task}, {score} × 100: {base} {shown(list(dense.values()))}"]
    for name in dict.fromkeys(r["trained"] for r in results if r["trained"] != base):
        apart = [r["scores"][name] - dense[r["seed"]] for r in results if r["trained"] == name]
        parts.append(f"{name} {shown(apart, sign='+')}")
    chances = [r.get("chance", 0.0) for r in results if r["trained"] == base]  # no run of before has it stored
    if any(chances):
        parts.append(f"one answer to everything {shown(chances)}")
    return "; ".join(parts) + "."


def draw(axes: Any, results: list[Result], costs: list[Result], score: str) -> None:
    """Scores with their standard errors."""
    names = [cost["mechanism"] for cost in costs]
    for row, name in enumerate(reversed(names)):
        mean, error = mean_and_error([r["scores"][name] for r in results if r["trained"] == name])
        axes.errorbar(100 * mean, row, xerr=None if math.isnan(error) else 100 * error, fmt="o", capsize=4)
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set(xlabel=f"{score} × 100, trained and run with", ylim=(-0.5, len(names) - 0.5))


def _ratio(peak: int | None, base: int | None) -> str:
    return "–" if not peak or not base else f"{peak / base:.2f}×"
