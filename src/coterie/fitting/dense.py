"""Dense attention where candidates are tried: its answer, which is computed once, and its time."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from coterie.mechanisms import Full
from coterie.observe import Seen


class Dense(NamedTuple):
    """What dense attention answers, and the seconds that PyTorch's own takes on the same tensors, without masks."""

    out: Tensor
    seconds: float


def dense(seen: Seen) -> Dense:
    """Attend densely to what was seen. PyTorch's attention is run for its time; its answer is right without masks.

    Example:
        >>> import coterie, torch
        >>> from coterie.fitting.dense import dense
        >>> seen = []
        >>> with coterie.observing(seen.append):
        ...     out = coterie.attention(*torch.randn(3, 1, 2, 50, 8), mechanism="full")
        >>> torch.allclose(dense(seen[0]).out, out, atol=1e-6)
        True
    """
    call = seen.call
    square = seen.q.shape[2] == seen.k.shape[2]
    start = time.perf_counter()
    out: Tensor = F.scaled_dot_product_attention(
        seen.q,
        seen.k,
        seen.v,
        is_causal=call.causal and square,
        scale=call.scale,
        enable_gqa=seen.q.shape[1] != seen.k.shape[1],
    )
    seconds = time.perf_counter() - start
    masks = (call.key_mask, call.query_mask)
    plain = call.pair_mask is None and all(mask is None or bool(mask.all()) for mask in masks)
    if call.causal:
        plain = plain and square and not bool(call.offset.any())
    return Dense(out if plain else seen.attend(Full()), seconds)
