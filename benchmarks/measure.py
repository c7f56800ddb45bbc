"""Timing on a shared machine: candidates take turns in one run, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def interleaved(candidates: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each candidate; every repeat runs all of them in turn, after one warm-up."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for repeat in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peaked_tensors(length: int, heads: int = 8, dim: int = 64, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, length, dim) whose attention is peaked: token i's key is a noisy copy of its query, and
    neighbours of a cluster resemble each other, as in a trained model."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    topics = draw(1, heads, 64, dim)
    which = torch.randint(64, (1, heads, length), generator=generator)
    topic = topics.gather(2, which[..., None].expand(-1, -1, -1, dim))
    q = 1.2 * topic + 0.8 * draw(1, heads, length, dim)
    k = q + 0.4 * draw(1, heads, length, dim)
    return q, k, 0.7 * topic + 0.7 * draw(1, heads, length, dim)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖."""
    return float((out - exact).norm() / exact.norm())
