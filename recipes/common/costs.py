"""What a training step or a forward costs with each mechanism: time, memory, and how many scores a query computes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from benchmarks.measure import peak_bytes

import coterie
from coterie import as_mechanism
from coterie.observe import Seen
from coterie.timing import interleaved
from recipes.common.models import attend_by
from recipes.common.precision import autocast


def scores_met(run: Callable[[], object]) -> float | None:
    """How many scores a head computes in what runs, means of clusters among them, on average over all calls of Coterie;
    None if it is not called."""
    heads: list[float] = []

    def look(seen: Seen) -> None:
        plan = as_mechanism(seen.mechanism).plan(seen.q, seen.k, **seen.planning())
        heads.append(float(plan.pairs_met().double().mean()))

    with coterie.observing(look):
        run()
    return statistics.fmean(heads) if heads else None


def scores_of_a_query(model: Any, texts: list[Any], mechanism: str) -> tuple[float, float]:
    """How many scores a query computes in texts of one row each, means of clusters among them; and how many it would
    compute densely. Where Coterie is not called the model runs densely: it does for a few tokens."""
    met = pairs = queries = 0.0
    attend_by(model, mechanism)
    for text in texts:
        tokens = text["input_ids"].shape[1]
        with torch.no_grad():
            found = scores_met(partial(model, **text))
        met += tokens**2 if found is None else found
        pairs += tokens**2
        queries += tokens
    return met / queries, pairs / queries


def training_step(model: Any, batch: Any, mechanism: str, *, bf16: bool = False) -> None:
    """Forward and backward; gradients are dropped."""
    model.train()
    attend_by(model, mechanism)
    with autocast(model, bf16):
        loss = model(**batch).loss
    loss.backward()
    model.zero_grad(set_to_none=True)


def inference(model: Any, batch: Any, mechanism: str, *, bf16: bool = False) -> None:
    """Forward alone."""
    attend_by(model, mechanism).eval()
    with torch.no_grad(), autocast(model, bf16):
        model(**batch)


def inference_costs(
    model: Any,
    longest: Any,
    texts: list[Any],
    mechanisms: list[str],
    repeats: int,
    tick: Callable[[], None] = lambda: None,
    *,
    bf16: bool = False,
) -> list[dict[str, Any]]:
    """A row for each mechanism: seconds of a forward on the batch `longest`, all taking turns; and the scores of a
    query in `texts`, of one row each."""
    runs = {name: partial(inference, model, longest, name, bf16=bf16) for name in mechanisms}
    seconds = interleaved(runs, repeats, tick)
    return [{**_row(model, longest, texts, name, tick), "seconds": seconds[name]} for name in mechanisms]


def costs(
    model: Any,
    longest: Any,
    texts: list[Any],
    mechanisms: list[str],
    repeats: int,
    tick: Callable[[], None] = lambda: None,
    *,
    bf16: bool = False,
) -> list[dict[str, Any]]:
    """The same of a training step, and the rise of memory in it."""
    runs = {name: partial(training_step, model, longest, name, bf16=bf16) for name in mechanisms}
    seconds = interleaved(runs, repeats, tick)
    return [
        {**_row(model, longest, texts, name, tick), "step": seconds[name], "peak_bytes": peak_bytes(runs[name])}
        for name in mechanisms
    ]


def _row(model: Any, longest: Any, texts: list[Any], name: str, tick: Callable[[], None]) -> dict[str, Any]:
    """What both say of a mechanism."""
    met, of = scores_of_a_query(model, texts, name)
    tick()
    count, tokens = longest["input_ids"].shape
    return {"mechanism": name, "tokens": tokens, "texts": count, "scores": met, "dense_scores": of}
