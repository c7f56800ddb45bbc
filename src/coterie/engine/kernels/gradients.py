"""The backward pass: what is launched, in which order.

Gradients of keys and values are the same in every run: each slot of a round's key order gets a row of its own, slots
are sorted by their key, and each key adds up its slots. With `COTERIE_ATOMICS=1` in the environment they are added as
they come, which needs less memory, and differs in the last digits from run to run.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.engine.flat import Inputs
from coterie.engine.kernels import backward as kernels
from coterie.engine.kernels.arguments import Round, Rows
from coterie.engine.kernels.launches import ROWS, Prepared, cleaned, tile_constants, with_means
from coterie.engine.kernels.rounds import (
    Given,
    Intervals,
    as_round,
    key_tiles,
    lists_by_row,
    pooled_heads,
    query_tiles,
)
from coterie.engine.kernels.rows import spread_means, sum_lists, weigh_gradient
from coterie.engine.kernels.sizes import gradient_tile, key_tile, padded
from coterie.launching import launch

_SLOTS = 2  # times the key rows: so many slots have gradients in memory at a time
_LEAST = 4096  # and so many, however few keys there are
_PROGRAMS = 256  # programs that fill a large GPU


class _Tensors(NamedTuple):
    """What every kernel of the backward pass reads."""

    q: Rows
    k: Rows
    v: Rows
    grad: Tensor  # (B, H, query rows, Dv), in the dtype of q
    lse: Tensor
    shift: Tensor
    wild: Tensor  # NaN where the gradient of a row is not finite


class _Sums(NamedTuple):
    """What is added up, float32."""

    q: Tensor  # (B, H, query rows, D)
    k: Tensor  # (B, Hk, key rows, D)
    v: Tensor  # (B, Hk, key rows, Dv)
    mask: _MaskSums


class _MaskSums(NamedTuple):
    """The gradient of a float mask, where it is summed: at most one of these is there."""

    pairs: Tensor | None = None  # like the mask, if it tells queries and keys apart
    rows: Tensor | None = None  # (B, H, query rows), if it is the same for all keys
    keys: Tensor | None = None  # (B, H, Nk), if it is the same for all queries

    @staticmethod
    def of(given: Inputs, rows: int, wanted: bool) -> _MaskSums:
        """Zeros in the right place."""
        mask = given.mask
        if not wanted or mask is None:
            return _MaskSums()
        lead = given.q.shape[:2]
        if mask.shape[3] == 1:
            return _MaskSums(rows=mask.new_zeros((*lead, rows), dtype=torch.float32))
        if mask.shape[2] == 1:
            return _MaskSums(keys=mask.new_zeros((*lead, given.k.shape[2]), dtype=torch.float32))
        return _MaskSums(pairs=torch.zeros(mask.shape, dtype=torch.float32, device=mask.device))

    def total(self, mask: Tensor, alone: Tensor | None, self_keys: Tensor | None) -> Tensor:
        """In the shape of the mask; `alone` (B, H, Nq) are the gradients of scores with self keys."""
        found = self.pairs
        if self.rows is not None:
            found = _folded(self.rows[..., None], mask, sum_queries=mask.shape[2] == 1)
        elif self.keys is not None:
            found = _folded(self.keys[:, :, None], mask, sum_queries=False)
        assert found is not None
        if alone is not None and self_keys is not None and found.numel():
            batch, heads, queries = alone.shape
            axes = [torch.arange(n, device=mask.device).view(s) for n, s in ((batch, (-1, 1, 1)), (heads, (1, -1, 1)))]
            row = torch.arange(queries, device=mask.device)
            place = (*axes, row.expand_as(alone), self_keys.clamp(min=0).long()[:, None].expand_as(alone))
            cells = tuple(
                (x if size > 1 else torch.zeros_like(x)).expand_as(alone)
                for x, size in zip(place, mask.shape, strict=True)
            )
            found = found.index_put(cells, alone, accumulate=True)
        return found.to(mask.dtype)


def _folded(sums: Tensor, mask: Tensor, *, sum_queries: bool) -> Tensor:
    """Sums over the axes that the mask does not have."""
    axes = [axis for axis in (0, 1) if mask.shape[axis] == 1] + ([2] if sum_queries else [])
    return sums.sum(axes, keepdim=True) if axes else sums


def backward(
    given: Inputs,
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    mask_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the float mask (empty unless asked for), in their own dtypes."""
    if mask_needs_grad and given.mask is not None:
        given = given._replace(mask=given.mask.contiguous())  # its gradient lies as it does
    prepared = Prepared.of(given)
    call, wanted = prepared.call, given.differentiable(mask_needs_grad)
    values = with_means(given.v, given.key_means)
    sums = _Sums(
        q=_zeros(given.q, call.query_rows),
        k=_zeros(given.k, call.key_rows),
        v=_zeros(given.v, call.key_rows),
        mask=_MaskSums.of(given, call.query_rows, mask_needs_grad),
    )
    slopes = None
    if lse.numel():
        tensors = _Tensors(
            Rows.of(cleaned(with_means(given.q, given.query_means))[0]),
            Rows.of(cleaned(with_means(given.k, given.key_means))[0]),
            Rows.of(values),
            *_weighed(grad_out, grad_lse, out, lse, given.q.dtype),
        )
        for each in prepared.rounds:
            one = as_round(each)
            _round_queries(prepared, given, each, one, tensors, sums)
            _round_keys(prepared, given, each, one, tensors, sums)
        if given.self_keys is not None:
            slopes = _selves(prepared, given, tensors, sums, alone)
        for total, means, length in (
            (sums.q, given.query_means, call.num_queries),
            (sums.k, given.key_means, call.num_keys),
            (sums.v, given.key_means, call.num_keys),
        ):
            _spread(total, means, length)
    grads = [
        sums.q[:, :, : call.num_queries].to(given.q.dtype),
        sums.k[:, :, : call.num_keys].to(given.k.dtype),
        sums.v[:, :, : call.num_keys].to(given.v.dtype),
    ]
    first, second, third = (x.contiguous() for x in grads)
    if mask_needs_grad and given.mask is not None:
        return first, second, third, sums.mask.total(given.mask, slopes, given.self_keys)
    return first, second, third, wanted[3]


def _zeros(x: Tensor, rows: int) -> Tensor:
    return x.new_zeros((*x.shape[:2], rows, x.shape[-1]), dtype=torch.float32)


def _weighed(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dout without wild numbers, lse, shift, which rows of dout were wild)."""
    grad_out, grad_lse, out, lse = (x.detach().contiguous() for x in (grad_out, grad_lse, out, lse))
    shift, wild, fine = torch.empty_like(lse), torch.empty_like(lse), torch.empty_like(out, dtype=dtype)
    rows, dim = lse.numel(), out.shape[-1]
    tensors = (grad_out, grad_lse, out, shift, fine, wild, rows)
    launch(weigh_gradient, (-(-rows // ROWS),), *tensors, DIM=dim, BLOCK=padded(dim), ROWS=ROWS)
    return fine, lse, shift, wild


def _round_queries(prepared: Prepared, given: Inputs, each: Given, one: Round, tensors: _Tensors, sums: _Sums) -> None:
    call, mask = prepared.call, sums.mask
    pool = 1 if mask.pairs is not None else pooled_heads(each, call, once=given.once)
    size = gradient_tile(prepared.width, prepared.rows(each.slots * pool), **prepared.kind(each))
    if prepared.heaviest and prepared.width > 64:
        size = size._replace(keys=16)  # more would spill
    tiles = query_tiles(one, size.rows // pool, pool)
    for begin, step, count in _portions(given, mask.pairs, pool):
        launch(
            kernels.round_queries,
            (tiles.number * count,),
            *tensors[:6],
            *(sums.q, mask.pairs, mask.rows, tiles, call, one, prepared.others, given.scale, begin, step),
            **prepared.widths,
            **tile_constants(size.rows, size.keys, given.q.dtype),
            POOL=pool,
            num_warps=size.warps,
            num_stages=size.stages,
        )


def _portions(given: Inputs, pairs: Tensor | None, pool: int) -> list[tuple[int, int, int]]:
    """(first, step, how many) heads at a time: samples or heads that share a mask must not add to it at once."""
    batch, heads = given.q.shape[:2]
    if pairs is None or (pairs.shape[0] == batch and pairs.shape[1] == heads):
        return [(0, 1, batch * heads // pool)]
    if pairs.shape[1] == heads:
        return [(b * heads, 1, heads) for b in range(batch)]
    if pairs.shape[0] == batch:
        return [(h, heads, batch) for h in range(heads)]
    return [(bh, 1, 1) for bh in range(batch * heads)]


def _round_keys(prepared: Prepared, given: Inputs, each: Given, one: Round, tensors: _Tensors, sums: _Sums) -> None:
    call, key_sums = prepared.call, sums.mask.keys
    atomic = os.environ.get("COTERIE_ATOMICS") == "1" and key_sums is None
    heads = given.q.shape[0] * call.heads
    size = key_tile(prepared.width, prepared.rows(each.slots), **prepared.kind(each))
    room = max(_LEAST, _SLOTS * call.key_rows)
    for first_slot in range(0, one.key_slots, room):
        slots = min(room, one.key_slots - first_slot)
        cut = key_tiles(one, size.keys, first_slot, slots)
        split = _split(heads * cut.tiles.number, one.query_slots // (2 * size.rows))
        new = sums.k.new_empty
        slot_k, slot_v, slot_mask = sums.k, sums.v, None
        if not atomic:
            slot_k = new((heads, slots, split, given.q.shape[-1]))
            slot_v = new((heads, slots, split, given.v.shape[-1]))
            slot_mask = None if key_sums is None else new((heads, slots, split, 1))
        launch(
            kernels.round_keys,
            (cut.tiles.number * heads, split),
            *tensors,
            *(slot_k, slot_v, slot_mask, cut.tiles, cut.last, cut.by_start, cut.low, cut.high),
            *(call, one, prepared.others, given.scale, first_slot, slots, split),
            **prepared.widths,
            **tile_constants(size.rows, size.keys, given.q.dtype),
            ATOMIC=atomic,
            num_warps=size.warps,
            num_stages=size.stages,
        )
        if atomic:
            continue
        order = one.key_order.flatten(0, 1)[:, first_slot : first_slot + slots]
        keys = torch.where(cut.covered, order, call.key_rows)
        lists = lists_by_row(keys.view(given.q.shape[0] * call.key_heads, -1), call.key_rows)
        for source, total in ((slot_k, sums.k), (slot_v, sums.v)):
            add_lists(source, *lists, total, split)
        if slot_mask is not None and key_sums is not None:
            real = torch.where(keys < call.num_keys, keys, call.num_keys)
            add_lists(slot_mask, *lists_by_row(real, call.num_keys), key_sums, split)


def _split(programs: int, most: int) -> int:
    """How many programs share the query rows of a tile, so that there are enough of them: a power of two."""
    wanted = max(1, min(8, most, _PROGRAMS // max(1, programs)))
    return 1 << (wanted.bit_length() - 1)


def add_lists(source: Tensor, listed: Tensor, first: Tensor, total: Tensor, split: int) -> None:
    """Add to each row of `total` the rows of the source that are listed for it."""
    heads, targets = listed.shape[0], first.shape[-1] - 1
    dim = source.shape[-1]
    begin, end = first[:, :-1].contiguous(), first[:, 1:].contiguous()
    grid = (-(-targets // ROWS) * heads,)
    tensors = (source, listed.shape[-1], listed, listed.shape[-1], begin, end, total, targets, 0, targets)
    launch(sum_lists, grid, *tensors, DIM=dim, BLOCK=padded(dim), ROWS=ROWS, SPLIT=split, MEAN=False)


def _selves(prepared: Prepared, given: Inputs, tensors: _Tensors, sums: _Sums, alone: Tensor) -> Tensor:
    """What queries pass on that met nobody but their self key; returns the gradients of those scores, (B, H, Nq)."""
    call = prepared.call
    assert given.self_keys is not None
    self_keys = given.self_keys.contiguous()
    slopes = sums.q.new_zeros(given.q.shape[:3])
    kept = torch.zeros_like(slopes)
    heads = given.q.shape[0] * call.heads
    fixed: dict[str, Any] = {**prepared.widths, "ROWS": ROWS}
    read = (tensors.q, tensors.k, tensors.v, tensors.grad, tensors.shift, tensors.wild, alone.contiguous(), self_keys)
    grid = (-(-call.num_queries // ROWS) * heads,)
    launch(kernels.self_queries, grid, *read, sums.q, slopes, kept, call, given.scale, **fixed)
    listed, first = lists_by_row(torch.where(self_keys < 0, call.num_keys, self_keys), call.num_keys)
    grid = (-(-call.num_keys // ROWS) * given.q.shape[0] * call.key_heads,)
    lists = (tensors.q, tensors.grad, slopes, kept, listed, first, sums.k, sums.v, call, given.scale)
    launch(kernels.self_key_rows, grid, *lists, **fixed)
    return slopes


def _spread(total: Tensor, means: list[Tensor], length: int) -> None:
    """Add the gradients of the means, which are behind the first `length` rows, to their members."""
    if not means or not length or not means[1].shape[-1] or not means[0].shape[-1]:
        return
    order, start, stop = (x.flatten(0, 1).contiguous() for x in means[:3])
    heads, slots = order.shape
    intervals = Intervals.of(start, stop, slots, stop <= start)
    low, high = intervals.around(torch.arange(slots, device=order.device, dtype=torch.int32).expand(heads, -1))
    listed, first = lists_by_row(torch.where(low < high, order, length), length)
    dim = total.shape[-1]
    tensors = (total, total, listed, first, intervals.by_start, start, stop, low, high)
    sizes = (length, slots, start.shape[-1], total.shape[2])
    grid = (-(-length // ROWS) * heads,)
    launch(spread_means, grid, *tensors, *sizes, DIM=dim, BLOCK=padded(dim), ROWS=ROWS)
