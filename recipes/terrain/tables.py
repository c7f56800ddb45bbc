"""The tables, the plot and the sentence of what was found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from recipes.common import ranks as common
from recipes.common.results import Table
from recipes.common.scores import mean_and_error, shown
from recipes.common.study import Result
from recipes.terrain.attending import COMMON, Way

GOAL = 0.02  # relative image error of near–far at a quarter of the pairs
Found = list[Result]  # one for each image


def label(way: Way) -> str:
    """What a way is called in tables and on sheets."""
    return "one answer for all queries" if way.mechanism == COMMON else str(way)


def errors(found: Found, ways: list[Way], where: str) -> Table:
    """Each way of attending: how many pairs met, and how far its images are from dense ones."""
    rows = []
    for index, way in enumerate(ways):
        mine = [image["ways"][index] for image in found]
        rows.append(
            [
                label(way),
                mine[0]["sized"],
                shown([each["share"] for each in mine]),
                shown([each["relative"] for each in mine], digits=3),
                f"{100 * max(each['relative'] for each in mine):.3f}",
                shown([each["shape"] for each in mine], digits=3),
            ]
        )
    columns = ["attention", "over most tokens it is", "pairs met, %", "image error, %", "worst", "shape error, %"]
    return f"{where}, without training: {_images(found)}, ± standard error", columns, rows


def ranks(found: Found, probe: Way) -> Table:
    """The singular values of the maps, by how many tokens they are over, and the mass on the keys that a way meets."""
    rows = []
    for index, first in enumerate(found[0]["ranks"]):
        mine = [image["ranks"][index] for image in found]
        rows.append(
            [
                f"{first['tokens']:,}",
                str(first["blocks"]),
                *common.cells(mine),
                shown([each["mass"] for each in mine]),
            ]
        )
    columns = ["tokens", "blocks", *common.COLUMNS, f"mass met by {probe}, %"]
    return f"singular values of the dense maps, medians over heads: {_images(found)}", columns, rows


def _images(found: Found) -> str:
    return f"{len(found)} image{'s' * (len(found) > 1)}"


def words(found: Found, ways: list[Way]) -> str:
    """What it says in a few words."""
    common = _errors(found, ways, lambda way: way.mechanism == COMMON)
    said = [f"one answer for all queries changes the image by {shown(common, digits=1)} %"]
    for way in ways:
        if way.part == 4:
            said.append(f"{way} {shown(_errors(found, ways, way.__eq__), digits=2)} %")
    near = _errors(found, ways, lambda way: way.mechanism.startswith("near-far") and way.part == 4 and not way.where)
    if near:
        met = "met" if statistics.fmean(near) <= GOAL else "missed"
        said.append(f"the goal for near–far at 1/4 of the pairs, {100 * GOAL:.0f} %, is {met}")
    return "; ".join(said) + "."


def _errors(found: Found, ways: list[Way], which: Callable[[Way], Any]) -> list[float]:
    index = next((index for index, way in enumerate(ways) if which(way)), None)
    return [] if index is None else [image["ways"][index]["relative"] for image in found]


def draw(axes: Any, *, found: Found, ways: list[Way]) -> None:
    """The image error by the share of pairs that met; the line across is one answer for all queries."""
    common = statistics.fmean(_errors(found, ways, lambda way: way.mechanism == COMMON))
    axes.axhline(100 * common, color="grey", linestyle="--", label="one answer for all queries")
    for name in dict.fromkeys((way.where, way.mechanism) for way in ways if way.part):
        mine = [index for index, way in enumerate(ways) if way.part and (way.where, way.mechanism) == name]
        points = []
        for index in mine:
            share = statistics.fmean(image["ways"][index]["share"] for image in found)
            mean, error = mean_and_error([image["ways"][index]["relative"] for image in found])
            points.append((100 * share, 100 * mean, 0.0 if math.isnan(error) else 100 * error))
        shares, means, bars = zip(*sorted(points), strict=True)
        axes.errorbar(shares, means, bars, marker="o", capsize=3, label="=".join(part for part in name if part))
    axes.set(xscale="log", yscale="log", xlabel="pairs that meet, one in", ylabel="relative image error, %")
    parts = sorted({way.part for way in ways if way.part})
    axes.set_xticks([100 / part for part in parts], [str(part) for part in parts])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
