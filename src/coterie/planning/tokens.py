"""Tokens: what a mechanism plans from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.call import Call, Sizes
from coterie.plan import Means, Plan, Round
from coterie.planning import native as native_steps
from coterie.planning import reference as reference_steps
from coterie.planning.orders import compact


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a mechanism plans from: queries and keys, and which of them are real.

    A view of a `Call`, whose every sample has a mask.

    Attributes:
        call: the call that is planned.
        query_mask, key_mask: (B, Nq), (B, Nk) bool, True for real tokens.
        guests: (B, Nq) bool, those of `query_mask` that are no real tokens; only what is `per_query` has any.
    """

    call: Call
    query_mask: Tensor
    key_mask: Tensor
    guests: Tensor | None = None

    @property
    def raw_q(self) -> Tensor:
        """(B, H, Nq, D), as they came."""
        return self.call.q.detach()

    @property
    def raw_k(self) -> Tensor:
        """(B, Hk, Nk, D), as they came."""
        return self.call.k.detach()

    @property
    def sizes(self) -> Sizes:
        """batch, heads, key_heads, queries, keys."""
        return self.call.sizes

    @property
    def offset(self) -> Tensor:
        """(B,) int32; query i sits at key position i + offset."""
        return self.call.offset

    @property
    def causal(self) -> bool:
        """Whether the keys behind a query's position are hidden from it."""
        return self.call.causal

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.call.scale

    @property
    def layer(self) -> int:
        """Index for the random draws."""
        return self.call.layer

    @property
    def backend(self) -> str:
        """Whose `steps`, the costly parts of planning, are taken: "reference" or "native"."""
        return self.call.backend

    @property
    def steps(self) -> Any:
        """The planning steps of the backend: `coterie.planning.reference` or its native twin."""
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
        shape = (index.shape[0], self.sizes.heads, *index.shape[1:])
        return index.to(torch.int32)[:, None].expand(shape)

    def plan(
        self,
        rounds: tuple[Round, ...],
        *,
        duplicates: Any = "count",
        query_means: Means | None = None,
        key_means: Means | None = None,
        answer: Tensor | None = None,
        mass: Tensor | None = None,
    ) -> Plan:
        """A plan for these tokens; if causal, a query that meets only the future falls back on itself."""
        return Plan(
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
        positions = self.query_positions
        inside = (positions >= 0) & (positions < self.sizes.keys) & self.query_mask
        at = positions.clamp(0, max(0, self.sizes.keys - 1)).long()
        if self.sizes.keys:
            inside = inside & self.key_mask.gather(-1, at)
        return torch.where(inside, at, -1).to(torch.int32)


def _planning(x: Tensor, mask: Tensor) -> Tensor:
    wide = x.to(torch.float64).masked_fill(~mask[:, None, :, None], 0)
    return torch.where(wide.isfinite(), wide, 0)
