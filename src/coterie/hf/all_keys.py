"""Dense attention of a few new tokens over a cache, which is read once for all query heads that share a key head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, why_not
from coterie.hf.asked import Asked

_FEW = 24  # queries that share keys: of more of them, in float32, SDPA's blocks are faster


class Visible(NamedTuple):
    """What new tokens see.

    Attributes:
        real: (B, N) uint8, which keys are; None: all.
        seen: (B, Nq) int32, of how many of the first keys a token sees those that are real.
        all: whether every token sees every key.
    """

    real: Tensor | None
    seen: Tensor
    all: bool

    @staticmethod
    def everything(q: Tensor, k: Tensor) -> Visible:
        """All keys."""
        seen = torch.full((q.shape[0], q.shape[2]), k.shape[2], dtype=torch.int32, device=q.device)
        return Visible(None, seen, all=True)


def answers(call: Asked) -> bool:
    """Whether the kernel takes a call, and is faster than SDPA."""
    q, k, v = call.q, call.k, call.v
    if why_not() or call.dropout or q.device.type != "cpu" or not q.dtype == k.dtype == v.dtype:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return False
    few = q.shape[2] * q.shape[1] <= _FEW * k.shape[1]
    return few if q.dtype == torch.float32 else q.dtype in (torch.bfloat16, torch.float16)


def answer(call: Asked, visible: Visible) -> Tensor:
    """(B, H, Nq, Dv): softmax attention over all keys that each token sees; 0 for a token that sees none.

    The keys are cut into pieces of 512, which the threads share, so the bits do not depend on how many there are.
    """
    q, k, v = (last_contiguous(x) for x in (call.q, call.k, call.v))
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    kernels().decode_all(q, k, v, visible.real, visible.seen, scale, torch.get_num_threads(), out)
    return out.to(q.dtype)
