"""Timing on a shared machine: candidates take turns in one run, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(
    candidates: Mapping[str, Callable[[], object]], repeats: int, tick: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median seconds of each candidate; every repeat runs all of them in turn, after one warm-up.

    Args:
        candidates: what to run, by name.
        repeats: how often each is timed.
        tick: called after each turn, the warm-up included.

    Example:
        >>> from coterie.timing import interleaved
        >>> sorted(interleaved({"a": lambda: sum(range(9)), "b": lambda: None}, repeats=3))
        ['a', 'b']
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - start)
        tick()
    return {name: statistics.median(taken) for name, taken in times.items()}
