"""What is trained: every mechanism with every number of clusters, on sequences of every length."""

from __future__ import annotations

from typing import NamedTuple

from coterie.cli.inputs import UserError
from recipes.common.models import slug
from recipes.common.templates import PLACE, Point, points_of
from recipes.common.trying import trying
from recipes.copy.network import Copier, Shape, read
from recipes.copy.sequences import TASKS, batch


class Cell(NamedTuple):
    """One model of a study, but for its seed.

    Attributes:
        clusters: what stands for {clusters} in the template; 0 if there is no such place.
    """

    template: str
    clusters: int
    mechanism: str
    length: int

    def name(self, seed: int) -> str:
        """Of its files."""
        return f"{slug(self.mechanism)}-{self.length}-{seed}"


def cells_of(templates: list[str], clusters: list[int], lengths: list[int]) -> list[Cell]:
    """The shortest sequences first; each mechanism once a length.

    >>> [cell.mechanism for cell in cells_of(["dense", "clustered:clusters={clusters}"], [5, 9], [32])]
    ['dense', 'clustered:clusters=5', 'clustered:clusters=9']
    """
    points = []
    for template in dict.fromkeys(templates):
        if PLACE in template:
            points += points_of([template], clusters, read)
            continue
        try:
            points.append(Point(template, 0, read(template)))
        except (ValueError, TypeError) as error:
            raise UserError(f"--mechanism {template}: {error}") from error
    once = {point.mechanism: point for point in reversed(points)}
    mine = [point for point in points if once[point.mechanism] is point]
    return [Cell(*point, length) for length in lengths for point in mine]


def check(cells: list[Cell], task: str, shape: Shape) -> None:
    """Raise what is wrong with lengths, sizes or a mechanism in the model, before anything is written."""
    if task not in TASKS:
        raise UserError(f"--task must be one of {', '.join(TASKS)}, not {task!r}.")
    for length in sorted({cell.length for cell in cells}):
        if length % 2 or length < 8:
            raise UserError(f"--lengths must be even and at least 8, as there are two copies, not {length}.")
    if shape.width % shape.heads:
        raise UserError(f"--width {shape.width} must be a multiple of --heads {shape.heads}.")
    for mechanism in dict.fromkeys(cell.mechanism for cell in cells):
        model = Copier(mechanism, 8, shape._replace(layers=1), causal=task == "causal")
        with trying(mechanism, f"on the {task} copy"):
            model(batch(task, 1, 8, 0, 0).seen)
