"""What `fit` found: shown, saved, read again and put into a model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from coterie._version import __version__
from coterie.checks import expect, expect_type
from coterie.files import plain, read_json, write_json
from coterie.fitting.decoding.result import AtContext, Decoding
from coterie.fitting.profile import Tried
from coterie.fitting.search import Choices
from coterie.fitting.tables import choices_table, contexts_table, decoding_table, lengths_table, tried_table
from coterie.hosts import DENSE, host_of
from coterie.tables import folded, output, paragraph

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class AtLength:
    """What the certifying documents of one length said.

    Attributes:
        fidelity: their mean.
        dense_seconds, fitted_seconds: of a whole forward pass over one of them, the least of a few that took turns.
        documents: how many they were.
        bound: what is sure of the mean over all documents like them, or of the share that has the fidelity.
        method: how the bound was found: "t", "betting", "binomial", or "exact" where attention stays dense.
    """

    tokens: int
    fidelity: float
    dense_seconds: float
    fitted_seconds: float
    documents: int = 0
    bound: float = math.nan
    method: str = ""


@dataclass(frozen=True)
class Fit:
    """What `fit` found.

    Attributes:
        choices: the mechanism of each attention module, or "dense".
        fidelity: what was asked for; `measure` says of what.
        calibrated, held_out: the mean fidelity on the documents of the search, and on those that certified, which
            chose no plan but where to stop; the worst of all lengths.
        certified: whether it is promised, with so much `confidence`, that the mean over all documents like these, or
            a `share` of them, has the fidelity. `lengths` has the bounds.
        table: everything that was tried in every module.
        attention_seconds: of all attention modules together, dense and fitted, each timed on its own.
        lengths: fidelity and speed of the whole model on held-out batches of each length.
        windows: modules with a sliding window of their own, and its width: longer inputs run that, whatever is chosen.
        notes: what a user should know.
        decode: what answers new tokens over a cache; None if nobody asked, and they are dense.
    """

    choices: Choices
    measure: str
    fidelity: float
    calibrated: float
    held_out: float
    table: list[Tried]
    attention_seconds: tuple[float, float]
    lengths: list[AtLength]
    seed: int
    notes: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    confidence: float = 0.95
    share: float | None = None
    certified: bool = False
    windows: dict[str, int] = field(default_factory=dict)
    decode: Decoding | None = None

    @property
    def all_dense(self) -> bool:
        """Whether nothing paid."""
        return set(self.choices.values()) == {DENSE}

    @property
    def holds(self) -> bool:
        """Whether the fidelity is promised, or was at least seen on held-out data."""
        decodes = self.decode is None or self.decode.certified or self.decode.held_out >= self.fidelity
        return (self.certified or self.held_out >= self.fidelity) and decodes

    @property
    def promise(self) -> str:
        """What may be expected of documents like these, in a sentence."""
        if self.all_dense:
            return "All attention is dense: answers do not change."
        return self._promise(self.certified, self.held_out)

    @property
    def decode_promise(self) -> str:
        """What may be expected of the tokens that are decoded, in a sentence; "" if nobody asked."""
        if self.decode is None:
            return ""
        if self.all_dense and self.decode.all_dense:
            return "New tokens: decoding is dense, and they do not change."
        return f"New tokens: {self._promise(self.decode.certified, self.decode.held_out)}"

    def _promise(self, certified: bool, held_out: float) -> str:
        if not certified:
            seen = f": {held_out:.4f} was seen on held-out documents" if math.isfinite(held_out) else ""
            return f"Nothing is promised{seen}."
        whom = "on documents like yours" if self.share is None else f"on {100 * self.share:g}% of documents like yours"
        mean = "a mean fidelity" if self.share is None else "a fidelity"
        return f"With {100 * self.confidence:g}% confidence: {mean} of at least {self.fidelity:g} {whom}."

    @property
    def speedups(self) -> tuple[float, float]:
        """Of attention alone, and of the whole model."""
        dense, fitted = (sum(getattr(x, f"{name}_seconds") for x in self.lengths) for name in ("dense", "fitted"))
        if not self.lengths:
            dense = fitted = math.nan
        attention, model = (a / b if b else 1.0 for a, b in (self.attention_seconds, (dense, fitted)))
        return attention, model

    @property
    def speed(self) -> str:
        """How much faster it is, in words."""
        attention, model = self.speedups
        if not math.isfinite(attention):
            return "nothing was timed"
        whole = f"the whole model {model:.2f}×" if math.isfinite(model) else "the whole model was not timed"
        return f"attention alone {attention:.2f}× as fast, {whole}"

    def apply(self, model: Any) -> Any:
        """Put the chosen mechanisms into a model; returns what `coterie.hf.apply` or `coterie.nn.swap` returns."""
        host = host_of(model)
        host.put(self.choices, None if self.decode is None else self.decode.choices)
        return getattr(host, "_swap", None) or model

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `coterie.hf.load(model, file)` reads "modules", and those in "decode" if that is there."""
        found = asdict(self)
        found["modules"] = found.pop("choices")
        decode = found.pop("decode")
        if decode is not None:
            found["decode"] = {"modules": decode.pop("choices"), **decode}
        whole: dict[str, Any] = plain({"coterie": __version__, **found})
        return whole

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, whole or not at all."""
        write_json(Path(path), self.to_dict())

    @staticmethod
    def load(path: str | Path) -> Fit:
        """Read what `save` wrote; ValueError if it is anything else."""
        found = read_json(Path(path))
        known = isinstance(found, dict) and "modules" in found and "held_out" in found
        expect(known, "path", "a file that Fit.save wrote", path)
        found["choices"] = found.pop("modules")
        found.pop("coterie", None)
        try:
            dense, fitted = found["attention_seconds"]
            found["attention_seconds"] = _number("attention_seconds", dense), _number("attention_seconds", fitted)
            found["table"] = [_as(Tried, row) for row in found["table"]]
            found["lengths"] = [_as(AtLength, row) for row in found["lengths"]]
            for name, kind in (("choices", dict), ("environment", dict), ("notes", list)):
                _expect_words(name, found.get(name, kind()), kind)
            if "decode" in found:
                found["decode"] = _decoding(dict(found["decode"]))
            windows = found.get("windows", {})
            wide = isinstance(windows, dict) and all(type(width) is int for width in windows.values())
            expect_type(wide, "windows", "a dict of numbers", ascii(windows)[:100])
            read = _as(Fit, found)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"path: expected a file that Fit.save wrote, got {path} ({error})") from error
        return read

    def __str__(self) -> str:
        width = max(map(len, self.choices))
        over_cache = {} if self.decode is None or self.decode.all_dense else self.decode.choices
        lines = [
            f"{name:{width}}  {spec}" + (f", decoding {over_cache[name]}" if name in over_cache else "")
            for name, spec in self.choices.items()
        ]
        return "\n".join([*lines, "", *self._said()])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        tried = tried_table(self)
        return output(
            choices_table(self).html(),
            lengths_table(self).html(),
            *([] if self.decode is None else [decoding_table(self.decode).html(), contexts_table(self).html()]),
            *map(paragraph, self._said()),
            folded(f"everything that was tried: {len(tried.rows):,} rows", tried.html()),
        )

    def _said(self) -> list[str]:
        """The result in a few sentences."""
        seen = (("calibrated", self.calibrated), ("held out", self.held_out))
        known = [f"{what} {score:.4f}" for what, score in seen if math.isfinite(score)]
        return [
            ", ".join([f"fidelity ({self.measure}): asked {self.fidelity}", *known]),
            self.promise,
            self.speed,
            *self.notes,
            *([] if self.decode is None else [self.decode_promise, self.decode.speed, *self.decode.notes]),
        ]


def _decoding(found: dict[str, Any]) -> Decoding:
    """What was stored of decoding."""
    found["choices"] = found.pop("modules")
    found["table"] = [_as(Tried, row) for row in found["table"]]
    found["lengths"] = [_as(AtContext, row) for row in found["lengths"]]
    _expect_words("choices", found["choices"], dict)
    _expect_words("notes", found["notes"], list)
    return _as(Decoding, found)


def _expect_words(name: str, part: Any, kind: type) -> None:
    words = part.values() if isinstance(part, dict) else part
    told = isinstance(part, kind) and all(isinstance(word, str) for word in words)
    expect_type(told, name, f"a {kind.__name__} of strings", ascii(part)[:100])


def _as(kind: type[_Row], row: dict[str, Any]) -> _Row:
    """A dataclass from JSON, its numbers and strings checked; null is NaN, which JSON does not know."""
    kinds: dict[Any, type] = {"str": str, "float": float, "int": int, "bool": bool}
    for each in fields(kind):  # type: ignore[arg-type]
        wanted, value = kinds.get(each.type), row.get(each.name, each.default)
        if wanted is float or (each.type == "float | None" and value is not None):
            row[each.name] = _number(each.name, value)
        elif wanted is not None:
            expect_type(type(value) is wanted, each.name, f"of type {each.type}", type(value).__name__)
    return kind(**row)


def _number(name: str, value: Any) -> float:
    expect_type(value is None or type(value) in (int, float), name, "a number or null", type(value).__name__)
    return math.nan if value is None else float(value)
