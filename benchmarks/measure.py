"""What the benchmarks measure, and on what."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def peak_bytes(run: Callable[[], object], *, kept: bool = False) -> int | None:
    """How far the resident memory of this process rises while `run` runs; None where the kernel does not tell.

    What its first run allocates and keeps counts if `kept`.
    """
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def read(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024

    if not kept:
        run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # and what is only cached goes back
    try:
        clear.write_text("5")  # sets the peak back to what is resident now
    except OSError:
        return None
    before = read("VmRSS:")
    run()
    return max(0, read("VmHWM:") - before)


def peaked_tensors(
    length: int, heads: int = 8, dim: int = 64, *, batch: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (batch, heads, length, dim) whose attention is peaked: token i's key is a noisy copy of its query, and
    tokens of one of 64 topics resemble each other, as in a trained model."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    topics = draw(batch, heads, 64, dim)
    which = torch.randint(64, (batch, heads, length), generator=generator)
    topic = topics.gather(2, which[..., None].expand(-1, -1, -1, dim))
    q = 1.2 * topic + 0.8 * draw(batch, heads, length, dim)
    k = q + 0.4 * draw(batch, heads, length, dim)
    return q, k, 0.7 * topic + 0.7 * draw(batch, heads, length, dim)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """‖out − exact‖ / ‖exact‖."""
    return float((out - exact).norm() / exact.norm())
