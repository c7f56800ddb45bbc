"""Local: a window around each query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.checks import expect_int
from coterie.mechanisms.base import PerQuery, register
from coterie.plan import Plan, Round
from coterie.planning import whole
from coterie.planning.orders import ceil_div, compact
from coterie.planning.tokens import Tokens

_BLOCK = 128  # queries that share a gathered range of keys


def windowed(tokens: Tokens, window: tuple[int, int], query_mask: Tensor, key_mask: Tensor) -> Round:
    """Blocks of neighbouring queries, each with the range of keys that the window of any of them reaches."""
    queries, keys = tokens.sizes.queries, tokens.sizes.keys
    blocks = max(2, ceil_div(queries, _BLOCK))  # 1 would be a graph of its own
    low, high = window
    reach = 0 if tokens.causal else -low
    if whole.possible(tokens.call):
        return at_once(
            tokens, whole.neighbours(query_mask, key_mask, tokens.offset, blocks, _BLOCK, high, reach), window
        )
    edges = (torch.arange(blocks + 1, device=tokens.device) * _BLOCK).clamp(max=queries)
    query_order, _ = compact(query_mask)
    key_order, _ = compact(key_mask)
    # Positions of the first and last query of a block, whether real or not: a superset that the window then cuts.
    first = edges[:-1] + tokens.offset[:, None]
    last = edges[1:] - 1 + tokens.offset[:, None]
    return Round(
        query_order=tokens.per_head(query_order),
        query_offsets=tokens.per_head(_ranks(query_mask, edges.expand(tokens.sizes.batch, -1))),
        key_order=tokens.per_head(key_order),
        key_start=tokens.per_head(_ranks(key_mask, (first - high).clamp(0, keys))),
        key_stop=tokens.per_head(_ranks(key_mask, (last + reach + 1).clamp(0, keys))),
        window=window,
    )


def at_once(tokens: Tokens, found: whole.Neighbours, window: tuple[int, int] | None = None) -> Round:
    """What one native call has found, for every head."""
    order, offsets, keys, start, stop = (tokens.per_head(x) for x in found)
    return Round(order, offsets, keys, start, stop, window=window)


def _ranks(mask: Tensor, positions: Tensor) -> Tensor:
    """How many real tokens come before each position."""
    before = torch.nn.functional.pad(mask.cumsum(-1), (1, 0))
    return before.gather(-1, positions.long())


def window_of(size: int, causal: bool) -> tuple[int, int]:
    """The window of `size` as bounds on query position − key position."""
    return (0, size - 1) if causal else (-(size // 2), size // 2)


@register("local")
@dataclass(frozen=True)
class Local(PerQuery):
    """A window: query i meets keys j with `|i − j| ≤ window // 2`; causal, the last `window` keys, its own included.

    Positions are indices, padding counted. With Nq ≠ Nk, query i sits at key position i + causal_offset, also when
    not causal; the default is Nk − Nq. O(N·window). Causality: `strict`.

    Example:
        >>> import coterie, torch
        >>> q = torch.randn(1, 1, 6, 4)
        >>> coterie.Local(window=2).plan(q, q, is_causal=True).to_dense()[0, 0, 3].tolist()
        [0, 0, 1, 1, 0, 0]
    """

    size_field = "window"

    window: int = 256

    def check(self) -> None:
        expect_int("window", self.window, at_least=1)

    def build(self, tokens: Tokens) -> Plan:
        window = window_of(self.window, tokens.causal)
        found = windowed(tokens, window, tokens.query_mask, tokens.key_mask)
        return tokens.plan((found,), sound=whole.possible(tokens.call))
