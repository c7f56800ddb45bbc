"""One dense pass that tries every candidate in every attention module: what it costs, and what it changes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.checks import expect
from coterie.fitting.measures import length_of
from coterie.fitting.task import Task
from coterie.hosts import DENSE
from coterie.mechanisms import Full, Mechanism
from coterie.mechanisms.at_least import at_least
from coterie.observe import Seen, observing


@dataclass(frozen=True)
class Tried:
    """A candidate in one attention module."""

    module: str
    mechanism: str
    error: float  # relative error of the attention's output; NaN if it was refused
    seconds: float  # of attention on all batches, the median over modules of this shape
    note: str = ""


class Shape(NamedTuple):
    """What an attention call looked like."""

    batch: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool


@dataclass
class Profile:
    """What was seen in a module: squared errors of candidates, and their times by shape and batch."""

    errors: dict[tuple[str, str], dict[Shape, list[float]]] = field(default_factory=dict)
    times: dict[tuple[Shape, str], list[float]] = field(default_factory=dict)
    shapes: dict[str, list[Shape]] = field(default_factory=dict)  # of a module, one for each call
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    slow: set[tuple[Shape, str]] = field(default_factory=set)  # for this shape, slower than dense

    def table(self, candidates: list[Mechanism]) -> list[Tried]:
        """Everything that was tried; dense attention first."""
        rows = []
        for module, shapes in self.shapes.items():
            rows.append(Tried(module, DENSE, 0.0, sum(self._seconds(shape, DENSE) for shape in shapes)))
            rows += [self._row(module, mechanism) for mechanism in candidates]
        return rows

    def _row(self, module: str, mechanism: Mechanism) -> Tried:
        """A candidate, dense at the lengths where it does not pay."""
        name = str(mechanism)
        if (module, name) in self.refused:
            return Tried(module, name, float("nan"), float("nan"), self.refused[module, name])
        shapes, errors = self.shapes[module], self.errors.get((module, name), {})
        lengths = sorted({shape.keys[2] for shape in shapes})
        first = next((n for n in lengths if all(self._pays(module, name, m) for m in lengths if m >= n)), None)
        if first is None:
            known = [statistics.fmean(each) for each in errors.values()]
            error = statistics.fmean(known) ** 0.5 if known else float("nan")
            seconds = sum(self._seconds(shape, name) for shape in shapes)
            return Tried(module, name, error, seconds, "slower than dense")
        long = [shape for shape in shapes if shape.keys[2] >= first]
        short = [shape for shape in shapes if shape.keys[2] < first]
        seconds = sum(self._seconds(s, name) for s in long) + sum(self._seconds(s, DENSE) for s in short)
        error = (sum(statistics.fmean(errors[shape]) for shape in long) / len(shapes)) ** 0.5
        return Tried(module, str(at_least(first, mechanism)) if short else name, error, seconds)

    def _seconds(self, shape: Shape, name: str) -> float:
        return statistics.median(self.times[shape, name])

    def _pays(self, module: str, name: str, keys: int) -> bool:
        """Whether a candidate is faster than dense attention with so many keys."""
        shapes = [shape for shape in self.shapes[module] if shape.keys[2] == keys]
        if any((shape, name) in self.slow for shape in shapes):
            return False
        return sum(self._seconds(s, name) for s in shapes) < sum(self._seconds(s, DENSE) for s in shapes)


class Profiled(NamedTuple):
    """Everything that was tried, and at which numbers of tokens."""

    table: list[Tried]
    lengths: list[int]
    notes: list[str]


def profile(task: Task) -> Profiled:
    """Try every candidate in every module, with at most half of the time budget."""
    found = _watch(task)
    reached = {shape.batch for shapes in found.shapes.values() for shape in shapes}
    lengths = sorted({length_of(task.fitted[index]) for index in reached})
    notes = []
    if len(reached) < len(task.fitted):
        notes.append(
            f"Half of the time budget was used up by {len(reached)} of {len(task.fitted)} batches: candidates were "
            f"tried at {', '.join(map(str, lengths))} tokens."
        )
    return Profiled(found.table(task.candidates), lengths, notes)


@torch.no_grad()
def _watch(task: Task) -> Profile:
    """Run the batches densely and try the candidates on the way."""
    found, done, total = Profile(), 0, len(task.host.names) * len(task.fitted)
    task.host.put_everywhere("full")

    def tick() -> None:
        nonlocal done
        done += 1
        task.tell("candidates", done, max(total, done))

    with task.host.watching():
        for index, batch in enumerate(task.fitted):
            if index and task.out_of_time(0.5):
                break

            def observer(seen: Seen, index: int = index) -> None:
                _try(found, task.host.name_of(seen), index, seen, task.candidates, tick)

            with observing(observer):
                task.host.run(batch)
    expect(bool(found.shapes), "batches", "inputs that reach an attention module with more than a few queries", "none")
    return found


def _try(
    found: Profile, module: str, index: int, seen: Seen, candidates: list[Mechanism], tick: Callable[[], None]
) -> None:
    if not isinstance(seen.mechanism, Full) and seen.mechanism != "full":
        return  # a sliding window, which stays as it is
    tick()
    shape = Shape(index, tuple(seen.q.shape), tuple(seen.k.shape), seen.call.causal)
    found.shapes.setdefault(module, []).append(shape)
    exact = _at_real_queries(seen, seen.attend(Full()))
    size = float(exact.square().sum())
    found.times.setdefault((shape, DENSE), []).append(_dense_seconds(seen))
    dense = statistics.median(found.times[shape, DENSE])
    for mechanism in candidates:
        name = str(mechanism)
        if (shape, name) in found.slow or (module, name) in found.refused:
            continue
        start = time.perf_counter()
        try:
            out = seen.attend(mechanism)
        except ValueError as error:
            found.refused[module, name] = str(error)
            continue
        taken = time.perf_counter() - start
        times = found.times.setdefault((shape, name), [])
        times.append(taken)
        squared = float((_at_real_queries(seen, out) - exact).square().sum()) / max(size, 1e-300)
        found.errors.setdefault((module, name), {}).setdefault(shape, []).append(squared)
        if len(times) >= 3 and min(times) > dense:
            found.slow.add((shape, name))


def _at_real_queries(seen: Seen, out: Tensor) -> Tensor:
    """What counts in an error: guests, padding that a model may read, do not."""
    mask = seen.call.query_mask
    return out.double() if mask is None else out.double().masked_fill(~mask[:, None, :, None], 0)


def _dense_seconds(seen: Seen) -> float:
    """PyTorch's own attention on the same tensors, without padding."""
    square = seen.q.shape[2] == seen.k.shape[2]
    start = time.perf_counter()
    out: Tensor = F.scaled_dot_product_attention(
        seen.q,
        seen.k,
        seen.v,
        is_causal=seen.call.causal and square,
        scale=seen.call.scale,
        enable_gqa=seen.q.shape[1] != seen.k.shape[1],
    )
    assert out.shape[2] == seen.q.shape[2]
    return time.perf_counter() - start
