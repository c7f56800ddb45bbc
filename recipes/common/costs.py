"""What a training step costs with each mechanism: time, memory, and how many scores a query computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.measure import peak_bytes

import coterie
from coterie import Full, as_mechanism
from coterie.observe import Seen
from coterie.timing import interleaved
from recipes.common.models import attend_by


def scores_of_a_query(model: Any, batch: Any, mechanism: str) -> tuple[float, float]:
    """How many scores a query computes, means of clusters among them, and how many dense attention computes."""
    wanted = Full() if mechanism == "dense" else as_mechanism(mechanism)
    met = pairs = queries = 0

    def look(seen: Seen) -> None:
        nonlocal met, pairs, queries
        call = seen.call
        met += int(wanted.plan(call.q, call.k, **call.planning()).pairs_met().sum())
        pairs += int(Full().plan(call.q, call.k, **call.planning()).pairs_met().sum())
        queries += call.q.shape[1] * int(
            call.query_mask.sum() if call.query_mask is not None else call.q[:, 0, :, 0].numel()
        )

    attend_by(model, "full")  # so that every call is seen
    with coterie.observing(look), torch.no_grad():
        model(**batch)
    return met / queries, pairs / queries


def training_step(model: Any, batch: Any, mechanism: str) -> None:
    """Forward and backward; gradients are dropped."""
    attend_by(model, mechanism)
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


def costs(
    model: Any,
    longest: Any,
    sample: Any,
    mechanisms: list[str],
    repeats: int,
    tick: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each mechanism: seconds of a training step on the batch `longest` and the rise of memory in it, all
    taking turns; and the scores of a query in the batch `sample`."""
    model.train()
    runs = {name: partial(training_step, model, longest, name) for name in mechanisms}
    seconds = interleaved(runs, repeats, tick)
    rows = []
    for name in mechanisms:
        met, of = scores_of_a_query(model, sample, name)
        peak = peak_bytes(runs[name])
        row = {"mechanism": name, "tokens": longest["input_ids"].shape[1], "step": seconds[name], "peak_bytes": peak}
        rows.append({**row, "scores": met, "dense_scores": of})
        tick()
    return rows
