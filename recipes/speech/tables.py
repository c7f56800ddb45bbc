"""The tables, the plot and the sentence of what was found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from recipes.common.results import Table
from recipes.common.scores import mean_and_error, of_seeds, shown
from recipes.common.study import Result
from recipes.speech.network import DENSE


class Point(NamedTuple):
    """Models of so many layers, trained with one mechanism and run with another: an error for each seed."""

    layers: int
    trained: str
    running: str
    errors: list[float]
    milliseconds: float

    @property
    def error(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.errors)

    @property
    def words(self) -> str:
        """What it is."""
        how = self.running if self.trained == self.running else f"{self.running} (trained with {self.trained})"
        return f"{how}, {self.layers} layers"


def points(results: list[Result], costs: list[Result], unit: str) -> list[Point]:
    """Every model with every mechanism that it ran with."""
    times = {(cost["layers"], cost["mechanism"]): cost["milliseconds"] for cost in costs}
    found: dict[tuple[int, str, str], list[float]] = {}
    for result in results:
        for running, errors in result["errors"].items():
            found.setdefault((result["layers"], result["trained"], running), []).append(errors[unit])
    return [Point(*key, errors, times[key[0], key[2]]) for key, errors in found.items()]


def frontier(found: Iterable[Point]) -> list[Point]:
    """Those that nobody beats who is as quick: each next one takes longer and makes fewer errors."""
    best: list[Point] = []
    for point in sorted(found, key=lambda each: (each.milliseconds, each.error, each.trained != each.running)):
        if not best or point.error < best[-1].error:
            best.append(point)
    return best


def trained_with(results: list[Result], costs: list[Result], unit: str, beam: int, corpus: str) -> Table:
    """Each mechanism, trained and run with."""
    spelled = any("word" in errors for result in results for errors in result["errors"].values())
    rows = []
    for cost in costs:
        mine = [r for r in results if (r["layers"], r["trained"]) == (cost["layers"], cost["mechanism"])]
        if not mine:
            continue  # it was run with alone
        name = cost["mechanism"]
        rows.append(
            [
                str(cost["layers"]),
                name,
                shown([r["errors"][name][unit] for r in mine]),
                *([shown([r["errors"][name]["word"] for r in mine])] if spelled else []),
                *([shown([r["beam"][unit] for r in mine])] if beam else []),
                shown([r["seconds_per_epoch"] for r in mine], 1, 1),
                _megabytes(cost["peak_bytes"]),
                f"{cost['milliseconds']:.1f}",
            ]
        )
    columns = ["layers", "trained and run with", f"{unit} error, %"]
    columns += ["word error, %"] if spelled else []
    columns += [f"with a beam of {beam}"] if beam else []
    columns += ["s an epoch", "step memory, MB", "ms an utterance"]
    seeds = len({r["seed"] for r in results})
    tokens = statistics.fmean(cost["tokens"] for cost in costs)
    title = f"{corpus}, {of_seeds(seeds)}; utterances of {tokens:.0f} tokens"
    return title, columns, rows


def interchange(results: list[Result], unit: str) -> Table:
    """Trained with one, run with another."""
    running = list(results[0]["errors"])
    rows = []
    for layers, trained in dict.fromkeys((r["layers"], r["trained"]) for r in results):
        mine = [r for r in results if (r["layers"], r["trained"]) == (layers, trained)]
        rows.append([str(layers), trained, *(shown([r["errors"][name][unit] for r in mine]) for name in running)])
    return f"trained ↓, run with →: {unit} error, %", ["layers", "trained with", *running], rows


def fixed_budget(found: list[Point], unit: str) -> Table:
    """All points by their time; what is on the frontier has nobody before it with fewer errors (Figure 1)."""
    mine = as_trained(found)
    best = frontier(mine)
    rows = [
        [
            f"{point.milliseconds:.1f}",
            str(point.layers),
            point.running,
            point.trained,
            shown(point.errors),
            "best so far" if point in best else "",
        ]
        for point in mine
    ]
    columns = ["ms an utterance", "layers", "run with", "trained with", f"{unit} error, %", "at equal time"]
    return "inference under a fixed budget: quickest first", columns, rows


def as_trained(found: list[Point]) -> list[Point]:
    """Of each number of layers and mechanism, models that were trained with it, or densely if none was; quickest first.

    Not those that served it best: they would be chosen by the errors that are reported.
    """
    chosen: dict[tuple[int, str], Point] = {}
    for point in sorted(found, key=lambda each: (each.trained != each.running, each.trained != DENSE)):
        chosen.setdefault((point.layers, point.running), point)
    return sorted(chosen.values(), key=lambda each: each.milliseconds)


def words(found: list[Point], unit: str, corpus: str) -> str:
    """Dense attention, and who is best in no more time."""
    said = []
    for dense in (point for point in found if point.trained == point.running == DENSE):
        start = f"{corpus}, {dense.layers} layers, dense: {shown(dense.errors)} % {unit} errors"
        budget = [p for p in as_trained(found) if p.running != DENSE and p.milliseconds <= dense.milliseconds]
        if not budget:
            others = any(point.running != DENSE for point in found)
            alone = f"{start} in {dense.milliseconds:.1f} ms an utterance"
            said.append(f"{alone}; nothing is as quick" if others else alone)
            continue
        best = min(budget, key=lambda each: (each.error, each.milliseconds))
        said.append(
            f"{start} in {dense.milliseconds:.1f} ms an utterance; best in no more time: {best.words}, "
            f"{shown(best.errors)} % in {best.milliseconds:.1f} ms"
        )
    return "; ".join(said) + "."


def draw(errors: Any, course: Any, *, found: list[Point], results: list[Result], unit: str) -> None:
    """Error against time at inference, and how errors fell in training."""
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(point.running for point in found))}
    for name, colour in colours.items():
        own = sorted((p for p in found if p.trained == p.running == name), key=lambda each: each.milliseconds)
        if own:
            bars = [mean_and_error(point.errors)[1] for point in own]
            errors.errorbar(
                [point.milliseconds for point in own],
                [100 * point.error for point in own],
                [0.0 if math.isnan(bar) else 100 * bar for bar in bars],
                marker="o",
                capsize=3,
                color=colour,
                label=name,
            )
        others = [p for p in found if p.running == name != p.trained]
        x, y = [p.milliseconds for p in others], [100 * p.error for p in others]
        errors.plot(x, y, ".", color=colour, alpha=0.4, markersize=4, label=None if own else name)
    best = frontier(as_trained(found))
    errors.step(
        [p.milliseconds for p in best], [100 * p.error for p in best], where="post", color="grey", linewidth=0.8
    )
    errors.set(
        xlabel="ms an utterance", ylabel=f"{unit} error, %", title="small dots: trained with another", ylim=(0, None)
    )
    errors.legend(fontsize=7)
    for result in results:
        if result["seed"] == 0 and result["looks"]:
            epochs, seen = zip(*result["looks"], strict=True)
            style = ["-", "--", ":"][sorted({r["layers"] for r in results}).index(result["layers"]) % 3]
            course.plot(epochs, [100 * each for each in seen], style, color=colours[result["trained"]])
    course.set(xlabel="epoch", ylabel=f"{unit} error, %", title="in training, seed 0", ylim=(0, 105))


def _megabytes(count: int | None) -> str:
    return "–" if not count else f"{count / 2**20:.0f}"
