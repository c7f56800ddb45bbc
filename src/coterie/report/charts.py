"""The plots of the report: what was tried, how it did at each length, and fidelity against speed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from coterie.fitting.result import Fit
from coterie.hosts import DENSE
from coterie.report.names import clipped
from coterie.report.svg import GREY, Frame, axis, categories, drawable, kinds, shape
from coterie.report.words import lowest, measure_words
from coterie.tables import as_html


def tried_plot(found: Fit) -> str:
    """Time and error of every candidate, means over modules, and a legend whose families can be picked."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for row in found.table:
        if drawable(row.error, row.seconds):
            rows.setdefault(_anywhere(row.mechanism), []).append((1e3 * row.seconds, row.error))
    if not rows:
        return "<p>Nothing was tried, or all of it was refused.</p>"
    means = {name: _mean(each) for name, each in rows.items()}
    families = kinds(list(dict.fromkeys(_family(name) for name in means)), grey=DENSE)
    runs = [_anywhere(spec) for spec in found.choices.values()]
    frame = Frame(
        axis("attention of a module, ms", [x for x, _ in means.values()], least=0),
        axis("relative error of its output", [y for _, y in means.values()], least=0),
        "Time and error of every candidate",
    )
    for name, (x, y) in sorted(means.items(), key=lambda each: each[0] in runs):  # what runs is drawn last
        count = runs.count(name)
        tip = f"{name}\n{x:.1f} ms, error {y:.3f}\n{_used(count, len(runs))}"
        family = _family(name)
        frame.point(x, y, tip, families[family], full=count > 0, series=family)
    buttons = "".join(_button(name, kind) for name, kind in families.items())
    return f"{frame.svg()}<div class=legend role=group aria-label='Families of mechanisms'>{buttons}</div>"


def _button(family: str, kind: int) -> str:
    mark = shape(kind).format(x=8, y=8)
    return (
        f'<button type=button aria-pressed=false data-series="{as_html(family)}">'
        f'<svg viewBox="0 0 16 16" aria-hidden=true><g class="point k{kind}">{mark}</g></svg>'
        f"{as_html(family)}</button>"
    )


def _anywhere(spec: str) -> str:
    """A mechanism without the length from which on it runs, which differs from module to module.

    >>> _anywhere("near-far:near=48@2048")
    'near-far:near=48'
    """
    return re.sub(r"@\d+$", "", spec)


def _family(spec: str) -> str:
    """What a mechanism is called without its settings; one in JSON is somebody's own.

    >>> _family("near-far:near=48"), _family('{"name": "mine"}')
    ('near-far', 'in JSON')
    """
    return "in JSON" if spec.startswith("{") else spec.partition(":")[0]


def _used(count: int, modules: int) -> str:
    return f"runs in {count} of {modules} modules" if count else "runs nowhere"


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    return x, y


def lengths_plots(found: Fit) -> str:
    """Fidelity with its bounds, and speed-ups, side by side; nothing where there is one length, which a table tells."""
    at = [x for x in found.lengths if x.fitted_seconds > 0 and drawable(x.fidelity, x.dense_seconds / x.fitted_seconds)]
    if len(at) < 2 or not drawable(found.fidelity):
        return ""
    names = [f"{x.tokens:,}" for x in at]
    bounds = {i: x.bound for i, x in enumerate(at) if found.share is None and drawable(x.bound)}
    heights = [*(x.fidelity for x in at), *bounds.values(), found.fidelity]
    faithful = Frame(
        categories("tokens", names), axis("fidelity", heights, most=1 if max(heights) <= 1 else None), "Fidelity"
    )
    for i, x in enumerate(at):
        sure = f"\nat least {x.bound:.4f} ({x.method}, {x.documents:,} documents)" if i in bounds else ""
        if i in bounds:
            faithful.whisker(i, x.bound, x.fidelity)
        faithful.point(i, x.fidelity, f"{x.tokens:,} tokens\nmean {x.fidelity:.4f}{sure}")
    faithful.level(found.fidelity, f"asked {found.fidelity:g}")
    ratios = [x.dense_seconds / x.fitted_seconds for x in at]
    fast = Frame(
        categories("tokens", names), axis("speed-up of the model", [*ratios, 1.15 * max(ratios)], least=0), "Speed"
    )
    for i, (x, ratio) in enumerate(zip(at, ratios, strict=True)):
        tip = f"{x.tokens:,} tokens\n{x.dense_seconds:.2f} s dense, {x.fitted_seconds:.2f} s fitted"
        fast.bar(i, ratio, tip, f"{ratio:.2f}×", 1)
    return f"<div class=pair>{faithful.svg()}{fast.svg()}</div>"


def trade_off(fits: Sequence[Fit], names: Sequence[str]) -> str:
    """Fidelity against speed of the whole model, a point for each fit, and dense attention."""
    drawn = [
        (name, found, found.speedups[1])
        for name, found in zip(names, fits, strict=True)
        if drawable(found.held_out, found.speedups[1])
    ]
    measures = list(dict.fromkeys(measure_words(found.measure) for found in fits))
    bounds = {name: bound for name, found, _ in drawn if (bound := _bound(found)) is not None}
    heights = [*(found.held_out for _, found, _ in drawn), *bounds.values(), 1.0]
    speeds = [*(speed for _, _, speed in drawn), 1.0]
    frame = Frame(
        axis("speed-up of the whole model", [*speeds, max(speeds) * 1.05], least=min(speeds) - 0.05),
        axis(
            "fidelity" if len(measures) > 1 else clipped(measures[0], 40),
            heights,
            most=1 if max(heights) <= 1 else None,
        ),
        "Fidelity against speed",
    )
    frame.point(1.0, 1.0, "dense attention\n1×, fidelity 1", GREY, full=False)
    for name, found, speed in drawn:
        tip = f"{name}\nasked {found.fidelity:g}, seen {found.held_out:.4f}\n{speed:.2f}× as fast"
        if name in bounds:
            tip += f"\nat least {bounds[name]:.4f}"
            frame.whisker(speed, bounds[name], found.held_out)
        frame.point(speed, found.held_out, tip, full=found.certified)
    for name, found, speed in drawn:
        asked = f"asked {found.fidelity:g}"
        frame.label_point(speed, found.held_out, clipped(name if asked in name else f"{name}: {asked}", 28))
    frame.label_point(1.0, 1.0, DENSE)
    return frame.svg()


def _bound(found: Fit) -> float | None:
    """What is sure of the mean at every length; None if nothing is, or if the share of documents is bounded instead."""
    at = lowest(found)
    return None if at is None or found.share is not None or not drawable(at.bound) else at.bound
