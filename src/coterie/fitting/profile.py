"""One dense pass that tries every candidate in every attention module: what it costs, and what it changes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.errors import expect
from coterie.fitting.hosts import DENSE, Host
from coterie.mechanisms import Full, Mechanism
from coterie.observe import Seen, observing


@dataclass(frozen=True)
class Tried:
    """A candidate in one attention module."""

    module: str
    mechanism: str
    error: float  # relative error of the attention's output; NaN if it was refused
    seconds: float  # of attention on all batches, the median over modules of this shape
    note: str = ""


@dataclass
class Profile:
    """What was seen in a module: squared errors of candidates, and their times by shape and batch."""

    errors: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    times: dict[tuple[Any, str], list[float]] = field(default_factory=dict)
    shapes: dict[str, list[Any]] = field(default_factory=dict)  # of a module, one for each call
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    slow: set[tuple[Any, str]] = field(default_factory=set)  # for this shape, slower than dense

    def seconds(self, module: str, mechanism: str) -> float:
        """The time of a module's calls."""
        return sum(statistics.median(self.times[shape, mechanism]) for shape in self.shapes[module])

    def table(self, candidates: list[str]) -> list[Tried]:
        """Everything that was tried; dense attention first."""
        rows = []
        for module in self.shapes:
            rows.append(Tried(module, DENSE, 0.0, self.seconds(module, DENSE)))
            for name in candidates:
                if (module, name) in self.refused:
                    rows.append(Tried(module, name, float("nan"), float("nan"), self.refused[module, name]))
                elif any((shape, name) in self.slow for shape in self.shapes[module]):
                    known = self.errors.get((module, name))
                    error = statistics.fmean(known) ** 0.5 if known else float("nan")
                    rows.append(Tried(module, name, error, self._known(module, name), "slower than dense"))
                else:
                    error = statistics.fmean(self.errors[module, name]) ** 0.5
                    rows.append(Tried(module, name, error, self.seconds(module, name)))
        return rows

    def _known(self, module: str, name: str) -> float:
        return sum(statistics.median(self.times[s, name]) for s in self.shapes[module] if (s, name) in self.times)


@torch.no_grad()
def profile(
    host: Host,
    batches: list[Any],
    candidates: list[Mechanism],
    tick: Callable[[], None],
    out_of_time: Callable[[], bool],
) -> Profile:
    """Run the batches densely and try the candidates on the way; `tick` is called for each module and batch."""
    found = Profile()
    host.put_everywhere("full")
    with host.watching():
        for index, batch in enumerate(batches):
            if index and out_of_time():
                break

            def observer(seen: Seen, index: int = index) -> None:
                _try(found, host.current, index, seen, candidates, tick)

            with observing(observer):
                host.run(batch)
    expect(bool(found.shapes), "batches", "inputs that reach an attention module with more than a few queries", "none")
    return found


def _try(
    found: Profile, module: str, index: int, seen: Seen, candidates: list[Mechanism], tick: Callable[[], None]
) -> None:
    if not isinstance(seen.mechanism, Full) and seen.mechanism != "full":
        return  # a sliding window, which stays as it is
    tick()
    shape = (index, tuple(seen.q.shape), tuple(seen.k.shape), bool(seen.settings["is_causal"]))
    found.shapes.setdefault(module, []).append(shape)
    exact = seen.attend(Full()).double()
    size = float(exact.square().sum())
    found.times.setdefault((shape, DENSE), []).append(_dense_seconds(seen))
    dense = statistics.median(found.times[shape, DENSE])
    for mechanism in candidates:
        name = str(mechanism)
        if (shape, name) in found.slow or (module, name) in found.refused:
            continue
        start = time.perf_counter()
        try:
            out = seen.attend(mechanism)
        except ValueError as error:
            found.refused[module, name] = str(error)
            continue
        taken = time.perf_counter() - start
        times = found.times.setdefault((shape, name), [])
        times.append(taken)
        squared = float((out.double() - exact).square().sum()) / max(size, 1e-300)
        found.errors.setdefault((module, name), []).append(squared)
        if len(times) >= 3 and min(times) > dense:
            found.slow.add((shape, name))


def _dense_seconds(seen: Seen) -> float:
    """PyTorch's own attention on the same tensors, without padding."""
    square = seen.q.shape[2] == seen.k.shape[2]
    start = time.perf_counter()
    out: Tensor = F.scaled_dot_product_attention(
        seen.q,
        seen.k,
        seen.v,
        is_causal=bool(seen.settings["is_causal"]) and square,
        scale=seen.settings["scale"],
        enable_gqa=seen.q.shape[1] != seen.k.shape[1],
    )
    assert out.shape[2] == seen.q.shape[2]
    return time.perf_counter() - start
