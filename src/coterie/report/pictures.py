"""What the report draws: the error of every head, and who meets whom in the hardest one of each module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coterie.analysis.head_errors import relative_errors
from coterie.analysis.memberships import meetings
from coterie.fitting.fit import Fit
from coterie.hosts import DENSE, watch_dense
from coterie.mechanisms import Full, NearFar, as_mechanism
from coterie.observe import Seen

_GRID = 128  # cells of the picture of a plan


@dataclass(frozen=True)
class Pictures:
    """By module: the error of every head, the mechanism it was made with, and the plan of its hardest head."""

    errors: dict[str, list[float]]
    mechanisms: dict[str, str]
    meetings: dict[str, list[list[float]]]  # the share of pairs that meet, in each cell of a grid

    def hardest(self, module: str) -> int:
        """The head with the largest error."""
        return max(range(len(self.errors[module])), key=self.errors[module].__getitem__)

    @staticmethod
    def of(model: Any, found: Fit, batch: Any, tell: Callable[[str, int, int], None]) -> Pictures:
        """Run one batch densely, and the chosen mechanisms on the way; near-far where dense attention was chosen."""
        pictures = Pictures({}, {}, {})

        def look(name: str, seen: Seen) -> None:
            spec = found.choices.get(name, DENSE)
            mechanism = NearFar() if spec == DENSE else as_mechanism(spec)
            exact = seen.attend(Full())
            try:
                each = relative_errors(seen.attend(mechanism), exact)
            except ValueError as refusal:  # it stays dense, where nothing is lost
                pictures.errors[name], pictures.mechanisms[name] = [0.0] * exact.shape[1], f"dense: {refusal}"
            else:
                pictures.errors[name], pictures.mechanisms[name] = each.tolist(), str(mechanism)
                plan = mechanism.plan(seen.q, seen.k, **seen.planning())
                shares = meetings(plan, head=pictures.hardest(name), cells=_GRID)
                pictures.meetings[name] = [[round(x, 2) for x in row] for row in shares.tolist()]
            tell("pictures", len(pictures.errors), len(found.choices))

        watch_dense(model, batch, look)
        return pictures
