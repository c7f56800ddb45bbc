"""The tables of a fit: what runs, how it did at each length, and everything that was tried."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from coterie.hosts import DENSE
from coterie.tables import Table

if TYPE_CHECKING:
    from coterie.fitting.decoding.result import AtContext, Decoding
    from coterie.fitting.result import AtLength, Fit


def choices_table(found: Fit) -> Table:
    """What runs in each attention module, and what that costs there.

    Example:
        >>> from coterie.fitting.profile import Tried
        >>> from coterie.fitting.result import Fit
        >>> from coterie.fitting.tables import choices_table
        >>> tried = [Tried("a", "dense", 0.0, 0.2), Tried("a", "near-far", 0.1, 0.05)]
        >>> found = Fit({"a": "near-far"}, "hidden", 0.9, 0.95, 0.94, tried, (0.2, 0.05), [], 0)
        >>> print(choices_table(found).text())
        attention module  runs      error there  attention, ms  dense, ms
        a                 near-far        0.100           50.0      200.0
    """
    tried = {(row.module, row.mechanism): row for row in found.table}
    rows = []
    for module, spec in found.choices.items():
        row, dense = tried.get((module, spec)), tried.get((module, DENSE))
        cells = [_number(row.error, 3), _number(row.seconds * 1e3, 1)] if row else ["–", "–"]
        runs = f"its own window ({found.windows[module]})" if module in found.windows and row is None else spec
        rows.append([module, runs, *cells, _number(dense.seconds * 1e3, 1) if dense else "–"])
    return Table(["attention module", "runs", "error there", "attention, ms", "dense, ms"], rows, words=(0, 1))


def lengths_table(found: Fit) -> Table:
    """Fidelity and speed of the whole model on held-out documents, and what is sure of all documents like them.

    Example:
        >>> from coterie.fitting.result import AtLength, Fit
        >>> from coterie.fitting.tables import lengths_table
        >>> at = AtLength(2048, 0.9953, 0.83, 0.64, 4, 0.9941, "t")
        >>> print(lengths_table(Fit({}, "hidden", 0.99, 1.0, 1.0, [], (1.0, 1.0), [at], 0)).text())
        tokens  documents  fidelity   at least  model, dense  model, fitted  speed-up
         2,048          4    0.9953  0.9941 (t)        0.83 s         0.64 s     1.30×
    """
    rows = [
        [
            f"{at.tokens:,}",
            str(at.documents or "–"),
            _number(at.fidelity, 4),
            _sure(at, found.share),
            *(f"{x:.2f} s" if math.isfinite(x) else "–" for x in (at.dense_seconds, at.fitted_seconds)),
            _speedup(at),
        ]
        for at in found.lengths
    ]
    columns = ["tokens", "documents", "fidelity", "at least" if found.share is None else "share at least"]
    return Table([*columns, "model, dense", "model, fitted", "speed-up"], rows, words=())


def decoding_table(found: Decoding) -> Table:
    """What answers new tokens in each attention module, and what that costs there.

    Example:
        >>> from coterie.fitting.decoding.result import Decoding
        >>> from coterie.fitting.profile import Tried
        >>> from coterie.fitting.tables import decoding_table
        >>> tried = [Tried("a", "dense", 0.0, 2e-4), Tried("a", "near-far", 0.1, 5e-5)]
        >>> print(decoding_table(Decoding({"a": "near-far"}, 1.0, 0.99, True, tried)).text())
        attention module  decodes   error there  attention, µs a token  dense, µs a token
        a                 near-far        0.100                     50                200
    """
    tried = {(row.module, row.mechanism): row for row in found.table}
    rows = []
    for module, spec in found.choices.items():
        row, dense = tried.get((module, spec)), tried.get((module, DENSE))
        cells = [_number(row.error, 3), _number(row.seconds * 1e6, 0)] if row else ["–", "–"]
        rows.append([module, spec, *cells, _number(dense.seconds * 1e6, 0) if dense else "–"])
    columns = ["attention module", "decodes", "error there", "attention, µs a token", "dense, µs a token"]
    return Table(columns, rows, words=(0, 1))


def contexts_table(found: Fit) -> Table:
    """Fidelity and speed of decoding behind held-out documents. "Dynamic cache" is transformers' own, with the model's
    own attention; "Coterie's" is `coterie.hf.Cache` with dense attention.

    Example:
        >>> from coterie.fitting.decoding.result import AtContext, Decoding
        >>> from coterie.fitting.result import Fit
        >>> from coterie.fitting.tables import contexts_table
        >>> at = AtContext(8192, 0.9953, 4, 0.9941, "t", 10.0, 15.0, 25.0)
        >>> decode = Decoding({"a": "near-far"}, 0.996, 0.9953, True, lengths=[at])
        >>> print(contexts_table(Fit({}, "loss", 0.99, 1.0, 1.0, [], (1.0, 1.0), [], 0, decode=decode)).text())
        tokens  documents  fidelity   at least  tokens/s, dynamic cache  Coterie's  fitted  speed-up
         8,192          4    0.9953  0.9941 (t)                     10.0       15.0    25.0     2.50×
    """
    rows = [
        [
            f"{at.tokens:,}",
            str(at.documents or "–"),
            _number(at.fidelity, 4),
            _sure(at, found.share),
            *(_number(rate, 1) for rate in (at.own_rate, at.dense_rate, at.fitted_rate)),
            f"{at.fitted_rate / at.own_rate:.2f}×" if at.own_rate > 0 else "–",
        ]
        for at in (found.decode.lengths if found.decode is not None else ())
    ]
    columns = ["tokens", "documents", "fidelity", "at least" if found.share is None else "share at least"]
    return Table([*columns, "tokens/s, dynamic cache", "Coterie's", "fitted", "speed-up"], rows, words=())


def trade_off_table(found: list[Fit]) -> Table:
    """Several fits of a model: what was asked, seen and promised, and what that costs.

    Example:
        >>> from coterie.fitting.result import AtLength, Fit
        >>> from coterie.fitting.tables import trade_off_table
        >>> at = AtLength(2048, 0.9953, 0.83, 0.64, 4, 0.9941, "t")
        >>> one = Fit({"a": "near-far"}, "hidden", 0.99, 0.996, 0.9953, [], (1.0, 0.5), [at], 0, certified=True)
        >>> print(trade_off_table([one]).text())
        asked  promised  held out  at least  attention  whole model
         0.99  yes         0.9953    0.9941      2.00×        1.30×
    """
    rows = []
    for each in found:
        bounds = [at.bound for at in each.lengths]
        least = min(bounds, default=math.nan) if all(map(math.isfinite, bounds)) else math.nan
        attention, model = each.speedups
        rows.append(
            [
                f"{each.fidelity:g}",
                "dense" if each.all_dense else "yes" if each.certified else "no",
                _number(each.held_out, 4),
                _number(least, 4),
                f"{attention:.2f}×",
                f"{model:.2f}×" if math.isfinite(model) else "–",
            ]
        )
    return Table(["asked", "promised", "held out", "at least", "attention", "whole model"], rows, words=(1,))


def _sure(at: AtLength | AtContext, share: float | None) -> str:
    """A bound, and how it was found."""
    if at.method == "exact" or not math.isfinite(at.bound):
        return "exact" if at.method == "exact" else "–"
    return f"{at.bound:.4f} ({at.method})" if share is None else f"{at.bound:.1%} ({at.method})"


def _speedup(at: AtLength) -> str:
    """How many times as fast; where attention stays dense, nothing is to be compared."""
    if not at.fitted_seconds > 0:
        return "–"
    return "the same" if at.method == "exact" else f"{at.dense_seconds / at.fitted_seconds:.2f}×"


def tried_table(found: Fit) -> Table:
    """Every candidate in every module.

    Example:
        >>> from coterie.fitting.profile import Tried
        >>> from coterie.fitting.result import Fit
        >>> from coterie.fitting.tables import tried_table
        >>> tried = [Tried("a", "local", 0.5, 0.01, "slower than dense")]
        >>> print(tried_table(Fit({}, "hidden", 0.9, 1.0, 1.0, tried, (1.0, 1.0), [], 0)).text())
        attention module  mechanism  error    ms  note
        a                 local      0.500  10.0  slower than dense
    """
    rows = [
        [row.module, row.mechanism, _number(row.error, 3), _number(row.seconds * 1e3, 1), row.note]
        for row in found.table
    ]
    return Table(["attention module", "mechanism", "error", "ms", "note"], rows, words=(0, 1, 4))


def _number(x: float, digits: int) -> str:
    """A candidate that was refused has neither an error nor a time."""
    return f"{x:.{digits}f}" if math.isfinite(x) else "–"
