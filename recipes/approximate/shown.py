"""The table and the plot of a sweep."""

from __future__ import annotations

from typing import Any

from recipes.approximate.kept import Estimate, Kept
from recipes.common.results import Table
from recipes.common.study import Result
from recipes.common.tuning import DENSE


def table(dense: Estimate, found: list[Kept], costs: list[Result], title: str, score: str) -> Table:
    """A row for dense attention, and one for each mechanism of the sweep."""
    by_mechanism = {cost["mechanism"]: cost for cost in costs}
    base = by_mechanism[DENSE]
    rows = [[DENSE, "", _met(base), dense.shown(), "", _time(base, base)]]
    for each in found:
        cost = by_mechanism[each.point.mechanism]
        clusters, apart = str(each.point.clusters), each.difference.shown("+")
        rows.append([each.point.mechanism, clusters, _met(cost), each.score.shown(), apart, _time(cost, base)])
    columns = ["run with", "clusters", "scores a query", score, "difference to dense"]
    return title, [*columns, f"ms, {base['texts']} × {base['tokens']} tokens"], rows


def _met(cost: Result) -> str:
    return f"{cost['scores']:.1f} of {cost['dense_scores']:.1f}"


def _time(cost: Result, base: Result) -> str:
    return f"{1000 * cost['seconds']:.0f} ({cost['seconds'] / base['seconds']:.2f}×)"


def draw(axes: Any, dense: Estimate, found: list[Kept], score: str) -> None:
    """Score against clusters, a line for each mechanism; dense attention dashed, with its standard error."""
    level, error = 100 * dense.value, 100 * dense.error
    axes.axhline(level, linestyle="--", color="black", label=DENSE)
    axes.axhspan(level - error, level + error, color="black", alpha=0.1)
    for template in dict.fromkeys(each.point.template for each in found):
        mine = [each for each in found if each.point.template == template]
        axes.errorbar(
            [each.point.clusters for each in mine],
            [100 * each.score.value for each in mine],
            yerr=[100 * each.score.error for each in mine],
            marker="o",
            capsize=3,
            label=template,
        )
    axes.set_xscale("log")
    clusters = sorted({each.point.clusters for each in found})
    axes.set_xticks(clusters, [str(count) for count in clusters])
    axes.minorticks_off()
    axes.set(xlabel="clusters", ylabel=f"{score} × 100")
    axes.legend(fontsize="small")
