"""How long the model takes, dense and fitted."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import torch

from coterie.fitting.certify import Certified
from coterie.fitting.measures import length_of
from coterie.fitting.profile import Profiled
from coterie.fitting.result import AtLength
from coterie.fitting.task import Task
from coterie.hosts import DENSE

_REPEATS = 3


class Timed(NamedTuple):
    """Seconds, before and after."""

    attention_seconds: tuple[float, float]  # of all attention modules together, each timed on its own
    lengths: list[AtLength]  # of the whole model, on the checked batches

    @property
    def speedup(self) -> float:
        """Of the whole model, over all lengths; 1 where nothing took any time."""
        dense, fitted = (sum(getattr(at, f"{name}_seconds") for at in self.lengths) for name in ("dense", "fitted"))
        return dense / fitted if fitted else 1.0

    def all_dense(self) -> Timed:
        """The same if attention stays as it is."""
        lengths = [
            replace(at, fitted_seconds=at.dense_seconds, fidelity=1.0, bound=1.0, method="exact") for at in self.lengths
        ]
        return Timed((self.attention_seconds[0],) * 2, lengths)


def time_passes(task: Task, profiled: Profiled, certified: Certified) -> Timed:
    """Time the promised plan against dense attention."""
    apart = {(row.module, row.mechanism): row.seconds for row in profiled.table}
    dense, fitted = (
        sum(apart[module, spec] for module, spec in plan.items())
        for plan in (dict.fromkeys(certified.plan, DENSE), certified.plan)
    )
    choices = task.whole(certified.plan)
    same = set(choices.values()) == {DENSE}
    best = _best(task, {"dense": None} if same else {"dense": None, "fitted": choices}, 1 if same else _REPEATS)
    after = "dense" if same else "fitted"
    lengths = [
        AtLength(n, each.fidelity, best["dense", n], best[after, n], len(each.scores), *each.bound)
        for n, each in certified.judged.items()
    ]
    return Timed((dense, fitted), lengths)


@torch.no_grad()
def _best(task: Task, ways: dict[str, dict[str, str] | None], repeats: int) -> dict[tuple[str, int], float]:
    """Seconds by way and length: whole forward passes in turn; the least of a few, as other work only ever adds."""
    best: dict[tuple[str, int], float] = {}
    begun = time.perf_counter()
    for repeat in range(repeats):
        for name, choices in ways.items():
            if choices is None:
                task.host.undo()
            else:
                task.host.put(choices)
            taken: dict[int, float] = {}
            for batch in task.checked:
                start = time.perf_counter()
                task.host.attend(batch)
                tokens = length_of(batch)
                taken[tokens] = taken.get(tokens, 0.0) + time.perf_counter() - start
            for tokens, seconds in taken.items():
                best[name, tokens] = min(best.get((name, tokens), float("inf")), seconds)
        task.tell("timing", repeat + 1, repeats)
        if task.out_of_time(ahead=(time.perf_counter() - begun) / (repeat + 1)):
            break
    return best
