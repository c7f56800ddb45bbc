"""What the report draws: the error of every head, and who meets whom in the hardest one of each module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.analysis.memberships import meetings
from coterie.fitting.fit import Fit
from coterie.hosts import DENSE, watch_dense
from coterie.mechanisms import Full, Mechanism, NearFar, as_mechanism
from coterie.observe import Seen

_ROWS = 64  # queries whose entropy is looked at
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
                each = _relative(seen.attend(mechanism), exact)
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


@torch.no_grad()
def head_errors(model: Any, batch: Any, mechanism: Mechanism) -> dict[str, list[tuple[float, float]]]:
    """For every attention module and head: the relative error of a mechanism, and the mean entropy of attention."""
    found: dict[str, list[tuple[float, float]]] = {}

    def look(name: str, seen: Seen) -> None:
        error = _relative(seen.attend(mechanism), seen.attend(Full()))
        found[name] = list(zip(error.tolist(), _entropy(seen).tolist(), strict=True))

    watch_dense(model, batch, look)
    return found


def _relative(out: Tensor, exact: Tensor) -> Tensor:
    """(heads,)"""
    size = exact.double().square().sum((0, 2, 3)).clamp(min=1e-300)
    return ((out.double() - exact.double()).square().sum((0, 2, 3)) / size).sqrt()


def _entropy(seen: Seen) -> Tensor:
    """The mean entropy of the attention of some queries, (heads,)."""
    queries = seen.q.shape[2]
    rows = torch.linspace(0, queries - 1, min(_ROWS, queries)).long()
    keys = seen.k.repeat_interleave(seen.q.shape[1] // seen.k.shape[1], 1)
    scale = seen.settings["scale"] or seen.q.shape[-1] ** -0.5
    scores = scale * seen.q[:, :, rows].double() @ keys.double().transpose(-1, -2)
    if seen.settings["is_causal"]:
        hidden = torch.arange(keys.shape[2]) > (rows + keys.shape[2] - queries)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    p = F.softmax(scores, -1)
    return -(p * p.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
