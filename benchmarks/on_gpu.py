"""What `python -m benchmarks.gpu` measures on a GPU: the promised calls beside PyTorch's flash attention, in one run.

The calls are those of `benchmarks/promises.py`, planning included, in bfloat16, as flash attention has no float32. What
is wanted there is wanted of CPUs; here it stands beside what is found, so that tables of several machines can be
compared. Nothing is measured unless the kernels agree with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import coterie
from benchmarks.measure import peaked_tensors, relative_error
from benchmarks.promises import GROWTHS, IMPROVED, MEMORIES, NEAR_FAR, PROMISES, SMYRF, Attend, Promise, ours, step
from coterie import Mechanism
from coterie.timing import interleaved

LENGTHS = (1024, 4096, 16_384, 65_536)
LONG = 65_536
CHECKED = ((SMYRF, False), (SMYRF, True), (IMPROVED, False), (NEAR_FAR, False), (NEAR_FAR, True))
HEAD = ("call", "SDPA (flash) ms", "ours ms", "× SDPA", "wanted of a CPU")
Row = tuple[str, ...]


class Place(NamedTuple):
    """Where it runs: a GPU, or for tests the CPU."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    backend: str = "triton"
    repeats: int = 20

    def tensors(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of 8 heads × 64."""
        q, k, v = (x.to(self.device, self.dtype) for x in peaked_tensors(length))
        return q, k, v

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def waited(self, run: Callable[[], object]) -> Callable[[], None]:
        """A run that ends when its work does."""

        def whole() -> None:
            run()
            self.wait()

        return whole

    def ours(self, mechanism: Mechanism, *, causal: bool = False) -> Attend:
        """The whole call, planning included."""
        return ours(mechanism, self.backend, causal=causal)

    def milliseconds(self, runs: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Medians of runs that take turns."""
        seconds = interleaved({name: self.waited(run) for name, run in runs.items()}, self.repeats)
        return {name: 1e3 * taken for name, taken in seconds.items()}

    def peak(self, run: Callable[[], object]) -> int | None:
        """Bytes that a run takes beyond what was there before; None where nobody counts."""
        if self.device != "cuda":
            return None
        run()
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated() - before


def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """PyTorch's flash attention, and an error where there is none: never another kernel in its place."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def wrong(place: Place, length: int = 500) -> list[str]:
    """What differs from the float64 reference, forward or backward, by more than rounding to bfloat16."""
    found = []
    for mechanism, causal in CHECKED:
        tensors = place.tensors(length)
        plan = mechanism.plan(*tensors[:2], is_causal=causal, backend=place.backend)
        results = []
        for backend, dtype in ((place.backend, place.dtype), ("reference", torch.float64)):
            inputs = [x.to(dtype).requires_grad_() for x in tensors]
            out = coterie.grouped_attention(inputs[0], inputs[1], inputs[2], plan, backend=backend).out
            results.append((out, *torch.autograd.grad(out.double().square().sum(), inputs)))
        for name, ours_, theirs in zip(("out", "grad q", "grad k", "grad v"), *results, strict=True):
            error = relative_error(ours_.detach().double(), theirs.detach())
            if not error < 0.03:
                found.append(f"{mechanism}{', causal' * causal}: {name} is {error:.2g} away from the reference")
    return found


def promised(place: Place, promises: list[Promise]) -> Iterator[Row]:
    """Each promised call beside flash attention, forward, or forward and backward."""
    for each in promises:
        tensors = place.tensors(each.length)
        attends: dict[str, Attend] = {
            "sdpa": partial(flash, causal=each.causal),
            "ours": place.ours(each.mechanism, causal=each.causal),
        }
        ms = place.milliseconds({n: partial(step, a, *tensors, backward=each.backward) for n, a in attends.items()})
        times = f"{ms['sdpa']:.3f}", f"{ms['ours']:.3f}", f"{ms['sdpa'] / ms['ours']:.2f}"
        yield (each.name, *times, f"{each.want:g}")


def growths(place: Place, cases: list[tuple[Mechanism, int, float]], long: int = LONG) -> Iterator[Row]:
    """Time of a long call over that of a shorter one."""
    for mechanism, length, most in cases:
        attend, lengths = place.ours(mechanism), {"short": length, "long": long}
        ms = place.milliseconds({name: partial(step, attend, *place.tensors(n)) for name, n in lengths.items()})
        name = f"{mechanism}, time at {long:,} / time at {length:,}"
        yield name, "", f"{ms['long']:.3f}", f"{ms['long'] / ms['short']:.2f}", f"≤ {most:g}"


def memories(place: Place, cases: list[tuple[Mechanism, bool, float]], long: int = LONG) -> Iterator[Row]:
    """Peak memory beyond q, k, v and out, in multiples of q."""
    for mechanism, causal, most in cases:
        tensors = place.tensors(long)
        peak = place.peak(partial(step, place.ours(mechanism, causal=causal), *tensors))
        size = tensors[0].numel() * tensors[0].element_size()
        cell = "–" if peak is None else f"{(peak - size) / size:.2f} × q"
        name = f"{mechanism}, {long:,}, {'causal, ' * causal}forward: peak memory beyond q, k, v, out"
        yield name, "", "", cell, f"≤ {most:g}"


def lengths(place: Place, sizes: tuple[int, ...] = LENGTHS) -> Iterator[Row]:
    """Two mechanisms at every length, forward, and forward and backward."""
    for length in sizes:
        for mechanism in (coterie.Smyrf(rounds=4, cluster_size=64), NEAR_FAR):
            yield from (
                (*row[:4], "")
                for row in promised(place, [Promise(mechanism, length, 0, backward=both) for both in (False, True)])
            )


def rows(place: Place) -> Iterator[Row]:
    """All of it."""
    yield from promised(place, PROMISES)
    yield from growths(place, GROWTHS)
    yield from memories(place, MEMORIES)
    yield from lengths(place)


def title() -> str:
    """The GPU, and what runs on it."""
    import triton

    return (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}: 8 heads × 64, "
        "bfloat16, batch 1, planning included"
    )
