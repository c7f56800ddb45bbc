"""From what every candidate costs and changes in every module to a path of plans, the cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from coterie.fitting.measures import Remembered, least
from coterie.fitting.profile import Profiled, Tried
from coterie.fitting.task import Task
from coterie.hosts import DENSE

Choices = dict[str, str]
SEARCH = 0.6  # of a budget is over when the search is
_WORTH = 0.01  # of a plan's time that a cheaper one must save to be looked for
_GUESSES = 4  # plans that are run where errors say that the border is; then halving
_ALIKE = 1.02  # how much slower a plan may be that is the same everywhere


class Searched(NamedTuple):
    """Plans from the fastest to all dense, and the first that holds on the fitted batches."""

    plans: list[Choices]
    chosen: int
    scores: dict[int, float]  # of the plans that were run: the worst fidelity of all lengths
    notes: list[str]


class Cost(NamedTuple):
    """What a plan takes, and the sum of its modules' squared errors."""

    seconds: float
    error: float


def search(task: Task, remembered: Remembered, profiled: Profiled) -> Searched:
    """The cheapest plan that holds on the batches that are fitted on."""
    plans = path(profiled.table)
    costs = [cost_of(plan, profiled.table) for plan in plans]
    dense = least(remembered.on_fitted({}, task.target))  # 1, but for decoding behind a prefill that is not
    if not dense >= task.target:
        return Searched([{}], 0, {0: dense}, [])
    scores = {len(plans) - 1: dense}
    steps = max(1, (len(plans) - 1).bit_length())

    def holds(plan: Choices) -> bool:
        index = plans.index(plan)
        if index not in scores:
            scores[index] = least(remembered.on_fitted(plan, task.target))
            task.tell("search", min(len(scores) - 1, steps), steps)
        return scores[index] >= task.target

    stopped = False

    def over() -> bool:
        nonlocal stopped
        mine, others = (remembered.seconds(part) for part in (remembered.fitted, remembered.checked))
        if len(scores) == 1 and not task.out_of_time(ahead=mine + others):
            return False  # without a plan that was run there is none to certify
        stopped = task.out_of_time(SEARCH, mine)
        return stopped

    def probe(low: int, high: int) -> int | None:
        if costs[high].seconds - costs[low].seconds < _WORTH * costs[high].seconds:
            return None
        guess = border(costs, scores, task.target) if len(scores) <= _GUESSES else None
        return (low + high) // 2 if guess is None else min(max(guess, low), high - 1)

    chosen = cheapest(plans, holds, over, probe)
    notes = []
    if stopped:
        notes.append("The time budget ended the search: a cheaper plan may hold, too.")
    elif chosen < len(plans) - 1:
        same = alike(profiled.table, plans[chosen], costs[chosen])
        if same is not None and least(remembered.on_fitted(same, task.target)) >= scores[chosen]:
            plans = [*plans[:chosen], same, *plans[chosen:]]
            scores = {index + (index >= chosen): score for index, score in scores.items()}
            scores[chosen] = least(remembered.on_fitted(same, task.target))
    return Searched(plans, chosen, scores, notes)


def path(table: list[Tried]) -> list[Choices]:
    """Plans from the fastest to all dense. Each is the one before with one module made more exact, and the one whose
    squared error falls most for a second more goes first: the lower convex hulls of all modules, merged by slope."""
    hulls = {module: _hull(rows) for module, rows in _by_module(table).items()}
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


def _by_module(table: list[Tried]) -> dict[str, list[Tried]]:
    """What has run, by module."""
    found: dict[str, list[Tried]] = {}
    for row in table:
        if math.isfinite(row.error) and math.isfinite(row.seconds):
            found.setdefault(row.module, []).append(row)
    return found


def cost_of(plan: Choices, table: list[Tried]) -> Cost:
    """What is known of a plan from its modules."""
    rows = [row for row in table if plan.get(row.module) == row.mechanism]
    return Cost(sum(row.seconds for row in rows), sum(row.error**2 for row in rows))


def border(costs: list[Cost], scores: Mapping[int, float], target: float) -> int | None:
    """Where a path begins to hold, if what is lost is in proportion to the sum of squared errors; None if it is not
    known in which.

    On MiniLM that was true to 3 % over a range of 1 to 30.

    >>> border([Cost(1, 0.8), Cost(2, 0.4), Cost(3, 0.1), Cost(4, 0.0)], {0: 0.92, 3: 1.0}, 0.99)
    2
    """
    known = [(abs(1 - score - (1 - target)), index) for index, score in scores.items() if score < 1]
    known = [(far, index) for far, index in known if costs[index].error > 0 and not math.isnan(far)]
    if not known:
        return None
    _, nearest = min(known)
    allowed = (1 - target) * costs[nearest].error / (1 - scores[nearest])
    return next(index for index, cost in enumerate(costs) if cost.error <= allowed)


def alike(table: list[Tried], plan: Choices, cost: Cost) -> Choices | None:
    """The most exact of the plans that run one mechanism in every module and take no longer than a plan, if it is more
    exact than that: nobody wants six mechanisms where one does better."""
    mechanisms = dict.fromkeys(row.mechanism for row in table if row.mechanism != DENSE)
    rows = {(row.module, row.mechanism): row for row in table if math.isfinite(row.error)}
    everywhere = [each for each in mechanisms if all((module, each) in rows for module in plan)]
    plans = [(cost_of(same, table), same) for same in (dict.fromkeys(plan, each) for each in everywhere)]
    cheap = [(each.error, same) for each, same in plans if each.seconds <= _ALIKE * cost.seconds and same != plan]
    best = min(cheap, key=lambda each: each[0], default=None)
    return None if best is None or best[0] >= cost.error else best[1]


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


def _halving(low: int, high: int) -> int | None:
    return (low + high) // 2


def cheapest(
    plans: list[Choices],
    holds: Callable[[Choices], bool],
    out_of_time: Callable[[], bool],
    probe: Callable[[int, int], int | None] = _halving,
) -> int:
    """The first plan of a path that holds; all dense, the last one, always does.

    Args:
        probe: which of those from `low` to below `high` to try, as the one at `high` holds; None: it is good enough.
    """
    low, high = 0, len(plans) - 1
    while low < high and not out_of_time():
        middle = probe(low, high)
        if middle is None:
            break
        if holds(plans[middle]):
            high = middle
        else:
            low = middle + 1
    return high
