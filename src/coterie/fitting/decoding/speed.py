"""Tokens a second of decoding: as the model came, over Coterie's cache, and fitted."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from coterie.fitting.decoding.measure import Continued
from coterie.fitting.measures import Remembered
from coterie.fitting.task import Task

_TURNS = 3
_TURN = 8  # tokens that are timed in a turn, after one that is not
_WAYS = 3


class Rates(NamedTuple):
    """Tokens a second; NaN where nothing was timed."""

    own: float = math.nan  # the model's own attention over transformers' dynamic cache
    dense: float = math.nan  # dense attention over Coterie's cache
    fitted: float = math.nan


def time_tokens(task: Task, remembered: Remembered, scale: Continued, choices: Mapping[str, str]) -> dict[int, Rates]:
    """Decode a few tokens at the end of a document of each length. What there is no time for is missing."""
    found: dict[int, Rates] = {}
    first = {scale.length(index): index for index in reversed(remembered.checked)}
    try:
        for done, (tokens, index) in enumerate(sorted(first.items())):
            if not task.out_of_time(ahead=_WAYS * scale.seconds[index]):
                found[tokens] = _rates(scale, scale.batches[index], choices)
            task.tell("timing", done + 1, len(first))
    except KeyboardInterrupt:
        remembered.interrupted = True
    return found


def _rates(scale: Continued, batch: Mapping[str, Any], choices: Mapping[str, str]) -> Rates:
    """Ways take turns, each with a cache of its own; the least time counts, as other work only ever adds."""
    rows, length = batch["input_ids"].shape
    turn = max(1, min(_TURN, length // 16))
    at = length - _TURNS * (turn + 1)
    ways: dict[str, Mapping[str, str] | None] = {"own": None, "dense": {}}
    if not scale.decodes_densely(choices, length):
        ways["fitted"] = choices
    caches = {}
    for name, way in ways.items():
        caches[name] = _put(scale, way)
        scale.writer.read(batch, at, caches[name])
    best = dict.fromkeys(ways, math.inf)
    for _ in range(_TURNS):
        for name, way in ways.items():
            _put(scale, way)
            scale.writer.write(batch, at, at + 1, caches[name])
            start = time.perf_counter()
            for token in range(at + 1, at + 1 + turn):
                scale.writer.write(batch, token, token + 1, caches[name])
            best[name] = min(best[name], time.perf_counter() - start)
        at += turn + 1
    own, dense = (rows * turn / best[name] for name in ("own", "dense"))
    return Rates(own, dense, rows * turn / best["fitted"] if "fitted" in best else dense)


def _put(scale: Continued, way: Mapping[str, str] | None) -> Any:
    """Let the model decode in some way; returns an empty cache for it."""
    import coterie.hf

    if way is None:
        from transformers import DynamicCache

        scale.writer.undo()
        return DynamicCache(config=scale.writer.model.config)
    scale.writer.put(way)
    return coterie.hf.Cache(scale.writer.model)
