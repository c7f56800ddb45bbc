"""The largest scores of each row on a GPU, read where they lie: nothing is sorted, and nobody waits.

A torch custom op; Triton is imported when it first runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.planning.orders import ceil_div

_ROWS, _KEYS = 4, 128  # of a program


def _largest(
    scores: Tensor, seen: Tensor | None, places: Tensor | None, chosen: Tensor | None, scale: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    from coterie.planning.kernels.largest import largest

    picks, counts = _nothing(scores, seen, places, chosen, scale, count)
    heads, parts, members, keys = scores.shape[1:]
    rows = counts.numel()
    if rows and keys and count:
        strides = (0, 0, 0) if seen is None else seen.stride()[:3]
        largest[(ceil_div(rows, _ROWS),)](
            *(scores, None if seen is None else seen.view(torch.uint8), strides),
            *(places, None if chosen is None else chosen.view(torch.uint8), 0 if chosen is None else chosen.shape[-1]),
            *(scale, heads, parts, members, keys, rows, picks, counts, count),
            ROWS=_ROWS,
            KEYS=_KEYS,
            enable_fp_fusion=True,
        )
    return picks, counts


def _nothing(
    scores: Tensor, seen: Tensor | None, places: Tensor | None, chosen: Tensor | None, scale: Tensor | None, count: int
) -> tuple[Tensor, Tensor]:
    picks = scores.new_zeros((*scores.shape[:-1], count), dtype=torch.int32)
    return picks, scores.new_zeros(scores.shape[:-1], dtype=torch.int32)


largest_op = torch.library.custom_op(
    "coterie::largest_triton",
    _largest,
    mutates_args=(),
    schema="(Tensor scores, Tensor? seen, Tensor? places, Tensor? chosen, Tensor? scale, int count) "
    "-> (Tensor, Tensor)",
)
largest_op.register_fake(_nothing)


def largest_seen(scores: Tensor, seen: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest scores (B, H, N, Nk) that are `seen` (B, 1 | N, Nk), ascending, then 0."""
    seen = seen.expand(-1, scores.shape[2], -1)[:, None]
    return largest_op(scores.contiguous()[:, :, None], seen, None, None, None, count)[0][:, :, 0].long()


def largest_chosen(scores: Tensor, scale: Tensor, places: Tensor, chosen: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest products of a key's score and scale, ascending, then 0.

    Keys count whose place is chosen by the row. scores (B, H, P, G, Nk), scale (B, H, Nk), places (B, H, P, Nk),
    chosen (B, H, P, G, V) bool.
    """
    given = places.to(torch.int32).contiguous(), chosen.contiguous(), scale.contiguous()
    return largest_op(scores.contiguous(), None, *given, count)[0].long()
