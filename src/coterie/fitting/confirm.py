"""Whether what held on the batches that were fitted on holds on others."""

from __future__ import annotations

from typing import NamedTuple

from coterie.fitting.measures import Remembered, least
from coterie.fitting.search import Choices, Searched
from coterie.fitting.task import Task


class Confirmed(NamedTuple):
    """The plan that is promised."""

    plan: Choices
    held_out: dict[int, float]  # its fidelity on the checked batches, by length
    calibrated: float  # on the fitted ones, the worst of all lengths
    notes: list[str]


def confirm(task: Task, remembered: Remembered, searched: Searched) -> Confirmed:
    """Check the plan that was found, and go on along the path to more exact ones until one holds."""
    plans, chosen = searched.plans, searched.chosen
    held_out = remembered.on_checked(plans[chosen])
    first = least(held_out)
    while not least(held_out) >= task.target and chosen < len(plans) - 1:
        chosen = min(len(plans) - 1, chosen + max(1, len(plans) // 20))
        held_out = remembered.on_checked(plans[chosen])
    notes = []
    if not first >= task.target:  # NaN holds nothing
        notes.append(
            f"The cheapest plan that held on the calibration batches gave {first:.4f} on held-out ones; "
            "it was made more exact until it held there."
        )
    known = searched.scores.get(chosen)
    calibrated = least(remembered.on_fitted(plans[chosen])) if known is None else known
    return Confirmed(plans[chosen], held_out, calibrated, notes)
