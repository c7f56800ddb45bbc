"""Exact attention of some queries of a call: what everything that is approximate is measured against."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from coterie.call import Call

BUDGET = 1 << 21  # weights in memory at a time
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class ExactRows:
    """Dense attention of some queries, a block of keys at a time:

        s_ij = scale·q_i·k_j + mask_ij,   w_ij = e^{s_ij} / Σ_j e^{s_ij}

    over the keys j that query i sees: real ones, of which no mask hides the pair, and none from its future if the call
    is causal. Whatever is in padded rows never matters. A padded query sees nobody.

    Attributes:
        call: the call, with all its masks.
        rows: (B, R) int64: the queries of each sample; −1 is none, which sees nobody.
        dtype: of the products q·k; what comes out is float64.

    Example:
        >>> import torch
        >>> from coterie.call import Call
        >>> call = Call.of(torch.randn(1, 4, 50, 8), torch.randn(1, 2, 70, 8), is_causal=True, runs=False)
        >>> some = ExactRows(call, torch.tensor([[0, 7, 49]]))
        >>> some.shape, (some.weights(slice(0, 70)) > 0).sum(-1)[0, 0].tolist()
        ((1, 4, 3), [21, 28, 70])
    """

    call: Call
    rows: Tensor
    dtype: torch.dtype = torch.float64

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, R)."""
        return (self.call.sizes.batch, self.call.sizes.heads, self.rows.shape[1])

    @property
    def positions(self) -> Tensor:
        """(B, R): the key position that each query is level with."""
        return self._index + self.call.offset[:, None]

    @property
    def visible(self) -> int:
        """How many of the first keys the queries can see, all but the last ones that are everybody's future."""
        keys = self.call.sizes.keys
        if not (self.call.causal and self.rows.numel()):
            return keys
        return max(0, min(keys, int(self.positions.max()) + 1))

    def blocks(self) -> Iterator[slice]:
        """All keys, so many at a time that the weights on them fit into memory."""
        return blocks(self.call.sizes.keys, math.prod(self.shape))

    def scores(self, columns: slice = _ALL) -> Tensor:
        """s on some keys, (B, H, R, columns); −inf where a key is not seen."""
        first, stop, _ = columns.indices(self.call.sizes.keys)
        together = self._queries @ self.call.k[:, :, first:stop].detach().to(self.dtype).mT
        scores = together.double().view(*self.shape, stop - first)
        hidden = [] if self._all_real else [~self._real[:, None, :, None]]
        if self.call.key_mask is not None:
            hidden.append(~self.call.key_mask[:, None, None, first:stop])
        if self.call.causal:
            keys = torch.arange(first, stop, device=scores.device)
            hidden.append(keys > self.positions[:, None, :, None])
        if self.call.pair_mask is not None:
            mask = self._of_rows(self.call.pair_mask.detach(), slice(first, stop))
            if mask.dtype == torch.bool:
                hidden.append(~mask)
            else:
                scores += mask
                hidden.append(mask == float("-inf"))  # NaN − ∞ would still be NaN
        return scores.masked_fill_(reduce(torch.logical_or, hidden), float("-inf")) if hidden else scores

    @cached_property
    def lse(self) -> Tensor:
        """log Σ_j e^{s_ij}, (B, H, R); −inf for a query that sees nobody."""
        total = torch.full(self.shape, float("-inf"), dtype=torch.float64, device=self.rows.device)
        for columns in self.blocks():
            total = torch.logaddexp(total, self.scores(columns).logsumexp(-1))
        return total

    def weights(self, columns: slice) -> Tensor:
        """w on some keys, (B, H, R, columns); all 0 for a query that sees nobody, NaN for one that sees NaN."""
        lse = torch.where(self.lse == float("-inf"), 0, self.lse)
        return self.scores(columns).sub_(lse[..., None]).exp_()

    def answers(self, weights: Tensor, columns: slice) -> Tensor:
        """What weights (B, H, R, columns) take from the values of these keys, (B, H, R, Dv)."""
        assert self.call.v is not None
        v = self.call.v[:, :, columns].detach().double()
        if self.call.key_mask is not None:
            v = v.masked_fill(~self.call.key_mask[:, None, columns, None], 0)
        return (self._by_key_head(weights) @ v).view(*self.shape, v.shape[-1])

    @cached_property
    def _index(self) -> Tensor:
        return self.rows.clamp(min=0)

    @cached_property
    def _real(self) -> Tensor:
        """(B, R): whether there is a query, and one that is answered."""
        answered, there = self.call.answered, self.rows >= 0
        return there if answered is None else there & answered.gather(-1, self._index)

    @cached_property
    def _all_real(self) -> bool:
        return bool(self._real.all())

    @cached_property
    def _queries(self) -> Tensor:
        """The queries, scaled, by the key head that they read: (B, Hk, H / Hk · R, D)."""
        index = self._index[:, None, :, None].expand(*self.shape, self.call.q.shape[-1])
        return self._by_key_head(self.call.scale * self.call.q.detach().gather(2, index).to(self.dtype))

    def _by_key_head(self, x: Tensor) -> Tensor:
        """(B, H, R, …) as (B, Hk, H / Hk · R, …): heads that share their keys side by side."""
        return x.unflatten(1, (self.call.sizes.key_heads, -1)).flatten(2, 3)

    def _of_rows(self, mask: Tensor, columns: slice) -> Tensor:
        """The part of a (B | 1, H | 1, Nq | 1, Nk | 1) mask that is about these queries and some keys."""
        if mask.shape[3] > 1:
            mask = mask[..., columns]
        if mask.shape[2] == 1:
            return mask
        index = self._index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        return mask.expand(index.shape[0], -1, -1, -1).gather(2, index)


def softmax(scores: Tensor) -> Tensor:
    """The weights of whole rows of scores; all 0 where everything is −inf.

    >>> softmax(torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]])).tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    """
    lonely = (scores == float("-inf")).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill_(lonely, 0)


def blocks(length: int, each: int) -> Iterator[slice]:
    """A length cut into slices, where one step of it holds `each` numbers."""
    size = max(1, BUDGET // max(1, each))
    for start in range(0, length, size):
        yield slice(start, min(length, start + size))
