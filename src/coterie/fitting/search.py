"""From what every candidate costs and changes in every module to a path of plans, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from coterie.fitting.measures import Remembered, least
from coterie.fitting.profile import Profiled, Tried
from coterie.fitting.task import Task
from coterie.hosts import DENSE

Choices = dict[str, str]
SEARCH = 0.65  # of a budget is over when the search is; half of it when candidates have been tried


class Searched(NamedTuple):
    """Plans from the fastest to all dense, and the first that holds on the fitted batches."""

    plans: list[Choices]
    chosen: int
    scores: dict[int, float]  # of the plans that were run: the worst fidelity of all lengths
    notes: list[str]


def search(task: Task, remembered: Remembered, profiled: Profiled) -> Searched:
    """The cheapest plan that holds on the batches that are fitted on."""
    plans = path(profiled.table)
    scores = {len(plans) - 1: 1.0}  # all dense
    steps = max(1, (len(plans) - 1).bit_length())

    def holds(plan: Choices) -> bool:
        index = plans.index(plan)
        if index not in scores:
            scores[index] = least(remembered.on_fitted(plan))
            task.tell("search", min(len(scores) - 1, steps), steps)
        return scores[index] >= task.target

    chosen = cheapest(plans, holds, lambda: task.out_of_time(SEARCH))
    notes = []
    if task.out_of_time(SEARCH):
        notes.append(f"The time budget of {task.budget:g} s ended the search: a cheaper plan may hold, too.")
    return Searched(plans, chosen, scores, notes)


def path(table: list[Tried]) -> list[Choices]:
    """Plans from the fastest to all dense. Each is the one before with one module made more exact, and the one whose
    squared error falls most for a second more goes first: the lower convex hulls of all modules, merged by slope."""
    by_module: dict[str, list[Tried]] = {}
    for row in table:
        if math.isfinite(row.error) and math.isfinite(row.seconds):
            by_module.setdefault(row.module, []).append(row)
    hulls = {module: _hull(rows) for module, rows in by_module.items()}
    plan = {module: hull[0].mechanism for module, hull in hulls.items()}
    steps = []
    for order, (module, hull) in enumerate(hulls.items()):
        for before, after in pairwise(hull):
            gain = (before.error**2 - after.error**2) / max(after.seconds - before.seconds, 1e-12)
            steps.append((-gain, order, module, after.mechanism))
    plans = [dict(plan)]
    for _, _, module, mechanism in sorted(steps):
        plan[module] = mechanism
        plans.append(dict(plan))
    return plans


def _hull(rows: list[Tried]) -> list[Tried]:
    """The candidates of a module that no other beats, from fast to exact; the last is dense."""
    dense = next(row for row in rows if row.mechanism == DENSE)
    faster = sorted((row for row in rows if row.seconds < dense.seconds), key=lambda row: (row.seconds, row.error))
    hull: list[Tried] = []
    for row in [*faster, dense]:
        if hull and row.error >= hull[-1].error and row is not dense:
            continue  # slower and no better; dense stays, as what is exact here need not be elsewhere
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) > _slope(hull[-2], row):
            hull.pop()
        hull.append(row)
    return hull


def _slope(a: Tried, b: Tried) -> float:
    """Squared error lost for a second, negative: the steeper the better."""
    return (b.error**2 - a.error**2) / max(b.seconds - a.seconds, 1e-12)


def cheapest(plans: list[Choices], holds: Callable[[Choices], bool], out_of_time: Callable[[], bool]) -> int:
    """The first plan of a path that holds, by halving; all dense, the last one, always does."""
    low, high = 0, len(plans) - 1
    while low < high and not out_of_time():
        middle = (low + high) // 2
        if holds(plans[middle]):
            high = middle
        else:
            low = middle + 1
    return high
