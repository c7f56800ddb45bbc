"""What is promised of speed: cases, each with what is wanted of it against SDPA in the same run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import coterie
from benchmarks.measure import peaked_tensors
from coterie import Mechanism

Attend = Callable[..., Tensor]
SMYRF = coterie.Smyrf(rounds=2, cluster_size=64)
IMPROVED = coterie.ImprovedClustered(clusters=100, topk=32)
NEAR_FAR = coterie.NearFar(near=64)


def step(attend: Attend, q: Tensor, k: Tensor, v: Tensor, *, backward: bool = False) -> None:
    """One forward pass, and its gradients if asked for."""
    inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out = attend(*inputs)
    if backward:
        torch.autograd.grad(out.sum(), inputs, allow_unused=True)  # a peer that shares queries and keys ignores k


def ours(mechanism: Mechanism, backend: str = "native", *, causal: bool = False) -> Attend:
    """The whole call, planning included."""
    return partial(coterie.attention, mechanism=mechanism, backend=backend, is_causal=causal)


def sdpa(*, causal: bool = False) -> Attend:
    """What everything is compared with."""
    return partial(F.scaled_dot_product_attention, is_causal=causal)


class Promise(NamedTuple):
    """A call of 8 heads × 64, float32, batch 1, and how many times as fast as SDPA it should be."""

    mechanism: Mechanism
    length: int
    want: float
    causal: bool = False
    backward: bool = False

    @property
    def name(self) -> str:
        kind = ("causal, " if self.causal else "") + ("forward + backward" if self.backward else "forward")
        return f"{self.mechanism}, {self.length:,}, {kind}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v."""
        return peaked_tensors(self.length)

    def runs(self, tensors: tuple[Tensor, Tensor, Tensor]) -> dict[str, Callable[[], None]]:
        """SDPA and ours."""
        return {
            "sdpa": partial(step, sdpa(causal=self.causal), *tensors, backward=self.backward),
            "ours": partial(step, ours(self.mechanism, causal=self.causal), *tensors, backward=self.backward),
        }

    def turns(self, repeats: int) -> int:
        """Of each, at least `repeats`: short calls are repeated more often."""
        return repeats * max(1, 4096 // self.length)


PROMISES = [
    Promise(SMYRF, 8192, 30),
    Promise(SMYRF, 8192, 30, backward=True),
    Promise(SMYRF, 1024, 3),
    Promise(SMYRF, 512, 1),
    Promise(IMPROVED, 4096, 10),
    Promise(IMPROVED, 8192, 20, backward=True),
    Promise(NEAR_FAR, 8192, 12),
    Promise(NEAR_FAR, 32_768, 25),
    Promise(coterie.NearFar(near=128), 16_384, 8, causal=True),
    Promise(NEAR_FAR, 1024, 2),
]
# Time at 65,536 tokens over that at fewer, at most.
GROWTHS = [(SMYRF, 8192, 8.8), (NEAR_FAR, 16_384, 9.0)]
# Peak memory beyond q, k, v and out at 65,536 tokens, in multiples of q, at most.
MEMORIES = [
    (coterie.Smyrf(rounds=4, cluster_size=64), False, 1.0),
    (NEAR_FAR, False, 1.0),
    (coterie.NearFar(near=128), True, 1.5),
]
