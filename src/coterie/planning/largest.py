"""The largest scores of each row on a GPU, read where they lie: nothing is sorted, and nobody waits.

A torch custom op; Triton is imported when it first runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.launching import launch
from coterie.planning.orders import ceil_div

_ROWS, _KEYS = 4, 128  # of a program


def _largest(scores: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    from coterie.planning.kernels.largest import largest

    picks, counts = _nothing(scores, seen, count)
    heads, members, keys = scores.shape[1:]
    rows = counts.numel()
    launch(
        largest,
        (ceil_div(rows, _ROWS) if keys and count else 0,),
        *(scores, seen.view(torch.uint8), seen.stride()[:2], heads, members, keys, rows, picks, counts, count),
        ROWS=_ROWS,
        KEYS=_KEYS,
    )
    return picks, counts


def _nothing(scores: Tensor, seen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    picks = scores.new_zeros((*scores.shape[:-1], count), dtype=torch.int32)
    return picks, scores.new_zeros(scores.shape[:-1], dtype=torch.int32)


largest_op = torch.library.custom_op(
    "coterie::largest_triton",
    _largest,
    mutates_args=(),
    schema="(Tensor scores, Tensor seen, int count) -> (Tensor, Tensor)",
)
largest_op.register_fake(_nothing)


def largest_seen(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest scores (B, H, N, Nk) that are `seen` (B, 1 | N, Nk), ascending, then 0."""
    return largest_op(scores.contiguous(), seen.expand(-1, scores.shape[2], -1), count)[0].long()
