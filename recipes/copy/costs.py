"""What a training step costs with each mechanism: time, memory, and how many scores a query computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from benchmarks.measure import peak_bytes

from coterie.timing import interleaved
from recipes.common.costs import scores_met
from recipes.common.study import Result
from recipes.copy.learning import Schedule, loss_of
from recipes.copy.network import DENSE, Copier, Shape
from recipes.copy.sequences import batch


def costs(
    mechanisms: list[str],
    task: str,
    length: int,
    shape: Shape,
    schedule: Schedule,
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> list[Result]:
    """A row for each mechanism, all taking turns, on sequences of one length."""
    causal, count = task == "causal", schedule.sequences(length)
    models = {name: Copier(name, length, shape, causal=causal) for name in mechanisms}

    def step(name: str) -> None:
        loss_of(models[name], task, count, length, 0, 0).backward()
        models[name].zero_grad(set_to_none=True)

    runs = {name: partial(step, name) for name in mechanisms}
    seconds = interleaved(runs, repeats, tick)
    dense = length * (length + 1) / 2 if causal else length**2
    some = batch(task, 1, length, 0, 0).seen
    rows = []
    for name in mechanisms:
        with torch.no_grad():
            met = dense if name == DENSE else scores_met(partial(models[name], some))
        rows.append(
            {
                "mechanism": name,
                "length": length,
                "sequences": count,
                "step": seconds[name],
                "peak_bytes": peak_bytes(runs[name]),
                "scores": None if met is None else met / length,  # a convolution has none
                "dense_scores": dense / length,
            }
        )
    return rows
