"""Mechanisms with a place for the number of clusters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import coterie
from coterie.cli.inputs import UserError

PLACE = "{clusters}"


class Point(NamedTuple):
    """One mechanism of a sweep."""

    template: str
    clusters: int
    mechanism: str


def written(mechanism: str) -> str:
    """A mechanism's string as Coterie writes it."""
    return str(coterie.as_mechanism(mechanism))


def points_of(templates: list[str], clusters: list[int], read: Callable[[str], str] = written) -> list[Point]:
    """Each template with each number of clusters; `read` raises ValueError or TypeError if it is no mechanism.

    >>> [point.mechanism for point in points_of(["near-far:near={clusters}"], [5, 10])]
    ['near-far:near=5', 'near-far:near=10']
    """
    found = []
    for template in dict.fromkeys(templates):
        if PLACE not in template:
            raise UserError(f"--mechanism {template}: expected {PLACE} in it, as in clustered:clusters={PLACE}.")
        for count in clusters:
            try:
                mechanism = read(template.replace(PLACE, str(count)))
            except (ValueError, TypeError) as error:
                raise UserError(f"--mechanism {template} with {count}: {error}") from error
            found.append(Point(template, count, mechanism))
    return found
