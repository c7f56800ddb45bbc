"""Mechanisms with a place for the number of clusters."""

from __future__ import annotations

from typing import NamedTuple

import coterie
from coterie.cli.inputs import UserError

PLACE = "{clusters}"


class Point(NamedTuple):
    """One mechanism of a sweep."""

    template: str
    clusters: int
    mechanism: str


def points_of(templates: list[str], clusters: list[int]) -> list[Point]:
    """Each template with each number of clusters.

    >>> [point.mechanism for point in points_of(["near-far:near={clusters}"], [5, 10])]
    ['near-far:near=5', 'near-far:near=10']
    """
    found = []
    for template in dict.fromkeys(templates):
        if PLACE not in template:
            raise UserError(f"--mechanism {template}: expected {PLACE} in it, as in clustered:clusters={PLACE}.")
        for count in clusters:
            try:
                mechanism = str(coterie.as_mechanism(template.replace(PLACE, str(count))))
            except (ValueError, TypeError) as error:
                raise UserError(f"--mechanism {template} with {count}: {error}") from error
            found.append(Point(template, count, mechanism))
    return found
