"""What a study of generators says: tables, a plot, a line of words."""

from __future__ import annotations

import math
from typing import Any

from recipes.biggan.attention import DENSE
from recipes.common.results import Table
from recipes.common.scores import mean_and_error, of_seeds
from recipes.common.study import Result


def trained_with(results: list[Result], floor: Result) -> Table:
    """Each mechanism, trained and run with; its difference to dense is that of the same seeds."""
    dense = {r["seed"]: r["quality"][DENSE]["distance"] for r in results if r["trained"] == DENSE}
    base = _median([r["seconds_per_step"] for r in results if r["trained"] == DENSE])
    by_inception = [key for key in ("fid", "kid") if all(key in r["quality"][r["trained"]] for r in results)]
    rows = []
    for name in _names(results):
        mine = [r for r in results if r["trained"] == name]
        found = [r["quality"][name] for r in mine]
        apart = [r["quality"][name]["distance"] - dense[r["seed"]] for r in mine]
        took = _median([r["seconds_per_step"] for r in mine])
        rows.append(
            [
                name,
                f"{mean_and_error([r['pairs'] for r in mine])[0]:.0%}",
                _shown([each["distance"] for each in found]),
                "" if name == DENSE else _shown(apart, sign="+"),
                _shown([each["precision"] for each in found]),
                _shown([each["recall"] for each in found]),
                *(_shown([each[key] for each in found]) for key in by_inception),
                f"{min(r['variety'][-1][1] for r in mine):.0%}",
                f"{took:.2f}",
                "–" if math.isnan(base) or math.isnan(took) else f"{took / base:.2f}×",
            ]
        )
    real = ["real images", "", f"{floor['distance']:.3f}", "", f"{floor['precision']:.3f}", f"{floor['recall']:.3f}"]
    rows.append([*real, *("" for _ in by_inception), "100%", "", ""])
    columns = ["trained and run with", "scores", "distance", "to dense", "precision", "recall"]
    columns += [*map(str.upper, by_inception), "least variety"]
    title = f"Fréchet distance in the features of a small network (not FID), {of_seeds(len(dense))}"
    return title, [*columns, "s a step", "to dense"], rows


def interchange(results: list[Result]) -> Table:
    """Trained with one mechanism, run with another: the weights are the same."""
    names = _names(results)
    rows = [
        [name, *(_shown([r["quality"][run]["distance"] for r in results if r["trained"] == name]) for run in names)]
        for name in names
    ]
    return "trained ↓, run → : distance", ["", *names], rows


def rounds(results: list[Result]) -> list[Table]:
    """What the schedule chose over training, of the first seed."""
    tables = []
    for result in results:
        if not result["rounds"] or result["seed"] != 0:
            continue
        for module in dict.fromkeys(entry[1] for entry in result["rounds"]):
            mine = [entry for entry in result["rounds"] if entry[1] == module]
            shown = mine[:: max(1, len(mine) // 10)]
            rows = [[str(step), str(taken), f"{error:.3f}"] for step, _, taken, error in shown]
            tables.append((f"rounds of {module}, {result['trained']}", ["step", "rounds", "error"], rows))
    return tables


def summary(results: list[Result], floor: Result) -> str:
    """In one line."""
    parts = []
    for name in _names(results):
        found = [r["quality"][name]["distance"] for r in results if r["trained"] == name]
        parts.append(f"{name} {_shown(found)}")
    warned = sum(bool(r["warnings"]) for r in results)
    more = f" {warned} of {len(results)} runs were warned of mode collapse." if warned else ""
    return f"Fréchet distance (not FID): {'; '.join(parts)}; real images {floor['distance']:.3f}.{more}"


def draw(distances: Any, losses: Any, results: list[Result]) -> None:
    """Distances of every run, and losses of the first seed."""
    names = _names(results)
    for row, name in enumerate(reversed(names)):
        found = [r["quality"][name]["distance"] for r in results if r["trained"] == name]
        distances.plot(found, [row] * len(found), "o")
    distances.set_yticks(range(len(names)), list(reversed(names)))
    distances.set(xlabel="Fréchet distance (not FID), each seed", ylim=(-0.5, len(names) - 0.5))
    for result in results:
        if result["seed"] == 0:
            losses.plot([step[1] for step in result["losses"]], label=result["trained"], linewidth=0.7)
    losses.set(xlabel="step", ylabel="generator's loss")
    losses.legend(fontsize="x-small")


def _names(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(r["trained"] for r in results))


def _shown(values: list[float], sign: str = "") -> str:
    mean, error = mean_and_error(values)
    return f"{mean:{sign}.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def _median(values: list[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else float("nan")
