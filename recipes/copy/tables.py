"""The tables, the heat map and the sentences of what was found."""

from __future__ import annotations

import statistics
from typing import Any

from recipes.common.results import Table
from recipes.common.scores import shown
from recipes.common.study import Result
from recipes.common.templates import PLACE
from recipes.copy.network import DENSE

Found = list[Result]  # one for each mechanism, length and seed


def solved(found: Found, task: str) -> Table:
    """A row for each mechanism: whether it solved each length, after how many steps and seconds of training."""
    lengths = _lengths(found)
    rows = [[name, *(_cell(_of(found, name, length)) for length in lengths)] for name in _mechanisms(found)]
    seeds = len({each["seed"] for each in found})
    title = f"{task} copy: solved is > 99 % on fresh sequences; {seeds} seed{'s' * (seeds > 1)}"
    return title, ["layers mix by", *(f"N = {length}" for length in lengths)], rows


def _cell(mine: Found) -> str:
    won = [each for each in mine if each["solved"]]
    if not won:
        return f"no: {shown([each['accuracy'] for each in mine])} % at {_mean(mine, 'steps'):,.0f} steps"
    share = "" if len(won) == len(mine) else f"{len(won)} of {len(mine)}: "
    return f"{share}{_mean(won, 'steps'):,.0f} steps, {_mean(won, 'seconds'):.0f} s"


def times(costs: list[Result]) -> Table:
    """What a training step costs, by length; the ratio is to dense attention, or to the first if that was not asked."""
    rows = []
    names = [cost["mechanism"] for cost in costs]
    base = DENSE if DENSE in names else names[0]
    for length in _lengths(costs):
        mine = [cost for cost in costs if cost["length"] == length]
        first = next(cost["step"] for cost in mine if cost["mechanism"] == base)
        for cost in mine:
            rows.append(
                [
                    f"{length} × {cost['sequences']}",
                    cost["mechanism"],
                    "–" if cost["scores"] is None else f"{cost['scores']:.1f} of {cost['dense_scores']:.1f}",
                    f"{1000 * cost['step']:.0f} ({cost['step'] / first:.2f}×)",
                    "–" if not cost["peak_bytes"] else f"{cost['peak_bytes'] / 2**20:.0f}",
                ]
            )
    columns = [
        "tokens × sequences",
        "layers mix by",
        "scores a query",
        f"ms a step (to {base})",
        "step memory, MB",
    ]
    return "a training step, forward and backward, all taking turns", columns, rows


def words(found: Found, task: str) -> str:
    """Who solved which length."""
    said = []
    for length in _lengths(found):
        won, lost = [], []
        for name in _mechanisms(found):
            mine = _of(found, name, length)
            steps = [each["steps"] for each in mine if each["solved"]]
            if len(steps) == len(mine):
                won.append(f"{name} ({statistics.fmean(steps):,.0f} steps)")
            else:
                most = f", {len(steps)} of {len(mine)} seeds" if steps else ""
                lost.append(f"{name} ({shown([each['accuracy'] for each in mine])} %{most})")
        parts = [f"{text} {', '.join(names)}" for text, names in (("solved by", won), ("not by", lost)) if names]
        said.append(f"{task} copy, N = {length}: {'; '.join(parts)}.")
    return "\n".join(said)


def panels(found: Found) -> list[str]:
    """What has a heat map of its own: each template with a place for clusters, and all others together, as ""."""
    own = list(dict.fromkeys(each["template"] for each in found if PLACE in each["template"]))
    return own + [""] * any(PLACE not in each["template"] for each in found)


def draw(*axes: Any, found: Found) -> None:
    """Clusters × length: the steps that it took, or in grey how far it came."""
    for each, template in zip(axes, panels(found), strict=True):
        mine = [one for one in found if one["template"] == template or (not template and PLACE not in one["template"])]
        _heat(each, mine, template)


def _heat(axes: Any, found: Found, template: str) -> None:
    lengths, names = _lengths(found), _mechanisms(found)
    most = max([each["steps"] for each in found if each["solved"]], default=1)
    axes.set_axisbelow(True)
    for row, name in enumerate(names):
        for column, length in enumerate(lengths):
            mine = _of(found, name, length)
            won = [each for each in mine if each["solved"]]
            if len(won) == len(mine):
                shade, text = 0.35 + 0.6 * (1 - _mean(won, "steps") / most), f"{_mean(won, 'steps'):,.0f}"
                colour = (1 - shade, 0.9, 1 - shade)
            else:
                colour, text = (0.85, 0.85, 0.85), f"{100 * _mean(mine, 'accuracy'):.0f} %"
                text += f"\n{len(won)} of {len(mine)}" * bool(won)
            axes.barh(row, 1, left=column - 0.5, height=1, color=colour, edgecolor="white", zorder=2)
            axes.text(column, row, text, ha="center", va="center", fontsize=8, zorder=3)
    labels = [str(_of(found, name, lengths[0])[0]["clusters"]) if template else name for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8 if template else 6)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set(xlabel="length", ylim=(-0.5, len(names) - 0.5), xlim=(-0.5, len(lengths) - 0.5))
    axes.set_title(f"{template or 'others'}\nsteps until it is solved; grey: not solved", fontsize=8)
    if template:
        axes.set_ylabel("clusters")


def _lengths(found: list[Result]) -> list[int]:
    return sorted({each["length"] for each in found})


def _mechanisms(found: Found) -> list[str]:
    return list(dict.fromkeys(each["mechanism"] for each in found))


def _of(found: Found, mechanism: str, length: int) -> Found:
    return [each for each in found if each["mechanism"] == mechanism and each["length"] == length]


def _mean(found: Found, key: str) -> float:
    return statistics.fmean(each[key] for each in found)
