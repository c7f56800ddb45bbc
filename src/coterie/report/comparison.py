"""The report on several fits of one model: fidelity against speed, and what each of them chose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coterie.checks import expect
from coterie.files import write_whole
from coterie.fitting.result import Fit
from coterie.fitting.tables import choices_table, lengths_table
from coterie.hosts import DENSE
from coterie.report import sections
from coterie.report.charts import trade_off
from coterie.report.document import document, paragraphs, plot, section, wide
from coterie.report.page import page
from coterie.report.pictures import Pictures
from coterie.report.words import lowest, measure_words, percent, times
from coterie.tables import Table, as_html, folded


def write_several(
    path: Path,
    fits: Sequence[Fit],
    pictures: Sequence[Pictures] = (),
    *,
    model: str,
    command: str,
    names: Sequence[str] | None = None,
) -> None:
    """Write the report on fits of one model, whole or not at all; on one fit, it is that of `write`.

    Args:
        fits: at several fidelities, say, or of several versions.
        pictures: of heads and plans, as many as fits; or none.
        names: what the page calls each fit; by what was asked of it, if None.

    Example:
        >>> import tempfile
        >>> from dataclasses import replace
        >>> from pathlib import Path
        >>> from coterie.fitting.fit import Fit
        >>> from coterie.report import write_several
        >>> exact = Fit({"a": "near-far:near=64"}, "hidden", 0.99, 1.0, 0.995, [], (0.2, 0.1), [], 0)
        >>> cheap = replace(exact, choices={"a": "near-far"}, fidelity=0.95, held_out=0.97)
        >>> path = Path(tempfile.mkdtemp()) / "report.html"
        >>> write_several(path, [cheap, exact], model="mine", command="coterie fit mine")
        >>> "asked 0.95" in path.read_text(encoding="utf-8")
        True
    """
    write_whole(Path(path), several_page(fits, pictures, model=model, command=command, names=names))


def several_page(
    fits: Sequence[Fit],
    pictures: Sequence[Pictures] = (),
    *,
    model: str,
    command: str,
    names: Sequence[str] | None = None,
) -> str:
    """The report as text."""
    expect(len(fits) > 0, "fits", "at least one", 0)
    expect(len(pictures) in (0, len(fits)), "pictures", f"none, or {len(fits)} of them", len(pictures))
    titles = list(names) if names is not None else asked_names(fits)
    expect(len(set(titles)) == len(fits), "names", f"{len(fits)} that differ", titles)
    expect_one_model(fits, titles)
    drawn: list[Pictures | None] = list(pictures) or [None] * len(fits)
    if len(fits) == 1:
        return page(fits[0], drawn[0], model=model, command=command)
    parts = [
        section("What this means", paragraphs(_meaning(fits, titles))),
        section("Fidelity against speed", plot("trade-off", trade_off(fits, titles), *_caption(fits))),
        section("Side by side", wide(summary_table(fits, titles)), wide(by_length_table(fits, titles))),
        section("What runs in each", _choices(fits, titles)),
        *_each(fits, titles, drawn),
    ]
    if command:
        parts.append(section("How to reproduce", f"<pre>{as_html(command)}</pre>"))
    shown = [sections.meeting_pictures(each) for each in drawn if each is not None and each.meetings]
    return document(f"Coterie: {model}", f"{model}: {len(fits)} fits compared", parts, {"meetings": shown})


def asked_names(fits: Sequence[Fit]) -> list[str]:
    """Fits by what was asked of them, numbered where that does not tell them apart.

    Example:
        >>> from coterie.fitting.fit import Fit
        >>> some = [Fit({}, "hidden", asked, 1.0, 1.0, [], (1.0, 1.0), [], 0) for asked in (0.95, 0.99)]
        >>> asked_names(some), asked_names([some[0], some[0]])
        (['asked 0.95', 'asked 0.99'], ['fit 1, asked 0.95', 'fit 2, asked 0.95'])
    """
    found = [f"asked {fit.fidelity:g}" for fit in fits]
    return found if len(set(found)) == len(found) else [f"fit {i}, {name}" for i, name in enumerate(found, 1)]


def expect_one_model(fits: Sequence[Fit], names: Sequence[str]) -> None:
    """Raise ValueError if fits have other attention modules than the first one."""
    for found, name in zip(fits[1:], names[1:], strict=True):
        expect(
            set(found.choices) == set(fits[0].choices),
            "fits",
            f"fits of one model; {names[0]} has {_modules(fits[0])}",
            f"{name} with {_modules(found)}",
        )


def _modules(found: Fit) -> str:
    names = list(found.choices)
    return f"{len(names)} attention module{'s' * (len(names) != 1)}" + (f" such as {names[0]}" if names else "")


def summary_table(fits: Sequence[Fit], names: Sequence[str]) -> Table:
    """What was asked of each fit, what is sure, and how fast it is."""
    columns = ["fit", "asked", "seen", "at least", "promised", "model", "attention", "replaced", "coterie"]
    return Table(columns, [_row(found, name) for found, name in zip(fits, names, strict=True)], words=(0,))


def _row(found: Fit, name: str) -> list[str]:
    attention, whole = found.speedups
    clustered = sum(spec != DENSE for spec in found.choices.values())
    return [
        name,
        f"{found.fidelity:g}",
        f"{found.held_out:.4f}" if math.isfinite(found.held_out) else "–",
        _sure(found),
        "dense" if found.all_dense else percent(found.confidence) if found.certified else "no",
        times(whole),
        times(attention),
        f"{clustered} of {len(found.choices)}",
        found.environment.get("coterie", "–"),
    ]


def _sure(found: Fit) -> str:
    at = lowest(found)
    if at is None or at.method == "exact":
        return "–" if at is None else "exact"
    return f"{at.bound:.4f}" if found.share is None else f"{at.bound:.1%} of documents"


def by_length_table(fits: Sequence[Fit], names: Sequence[str]) -> Table:
    """The tables of all fits by length, one below the other."""
    tables = [lengths_table(found) for found in fits]
    rows = [
        (at.tokens, [row[0], name, *row[1:]])
        for found, name, table in zip(fits, names, tables, strict=True)
        for at, row in zip(found.lengths, table.rows, strict=True)
    ]
    columns = ["tokens", "fit", "documents", "fidelity", "at least", *tables[0].columns[4:]]
    return Table(columns, [row for _, row in sorted(rows, key=lambda each: each[0])], words=(1,))


def _choices(fits: Sequence[Fit], names: Sequence[str]) -> str:
    """Modules down, fits across; rows in which fits differ are marked."""
    runs = [{row[0]: row[1] for row in choices_table(found).rows} for found in fits]
    head = "".join(f"<th style=text-align:left>{as_html(name)}</th>" for name in ("attention module", *names))
    rows: list[tuple[bool, str]] = []
    for module in fits[0].choices:
        specs = [each[module] for each in runs]
        cells = "".join(f"<td style=text-align:left>{as_html(spec)}</td>" for spec in (module, *specs))
        rows.append((len(set(specs)) > 1, cells))
    differing = sum(differs for differs, _ in rows)
    some = 0 < differing < len(rows)
    lines = "".join(
        f"<tr class=differs>{cells}</tr>" if differs and some else f"<tr>{cells}</tr>" for differs, cells in rows
    )
    told = f"The fits differ in {differing} of {len(rows)} attention modules" + (", which are marked." if some else ".")
    table = f"<table class=loose><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    return f"<div class=scroll tabindex=0>{table}</div>{paragraphs([told])}"


def _meaning(fits: Sequence[Fit], names: Sequence[str]) -> list[str]:
    """Which to take, what each promises, and what cannot be compared."""
    said = [
        f"{name}: speed of the model {times(found.speedups[1])}. {found.promise} {found.decode_promise}".strip()
        for name, found in zip(names, fits, strict=True)
    ]
    sure = [
        (found.speedups[1], name)
        for name, found in zip(names, fits, strict=True)
        if found.certified and not found.all_dense and math.isfinite(found.speedups[1])
    ]
    if sure:
        said.append(f"Of those that are promised, the fastest is this one: {max(sure)[1]}.")
    return [*said, *_apart(fits)]


def _apart(fits: Sequence[Fit]) -> list[str]:
    """In what else than their choices the fits differ, so that figures do not stand for the same."""

    def differ(found: Sequence[Any]) -> bool:
        return len(set(found)) > 1

    checks = [
        ([measure_words(each.measure) for each in fits], "Fidelity is not the same thing in all of them"),
        ([percent(each.confidence) for each in fits], "Confidence differs"),
        (["the mean" if each.share is None else percent(each.share) for each in fits], "What is promised differs"),
        ([", ".join(f"{at.tokens:,}" for at in each.lengths) or "none" for each in fits], "Numbers of tokens differ"),
        ([each.environment.get("machine", "unknown") for each in fits], "Times are of different machines"),
        ([each.environment.get("coterie", "unknown") for each in fits], "Versions of Coterie differ"),
    ]
    return [f"{said}: {'; '.join(dict.fromkeys(values))}." for values, said in checks if differ(values)]


def _caption(fits: Sequence[Fit]) -> list[str]:
    """What the plot shows."""
    said = [
        "To the right is faster, up is more faithful.",
        "A point is what was seen on held-out documents, at the worst length.",
    ]
    if any(found.share is None and lowest(found) is not None for found in fits):
        said.append("The line below it ends at what is sure of the mean of all documents like these.")
    if not all(found.certified for found in fits):
        said.append("A hollow point is not promised.")
    return said


def _each(fits: Sequence[Fit], names: Sequence[str], drawn: Sequence[Pictures | None]) -> list[str]:
    """Each fit by itself, folded; what was tried is shown once for those that share it."""
    found = []
    for index, (fit, name, pictures) in enumerate(zip(fits, names, drawn, strict=True)):
        prefix = f"fit{index + 1}-"
        parts = [sections.summary(fit), sections.means(fit), sections.runs(fit), sections.by_length(fit, prefix)]
        parts.append(sections.new_tokens(fit))
        if fit.table not in [other.table for other in fits[:index]]:
            parts.append(sections.tried(fit, prefix))
        if pictures is not None:
            parts += [sections.heads(pictures, prefix), sections.meetings(pictures, prefix)]
        found.append(folded(f"{name}, in full", "".join([*parts, sections.reproduce(fit, "")])))
    return [section("Each fit by itself", *found)]
