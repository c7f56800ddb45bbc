"""`fit`: choose a mechanism for every layer so that a fidelity holds, at the least time, and check it on other data."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from coterie._version import __version__
from coterie.checks import expect, expect_type
from coterie.files import plain, read_json, write_json
from coterie.fitting.measures import Fidelity, Measure, length_of
from coterie.fitting.profile import Tried, profile
from coterie.fitting.search import Choices, cheapest, path
from coterie.hosts import DENSE, Host, host_of
from coterie.mechanisms import ImprovedClustered, Local, Longformer, Mechanism, NearFar, Smyrf, as_mechanism

Progress = Callable[[str, int, int], None]
_Row = TypeVar("_Row")


def default_candidates(seed: int = 0) -> list[Mechanism]:
    """What is tried unless a user says otherwise."""
    return [
        *(NearFar(near=near, seed=seed) for near in (16, 32, 64, 128, 256)),
        Smyrf(rounds=1, cluster_size=32, seed=seed),
        *(Smyrf(rounds=rounds, cluster_size=64, seed=seed) for rounds in (2, 8)),
        ImprovedClustered(clusters=100, topk=64, space="euclidean", seed=seed),
        *(Local(window=window) for window in (64, 128, 256)),
        *(Longformer(window=window, global_tokens=4) for window in (256, 512)),
    ]


@dataclass(frozen=True)
class AtLength:
    """What was promised, on held-out batches of one length; seconds of whole forward passes, interleaved."""

    tokens: int
    fidelity: float
    dense_seconds: float
    fitted_seconds: float


@dataclass(frozen=True)
class Fit:
    """What `fit` found.

    Attributes:
        choices: the mechanism of each attention module, or "dense".
        fidelity: what was asked for; `measure` says of what.
        calibrated, held_out: the fidelity on the batches that were fitted on, and on the others.
        table: everything that was tried in every module.
        attention_seconds: of all attention modules together, dense and fitted, as measured apart.
        lengths: fidelity and speed of the whole model on held-out batches of each length.
        notes: what a user should know.
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

    @property
    def all_dense(self) -> bool:
        """Whether nothing paid."""
        return set(self.choices.values()) == {DENSE}

    @property
    def holds(self) -> bool:
        """Whether the promise was kept on held-out data."""
        return self.held_out >= self.fidelity

    @property
    def speedups(self) -> tuple[float, float]:
        """Of attention alone, and of the whole model."""
        dense, fitted = (sum(getattr(x, f"{name}_seconds") for x in self.lengths) for name in ("dense", "fitted"))
        attention, model = (a / b if b else 1.0 for a, b in (self.attention_seconds, (dense, fitted)))
        return attention, model

    def apply(self, model: Any) -> Any:
        """Put the chosen mechanisms into a model; returns what `coterie.hf.apply` or `coterie.nn.swap` returns."""
        host = host_of(model)
        host.put(self.choices)
        return getattr(host, "_swap", None) or model

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `coterie.hf.load(model, file)` reads "modules"."""
        found = asdict(self)
        found["modules"] = found.pop("choices")
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
                part = found.get(name, kind())
                words = part.values() if isinstance(part, dict) else part
                told = isinstance(part, kind) and all(isinstance(word, str) for word in words)
                expect_type(told, name, f"a {kind.__name__} of strings", ascii(part)[:100])
            read = _as(Fit, found)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"path: expected a file that Fit.save wrote, got {path} ({error})") from error
        return read

    def __str__(self) -> str:
        width = max(map(len, self.choices))
        lines = [f"{name:{width}}  {spec}" for name, spec in self.choices.items()]
        attention, model = self.speedups
        lines += [
            "",
            f"fidelity ({self.measure}): asked {self.fidelity}, calibrated {self.calibrated:.4f}, "
            f"held out {self.held_out:.4f}",
            f"speed: attention {attention:.2f}×, the whole model {model:.2f}×",
            *self.notes,
        ]
        return "\n".join(lines)


def _as(kind: type[_Row], row: dict[str, Any]) -> _Row:
    """A dataclass from JSON, its numbers and strings checked; null is NaN, which JSON does not know."""
    kinds: dict[Any, type] = {"str": str, "float": float, "int": int}
    for each in fields(kind):  # type: ignore[arg-type]
        wanted, value = kinds.get(each.type), row.get(each.name, each.default)
        if wanted is float:
            row[each.name] = _number(each.name, value)
        elif wanted is not None:
            expect_type(type(value) is wanted, each.name, f"of type {each.type}", type(value).__name__)
    return kind(**row)


def _number(name: str, value: Any) -> float:
    expect_type(value is None or type(value) in (int, float), name, "a number or null", type(value).__name__)
    return math.nan if value is None else float(value)


def fit(
    model: Any,
    batches: Iterable[Any],
    fidelity: float = 0.99,
    *,
    measure: Measure | None = None,
    held_out: Iterable[Any] | None = None,
    candidates: Sequence[Any] | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """The cheapest attention that keeps a model's answers on your own data, layer by layer.

    One dense pass tries every candidate in every attention module: its time here and its output's error. That gives a
    path of plans from the fastest to all dense; halving finds the cheapest whose fidelity holds on the batches, and
    the promise is checked on held-out ones (and made more exact until it holds there too; `notes` says if so). Where
    nothing pays, it is dense, and says so. The model is left as it was: `Fit.apply` changes it.

    Args:
        model: on Hugging Face's attention interface, or with torch.nn.MultiheadAttention inside.
        batches: dicts for a Hugging Face model; tensors or tuples of arguments for others. All lengths count: the
            fidelity must hold for each, and times are added up.
        fidelity: in (0, 1].
        measure: "hidden", the cosine of final hidden states; "loss", dense over clustered loss of the next token (the
            default of language models); or a callable (model, batch) → score, the higher the better.
        held_out: batches for the check; the last third of `batches` of each length by default.
        candidates: mechanisms to try.
        seconds: a budget; when it is used up, the best plan so far is checked and returned.
        seed: of the mechanisms.
        progress: called with (what, done, total).

    Example:
        >>> import coterie, torch
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
        >>> found = coterie.fit(model, [torch.randn(1, 64, 32) for _ in range(3)], fidelity=0.9)
        >>> sorted(found.choices), found.held_out >= 0.9
        (['layers.0.self_attn', 'layers.1.self_attn'], True)
    """
    expect_type(isinstance(fidelity, int | float), "fidelity", "a number", type(fidelity).__name__)
    expect(0 < fidelity <= 1, "fidelity", "a number in (0, 1]", fidelity)
    fitted, checked = _split(list(batches), held_out)
    wanted = [as_mechanism(each) for each in (default_candidates(seed) if candidates is None else candidates)]
    host, tell, start = host_of(model), progress or (lambda what, done, total: None), time.monotonic()
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return _Run(host, fitted, checked, float(fidelity), measure, wanted, seconds, seed, tell, start).fit()
    finally:
        host.restore()
        for module, was in training:
            module.training = was


def _split(batches: list[Any], held_out: Iterable[Any] | None) -> tuple[list[Any], list[Any]]:
    if held_out is not None:
        others = list(held_out)
        expect(bool(batches) and bool(others), "batches, held_out", "at least one of each", "none")
        return batches, others
    expect(len(batches) >= 2, "batches", "at least 2, as some are held out", len(batches))
    by_length: dict[int, list[Any]] = {}
    for batch in batches:
        by_length.setdefault(length_of(batch), []).append(batch)
    fitted: list[Any] = []
    checked: list[Any] = []
    for tokens, some in by_length.items():
        expect(len(some) >= 2, "batches", "at least 2 of each length, as some are held out", f"1 of {tokens} tokens")
        count = max(1, len(some) // 3)
        fitted += some[:-count]
        checked += some[-count:]
    return fitted, checked


@dataclass
class _Run:
    host: Host
    fitted: list[Any]
    checked: list[Any]
    target: float
    measure: Measure | None
    candidates: list[Mechanism]
    budget: float | None
    seed: int
    tell: Progress
    start: float

    def fit(self) -> Fit:
        notes: list[str] = []
        self.fitted.sort(key=length_of, reverse=True)  # if time runs out, the long ones have been tried
        scale = Fidelity(self.host, self.measure, self.fitted + self.checked)
        here = list(range(len(self.fitted)))
        there = list(range(len(self.fitted), len(self.fitted) + len(self.checked)))
        self.host.put_everywhere(DENSE)
        for index in here + there:
            scale.remember(index)
            self.tell("dense answers", index + 1, len(here + there))
        found = self._profile()
        table = found.table(self.candidates)
        modules = set(found.shapes)
        plans = path(table)
        seen = {shape.batch for shapes in found.shapes.values() for shape in shapes}
        tried = sorted({length_of(self.fitted[index]) for index in seen})
        if len(seen) < len(self.fitted):
            notes.append(
                f"Half of the time budget was used up by {len(seen)} of {len(self.fitted)} batches: candidates were "
                f"tried at {', '.join(map(str, tried))} tokens."
            )
        scores: dict[int, float] = {len(plans) - 1: 1.0}  # all dense
        steps = max(1, (len(plans) - 1).bit_length())

        def holds(plan: Choices) -> bool:
            index = plans.index(plan)
            if index not in scores:
                scores[index] = _least(self._score(scale, plan, modules, here))
                self.tell("search", min(len(scores) - 1, steps), steps)
            return scores[index] >= self.target

        chosen = cheapest(plans, holds, self._out_of_time)
        if self._out_of_time():
            notes.append(f"The time budget of {self.budget:g} s was used up: a cheaper plan may hold, too.")
        by_length = self._score(scale, plans[chosen], modules, there)
        first = _least(by_length)
        while not _least(by_length) >= self.target and chosen < len(plans) - 1:
            chosen = min(len(plans) - 1, chosen + max(1, len(plans) // 20))
            by_length = self._score(scale, plans[chosen], modules, there)
        if not first >= self.target:  # NaN holds nothing
            notes.append(
                f"The cheapest plan that held on the calibration batches gave {first:.4f} on held-out ones; "
                "it was made more exact until it held there."
            )
        choices = self._whole(plans[chosen], modules)
        if set(choices.values()) == {DENSE}:
            notes.append(f"Nothing pays at {', '.join(map(str, tried))} tokens: dense attention is kept everywhere.")
        elif any("@" in spec for spec in choices.values()):
            notes.append("Short inputs stay dense: the number after '@' is that of keys from which a mechanism runs.")
        if chosen not in scores:
            scores[chosen] = _least(self._score(scale, plans[chosen], modules, here))
        return Fit(
            choices=choices,
            measure=scale.name,
            fidelity=self.target,
            calibrated=scores[chosen],
            held_out=_least(by_length),
            table=table,
            attention_seconds=self._attention_seconds(table, plans[chosen]),
            lengths=self._speed(choices, by_length),
            seed=self.seed,
            notes=notes,
            environment=environment(),
        )

    def _profile(self) -> Any:
        done, total = 0, len(self.host.names) * len(self.fitted)

        def tick() -> None:
            nonlocal done
            done += 1
            self.tell("candidates", done, max(total, done))

        return profile(self.host, self.fitted, self.candidates, tick, lambda: self._out_of_time(0.5))

    def _out_of_time(self, share: float = 1.0) -> bool:
        return self.budget is not None and time.monotonic() - self.start > share * self.budget

    def _whole(self, plan: Choices, modules: set[str]) -> Choices:
        """A choice for every module; those that were never asked stay dense."""
        return {name: plan[name] if name in modules else DENSE for name in self.host.names}

    def _score(self, scale: Fidelity, plan: Choices, modules: set[str], indices: list[int]) -> dict[int, float]:
        self.host.put(self._whole(plan, modules))
        return scale.by_length(indices)

    @staticmethod
    def _attention_seconds(table: list[Tried], plan: Choices) -> tuple[float, float]:
        times = {(row.module, row.mechanism): row.seconds for row in table}
        return sum(times[module, DENSE] for module in plan), sum(times[module, spec] for module, spec in plan.items())

    @torch.no_grad()
    def _speed(self, choices: Choices, fidelity: dict[int, float], repeats: int = 3) -> list[AtLength]:
        """Whole forward passes in turn; the least of a few, as other work only ever adds."""
        same = set(choices.values()) == {DENSE}
        best: dict[tuple[str, int], float] = {}
        for repeat in range(1 if same else repeats):
            for name in ("dense",) if same else ("dense", "fitted"):
                if name == "dense":
                    self.host.undo()
                else:
                    self.host.put(choices)
                taken: dict[int, float] = {}
                for batch in self.checked:
                    start = time.perf_counter()
                    self.host.hidden(batch)
                    tokens = length_of(batch)
                    taken[tokens] = taken.get(tokens, 0.0) + time.perf_counter() - start
                for tokens, seconds in taken.items():
                    best[name, tokens] = min(best.get((name, tokens), float("inf")), seconds)
            self.tell("timing", repeat + 1, repeats)
        return [AtLength(n, f, best["dense", n], best["dense" if same else "fitted", n]) for n, f in fidelity.items()]


def _least(scores: dict[int, float]) -> float:
    """The worst of some lengths; NaN if one is."""
    return math.nan if any(math.isnan(score) for score in scores.values()) else min(scores.values())


def environment() -> dict[str, str]:
    """What a figure depends on."""
    found = {
        "coterie": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    try:
        import transformers
    except ImportError:
        return found
    return found | {"transformers": transformers.__version__}


__all__ = ["Fit", "default_candidates", "environment", "fit"]
