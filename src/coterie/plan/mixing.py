"""Two plans for one batch: some samples follow the one, the rest follow the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from coterie.plan.plan import Means, Plan


def by_sample(first: Tensor, one: Callable[[], Plan], other: Callable[[], Plan]) -> Plan:
    """The plan that `one` makes in the samples where `first` (B,) holds, and the plan that `other` makes elsewhere.

    `other` must do without means. Where all samples follow the same, only that plan is made; but a compiled graph,
    which cannot know, makes both, and each is empty in the samples that follow the other.
    """
    if not torch.compiler.is_compiling():
        if bool(first.all()):
            return one()
        if not bool(first.any()):
            return other()
    ours, theirs = one(), other()
    windowed = any(each.window is not None for each in (*ours.rounds, *theirs.rounds))

    def only(plan: Plan, samples: Tensor) -> Plan:
        here = samples.to(torch.int32)[:, None, None]
        return replace(
            plan, rounds=tuple(replace(each, query_offsets=each.query_offsets * here) for each in plan.rounds)
        )

    def kept(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else torch.where(first[:, None, None], rows, -1)

    return replace(
        ours,
        rounds=only(ours, first).rounds + only(theirs, ~first).rounds,
        answer=kept(ours.answer),
        mass=kept(ours.mass),
        query_means=_placed(ours.query_means) if windowed else ours.query_means,
        key_means=_placed(ours.key_means) if windowed else ours.key_means,
    )


def _placed(means: Means | None) -> Means | None:
    """Means with positions, which no window asks for: they meet in rounds that have none."""
    if means is None or means.positions is not None:
        return means
    return replace(means, positions=torch.zeros_like(means.start))
