"""The reference backend: plain PyTorch, any device, the definition of correct.

Forward is an online softmax over the tiles of a plan, round after round:

    out_i = Σ exp(s_ij) v_j / Σ exp(s_ij),   lse_i = log Σ exp(s_ij),   s_ij = scale·q_i·k_j + bias_j + mask_ij

Backward recomputes each tile's scores and uses the final lse, so nothing of size N × group is ever stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from coterie.call import Call
from coterie.checks import SECOND_DERIVATIVE, check_transforms
from coterie.draws import keep_pairs
from coterie.plan import Means, Plan
from coterie.plan.tiles import Multiplicity, PlanTiles, Tile


@dataclass(frozen=True)
class Settings:
    """What stays fixed between forward and backward: a call without its tensors, which autograd keeps."""

    plan: Plan
    scale: float
    dropout_p: float
    seed: Tensor | None  # of dropout
    key_mask: Tensor | None  # (B, Nk), on top of the plan
    query_mask: Tensor | None  # (B, Nq), on top of the plan


class _Pairs:
    """Scores, probabilities and gathers for the tiles of one call."""

    def __init__(self, settings: Settings, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        self.settings, self.plan = settings, settings.plan
        self.tiles = PlanTiles(settings.plan)
        self.multiplicity = Multiplicity(self.tiles) if self.plan.duplicates == "once" else None
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.k, self.v = (x.flatten(0, 2) for x in (q, k, v))
        self.mask = mask
        self.width = q.shape[-1] + v.shape[-1]

    def row_index(self, tile: Tile) -> Tensor:
        """Query rows of a tile in the flattened (B * H * rows); unused slots point behind the end."""
        flat = tile.heads[:, None] * self.plan.query_rows + tile.rows
        return torch.where(tile.row_used, flat, self.plan.batch * self.plan.heads * self.plan.query_rows)

    def key_index(self, tile: Tile) -> Tensor:
        """The same for key rows in (B * key heads * rows)."""
        key_heads = tile.heads // (self.plan.heads // self.plan.key_heads)
        flat = key_heads[:, None] * self.plan.key_rows + tile.keys
        return torch.where(tile.key_used, flat, self.plan.batch * self.plan.key_heads * self.plan.key_rows)

    def gather(self, source: Tensor, index: Tensor) -> Tensor:
        """Rows of the flattened source in the dtype of accumulation; zeros where the slot is unused."""
        used = index < source.shape[0]
        rows = source[torch.where(used, index, 0)].to(self.dtype)
        return rows.masked_fill_(~used[..., None], 0)

    def mask_index(self, tile: Tile, mask: Tensor) -> tuple[Tensor, ...]:
        """Where a tile's pairs are in a mask of shape (B | 1, H | 1, Nq | 1, Nk | 1)."""
        batch, head = tile.heads // self.plan.heads, tile.heads % self.plan.heads
        index = (batch[:, None, None], head[:, None, None], tile.rows[:, :, None], tile.keys[:, None, :])
        return tuple(x if size > 1 else torch.zeros_like(x) for x, size in zip(index, mask.shape, strict=True))

    def scores(self, tile: Tile, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """s (T, Q, K), −inf where the pair does not meet, and which pairs do."""
        meets = tile.meets
        batch = (tile.heads // self.plan.heads)[:, None]
        if self.settings.key_mask is not None and self.plan.num_keys:
            real = tile.keys < self.plan.num_keys  # means were checked against the mask before
            seen = self.settings.key_mask[batch, torch.where(real, tile.keys, 0)] | ~real
            meets = meets & seen[:, None, :]
        if self.settings.query_mask is not None and self.plan.num_queries:
            real = tile.rows < self.plan.num_queries
            seen = self.settings.query_mask[batch, torch.where(real, tile.rows, 0)] | ~real
            meets = meets & seen[:, :, None]
        scores = (q @ k.mT) * self.settings.scale
        if tile.bias is not None:
            scores = scores + tile.bias.to(scores.dtype)
        if self.mask is not None:
            at_pairs = self.mask[self.mask_index(tile, self.mask)]
            if at_pairs.dtype == torch.bool:
                meets = meets & at_pairs
            else:
                scores = scores + at_pairs.to(scores.dtype)
                meets = meets & (at_pairs != float("-inf"))
        if self.multiplicity is not None:
            scores = scores - self.multiplicity(tile).clamp_(min=1).to(scores.dtype).log_()
        return scores.masked_fill(~meets, float("-inf")), meets

    def keep(self, tile: Tile) -> Tensor | None:
        """Dropout's factor for each pair: 0 or 1 / (1 − p)."""
        p, seed = self.settings.dropout_p, self.settings.seed
        if seed is None:
            return None
        heads, rows, keys = tile.heads[:, None, None], tile.rows[:, :, None], tile.keys[:, None, :]
        kept = keep_pairs(heads, rows, keys, dropout_p=p, seed=seed)
        return kept.to(self.dtype) / (1.0 - p) if p < 1.0 else torch.zeros_like(kept, dtype=self.dtype)


def _weighted(weights: Tensor, meets: Tensor, values: Tensor) -> Tensor:
    """weights @ values, where a pair that does not meet contributes nothing even if its value is inf or NaN."""
    finite = values.isfinite()
    if bool(finite.all()):
        return weights @ values
    total = weights @ torch.where(finite, values, 0)
    for column in (~finite).any(-1).any(0).nonzero().squeeze(-1).tolist():
        wild = torch.where(finite[:, column], 0, values[:, column])[:, None, :]
        share = weights[:, :, column, None] * wild
        total += torch.where(meets[:, :, column, None] & ~finite[:, None, column], share, 0)
    return total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor]:
        plan, pairs = settings.plan, _Pairs(settings, q, k, v, mask)
        rows = plan.batch * plan.heads * plan.query_rows
        # One row behind the end takes what the tiles' unused slots write.
        out = torch.zeros(rows + 1, v.shape[-1], dtype=pairs.dtype, device=q.device)
        top = torch.full((rows + 1,), float("-inf"), dtype=pairs.dtype, device=q.device)
        total = torch.zeros(rows + 1, dtype=pairs.dtype, device=q.device)

        def meet(tile: Tile) -> None:
            index, key_index = pairs.row_index(tile), pairs.key_index(tile)
            scores, meets = pairs.scores(tile, pairs.gather(pairs.q, index), pairs.gather(pairs.k, key_index))
            old = top[index]
            new = torch.maximum(old, scores.amax(-1))
            base = torch.where(new == float("-inf"), 0, new)
            weights = torch.exp(scores - base[..., None])
            fade = torch.exp(old - base)
            keep = pairs.keep(tile)
            dropped = weights if keep is None else weights * keep
            top[index] = new
            total[index] = total[index] * fade + weights.sum(-1)
            partial = _weighted(dropped, meets, pairs.gather(pairs.v, key_index))
            out[index] = torch.where(fade[..., None] == 0, 0, out[index] * fade[..., None]) + partial

        for tile in pairs.tiles(pairs.width):
            meet(tile)
        alone = (total[:rows] == 0).view(plan.batch, plan.heads, plan.query_rows)[..., : plan.num_queries]
        for tile in pairs.tiles.of_selves(alone):
            meet(tile)

        met = total[:rows] != 0
        out = torch.where(met[:, None], out[:rows] / total[:rows, None], 0)
        lse = torch.where(met, top[:rows] + total[:rows].log(), float("-inf"))
        shape = (plan.batch, plan.heads, plan.query_rows)
        out, lse = out.view(*shape, v.shape[-1]), lse.view(shape)
        ctx.settings = settings
        ctx.save_for_backward(q, k, v, mask, out, lse, alone)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_transforms(*grads)
        q, k, v, mask, out, lse, alone = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx.settings, q, k, v, mask, out, lse, alone, *grads)
        found = tuple(g if need else None for g, need in zip(found, ctx.needs_input_grad[:4], strict=True))
        if torch.is_grad_enabled():
            found = tuple(None if g is None else _Once.apply(g, q, k, v, mask, *grads) for g in found)
        return *found, None


def backward(
    settings: Settings,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v (means behind them) and of a float mask."""
    pairs = _Pairs(settings, q, k, v, mask)
    grad_q, grad_k, grad_v = (
        torch.zeros(x.shape[0] + 1, x.shape[1], dtype=pairs.dtype, device=x.device) for x in (pairs.q, pairs.k, pairs.v)
    )
    float_mask = mask is not None and mask.is_floating_point()
    grad_mask = torch.zeros_like(mask, dtype=pairs.dtype) if float_mask and mask is not None else None
    flat_lse, flat_grad = lse.reshape(-1), grad_out.flatten(0, 2)
    # ds_ij = p_ij (dp_ij − Σ_j p_ij dp_ij + dlse_i), and the sum is out_i · dout_i.
    shift = grad_lse.reshape(-1) - (flat_grad * out.flatten(0, 2)).sum(-1)

    def meet(tile: Tile) -> None:
        index, key_index = pairs.row_index(tile), pairs.key_index(tile)
        rows = torch.where(tile.row_used, index, 0)
        tile_q, tile_k = pairs.gather(pairs.q, index), pairs.gather(pairs.k, key_index)
        scores, meets = pairs.scores(tile, tile_q, tile_k)
        log_total = flat_lse[rows]
        weights = torch.exp(scores - torch.where(log_total == float("-inf"), 0, log_total)[..., None])
        grad = pairs.gather(flat_grad, index)
        keep = pairs.keep(tile)
        dropped = weights if keep is None else weights * keep
        grad_weights = grad @ pairs.gather(pairs.v, key_index).mT
        if keep is not None:
            grad_weights = grad_weights * keep
        grad_scores = weights * (grad_weights + shift[rows][..., None])
        grad_scores, dropped = torch.where(meets, grad_scores, 0), torch.where(meets, dropped, 0)
        # inf or NaN in a row has already reached the scores of the pairs it takes part in; it must not reach others.
        finite_q, finite_k = (torch.where(x.isfinite(), x, 0) for x in (tile_q, tile_k))
        _add(grad_q, index, (grad_scores @ finite_k) * settings.scale)
        _add(grad_k, key_index, (grad_scores.mT @ finite_q) * settings.scale)
        _add(grad_v, key_index, _weighted(dropped.mT, meets.mT, grad))
        if grad_mask is not None:
            where = torch.broadcast_tensors(*pairs.mask_index(tile, grad_mask))
            grad_mask.index_put_(where, grad_scores, accumulate=True)

    for tile in pairs.tiles(pairs.width):
        meet(tile)
    for tile in pairs.tiles.of_selves(alone):
        meet(tile)
    shaped = tuple(grad[:-1].view(x.shape).to(x.dtype) for grad, x in ((grad_q, q), (grad_k, k), (grad_v, v)))
    return *shaped, None if grad_mask is None or mask is None else grad_mask.to(mask.dtype)


def _add(total: Tensor, index: Tensor, rows: Tensor) -> None:
    total.index_add_(0, index.reshape(-1), rows.reshape(-1, rows.shape[-1]))


class _Once(torch.autograd.Function):
    """The identity on a gradient; differentiating it again is refused in words."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *depends: Tensor | None) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(SECOND_DERIVATIVE)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse) for every real and virtual query row, in the dtype of accumulation."""
    assert call.v is not None
    settings = Settings(plan, call.scale, call.dropout_p, call.seed, call.key_mask, call.answered)
    q, k, v = (
        _with_means(x, means)
        for x, means in ((call.q, plan.query_means), (call.k, plan.key_means), (call.v, plan.key_means))
    )
    result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, call.pair_mask, settings)
    return result


def _with_means(x: Tensor, means: Means | None) -> Tensor:
    """x with its segment means behind it, in the dtype of accumulation."""
    if means is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sizes = (means.stop - means.start).reshape(-1).long()
    segment = torch.arange(sizes.numel(), device=x.device).repeat_interleave(sizes)
    within = torch.arange(segment.numel(), device=x.device) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    head = segment // max(1, means.rows)
    slots = means.start.reshape(-1).long()[segment] + within
    member = means.order.flatten(0, 1)[head, slots] + head * x.shape[2]
    rows = wide.flatten(0, 2).index_select(0, member)
    sums = torch.zeros(sizes.numel(), x.shape[-1], dtype=wide.dtype, device=x.device).index_add(0, segment, rows)
    average = sums / sizes.clamp(min=1)[:, None]
    return torch.cat([wide, average.view(*x.shape[:2], means.rows, x.shape[-1])], 2)
