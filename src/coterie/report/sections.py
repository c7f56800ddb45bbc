"""The parts of the report on one fit; a report on several shows them for each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from coterie.fitting.result import Fit
from coterie.fitting.tables import choices_table, contexts_table, decoding_table, lengths_table, tried_table
from coterie.hosts import DENSE
from coterie.report.charts import lengths_plots, tried_plot
from coterie.report.document import paragraphs, plot, section, wide
from coterie.report.grid import picture
from coterie.report.names import short_names
from coterie.report.pictures import Pictures
from coterie.report.words import lowest, meaning, measure_words, percent, times
from coterie.tables import as_html, facts, folded


def summary(found: Fit) -> str:
    """The result in a few large figures and a sentence."""
    attention, whole = found.speedups
    seen = ("", "seen, not promised") if found.holds else ("bad", "does not hold")
    kind, verdict = ("good", "promised") if found.certified else seen
    clustered = sum(spec != DENSE for spec in found.choices.values())
    cards = [
        (
            f"{found.held_out:.4f}" if math.isfinite(found.held_out) else "–",
            f"fidelity on held-out text; asked {found.fidelity:g}: {verdict}",
            kind,
        ),
        *_bound(found),
        (times(whole), "speed of the whole model, against dense", ""),
        (times(attention), "speed of attention alone", ""),
        (f"{clustered} of {len(found.choices)}", "attention modules replaced", ""),
        *_rates(found),
    ]
    boxes = "".join(
        f"<div class=card><b class='{kind}'>{big}</b><span>{small}</span></div>" for big, small, kind in cards
    )
    return (
        f"<section aria-label=summary><div class=cards>{boxes}</div>"
        f"<p class=promise>{as_html(found.promise)}</p>{paragraphs(found.notes)}{_decoding_promise(found)}</section>"
    )


def _rates(found: Fit) -> list[tuple[str, str, str]]:
    """The card of decoding, where it was timed."""
    before, after = (math.nan, math.nan) if found.decode is None else found.decode.rates
    if not math.isfinite(before):
        return []
    return [(f"{after:.1f}", f"tokens a second when decoding, instead of {before:.1f}", "")]


def _decoding_promise(found: Fit) -> str:
    if found.decode is None:
        return ""
    return f"<p class=promise>{as_html(found.decode_promise)}</p>{paragraphs(found.decode.notes)}"


def _bound(found: Fit) -> list[tuple[str, str, str]]:
    """The card of the bound, where there is one that had to be shown."""
    at = lowest(found)
    if at is None or at.method == "exact":
        return []
    what = "the mean of all such documents" if found.share is None else "such documents hold"
    value = f"≥ {at.bound:.4f}" if found.share is None else f"≥ {at.bound:.1%}"
    return [(value, f"{what}, with {percent(found.confidence)} confidence", "")]


def means(found: Fit) -> str:
    """What the result means, in words."""
    return section("What this means", paragraphs(meaning(found)))


def runs(found: Fit) -> str:
    """What runs in each module."""
    said = [
        "“Error there” is how much the output of this attention module changes, relative to its size. It is not what "
        "the model's answers lose, which is measured on its own.",
        "Times are of attention on all documents of the search.",
    ]
    for spec in [spec for spec in found.choices.values() if re.search(r"@\d{1,18}$", spec)][:1]:
        mechanism, _, keys = spec.rpartition("@")
        said.append(
            f"“{spec}” runs {mechanism} on inputs of {int(keys):,} keys or more, and dense attention on shorter ones."
        )
    if found.windows:
        said.append("A module with a window of its own sees no more than that, whatever is chosen for it.")
    return section("What runs", wide(choices_table(found)), paragraphs(said))


def tried(found: Fit, prefix: str = "") -> str:
    """Every candidate as a point, and in a table that opens."""
    return section(
        "What was tried",
        plot(
            f"{prefix}candidates",
            tried_plot(found),
            "Each point is a candidate: its time and its error, on average over the attention modules. Those at the "
            "lower left are the best.",
            "Full points run in some module of the fitted model. Press the name of a family to see it alone.",
        ),
        folded(f"everything that was tried: {len(found.table):,} rows", wide(tried_table(found))),
    )


def by_length(found: Fit, prefix: str = "") -> str:
    """Fidelity and speed at each length."""
    drawn = lengths_plots(found)
    said = [f"Fidelity is the {measure_words(found.measure)}."]
    if found.share is None and lowest(found) is not None:
        said.append(
            f"A point is the mean of the documents that certified; the line below it ends at what is sure of the mean "
            f"of all such documents, with {percent(found.confidence)} confidence."
        )
    figure = plot(f"{prefix}lengths", drawn, *said) if drawn else ""
    return section("Fidelity and speed by length", figure, wide(lengths_table(found)))


def new_tokens(found: Fit) -> str:
    """What answers new tokens over a cache, and how fast they come; nothing if nobody asked."""
    if found.decode is None:
        return ""
    said = [
        "A text was read as above, and what follows it was decoded over the cache, each token as it stands in the "
        "text. Fidelity is the dense model's loss of those tokens over the fitted one's.",
        "Tokens a second are those of single steps at the end of one document: with the model's own attention and "
        "transformers' dynamic cache, with dense attention over Coterie's cache, and as fitted. Before the first of "
        "them the clusters of what was read are made, which is not counted.",
    ]
    parts = [] if found.decode.all_dense else [wide(decoding_table(found.decode))]
    return section("New tokens", wide(contexts_table(found)), *parts, paragraphs(said))


def heads(pictures: Pictures, prefix: str = "") -> str:
    """The error of every head: a row for each module."""
    names = list(pictures.errors)
    known = [error for errors in pictures.errors.values() for error in errors if math.isfinite(error)]
    most, columns = max(known, default=0.0), max(map(len, pictures.errors.values()), default=0)
    head = "".join(f"<th scope=col>{index}</th>" for index in range(columns))
    rows = "".join(
        f'<tr data-name="{as_html(f"{name}: {pictures.mechanisms[name]}")}">'
        f'<th scope=row title="{as_html(name)}">{as_html(short)}</th>'
        f"{_cells(pictures.errors[name], columns, most)}</tr>"
        for name, short in zip(names, short_names(names), strict=True)
    )
    table = f"<table class=heat><thead><tr><th>module \\ head</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
    scale = f"<p class=scale>error 0 <i></i> {most:.3f}</p>"
    said = (
        "Each cell is a head: the stronger its colour, the more its output changes. Where a module stays dense, the "
        "error is that which near-far would have had."
    )
    return section(
        "Which heads are hard", plot(f"{prefix}heads", f"<div class=scroll tabindex=0>{table}</div>{scale}", said)
    )


def _cells(errors: Sequence[float], columns: int, most: float) -> str:
    """A cell for each head; one that is no number, or that this module does not have, is empty."""
    found = [
        f"<td style=--part:{error / most if most else 0:.2f} data-value={error:.3f}></td>"
        if math.isfinite(error)
        else "<td></td>"
        for error in errors
    ]
    return "".join(found) + "<td></td>" * (columns - len(errors))


def meetings(pictures: Pictures, prefix: str = "") -> str:
    """Who meets whom in the hardest head of a module that a reader chooses."""
    if not pictures.meetings:
        return ""
    options = "".join(
        f"<option>{as_html(f'{name}, head {pictures.hardest(name)}: {pictures.mechanisms[name]}')}</option>"
        for name in pictures.meetings
    )
    first = picture(next(iter(pictures.meetings.values())))
    drawn = (
        f"<div class=grid><p><label>The hardest head of <select class=module>{options}</select></label></p>"
        f'<p class=down>queries ↓</p><img class=meetings alt="Who meets whom in this head" src="{first}">'
        "<p class=across>keys, from first to last →</p></div>"
    )
    said = "Each cell is a block of queries and keys: the stronger its colour, the more of its pairs meet exactly."
    return section("Who meets whom", plot(f"{prefix}meetings", drawn, said))


def meeting_pictures(pictures: Pictures) -> list[str]:
    """What the page's script shows when a module is chosen."""
    return [picture(shares) for shares in pictures.meetings.values()]


def reproduce(found: Fit, command: str) -> str:
    """What was run, and with what."""
    told = f"<pre>{as_html(command)}</pre>" if command else ""
    return section("How to reproduce", told, f"<p>Seed {found.seed}.</p>", wide(facts(found.environment.items())))
