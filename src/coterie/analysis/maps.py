"""Attention maps of single heads: the N × N weights are never held, blocks of rows are recomputed from q and k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.call import Call
from coterie.checks import expect

BLOCK = 1 << 22  # weights that are there at the same time
_LARGEST = 1e150  # products of larger numbers are infinite


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The map of one head after softmax, A = softmax(scale·q·kᵀ), between its real queries and real keys, in float64.

    A query that sees no key has a row of zeros.

    Attributes:
        sample, head: which one it is.
        q, k: (queries, D), (keys, D) float64, real rows alone; q holds the scale.
        query_at, key_at: (queries,), (keys,): the index of each real row among all rows, ascending.
        offset: query i sees the keys ≤ i + offset; None: all of them.
        mask: (Nq | 1, Nk | 1), bool or float: SDPA's mask of pairs, indexed by all rows.

    Example:
        >>> import torch
        >>> from coterie.analysis.maps import head_maps
        >>> q, k = torch.randn(2, 1, 1, 500, 16).unbind(0)
        >>> one = next(head_maps(q, k))
        >>> one.shape, one.times(torch.ones(500, 1, dtype=torch.float64)).sum().item()   # each row sums to 1
        ((500, 500), 500.0...)
    """

    sample: int
    head: int
    q: Tensor
    k: Tensor
    query_at: Tensor
    key_at: Tensor
    offset: int | None = None
    mask: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Real queries × real keys."""
        return self.q.shape[0], self.k.shape[0]

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """The rows, a block at a time: which, and their weights on the first keys; those on all later keys are 0."""
        queries, keys = self.shape
        step = max(1, BLOCK // keys)
        for first in range(0, queries, step):
            rows = slice(first, min(first + step, queries))
            yield rows, self._weights(rows)

    def times(self, x: Tensor) -> Tensor:
        """A @ x for x (keys, columns)."""
        out = x.new_zeros(self.shape[0], x.shape[1])
        for rows, weights in self.blocks():
            out[rows] = weights @ x[: weights.shape[1]]
        return out

    def transposed_times(self, x: Tensor) -> Tensor:
        """Aᵀ @ x for x (queries, columns)."""
        out = x.new_zeros(self.shape[1], x.shape[1])
        for rows, weights in self.blocks():
            out[: weights.shape[1]] += weights.mT @ x[rows]
        return out

    def energy(self) -> float:
        """‖A‖²_F, which is the sum of all squared singular values."""
        return float(sum(float(weights.square().sum()) for _, weights in self.blocks()))

    def dense(self) -> Tensor:
        """A itself, (queries, keys): for maps that fit."""
        out = self.q.new_zeros(self.shape)
        for rows, weights in self.blocks():
            out[rows, : weights.shape[1]] = weights
        return out

    def _weights(self, rows: slice) -> Tensor:
        """(rows, the first keys): as many keys as the last of these rows can see."""
        keys = self.shape[1]
        if self.offset is not None:
            last = self.query_at[rows][-1:] + self.offset
            keys = int(torch.searchsorted(self.key_at, last, right=True))
        scores = self.q[rows] @ self.k[:keys].mT
        if self.offset is not None:
            positions = self.query_at[rows, None] + self.offset
            scores.masked_fill_(self.key_at[:keys] > positions, float("-inf"))
        if self.mask is not None:
            part = _lookup(self.mask, self.query_at[rows], self.key_at[:keys])
            scores = torch.where(part, scores, float("-inf")) if part.dtype == torch.bool else scores + part
        lonely = ~(scores > float("-inf")).any(-1, keepdim=True)
        return scores.softmax(-1).masked_fill_(lonely, 0)


def _lookup(mask: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """A mask of pairs at some rows and keys; a side of length 1 stays so."""
    if mask.shape[0] > 1:
        mask = mask[rows]
    return mask[:, keys] if mask.shape[1] > 1 else mask


def head_maps(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
) -> Iterator[HeadMap]:
    """The map of every head of every sample, one after another; all arguments mean what they mean in `attention`.

    Padded rows are left out, so that they add no empty rows or columns; NaN in them is harmless.

    Args:
        q, k: (B, H, Nq, D), (B, Hk, Nk, D); fewer key heads are shared (GQA) without a copy.
        attn_mask: a mask of keys or of pairs, bool or float.
        key_mask, query_mask: (B, Nk), (B, Nq) bool, True for real tokens.
        is_causal, causal_offset: query i sees keys ≤ i + causal_offset, by default Nk − Nq.
        scale: 1/√D by default.

    Example:
        >>> import torch
        >>> from coterie.analysis.maps import head_maps
        >>> q, k = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 50, 8)
        >>> [(each.head, each.shape) for each in head_maps(q, k, is_causal=True)][:2]
        [(0, (30, 50)), (1, (30, 50))]
    """
    call = Call.of(
        q,
        k,
        attn_mask=attn_mask,
        key_mask=key_mask,
        query_mask=query_mask,
        is_causal=is_causal,
        causal_offset=causal_offset,
        scale=scale,
        runs=False,
    )
    return call_maps(call)


def call_maps(call: Call) -> Iterator[HeadMap]:
    """`head_maps` of a call."""
    sizes, q, k = call.sizes, call.q, call.k
    real_queries, real_keys = call.real_queries, call.real_keys
    _check_real("q", "query_mask", q, real_queries)
    _check_real("k", "key_mask", k, real_keys)
    pairs = None if call.pair_mask is None else _check_pairs(call.pair_mask.detach())

    def walk() -> Iterator[HeadMap]:
        for b in range(sizes.batch):
            query_at, key_at = real_queries[b].nonzero()[:, 0], real_keys[b].nonzero()[:, 0]
            for h in range(sizes.heads):
                yield HeadMap(
                    sample=b,
                    head=h,
                    q=call.scale * q[b, h, query_at].detach().double(),
                    k=k[b, h // (sizes.heads // sizes.key_heads), key_at].detach().double(),
                    query_at=query_at,
                    key_at=key_at,
                    offset=int(call.offset[b]) if call.causal else None,
                    mask=None if pairs is None else pairs[b % pairs.shape[0], h % pairs.shape[1]],
                )

    return walk()


def _check_real(name: str, mask_name: str, x: Tensor, real: Tensor) -> None:
    """Every sample needs a real row, and what is in real rows must be numbers."""
    empty = (~real.any(-1)).nonzero()
    got = f"none in sample {int(empty[0])}" if len(empty) else ""
    expect(not got, mask_name, "a real token in every sample", got)
    wrong = (~(x.abs() <= _LARGEST).all(-1) & real[:, None]).nonzero()  # NaN is not ≤ anything
    if len(wrong):
        b, h, i = wrong[0].tolist()
        expected = f"finite numbers in all real rows (padding goes into {mask_name})"
        expect(False, name, expected, f"{x[b, h, i].abs().max().item()} in sample {b}, head {h}, row {i}")


def _check_pairs(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        wrong = mask.isnan() | (mask == float("inf"))
        expect(not bool(wrong.any()), "attn_mask", "finite numbers or −inf", "NaN or +inf")
    return mask
