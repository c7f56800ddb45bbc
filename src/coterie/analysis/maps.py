"""Attention maps of single heads: the N × N weights are never held, blocks of rows are recomputed from q and k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor

from coterie.call import Call, Masks, Sizes
from coterie.checks import expect, expect_keywords
from coterie.exact import ExactRows, softmax

BLOCK = 1 << 22  # weights that are there at the same time
_LARGEST = 1e150  # products of larger numbers are infinite


@dataclass(frozen=True, eq=False)
class HeadMap:
    """The map of one head after softmax, A = softmax(scale·q·kᵀ), between its real queries and real keys, in float64.

    A query that sees no key has a row of zeros.

    Attributes:
        sample, head: which one it is.
        call: of this head alone, in float64, with the keys from the first real one to the last.
        query_at, key_at: (queries,), (keys,): the index of each real row among all rows, ascending.

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
    call: Call
    query_at: Tensor
    key_at: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Real queries × real keys."""
        return len(self.query_at), len(self.key_at)

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
        out = self.call.q.new_zeros(self.shape)
        for rows, weights in self.blocks():
            out[rows, : weights.shape[1]] = weights
        return out

    def _weights(self, rows: slice) -> Tensor:
        """(rows, the first keys): as many keys as the last of these rows can see."""
        exact = ExactRows(self.call, self.query_at[None, rows])
        visible = exact.visible
        weights = softmax(exact.scores(slice(0, visible)))[0, 0]
        if len(self.key_at) == self.call.sizes.keys:
            return weights
        column = self.key_at - self.key_at[0]
        return weights[:, column[column < visible]]


def head_maps(q: Tensor, k: Tensor, **masks: Unpack[Masks]) -> Iterator[HeadMap]:
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
    expect_keywords("head_maps", masks, Masks.__annotations__)
    return call_maps(Call.of(q, k, **masks, runs=False))


def call_maps(call: Call) -> Iterator[HeadMap]:
    """`head_maps` of a call."""
    real_queries, real_keys = call.real_queries, call.real_keys
    _check_real("q", "query_mask", call.q, real_queries)
    _check_real("k", "key_mask", call.k, real_keys)
    if call.pair_mask is not None and call.pair_mask.is_floating_point():
        wrong = call.pair_mask.isnan() | (call.pair_mask == float("inf"))
        expect(not bool(wrong.any()), "attn_mask", "finite numbers or −inf", "NaN or +inf")

    def walk() -> Iterator[HeadMap]:
        for b in range(call.sizes.batch):
            query_at, key_at = real_queries[b].nonzero()[:, 0], real_keys[b].nonzero()[:, 0]
            for h in range(call.sizes.heads):
                yield HeadMap(b, h, _one_head(call, b, h, key_at), query_at, key_at)

    return walk()


def _one_head(call: Call, b: int, h: int, key_at: Tensor) -> Call:
    """A call of one head of one sample in float64, without the keys before the first real one and behind the last."""
    sizes, pairs = call.sizes, call.pair_mask
    key_head = h // (sizes.heads // sizes.key_heads)
    first, stop = int(key_at[0]), int(key_at[-1]) + 1
    if pairs is not None:
        pairs = pairs.detach().expand(sizes.batch, sizes.heads, -1, -1)[b, h][None, None]
        pairs = pairs[..., first:stop] if pairs.shape[-1] > 1 else pairs
    return replace(
        call,
        q=call.q[b, h][None, None].detach().double(),
        k=call.k[b, key_head, first:stop][None, None].detach().double(),
        v=None,
        sizes=Sizes(1, 1, 1, sizes.queries, stop - first),
        key_mask=None if call.key_mask is None or len(key_at) == stop - first else call.key_mask[b, None, first:stop],
        query_mask=None,  # whoever is asked for is real
        guests=None,
        pair_mask=pairs,
        offset=call.offset[b, None] - first,
    )


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
