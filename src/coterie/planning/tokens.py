"""Tokens: what a mechanism plans from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from coterie.call import Call
from coterie.plan import Means, Plan, Round
from coterie.planning import native as native_steps
from coterie.planning import reference as reference_steps
from coterie.planning import whole
from coterie.planning.orders import compact
from coterie.planning.steps import Steps

_T = TypeVar("_T")


class _OfCall(Generic[_T]):
    """What tokens take from their call."""

    def __init__(self, read: Callable[[Call], _T]) -> None:
        self._read = read

    def __get__(self, tokens: Tokens | None, cls: type) -> _T:
        return self._read(tokens.call) if tokens is not None else self  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a mechanism plans from: queries and keys, and which of them are real. A view of a `Call`.

    Attributes:
        call: the call that is planned.
        query_mask, key_mask: (B, Nq), (B, Nk) bool, True for real tokens, whether the call has masks or not.
        guests: (B, Nq) bool, those of `query_mask` that are no real tokens, for mechanisms that are `per_query`.
        raw_q, raw_k: (B, H, Nq, D), (B, Hk, Nk, D), as they came.
        sizes: batch, heads, key_heads, queries, keys.
        offset: (B,) int32; query i sits at key position i + offset.
        causal: whether the keys behind a query's position are hidden from it.
        scale: of the scores.
        layer: index for the random draws.
        backend: "reference", "native" or "triton"; `steps` are its versions of the costly parts.
    """

    call: Call
    query_mask: Tensor
    key_mask: Tensor
    guests: Tensor | None = None

    raw_q = _OfCall(lambda call: call.q.detach())
    raw_k = _OfCall(lambda call: call.k.detach())
    sizes = _OfCall(lambda call: call.sizes)
    offset = _OfCall(lambda call: call.offset)
    causal = _OfCall(lambda call: call.causal)
    scale = _OfCall(lambda call: call.scale)
    layer = _OfCall(lambda call: call.layer)
    backend = _OfCall(lambda call: call.backend)

    @property
    def steps(self) -> Steps:
        """The planning steps of the backend: `coterie.planning.reference`, or its twin in C++ or on the GPU."""
        if self.backend == "triton":  # imported where it is used: most people have no GPU
            from coterie.planning import triton as triton_steps

            return triton_steps
        return native_steps if self.backend == "native" else reference_steps

    @property
    def q(self) -> Tensor:
        """(B, H, Nq, D) float64; padded rows and numbers that are not finite are 0."""
        return _planning(self.raw_q, self.query_mask)

    @property
    def k(self) -> Tensor:
        """(B, H, Nk, D) float64, one for each query head; padded rows and numbers that are not finite are 0."""
        return _planning(self.raw_k, self.key_mask).repeat_interleave(self.sizes.heads // self.sizes.key_heads, 1)

    @property
    def device(self) -> torch.device:
        """Where the plan is made."""
        return self.call.q.device

    @property
    def query_positions(self) -> Tensor:
        """(B, Nq): the key position that each query is level with."""
        return torch.arange(self.sizes.queries, device=self.device) + self.offset[:, None]

    @property
    def real_queries(self) -> tuple[Tensor, Tensor]:
        """The real queries in order, (B, Nq) int32, and how many, (B,)."""
        return compact(self.query_mask)

    @property
    def real_keys(self) -> tuple[Tensor, Tensor]:
        """The real keys in order, (B, Nk) int32, and how many, (B,)."""
        return compact(self.key_mask)

    def per_head(self, index: Tensor) -> Tensor:
        """A (B, …) index for every head, (B, H, …) int32, without a copy."""
        index = index.to(torch.int32).unsqueeze(1)
        return index.expand(-1, self.sizes.heads, *[-1] * (index.ndim - 2))

    def plan(
        self,
        rounds: tuple[Round, ...],
        *,
        duplicates: Any = "count",
        query_means: Means | None = None,
        key_means: Means | None = None,
        answer: Tensor | None = None,
        mass: Tensor | None = None,
        sound: bool = False,
    ) -> Plan:
        """A plan for these tokens; if causal, a query that meets only the future falls back on itself.

        `sound`: it need not be checked, as the compiled module has written it; see `coterie.planning.whole`.
        """
        make = Plan._unchecked if sound else Plan
        return make(
            num_queries=self.sizes.queries,
            num_keys=self.sizes.keys,
            key_heads=self.sizes.key_heads,
            rounds=rounds,
            offset=self.offset,
            duplicates=duplicates,
            causal=self.causal,
            self_keys=self._self_keys() if self.causal else None,
            query_means=query_means,
            key_means=key_means,
            answer=answer,
            mass=mass,
        )

    def _self_keys(self) -> Tensor:
        if whole.possible(self.call):
            return whole.self_keys(self.query_mask, self.key_mask, self.offset)
        positions = self.query_positions
        inside = (positions >= 0) & (positions < self.sizes.keys) & self.query_mask
        at = positions.clamp(0, max(0, self.sizes.keys - 1)).long()
        if self.sizes.keys:
            inside = inside & self.key_mask.gather(-1, at)
        return torch.where(inside, at, -1).to(torch.int32)


def _planning(x: Tensor, mask: Tensor) -> Tensor:
    wide = x.to(torch.float64).masked_fill(~mask[:, None, :, None], 0)
    return torch.where(wide.isfinite(), wide, 0)
