"""One dense pass that tries candidates in every attention module: what each costs, and what it changes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.checks import expect
from coterie.fitting.dense import dense
from coterie.fitting.lengths import Lengths
from coterie.fitting.task import Task
from coterie.hosts import DENSE
from coterie.mechanisms import Full, Mechanism
from coterie.mechanisms.at_least import at_least
from coterie.observe import Seen, observing

PROFILE = 0.25  # of a budget is over when candidates have been tried
_SHARE = 6  # of the heads, one in so many, are what candidates are screened on
_LONGER = 1.5  # times as many keys as were screened with: what was slow then may pay
_UNTRIED = "not tried: the time was up"
_SLOWER, _FASTER, _BETTER = 1.25, 0.85, 0.95  # ratios that a screening believes in


@dataclass(frozen=True)
class Tried:
    """A candidate in one attention module."""

    module: str
    mechanism: str
    error: float  # relative error of the attention's output; NaN if it was refused
    seconds: float  # of attention on all batches, the least over modules of this shape
    note: str = ""


class Shape(NamedTuple):
    """What an attention call looked like."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool


class Screened(NamedTuple):
    """A candidate on a few heads."""

    error: float  # squared, relative
    seconds: float


@dataclass
class Profile:
    """What was seen in a module: squared errors of candidates, and their times by shape."""

    errors: dict[tuple[str, str], dict[Shape, list[float]]] = field(default_factory=dict)
    times: dict[tuple[Shape, str], list[float]] = field(default_factory=dict)
    shapes: dict[str, list[Shape]] = field(default_factory=dict)  # of a module, one for each call
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    kept: dict[str, list[Mechanism]] = field(default_factory=dict)  # what a module's screening left
    beaten: dict[tuple[str, str], str] = field(default_factory=dict)  # what it did not, and why
    screened: dict[str, int] = field(default_factory=dict)  # with how many keys

    def table(self, candidates: list[Mechanism]) -> list[Tried]:
        """Everything that was tried; dense attention first."""
        rows = []
        for module, shapes in self.shapes.items():
            rows.append(Tried(module, DENSE, 0.0, sum(self.least(shape, DENSE) for shape in shapes)))
            rows += [self._row(module, mechanism) for mechanism in candidates]
        return rows

    def _row(self, module: str, mechanism: Mechanism) -> Tried:
        """A candidate, dense at the lengths where it does not pay."""
        name = str(mechanism)
        why = self.refused.get((module, name)) or self.beaten.get((module, name))
        shapes, errors = self.shapes[module], self.errors.get((module, name), {})
        if why is not None or not errors:
            return Tried(module, name, float("nan"), float("nan"), why or _UNTRIED)
        lengths = sorted({shape.keys[2] for shape in shapes})
        first = next((n for n in lengths if all(self._pays(module, name, m) for m in lengths if m >= n)), None)
        long = [shape for shape in shapes if (shape in errors if first is None else shape.keys[2] >= first)]
        short = [shape for shape in shapes if shape not in long]
        seconds = sum(self.least(s, name) for s in long) + sum(self.least(s, DENSE) for s in short)
        error = (sum(statistics.fmean(errors[shape]) for shape in long) / len(shapes)) ** 0.5
        if first is None:
            return Tried(module, name, error, seconds, "slower than dense")
        return Tried(module, str(at_least(first, mechanism)) if short else name, error, seconds)

    def least(self, shape: Shape, name: str) -> float:
        """The seconds of a call, when the machine was least disturbed: other work only ever adds."""
        return min(self.times[shape, name])

    def _pays(self, module: str, name: str, keys: int) -> bool:
        """Whether a candidate is faster than dense attention with so many keys."""
        shapes = [shape for shape in self.shapes[module] if shape.keys[2] == keys]
        if any(shape not in self.errors[module, name] for shape in shapes):
            return False  # not tried there in time
        return sum(self.least(s, name) for s in shapes) < sum(self.least(s, DENSE) for s in shapes)


class Profiled(NamedTuple):
    """Everything that was tried, and at which numbers of tokens."""

    table: list[Tried]
    lengths: list[int]
    notes: list[str]
    cut_short: bool = False  # there was no time for all of it


def profile(task: Task, lengths: Lengths) -> Profiled:
    """Try every candidate in every module, with a part of the time budget."""
    found, reached = Profile(), 0
    task.host.put_everywhere("full")
    with task.host.watching(), torch.no_grad():
        for batch in task.fitted:
            if reached and task.out_of_time(PROFILE):
                break
            with observing(Trial(task, found, len(task.fitted) - reached)):
                task.host.run(batch)
            reached += 1
    expect(bool(found.shapes), "batches", "inputs that reach an attention module with more than a few queries", "none")
    tokens = sorted({lengths.of(batch) for batch in task.fitted[:reached]})
    notes = []
    if reached < len(task.fitted):
        notes.append(
            f"The time was enough for {reached} of {len(task.fitted)} batches: candidates were tried at "
            f"{', '.join(map(str, tokens))} tokens."
        )
    table = found.table(task.candidates)
    missing = sum(row.note == _UNTRIED for row in table)
    if missing and not notes:
        notes.append(f"There was no time to try all candidates in all modules: {missing} are missing.")
    return Profiled(table, tokens, notes, bool(notes))


class Trial:
    """Tries candidates in every call of a pass, which goes on with what dense attention answers.

    Args:
        batches: how many are to come, this one included: all of them share what is left of the time.
    """

    def __init__(self, task: Task, found: Profile, batches: int) -> None:
        self.task, self.found = task, found
        self.left = len(task.host.names) * batches  # calls, as far as is known
        self.done = len(task.host.names) * (len(task.fitted) - batches)
        self.good = Counter(str(each) for some in found.kept.values() for each in some)

    def __call__(self, seen: Seen) -> Tensor | None:
        if not isinstance(seen.mechanism, Full) and seen.mechanism != "full":
            return None  # a sliding window, which stays as it is
        module = self.task.host.name_of(seen)
        until = self._until()
        shape = Shape(tuple(seen.q.shape), tuple(seen.k.shape), seen.call.causal)
        self.found.shapes.setdefault(module, []).append(shape)
        exact, seconds = dense(seen)
        self.found.times.setdefault((shape, DENSE), []).append(seconds)
        if seen.k.shape[2] > _LONGER * self.found.screened.get(module, 0):
            self._screen(module, seen, until)
        self._try(module, shape, seen, exact, until)
        self.left, self.done = self.left - 1, self.done + 1
        self.task.tell("candidates", self.done, max(self.done, self.done + self.left))
        return exact

    def _until(self) -> Callable[[], bool]:
        """Whether this call has had its share of the time."""
        now = time.monotonic()
        if self.task.budget is None:
            return lambda: False
        end = self.task.start + PROFILE * (self.task.end - self.task.start)
        share = max(0.0, end - now) / max(1, self.left)
        return lambda: time.monotonic() > now + share

    def _screen(self, module: str, seen: Seen, over: Callable[[], bool]) -> None:
        """Leave out what a few heads show to be slower than dense attention, or worse than another in both ways.

        What was good in other modules comes first, in case that time runs out.
        """
        wanted = sorted(self.task.candidates, key=lambda each: -self.good[str(each)])
        self.found.screened[module] = seen.k.shape[2]
        few = seen.some_heads(max(1, seen.k.shape[1] // _SHARE))
        if seen.q.shape[1] < _SHARE or few is seen:
            self.found.kept[module] = wanted
            return
        exact, seconds = dense(few)
        tried: dict[Mechanism, Screened] = {}
        for mechanism in wanted:
            if tried and over():
                break
            once = self._once(module, few, mechanism, exact)
            if once is not None and once.seconds > seconds:  # once more, in case that something else ran meanwhile
                again = self._once(module, few, mechanism, exact)
                once = once if again is None else min(once, again, key=lambda each: each.seconds)
                seconds = min(seconds, dense(few)[1])
            if once is not None:
                tried[mechanism] = once
        for each in self.task.candidates:  # with fewer keys they may have been
            self.found.beaten.pop((module, str(each)), None)
        where = f"on {few.q.shape[1]} of {seen.q.shape[1]} heads"
        for mechanism, mine in tried.items():
            if mine.seconds > _SLOWER * seconds:
                self.found.beaten[module, str(mechanism)] = f"slower than dense {where}"
            elif (better := next((o for o, its in tried.items() if _beats(its, mine)), None)) is not None:
                self.found.beaten[module, str(mechanism)] = f"{better} is faster and more exact {where}"
        self.found.kept[module] = [each for each in tried if (module, str(each)) not in self.found.beaten]
        self.good.update(map(str, self.found.kept[module]))

    def _try(self, module: str, shape: Shape, seen: Seen, exact: Tensor, over: Callable[[], bool]) -> None:
        for number, mechanism in enumerate(self.found.kept[module]):
            if number and over():
                break
            once = self._once(module, seen, mechanism, exact)
            if once is not None:
                self.found.times.setdefault((shape, str(mechanism)), []).append(once.seconds)
                self.found.errors.setdefault((module, str(mechanism)), {}).setdefault(shape, []).append(once.error)

    def _once(self, module: str, seen: Seen, mechanism: Mechanism, exact: Tensor) -> Screened | None:
        start = time.perf_counter()
        try:
            out = seen.attend(mechanism)
        except ValueError as error:
            self.found.refused[module, str(mechanism)] = str(error)
            return None
        taken = time.perf_counter() - start
        return Screened(squared_error(seen, out, exact), taken)


def _beats(a: Screened, b: Screened) -> bool:
    """Whether a candidate is clearly better than another in both ways."""
    return a.seconds < _FASTER * b.seconds and a.error < _BETTER * b.error


def squared_error(seen: Seen, out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖² / ‖exact‖² at real queries, in float64: guests, padding that a model may read, do not count."""
    mask = seen.call.query_mask
    hidden = None if mask is None or bool(mask.all()) else ~mask[:, None, :, None]
    off = size = 0.0
    for head in range(out.shape[1]):  # one at a time, without copies of all of it
        mine, right = out[:, head : head + 1].double(), exact[:, head : head + 1].double()
        if hidden is not None:
            mine, right = mine.masked_fill(hidden, 0), right.masked_fill(hidden, 0)
        off += float((mine - right).square().sum())
        size += float(right.square().sum())
    return off / max(size, 1e-300)
