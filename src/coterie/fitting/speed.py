"""How long the model takes, dense and fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from coterie.fitting.certify import Certified
from coterie.fitting.measures import Remembered, Scale
from coterie.fitting.profile import Profiled
from coterie.fitting.result import AtLength
from coterie.fitting.task import Task
from coterie.hosts import DENSE

_REPEATS = 3


class Timed(NamedTuple):
    """Seconds, before and after."""

    attention_seconds: tuple[float, float]  # of all attention modules together, each timed on its own
    lengths: list[AtLength]  # of the whole model, on a checked batch

    @property
    def speedup(self) -> float:
        """Of the whole model, over all lengths; NaN where nothing was timed."""
        dense, fitted = (sum(getattr(at, f"{name}_seconds") for at in self.lengths) for name in ("dense", "fitted"))
        return dense / fitted

    def all_dense(self) -> Timed:
        """The same if attention stays as it is."""
        lengths = [
            replace(at, fitted_seconds=at.dense_seconds, fidelity=1.0, bound=1.0, method="exact") for at in self.lengths
        ]
        return Timed((self.attention_seconds[0],) * 2, lengths)


Passes = dict[tuple[str, int], float]  # seconds, by "dense" or "fitted" and the number of tokens


def time_passes(
    task: Task,
    remembered: Remembered,
    profiled: Profiled,
    certified: Certified,
    timed: dict[frozenset[tuple[str, str]], Passes],
) -> Timed:
    """Time the promised plan against dense attention.

    `timed`: plans that were timed for other fidelities. The same plan is not timed again: noise would look like speed.
    """
    apart = {(row.module, row.mechanism): row.seconds for row in profiled.table}
    dense, fitted = (
        sum(apart[module, spec] for module, spec in plan.items())
        for plan in (dict.fromkeys(certified.plan, DENSE), certified.plan)
    )
    choices = task.whole(certified.plan)
    same = set(choices.values()) == {DENSE}
    ways = {"dense": None} if same else {"dense": None, "fitted": choices}
    scale = remembered.scale
    best = timed.setdefault(frozenset(choices.items()), {})
    try:
        if not best:
            _time(best, task, {scale.length(index): index for index in reversed(remembered.checked)}, scale, ways)
    except KeyboardInterrupt:
        remembered.interrupted = True
    lengths = []
    for tokens, documents in remembered.documents().items():
        stays = scale.exact(choices, tokens)  # what is the same takes the same: a difference would be noise
        before, after = (best.get((name, tokens), math.nan) for name in ("dense", "dense" if stays else "fitted"))
        seen = certified.judged.get(tokens)
        known = (math.nan, before, after) if seen is None else (seen.fidelity, before, after, documents, *seen.bound)
        lengths.append(AtLength(tokens, *known))
    return Timed((dense, fitted), lengths)


@torch.no_grad()
def _time(
    best: Passes,
    task: Task,
    first: dict[int, int],
    scale: Scale,
    ways: Mapping[str, dict[str, str] | None],
) -> None:
    """Seconds by way and length: whole forward passes in turn; the least of a few, as other work only ever adds. What
    there is no time for is not there."""
    repeats = _REPEATS if len(ways) > 1 else 1
    taken = len(ways) * sum(scale.seconds[index] for index in first.values())
    for repeat in range(repeats):
        if task.out_of_time(ahead=taken):
            break
        begun = time.perf_counter()
        for name, choices in ways.items():
            if choices is None:
                task.host.undo()
            else:
                task.host.put(choices)
            for tokens, index in first.items():
                start = time.perf_counter()
                task.host.attend(scale.batches[index])
                seconds = time.perf_counter() - start
                best[name, tokens] = min(best.get((name, tokens), math.inf), seconds)
        taken = time.perf_counter() - begun
        task.tell("timing", repeat + 1, repeats)
