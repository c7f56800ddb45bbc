"""The best keys of groups of queries on a GPU, found in the clusters that each group has chosen.

A torch custom op; Triton is imported when it first runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.launching import launch
from coterie.planning.bytes import Bytes
from coterie.planning.lloyd import padded
from coterie.planning.orders import ceil_div, compact

_ROWS, _KEYS = 8, 64  # of a program: as many groups as search together, and so many keys at a time


def _best_keys(
    queries: Tensor, keys: Tensor, scale: Tensor, order: Tensor, first: Tensor, size: Tensor, chosen: Tensor, near: int
) -> tuple[Tensor, Tensor]:
    from coterie.planning.kernels.best_keys import best_keys

    picks, places = _nothing(queries, keys, scale, order, first, size, chosen, near)
    batch, heads, chunks, groups, width = chosen.shape
    tiles = ceil_div(groups, _ROWS)
    by_tile = torch.nn.functional.pad(chosen, (0, 0, 0, tiles * _ROWS - groups)).unflatten(3, (tiles, _ROWS))
    listed, ranges = compact(by_tile.any(4))
    sizes = size[:, :, :, None].expand(*listed.shape).gather(-1, listed.long())
    ends = torch.where(torch.arange(width, device=size.device) < ranges[..., None], sizes, 0).cumsum(-1)
    starts, totals = (ends - sizes).to(torch.int32), ends[..., -1:].to(torch.int32).contiguous()
    grid = batch * heads * chunks * tiles if near and width else 0
    launch(
        best_keys,
        (grid,),
        *(queries, keys, scale, order, first, listed, starts, ranges.to(torch.int32), totals),
        *(chosen.view(torch.uint8), picks, places, heads, heads // keys.shape[1], groups, chunks, tiles, width),
        *(width.bit_length(), keys.shape[2], order.shape[-1], near),
        BLOCK=keys.shape[-1],
        ROWS=_ROWS,
        KEYS=_KEYS,
        num_stages=1,
    )
    return picks, places


def _nothing(
    queries: Tensor, keys: Tensor, scale: Tensor, order: Tensor, first: Tensor, size: Tensor, chosen: Tensor, near: int
) -> tuple[Tensor, Tensor]:
    picks = torch.zeros(*chosen.shape[:-1], near, dtype=torch.int32, device=chosen.device)
    return picks, torch.zeros_like(picks)


best_keys_op = torch.library.custom_op(
    "coterie::best_keys_triton",
    _best_keys,
    mutates_args=(),
    schema="(Tensor queries, Tensor keys, Tensor scale, Tensor order, Tensor first, Tensor size, Tensor chosen, "
    "int near) -> (Tensor, Tensor)",
)
best_keys_op.register_fake(_nothing)


def in_words(x: Bytes) -> Tensor:
    """Rows as int8, with zeros behind them up to a width that tensor cores multiply."""
    dim = x.whole.shape[-1]
    return torch.nn.functional.pad(x.whole.to(torch.int8), (0, max(32, padded(dim)) - dim)).contiguous()
