"""What attention costs a language model: the loss of the next token against dense attention, by part of the text.

An average over all tokens hides that the end of a long text may be bad: there most keys are far away.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.models import Heads, SmolLM, attending, dense, with_mechanism
from coterie import Mechanism

PARTS = ("all", "Q1", "Q2", "Q3", "Q4", "last half")


class Reading(NamedTuple):
    """A piece of text that was read with dense attention."""

    ids: Tensor
    losses: Tensor  # (N − 1,)
    heads: Heads  # of the last layer


class Cost(NamedTuple):
    """A mechanism in the place of dense attention; one number for each piece of text."""

    mechanism: str
    met: float  # keys
    losses: list[float]
    ratios: dict[str, list[float]]  # loss / dense loss, by part

    def shown(self, part: str) -> str:
        """The mean over the pieces, as per cent above dense, and its standard error if there are several."""
        off = [100 * (ratio - 1) for ratio in self.ratios[part]]
        error = f" ± {statistics.stdev(off) / len(off) ** 0.5:.2f}" if len(off) > 1 else ""
        return f"{statistics.fmean(off):+.2f}{error} %"

    def row(self) -> list[str]:
        """Its line in a table, under COLUMNS."""
        loss = f"{statistics.fmean(self.losses):.4f}"
        return [self.mechanism, f"{self.met:.0f}", loss, *map(self.shown, PARTS)]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        means = {part: statistics.fmean(ratios) for part, ratios in self.ratios.items()}
        return {**self._asdict(), "loss": statistics.fmean(self.losses), "against dense": means}


COLUMNS = ("attention", "keys met", "loss", *PARTS)


def read(model: SmolLM, ids: Tensor) -> Reading:
    """Read a piece with dense attention."""
    last: list[Heads] = []

    def catch(heads: Heads) -> Tensor:
        last[:] = [heads]
        return dense(heads)

    with attending(catch):
        losses = model.losses(ids)
    return Reading(ids, losses, last[0])


def dense_cost(readings: list[Reading]) -> Cost:
    """That of dense attention: the losses that the others are compared with."""
    length = readings[0].ids.shape[1]
    losses = [float(each.losses.mean()) for each in readings]
    return Cost("dense", (length + 1) / 2, losses, {part: [1.0] * len(readings) for part in PARTS})


def cost(model: SmolLM, readings: list[Reading], mechanism: Mechanism, name: str | None = None) -> Cost:
    """Read the same pieces with a mechanism."""
    losses: list[float] = []
    ratios: dict[str, list[float]] = {part: [] for part in PARTS}
    for each in readings:
        with attending(with_mechanism(mechanism)):
            found = model.losses(each.ids)
        losses.append(float(found.mean()))
        exact = by_part(each.losses)
        for part, loss in by_part(found).items():
            ratios[part].append(loss / exact[part])
    return Cost(name or str(mechanism), keys_met(mechanism, readings[0].heads), losses, ratios)


def by_part(losses: Tensor) -> dict[str, float]:
    """The mean loss of all tokens, of each quarter, and of the last half."""
    quarters = losses.tensor_split(4)
    each = (losses, *quarters, losses.tensor_split(2)[1])
    return {part: float(x.mean()) for part, x in zip(PARTS, each, strict=True)}


def keys_met(mechanism: Mechanism, heads: Heads) -> float:
    """Scores a query, means over all queries and heads."""
    plan = mechanism.plan(heads.q, heads.k, is_causal=heads.causal, scale=heads.scale)
    return float(plan.pairs_met().double().mean()) / heads.q.shape[2]
