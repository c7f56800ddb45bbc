"""The report as one HTML file without anything from outside."""

from __future__ import annotations

import html
import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from coterie.files import plain, readable, write_whole
from coterie.fitting.fit import Fit
from coterie.fitting.tables import choices_table, lengths_table, tried_table
from coterie.hosts import DENSE
from coterie.report.pictures import Pictures
from coterie.tables import Table, facts

_SYMBOLS = ("circle", "diamond", "square", "triangle-up")


def write(path: Path, found: Fit, pictures: Pictures, *, model: str, command: str) -> None:
    """Write the report, whole or not at all."""
    write_whole(Path(path), page(found, pictures, model=model, command=command))


def page(found: Fit, pictures: Pictures, *, model: str, command: str) -> str:
    """The report as text."""
    figures = {"candidates": _candidates(found), "lengths": _lengths(found), "heads": _heads(pictures)}
    if pictures.meetings:
        figures["meetings"] = _meetings(pictures)
    drawn = {name: json.loads(figure.to_json()) for name, figure in figures.items()}
    data = json.dumps(plain({"figures": drawn, "meetings": pictures.meetings}), allow_nan=False)
    data = data.replace("<", "\\u003c")  # no tag or comment ends or begins inside a script
    attention, whole = found.speedups
    seen = ("", "seen, not promised") if found.holds else ("bad", "does not hold")
    verdict = ("good", "promised") if found.certified else seen
    cards = [
        (
            f"{found.held_out:.4f}",
            f"{html.escape(found.measure)} on held-out text, asked {found.fidelity:g}: {verdict[1]}",
            verdict[0],
        ),
        (f"{attention:.2f}×", "attention alone against dense", ""),
        (f"{whole:.2f}×", "the whole model against dense", ""),
        (f"{sum(x != DENSE for x in found.choices.values())} of {len(found.choices)}", "modules clustered", ""),
    ]
    sections = [
        "<section aria-label='summary'><div class=cards>"
        + "".join(
            f"<div class=card><b class='{kind}'>{big}</b><span>{small}</span></div>" for big, small, kind in cards
        )
        + "</div>"
        + "".join(f"<p>{html.escape(note)}</p>" for note in (found.promise, *found.notes))
        + "</section>",
        _section("What runs", _wide(choices_table(found))),
        _section(
            "What was tried",
            _plot("candidates") + "<p>Each point is a candidate: its time and error, over all modules.</p>",
        ),
        _section("Fidelity and speed by length", _plot("lengths") + _wide(lengths_table(found))),
        _section("Which heads are hard", _plot("heads")),
    ]
    if pictures.meetings:
        sections.append(_section("Who meets whom", _chooser(pictures) + _plot("meetings")))
    sections.append(
        _section(
            "Everything that was tried",
            f"<details><summary>{len(found.table)} rows</summary>{_wide(tried_table(found))}</details>",
        )
    )
    versions = _wide(facts(found.environment.items()))
    sections.append(
        _section(
            "How to reproduce",
            f"<pre>{html.escape(command)}</pre><p>Seed {found.seed}.</p>{versions}",
        )
    )
    return readable(
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'><link rel=icon href='data:,'>"
        f"<title>Coterie: {html.escape(model)}</title><style>{_file('page.css')}</style></head><body><main>"
        f"<header><h1>{html.escape(model)}: attention at fidelity {found.fidelity}</h1>"
        "<button id=theme type=button>Light / dark</button></header>"
        f"{''.join(sections)}</main><script type=application/json id=data>{data}</script>"
        f"<script>{get_plotlyjs()}</script><script>{_file('page.js')}</script></body></html>"
    )


def _file(name: str) -> str:
    return files("coterie.report").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _plot(name: str) -> str:
    return f"<div class=plot id={name} role=img aria-label={name}></div>"


def _chooser(pictures: Pictures) -> str:
    """A list of modules; the page draws the one that is chosen."""
    options = (
        f"<option value='{html.escape(name)}'>{html.escape(name)}, head {pictures.hardest(name)}: "
        f"{html.escape(pictures.mechanisms[name])}</option>"
        for name in pictures.meetings
    )
    return f"<p><label>The hardest head of <select id=module>{''.join(options)}</select></label></p>"


def _wide(table: Table) -> str:
    """A table that scrolls on its own where the screen is narrow."""
    return f"<div class=scroll tabindex=0>{table.html()}</div>"


def _label(text: str) -> str:
    """Text in a figure, where plotly reads a little HTML: links, line breaks, bold."""
    return html.escape(text, quote=False)


def _candidates(found: Fit) -> Any:
    sums: dict[str, list[float]] = {}
    for row in found.table:
        if math.isfinite(row.error) and math.isfinite(row.seconds):
            total = sums.setdefault(row.mechanism, [0.0, 0.0, 0.0])
            total[0] += row.seconds * 1e3
            total[1] += row.error
            total[2] += 1
    figure = go.Figure()
    for index, (name, (milliseconds, error, count)) in enumerate(sums.items()):
        marker = {"size": 12, "symbol": _SYMBOLS[index // 10 % len(_SYMBOLS)]}  # colours repeat after ten
        figure.add_scatter(x=[milliseconds], y=[error / count], name=_label(name), mode="markers", marker=marker)
    layout = {"xaxis_title": "attention of all modules, ms", "yaxis_title": "mean relative error", "margin": {"t": 10}}
    return figure.update_layout(legend={"orientation": "h", "y": -0.25}, **layout)


def _lengths(found: Fit) -> Any:
    tokens = [at.tokens for at in found.lengths]
    speed = [at.dense_seconds / at.fitted_seconds for at in found.lengths]
    figure = go.Figure()
    figure.add_scatter(x=tokens, y=[at.fidelity for at in found.lengths], name="fidelity", mode="lines+markers")
    figure.add_scatter(x=tokens, y=speed, name="speed-up of the model", mode="lines+markers", yaxis="y2")
    figure.add_hline(y=found.fidelity, line_dash="dot", annotation_text="asked")
    return figure.update_layout(
        xaxis={
            "title": {"text": "tokens"},
            "type": "log",
            "tickvals": tokens,
            "ticktext": [f"{count:,}" for count in tokens],
        },
        yaxis={"title": {"text": _label(found.measure)}},
        yaxis2={
            "title": {"text": "speed-up"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "tickformat": ".2~f",
        },
        legend={"orientation": "h", "y": -0.25},
        margin={"t": 10},
    )


def _heads(pictures: Pictures) -> Any:
    most = max(map(len, pictures.errors.values()), default=0)
    rows = [errors + [None] * (most - len(errors)) for errors in pictures.errors.values()]
    names = [_label(f"{name} ({pictures.mechanisms[name]})") for name in pictures.errors]
    figure = go.Figure(
        go.Heatmap(z=rows, y=list(range(len(rows))), text=[[n] * most for n in names], colorscale="Viridis")
    )
    figure.update_traces(
        hovertemplate="%{text}<br>head %{x}: error %{z:.3f}<extra></extra>", colorbar={"title": "error"}
    )
    return figure.update_layout(
        xaxis_title="head", yaxis_title="attention module", yaxis_autorange="reversed", margin={"t": 10}
    )


def _meetings(pictures: Pictures) -> Any:
    first = next(iter(pictures.meetings.values()))
    figure = go.Figure(go.Heatmap(z=first, colorscale="Blues", zmin=0, showscale=False))
    figure.update_traces(hovertemplate="queries %{y}, keys %{x}: %{z:.0%} of the pairs meet<extra></extra>")
    axes = {"xaxis_title": "keys, from first to last", "yaxis_title": "queries", "yaxis_autorange": "reversed"}
    return figure.update_layout(xaxis_showticklabels=False, yaxis_showticklabels=False, margin={"t": 10}, **axes)
