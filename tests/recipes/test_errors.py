"""Edit distances against brute force: the shortest path through all edits of short strings."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipes.common.errors import edit_distance, error_rate

LETTERS = "ab"


def neighbours(word, longest):
    """All that one edit makes of a word."""
    for i in range(len(word) + 1):
        if len(word) < longest:
            yield from (word[:i] + letter + word[i:] for letter in LETTERS)
        if i < len(word):
            yield word[:i] + word[i + 1 :]
            yield from (word[:i] + letter + word[i + 1 :] for letter in LETTERS)


def brute_force(word, longest=4):
    """Distances to every word of at most so many letters, by breadth-first search."""
    found, edge = {word: 0}, [word]
    while edge:
        edge = [next_ for each in edge for next_ in neighbours(each, longest) if _new(next_, found, found[each] + 1)]
    return found


def _new(word, found, distance):
    if word in found:
        return False
    found[word] = distance
    return True


def test_every_pair_of_short_words():
    words = ["".join(letters) for length in range(5) for letters in product(LETTERS, repeat=length)]
    for a in words:
        expected = brute_force(a)
        for b in words:
            assert edit_distance(a, b) == expected[b], (a, b)


def slow(a, b):
    """The recursion itself."""
    if not a or not b:
        return len(a) + len(b)
    return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_the_recursion(a, b):
    assert edit_distance(a, b) == slow(a, b) == edit_distance(b, a)


def test_rates_count_symbols_not_texts():
    assert error_rate(["aaaa", "b"], ["aaaa", "c"]) == 1 / 5
    assert error_rate([["one", "two"], []], [["one"], ["x", "y"]]) == 3 / 2  # more than all
    assert error_rate(["a"], [""]) == 1


def test_refusals():
    with pytest.raises(ValueError, match="references: expected at least one symbol"):
        error_rate(["", ""], ["a", "b"])
    with pytest.raises(ValueError):
        error_rate(["a"], ["a", "b"])
