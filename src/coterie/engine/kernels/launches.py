"""The forward pass: what is launched, in which order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.engine.flat import Inputs
from coterie.engine.kernels import forward as kernels
from coterie.engine.kernels.arguments import Call, Others, Rows
from coterie.engine.kernels.precision import precision
from coterie.engine.kernels.rounds import (
    Given,
    as_met,
    as_round,
    given_rounds,
    is_empty,
    pooled_heads,
    query_tiles,
)
from coterie.engine.kernels.rows import clean_rows, sum_lists
from coterie.engine.kernels.sizes import padded, query_tile
from coterie.launching import launch

ROWS = 32  # that a program of a kernel over all rows takes


class Prepared(NamedTuple):
    """What forward and backward share: the call, its rounds, and how wide rows are."""

    call: Call
    rounds: list[Given]
    others: Others
    widths: dict[str, int]
    width: int  # the wider of keys and values, padded
    narrow: bool  # numbers of 16 bits
    heavy: bool  # each pair needs registers of its own, for a mask, dropout, how often it meets, or where a wide key is
    heaviest: bool  # for the last of these and one of the others

    def rows(self, queries: int) -> int:
        """How large a group seems to be when a tile is chosen for it."""
        return min(16, queries) if self.heaviest else queries

    def kind(self, each: Given) -> dict[str, bool]:
        """What tiles of a round are chosen by, besides the width and its groups; counts and skips are of pairs, too."""
        return {"narrow": self.narrow, "heavy": self.heavy or each.counts is not None or each.skip is not None}

    @staticmethod
    def of(given: Inputs) -> Prepared:
        """Checked inputs as the kernels take them."""
        call = _call(given)
        rounds = given_rounds(given)
        met = tuple(as_met(each, call) for each in rounds if not is_empty(each)) if given.once else None
        dim, value_dim = given.q.shape[-1], given.v.shape[-1]
        block, value_block = padded(dim), padded(value_dim)
        extra = call.mask is not None or call.seed is not None
        widths = {"DIM": dim, "VALUE_DIM": value_dim, "BLOCK": block, "VALUE_BLOCK": value_block}
        return Prepared(
            call=call,
            rounds=[x for x in rounds if not is_empty(x)],
            others=met,
            widths=widths,
            width=max(block, value_block),
            narrow=given.q.dtype != torch.float32,
            heavy=extra or met is not None or (call.key_places is not None and max(block, value_block) > 64),
            heaviest=extra and met is not None,
        )


def _call(given: Inputs) -> Call:
    heads, queries = given.q.shape[1:3]
    key_heads, keys = given.k.shape[1:3]
    mask, p = given.mask, given.dropout_p
    strides = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.detach().view(torch.uint8) if mask.dtype == torch.bool else mask.detach()
        sizes = zip(mask.shape, mask.stride(), strict=True)
        first, second, third, fourth = (stride if size > 1 else 0 for size, stride in sizes)
        strides = (first, second, third, fourth)
    return Call(
        heads=heads,
        key_heads=key_heads,
        num_queries=queries,
        num_keys=keys,
        query_rows=queries + (given.query_means[1].shape[-1] if given.query_means else 0),
        key_rows=keys + (given.key_means[1].shape[-1] if given.key_means else 0),
        dim=given.q.shape[-1],
        value_dim=given.v.shape[-1],
        offset=given.offset.contiguous(),
        causal=1 if given.causal else None,
        query_places=given.query_means[3].contiguous() if len(given.query_means) > 3 else None,
        key_places=given.key_means[3].contiguous() if len(given.key_means) > 3 else None,
        key_mask=_bytes(given.key_mask),
        query_mask=_bytes(given.query_mask),
        mask=mask,
        mask_strides=strides,
        added=1 if mask is not None and mask.is_floating_point() else None,
        seed=None if given.seed is None or p == 0 else int(given.seed),
        limit=min(2**32 - 1, int(p * 2**32)),
        kept=1.0 / (1.0 - p) if p < 1.0 else 0.0,
    )


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.detach().contiguous().view(torch.uint8)


def with_means(x: Tensor, means: list[Tensor]) -> Tensor:
    """x with its segment means behind it; rows lie side by side."""
    x = x.detach()
    if not means:
        return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
    order, start, stop = (each.contiguous() for each in means[:3])
    batch, heads, length, dim = x.shape
    rows = x.new_empty((batch, heads, length + start.shape[-1], dim))
    rows[:, :, :length] = x
    grid = (-(-start.shape[-1] // ROWS) * batch * heads,)
    sizes = (start.shape[-1], length, rows.shape[2])
    shape = {"DIM": dim, "BLOCK": padded(dim), "ROWS": ROWS, "SPLIT": 1, "MEAN": True}
    launch(sum_lists, grid, rows, rows.shape[2], order, order.shape[-1], start, stop, rows, *sizes, **shape)
    return rows


def cleaned(x: Tensor) -> tuple[Tensor, Tensor]:
    """A contiguous copy with zeros for inf and NaN, and (B, heads, N) NaN for rows that had any, otherwise 0."""
    batch, heads, rows, dim = x.shape
    copy = x.new_empty(x.shape)
    wild = x.new_empty((batch, heads, rows), dtype=torch.float32)
    shape = {"DIM": dim, "BLOCK": padded(dim), "ROWS": ROWS}
    launch(clean_rows, (-(-rows // ROWS) * batch * heads,), Rows.of(x), copy, wild, heads, rows, **shape)
    return copy, wild


def forward(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, who fell back on itself)."""
    prepared = Prepared.of(given)
    call, widths = prepared.call, prepared.widths
    out, top, alone = given.empty_results()
    out.zero_()
    top.fill_(float("-inf"))
    if out.shape[:3].numel() == 0:
        return out, top, alone
    total = torch.zeros_like(top)
    q = Rows.of(with_means(given.q, given.query_means))
    k = Rows.of(with_means(given.k, given.key_means))
    values, wild = cleaned(with_means(given.v, given.key_means))
    v = Rows.of(values)
    heads = out.shape[0] * out.shape[1]
    for each in prepared.rounds:
        pool = pooled_heads(each, call, once=given.once)
        size = query_tile(prepared.width, prepared.rows(each.slots * pool), **prepared.kind(each))
        one = as_round(each)
        tiles = query_tiles(one, size.rows // pool, pool)
        launch(
            kernels.round_forward,
            (tiles.number * (heads // pool),),
            *(q, k, v, wild, out, top, total, tiles, call, one, prepared.others, given.scale),
            **widths,
            **tile_constants(size.rows, size.keys, given.q.dtype),
            POOL=pool,
            num_warps=size.warps,
            num_stages=size.stages,
        )
    self_keys = None if given.self_keys is None else given.self_keys.contiguous()
    grid = (-(-call.query_rows // ROWS) * heads,)
    tensors = (q, k, v, wild, out, top, total, alone, self_keys, call, given.scale)
    launch(kernels.finish, grid, *tensors, **widths, ROWS=ROWS)
    return out, top, alone


def tile_constants(rows: int, keys: int, dtype: torch.dtype) -> dict[str, Any]:
    """What a kernel over tiles is compiled for, besides widths."""
    return {"ROWS": rows, "KEYS": keys, "PRECISION": precision(dtype)}
