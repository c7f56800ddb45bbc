"""From a table of what was tried to the plan that is certified first: the path, guesses along it, one for all."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.fitting.profile import Profiled, Tried
from coterie.fitting.search import Cost, alike, border, cheapest, cost_of, path, search
from coterie.fitting.task import Task
from coterie.hosts import DENSE

# --- the path of plans ------------------------------------------------------------------------------------------------

numbers = st.floats(0.001, 10.0)
candidates = st.lists(st.tuples(numbers, st.floats(0.0, 2.0)), min_size=0, max_size=5)


@given(st.lists(st.tuples(numbers, candidates), min_size=1, max_size=4))
def test_a_path_leads_from_the_fastest_to_dense_and_never_gets_worse(modules):
    table = []
    for index, (whole, others) in enumerate(modules):
        table.append(Tried(f"m{index}", DENSE, 0.0, whole))
        table += [Tried(f"m{index}", f"c{i}", error, seconds) for i, (seconds, error) in enumerate(others)]
    known = {(row.module, row.mechanism): row for row in table}
    plans = path(table)
    seconds = [sum(known[item].seconds for item in plan.items()) for plan in plans]
    errors = [sum(known[item].error ** 2 for item in plan.items()) for plan in plans]
    assert all(a <= b + 1e-9 for a, b in pairwise(seconds))
    assert all(a >= b - 1e-9 for a, b in pairwise(errors))
    assert errors[-1] == 0
    best = sum(min(row.seconds for row in table if row.module == f"m{i}") for i in range(len(modules)))
    assert seconds[0] == pytest.approx(best)


def test_candidates_that_were_refused_are_no_candidates():
    table = [Tried("m", DENSE, 0.0, 1.0), Tried("m", "x", math.nan, math.nan, "refused")]
    assert path(table) == [{"m": DENSE}]


@given(st.integers(1, 40), st.integers(0, 60))
def test_halving_finds_the_first_plan_that_holds(count, first):
    plans = [{"m": str(index)} for index in range(count)]
    found = cheapest(plans, lambda plan: int(plan["m"]) >= first, lambda: False)
    assert found == min(first, count - 1)


# --- the search -------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30), st.floats(0.0, 1.2), st.floats(0.5, 2.0))
def test_guesses_find_what_halving_finds(steps, allowed, bend):
    """Whatever the losses do on the way, as long as they fall."""
    errors = [sum(steps[index:]) for index in range(len(steps) + 1)]
    costs = [Cost(float(index), error) for index, error in enumerate(errors)]
    losses = [(error / max(errors)) ** bend for error in errors]
    plans, target = [{"m": str(index)} for index in range(len(errors))], 1 - allowed
    scores = {len(plans) - 1: 1.0}

    def holds(plan):
        index = int(plan["m"])
        scores[index] = 1 - losses[index]
        return scores[index] >= target

    def probe(low, high):
        guess = border(costs, scores, target)
        return (low + high) // 2 if guess is None else min(max(guess, low), high - 1)

    found = cheapest(plans, holds, lambda: False, probe)
    assert found == cheapest(plans, holds, lambda: False)


def test_losses_in_proportion_to_squared_errors_need_few_plans():
    costs = [Cost(float(index), (60 - index) / 60) for index in range(61)]
    ran = []

    class Model:
        fitted, checked = (0,), (1,)

        def on_fitted(self, plan, target):
            ran.append(plan)
            return {9: 1 - 0.1 * cost_of(plan, table).error}

        def seconds(self, indices):
            return 0.0

    table = [Tried(f"m{n}", DENSE, 0.0, 2.0) for n in range(60)]
    table += [Tried(f"m{n}", "local", (1 / 60) ** 0.5 * (1 - n / 1e6), 1.0) for n in range(60)]
    host: Any = None
    task = Task(host, [], [], 0.97, 0.95, None, [], None, 0.0, 0.0, lambda *_: None)
    remembered: Any = Model()
    found = search(task, remembered, Profiled(table, [9], []))
    assert costs[found.chosen].error == pytest.approx(0.3, abs=0.02)
    assert len([plan for plan in ran if plan]) <= 4


def test_one_mechanism_everywhere_is_taken_if_it_is_as_fast_and_more_exact():
    table = [Tried(name, DENSE, 0.0, 9.0) for name in "ab"]
    table += [Tried("a", "local", 0.5, 1.0), Tried("b", "local", 0.1, 3.0)]
    table += [Tried("a", "smyrf", 0.2, 2.0), Tried("b", "smyrf", 0.2, 2.0)]
    mixed = {"a": "local", "b": "local"}
    assert alike(table, mixed, cost_of(mixed, table)) == {"a": "smyrf", "b": "smyrf"}
    better = {"a": "smyrf", "b": "local"}
    assert alike(table, better, cost_of(better, table)) is None  # slower, and more exact
    refused = [*table, Tried("a", "topk", 0.0, 1.0), Tried("b", "topk", math.nan, math.nan, "why")]
    assert alike(refused, mixed, cost_of(mixed, refused)) == {"a": "smyrf", "b": "smyrf"}
