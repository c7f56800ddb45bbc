"""Labelled texts, and seeded choices among them that keep the parts apart."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from datasets import Dataset

from coterie.cli.inputs import UserError


class Labelled(NamedTuple):
    """A text and its class."""

    text: str
    label: int


def dataset(examples: Sequence[Labelled]) -> Dataset:
    """What a `Task` holds."""
    return Dataset.from_dict({"text": [e.text for e in examples], "label": [e.label for e in examples]})


def unique(examples: Iterable[Labelled]) -> list[Labelled]:
    """Each text once; one that has several labels is left out, since nobody can say which is right.

    >>> unique([Labelled("a", 0), Labelled("b", 1), Labelled("a", 0), Labelled("c", 0), Labelled("c", 1)])
    [Labelled(text='a', label=0), Labelled(text='b', label=1)]
    """
    labels: dict[str, set[int]] = {}
    for text, label in examples:
        labels.setdefault(text, set()).add(label)
    return [Labelled(text, *found) for text, found in labels.items() if len(found) == 1]


def balanced(
    examples: Sequence[Labelled], counts: Sequence[int], seed: int, where: str, classes: int = 2
) -> list[list[Labelled]]:
    """Disjoint parts of these sizes, with as many examples of each class, to within one.

    The first part depends on the seed and its own size alone, so that more training leaves the same test.
    """
    parts: list[list[Labelled]] = [[] for _ in counts]
    for label, mine in enumerate(_by_class(examples, seed, classes)):
        wanted = [count // classes + (label < count % classes) for count in counts]
        if len(mine) < sum(wanted):
            raise UserError(
                f"{where} has {len(mine):,} different texts of class {label}, and {sum(wanted):,} were asked for."
            )
        for part, count in zip(parts, wanted, strict=True):
            part += mine[:count]
            mine = mine[count:]
    return parts


def stratified(
    examples: Sequence[Labelled], share: float, seed: int, where: str, classes: int = 2
) -> tuple[list[Labelled], list[Labelled]]:
    """Two disjoint parts that hold all examples. The second gets this share of each class, and at least one of it.

    >>> rows = [Labelled(str(i), int(i < 10)) for i in range(30)]
    >>> [[sum(e.label for e in part), len(part)] for part in stratified(rows, 0.1, seed=0, where="rows")]
    [[9, 27], [1, 3]]
    """
    kept: list[Labelled] = []
    cut: list[Labelled] = []
    for label, mine in enumerate(_by_class(examples, seed, classes)):
        if len(mine) < 2:
            raise UserError(f"{where} has {len(mine)} texts of class {label}: a split needs at least 2.")
        at = min(max(1, round(share * len(mine))), len(mine) - 1)
        cut += mine[:at]
        kept += mine[at:]
    return kept, cut


def _by_class(examples: Sequence[Labelled], seed: int, classes: int) -> list[list[Labelled]]:
    """The examples of each class in an order that the seed draws."""
    found = [[e for e in examples if e.label == label] for label in range(classes)]
    for label, mine in enumerate(found):
        random.Random(f"{seed} {label}").shuffle(mine)
    return found
