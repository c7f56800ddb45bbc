"""How far clustered attention is from dense attention: of each head and each query, on all or on sampled queries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.analysis.engine_weights import engine_weights
from coterie.analysis.estimates import AttentionErrors, Estimate
from coterie.call import Call
from coterie.checks import expect, expect_int, expect_seed, expect_type
from coterie.exact import ExactRows
from coterie.functional import MechanismLike
from coterie.mechanisms import as_mechanism
from coterie.mechanisms.base import Mechanism, plan_call
from coterie.observe import Seen
from coterie.planning.orders import compact


def attention_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: MechanismLike,
    *,
    rows: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    attn_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
    layer: int = 0,
    backend: str = "auto",
) -> AttentionErrors:
    """What a mechanism changes on these tensors, against dense attention.

    The plan is made once, as `attention` would make it, and cut down to the queries that are looked at. Their weights
    on the keys come from the engine itself: values that are columns of the identity make its output the weights. The
    columns are taken in blocks, so that memory grows with N + rows and not with their product. Weights are computed in
    float32 or better by the engine and in float64 for dense attention.

    Args:
        q, k, v: as in `attention`; fewer key heads than query heads are fine.
        mechanism: any, those that attend through means too.
        rows: how many queries of each sample to look at; None is all of them, exactly.
        seed: of the sample of queries.
        confidence: of the intervals, between 0 and 1.
        attn_mask, key_mask, query_mask, is_causal, causal_offset, scale, layer, backend: as in `attention`.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.errors import attention_errors
        >>> q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
        >>> errors = attention_errors(q, k, v, coterie.TopK(k=30), rows=50)
        >>> errors.captured.shape, errors.output().value.shape
        (torch.Size([1, 2, 50]), torch.Size([1, 2]))
        >>> everything = attention_errors(q, k, v, coterie.TopK(k=300))
        >>> round(float(everything.mean("mass").value), 5), bool(everything.mean("output").value < 1e-5)
        (1.0, True)
    """
    masks: dict[str, Any] = {"attn_mask": attn_mask, "key_mask": key_mask, "query_mask": query_mask}
    place: dict[str, Any] = {"is_causal": is_causal, "causal_offset": causal_offset, "layer": layer}
    expect_type(isinstance(v, Tensor), "v", "a tensor", type(v).__name__)
    call = Call.of(q, k, v, **masks, **place, scale=scale, backend=backend, runs=False)
    return errors_of(call, as_mechanism(mechanism), rows, seed, confidence)


@torch.no_grad()
def errors_of(call: Call, mechanism: Mechanism, rows: int | None, seed: int, confidence: float) -> AttentionErrors:
    """`attention_errors` of a checked call."""
    if rows is not None:
        expect_int("rows", rows, at_least=2)
    expect_seed(seed)
    number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
    expect_type(number, "confidence", "a number", type(confidence).__name__)
    expect(0 < confidence < 1, "confidence", "a number between 0 and 1", confidence)
    plan = plan_call(mechanism, call)
    sampled, population = sample_rows(call.real_queries, rows, seed)
    sums = _Sums(ExactRows(call, sampled))
    for columns, weights in engine_weights(call, plan, sampled):
        sums.add(columns, weights)
    met = plan.pairs_met().double() / population.clamp(min=1)[:, None]
    return AttentionErrors(str(mechanism), float(confidence), sampled, population, met, **sums.found())


def call_errors(
    seen: Seen, mechanism: MechanismLike, *, rows: int | None = None, seed: int = 0, confidence: float = 0.95
) -> AttentionErrors:
    """`attention_errors` of a call of `coterie.attention` that an observer has seen, with its own masks and settings.

    Guests (padding that a Hugging Face model may read) do not count.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.errors import call_errors
        >>> model = coterie.nn.TransformerEncoderLayer(32, 4, batch_first=True, mechanism="full")
        >>> seen = []
        >>> with coterie.observing(seen.append):
        ...     _ = model(torch.randn(1, 100, 32))
        >>> call_errors(seen[0], "near-far:near=20", rows=30).rows.shape
        torch.Size([1, 30])
    """
    return errors_of(replace(seen.call, guests=None), as_mechanism(mechanism), rows, seed, confidence)


def sample_rows(mask: Tensor, rows: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Real queries of a (B, N) mask drawn without replacement: (B, R) ascending, −1 where there are fewer; and how many
    each sample has, (B,)."""
    order, population = compact(mask)
    length = mask.shape[-1]
    wanted = length if rows is None else min(rows, length)
    generator = torch.Generator().manual_seed(seed)
    found = torch.full((mask.shape[0], wanted), length, dtype=torch.int64)
    for b, real in enumerate(population.tolist()):
        some = torch.randperm(real, generator=generator)[:wanted]
        found[b, : some.numel()] = order[b].cpu()[some].long()
    found = found.sort(-1).values
    return torch.where(found < length, found, -1).to(mask.device), population


class _Sums:
    """What is summed over the columns."""

    def __init__(self, dense: ExactRows) -> None:
        self._dense = dense
        zero = torch.zeros(dense.shape, dtype=torch.float64, device=dense.rows.device)
        self._errors, self._norms, self._captured, self._moved = (zero.clone() for _ in range(4))
        self._out: Tensor | float = 0.0
        self._exact: Tensor | float = 0.0

    def add(self, columns: slice, found: Tensor) -> None:
        """A block of the mechanism's weights."""
        exact = self._dense.weights(columns)
        self._errors += (found - exact).square().sum(-1)
        self._norms += exact.square().sum(-1)
        self._captured += torch.where(found > 0, exact, 0).sum(-1)
        self._moved += (found - exact).abs().sum(-1)
        self._out = self._out + self._dense.answers(found, columns)
        self._exact = self._exact + self._dense.answers(exact, columns)

    def found(self) -> dict[str, Tensor]:
        """The tensors of queries of `AttentionErrors`."""
        out, exact = (torch.as_tensor(x, device=self._norms.device) for x in (self._out, self._exact))
        nothing = self._dense.lse == float("-inf")
        tensors = {
            "weight_error": self._errors.sqrt(),
            "weight_norm": self._norms.sqrt(),
            "output_error": (out - exact).norm(dim=-1) if out.ndim else torch.zeros_like(self._norms),
            "output_norm": exact.norm(dim=-1) if out.ndim else torch.zeros_like(self._norms),
            "captured": torch.where(nothing, 1.0, self._captured),
            "variation": self._moved / 2,
        }
        return {name: x.masked_fill(self._dense.rows[:, None] < 0, math.nan) for name, x in tensors.items()}


__all__ = ["AttentionErrors", "Estimate", "attention_errors", "call_errors"]
