"""The arguments of an SDPA call, laid out as `coterie.attention` takes them: 4 dimensions, masks taken apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.checks import expect, expect_type
from coterie.sdpa.masks import said


@dataclass(frozen=True, eq=False)
class Asked:
    """A call of `scaled_dot_product_attention` in 4 dimensions.

    Attributes:
        q, k, v: (B, H, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv).
        keys: (B, Nk) bool, True for real keys; None: all are.
        queries: (B, Nq) bool; the mask of the keys where there are as many queries as keys, as in self-attention.
        settings: the other arguments of `coterie.attention`.
        shape: of the answer, as SDPA gives it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor | None
    queries: Tensor | None
    settings: dict[str, Any]
    shape: tuple[int, ...]

    @property
    def real_keys(self) -> Tensor:
        """(B, Nk) bool, whether there is a mask or not."""
        return self.q.new_ones(self.k.shape[0], self.k.shape[2], dtype=torch.bool) if self.keys is None else self.keys

    @property
    def real_queries(self) -> Tensor:
        """(B, Nq) bool, whether there is a mask or not."""
        everyone = self.q.new_ones(self.q.shape[0], self.q.shape[2], dtype=torch.bool)
        return everyone if self.queries is None else self.queries


def asked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Asked:
    """What SDPA was called with; its `is_causal` lets query i see the keys ≤ i, however many there are."""
    heads = _Heads.of(query, key, value, enable_gqa)
    q, k, v = (heads.four(x) for x in (query, key, value))
    settings: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    keys = queries = None
    offset = 0 if is_causal else None
    if attn_mask is not None:
        found = said(heads.four_of_mask(attn_mask, q.shape[2], k.shape[2]), q.shape[2], k.shape[2])
        settings["attn_mask"] = found.pairs
        hidden = [each for each in (offset, found.offset) if each is not None]
        offset = min(hidden, default=None)
        if found.keys is not None:
            keys = found.keys.expand(q.shape[0], k.shape[2])
            queries = keys if q.shape[2] == k.shape[2] else torch.ones_like(q[:, 0, :, 0], dtype=torch.bool)
    if offset is not None:
        settings |= {"is_causal": True, "causal_offset": offset}
    return Asked(q, k, v, keys, queries, settings, (*heads.lead, query.shape[-2], value.shape[-1]))


@dataclass(frozen=True)
class _Heads:
    """How the leading dimensions of a call become a batch and heads."""

    lead: tuple[int, ...]  # of the queries and of the answer
    apart: bool  # the last of them are heads; a single one is a batch
    grouped: bool  # keys have heads of their own number

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> _Heads:
        """All leading dimensions broadcast, but for the heads of grouped queries."""
        named = {"query": q, "key": k, "value": v}
        for name, x in named.items():
            expect_type(not x.is_nested, name, "a padded tensor", "a nested one")
            expect(x.ndim >= 2, name, "2 dimensions or more", tuple(x.shape))
        leads = [tuple(x.shape[:-2]) for x in named.values()]
        grouped = enable_gqa and all(leads) and leads[0][-1] != leads[1][-1]
        try:
            shared = torch.broadcast_shapes(*(lead[:-1] if grouped else lead for lead in leads))
        except RuntimeError as error:
            got = ", ".join(str(tuple(x.shape)) for x in named.values())
            raise ValueError(f"query, key, value: expected leading dimensions that broadcast, got {got}") from error
        lead = (*shared, leads[0][-1]) if grouped else tuple(shared)
        return _Heads(lead, grouped or len(lead) > 1, grouped)

    @property
    def samples(self) -> tuple[int, ...]:
        """The leading dimensions that are no heads."""
        return self.lead[:-1] if self.apart else self.lead

    def four(self, x: Tensor) -> Tensor:
        """A tensor (…, N, D) as (B, H, N, D)."""
        heads = 1 if not self.apart else x.shape[-3] if self.grouped else self.lead[-1]
        if not self.apart:
            x = x.unsqueeze(-3)
        return x.expand(*self.samples, heads, -1, -1).reshape(math.prod(self.samples), heads, *x.shape[-2:])

    def four_of_mask(self, mask: Tensor, queries: int, keys: int) -> Tensor:
        """A mask (…, Nq | 1, Nk | 1) as (B | 1, H | 1, Nq | 1, Nk | 1)."""
        known = mask.dtype == torch.bool or mask.is_floating_point()
        expect_type(known, "attn_mask", "a bool or float dtype", mask.dtype)
        full = (*self.lead, queries, keys)
        shape = (1,) * (len(full) - mask.ndim) + tuple(mask.shape)
        fits = len(shape) == len(full) and all(a in (1, b) for a, b in zip(shape, full, strict=True))
        expect(fits, "attn_mask", "a shape that broadcasts to {}", tuple(mask.shape), full)
        mask = mask.reshape(shape)
        if not self.apart:
            mask = mask.unsqueeze(-3)
        if math.prod(mask.shape[:-3]) == 1:
            return mask.reshape(1, *mask.shape[-3:])
        return mask.expand(*self.samples, -1, -1, -1).reshape(math.prod(self.samples), *mask.shape[-3:])
