"""Seeded choices of labelled texts."""

from __future__ import annotations

import pytest
from recipes.common.splits import Labelled, balanced, stratified, unique

from coterie.cli.inputs import UserError

ROWS = [Labelled(f"text {i}", int(i % 3 == 0)) for i in range(90)]  # 60 and 30


def test_balanced_parts_are_disjoint_and_balanced():
    test, train = balanced(ROWS, [11, 30], 0, "rows")
    assert not {e.text for e in test} & {e.text for e in train}
    assert [sum(e.label for e in part) for part in (test, train)] == [5, 15]
    assert [len(part) for part in (test, train)] == [11, 30]
    assert set(test) | set(train) <= set(ROWS)


def test_the_seed_decides_and_the_first_part_stays():
    first = balanced(ROWS, [10, 20], 0, "rows")
    assert balanced(ROWS, [10, 20], 0, "rows") == first
    assert balanced(ROWS, [10, 40], 0, "rows")[0] == first[0]
    assert balanced(ROWS, [10, 20], 1, "rows")[0] != first[0]


def test_too_few_of_a_class():
    with pytest.raises(UserError, match="rows has 30 different texts of class 1, and 35 were asked for"):
        balanced(ROWS, [10, 60], 0, "rows")


@pytest.mark.parametrize("seed", range(5))
def test_stratified_keeps_the_classes_and_loses_nothing(seed):
    train, test = stratified(ROWS, 0.1, seed, "rows")
    assert sorted([*train, *test]) == sorted(ROWS)
    assert (len(test), sum(e.label for e in test)) == (9, 3)


def test_stratified_by_seed():
    assert stratified(ROWS, 0.1, 3, "rows") == stratified(ROWS, 0.1, 3, "rows")
    assert stratified(ROWS, 0.1, 3, "rows") != stratified(ROWS, 0.1, 4, "rows")


def test_stratified_has_both_classes_in_both_parts():
    few = [Labelled("a", 0), Labelled("b", 0), Labelled("c", 1), Labelled("d", 1)]
    for share in (0.01, 0.99):
        for part in stratified(few, share, 0, "few"):
            assert sorted(e.label for e in part) == [0, 1]
    with pytest.raises(UserError, match="few has 1 texts of class 1"):
        stratified(few[:3], 0.1, 0, "few")


def test_unique_leaves_out_what_contradicts_itself():
    rows = [Labelled("a", 0), Labelled("a", 0), Labelled("b", 0), Labelled("b", 1)]
    assert unique(rows) == [Labelled("a", 0)]
