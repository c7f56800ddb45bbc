"""How far clustered attention is from dense attention: of each head and each query, on all or on sampled queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.call import Call
from coterie.checks import expect, expect_int, expect_type
from coterie.engine.api import grouped_attention
from coterie.functional import MechanismLike
from coterie.mechanisms import as_mechanism
from coterie.mechanisms.base import Mechanism, plan_call
from coterie.observe import Seen
from coterie.plan import Plan, Round
from coterie.planning.orders import compact

_BUDGET = 1 << 21  # weights in memory at a time


class Estimate(NamedTuple):
    """A number, and an interval that holds it."""

    value: Tensor
    low: Tensor
    high: Tensor

    def __str__(self) -> str:
        if self.value.numel() != 1:
            return f"Estimate(value={self.value}, low={self.low}, high={self.high})"
        if float(self.high - self.low) == 0:
            return f"{float(self.value):.4g}"
        return f"{float(self.value):.4g} [{float(self.low):.4g}, {float(self.high):.4g}]"


@dataclass(frozen=True, eq=False)
class AttentionErrors:
    """What a mechanism changed: its weights ŵ_i = σ(P̂)_i on the real keys against those of dense attention, w_i.

    ŵ_ij is how much of v_j the answer of query i holds. If it meets a mean of keys, each of its members has an equal
    share of the mean's weight; if a mean query answers for it, its weights are those of the mean query.

    Every number is over the sampled queries of a sample (the same for all heads, drawn without replacement). Intervals
    are normal ones at the level `confidence`, of means over queries, with the correction (1 − n/N) for having seen n of
    N; roots and ratios are linearised (the delta method). If all queries were looked at, they have no width. Those of
    `mass` and `total_variation` hold as often as they say. Those of the norms are too narrow where few queries have
    most of the error: 90 % intervals from 60 of 251 queries held in 69 to 91 % of samples, head by head.

    Attributes:
        mechanism: its string.
        confidence: of the intervals.
        rows: (B, R) the queries that were looked at, ascending; −1 where a sample has fewer.
        population: (B,) how many real queries each sample has.
        keys_met: (B, H) scores that the engine computes for a query, on average over all queries; exact.
        weight_error: (B, H, R) ‖ŵ_i − w_i‖₂, the row of ‖σ(P̂) − σ(P)‖_F.
        weight_norm: (B, H, R) ‖w_i‖₂.
        output_error: (B, H, R) ‖ô_i − o_i‖₂; relative to `output_norm`, how wrong the answer of a query is.
        output_norm: (B, H, R) ‖o_i‖₂ of the dense answer.
        captured: (B, H, R) Σ_j w_ij over the keys j that i meets, directly or through a mean; 1 if it has none to meet.
        variation: (B, H, R) `½·Σ_j |ŵ_ij − w_ij|`, the mass that is in the wrong place; of plans whose pairs meet
            directly and once it is what was not captured.

    In the tensors of queries, NaN stands where `rows` has −1.
    """

    mechanism: str
    confidence: float
    rows: Tensor
    population: Tensor
    keys_met: Tensor
    weight_error: Tensor
    weight_norm: Tensor
    output_error: Tensor
    output_norm: Tensor
    captured: Tensor
    variation: Tensor

    # --- of each head, (B, H) -----------------------------------------------------------------------------------------

    def frobenius(self) -> Estimate:
        """‖σ(P̂) − σ(P)‖_F of each head, over all its real queries."""
        return self._of_heads(*self._root(self.weight_error.square(), self.population[:, None]))

    def relative_frobenius(self) -> Estimate:
        """‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F of each head."""
        return self._of_heads(*self._ratio(self.weight_error, self.weight_norm))

    def output(self) -> Estimate:
        """‖Ô − O‖_F / ‖O‖_F of each head's answers."""
        return self._of_heads(*self._ratio(self.output_error, self.output_norm))

    def mass(self) -> Estimate:
        """The mean softmax mass that the queries of each head capture."""
        return self._of_heads(*self._plain(self.captured))

    def total_variation(self) -> Estimate:
        """The mean mass in the wrong place, of each head."""
        return self._of_heads(*self._plain(self.variation))

    # --- the mean over heads and samples ------------------------------------------------------------------------------

    def mean(self, name: str) -> Estimate:
        """The mean over heads and samples of "frobenius", "relative_frobenius", "output", "mass" or "total_variation".

        Heads share their sampled queries, so the interval is that of the mean over heads of each query.
        """
        parts: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
            "frobenius": lambda: self._root(self.weight_error.square(), self.population[:, None]),
            "relative_frobenius": lambda: self._ratio(self.weight_error, self.weight_norm),
            "output": lambda: self._ratio(self.output_error, self.output_norm),
            "mass": lambda: self._plain(self.captured),
            "total_variation": lambda: self._plain(self.variation),
        }
        expect(name in parts, "name", "one of " + ", ".join(map(repr, parts)), repr(name))
        value, influence = parts[name]()
        some = self._counts > 0
        spread = self._variance(influence.mean(1)).masked_fill(~some, 0)
        samples = some.sum().clamp(min=1)
        mean = value.masked_fill(~some[:, None], 0).sum() / (samples * value.shape[1])
        return self._interval(mean, spread.sum().sqrt() / samples)

    def __str__(self) -> str:
        looked, real = int(self._counts.sum()), int(self.population.sum())
        lines = [
            f"{self.mechanism}: {float(self.keys_met.mean()):,.1f} keys met; {looked:,} of {real:,} queries"
            + ("" if looked == real else f", {self.confidence:.0%} intervals")
        ]
        for name, title in (
            ("frobenius", "‖σ(P̂) − σ(P)‖_F"),
            ("relative_frobenius", "relative to ‖σ(P)‖_F"),
            ("output", "relative error of outputs"),
            ("mass", "softmax mass captured"),
            ("total_variation", "mass in the wrong place"),
        ):
            lines.append(f"  {title:<26} {self.mean(name)}")
        return "\n".join(lines)

    # --- values and what each query adds to them ----------------------------------------------------------------------

    @property
    def _counts(self) -> Tensor:
        """(B,) queries that were looked at."""
        return (self.rows >= 0).sum(-1)

    def _average(self, x: Tensor) -> Tensor:
        """Over the queries that were looked at, (B, H)."""
        return x.masked_fill(self.rows[:, None] < 0, 0).sum(-1) / self._counts.clamp(min=1)[:, None]

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A mean, and how far each query is from it."""
        value = self._average(x)
        return value, x - value[..., None]

    def _root(self, squares: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """√(factor · mean), and its linear part for each query."""
        mean = self._average(squares)
        value = (factor * mean).sqrt()
        slope = torch.where(value > 0, factor / (2 * torch.where(value > 0, value, 1)), 0)
        return value, slope[..., None] * (squares - mean[..., None])

    def _ratio(self, errors: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """√(Σ errors² / Σ norms²), and its linear part for each query; 0 / 0 is 0."""
        size = self._average(norms.square())
        there = size > 0
        square = torch.where(there, self._average(errors.square()) / torch.where(there, size, 1), 0)
        value = torch.where(there | (self._average(errors.square()) == 0), square.sqrt(), math.inf)
        slope = torch.where(square > 0, 1 / (2 * square.sqrt() * size), 0)
        return value, slope[..., None] * (errors.square() - square[..., None] * norms.square())

    def _variance(self, influence: Tensor) -> Tensor:
        """Of a mean over sampled queries, (B, …) from (B, …, R); infinite if it was one query of several."""
        count, real, inside = self._counts.double(), self.population.double(), self.rows >= 0
        if influence.ndim == 3:
            count, real, inside = count[:, None], real[:, None], inside[:, None]
        squares = torch.where(inside, influence, 0).square().sum(-1)
        found = (1 - count / real.clamp(min=1)) * squares / ((count - 1).clamp(min=1) * count.clamp(min=1))
        return torch.where((count < 2) & (real > count), math.inf, found)

    def _of_heads(self, value: Tensor, influence: Tensor) -> Estimate:
        return self._interval(value, self._variance(influence).sqrt())

    def _interval(self, value: Tensor, deviation: Tensor) -> Estimate:
        level = torch.tensor(0.5 + self.confidence / 2, dtype=torch.float64, device=value.device)
        half = torch.special.ndtri(level) * deviation
        return Estimate(value, (value - half).clamp(min=0), value + half)


@torch.no_grad()
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
    call = Call.of(
        q,
        k,
        v,
        attn_mask=attn_mask,
        key_mask=key_mask,
        query_mask=query_mask,
        is_causal=is_causal,
        causal_offset=causal_offset,
        scale=scale,
        layer=layer,
        backend=backend,
        runs=False,
    )
    return _errors(call, as_mechanism(mechanism), rows, seed, confidence)


def _errors(call: Call, mechanism: Mechanism, rows: int | None, seed: int, confidence: float) -> AttentionErrors:
    if rows is not None:
        expect_int("rows", rows, at_least=2)
    expect_int("seed", seed, at_least=0, at_most=2**63 - 1)
    number = isinstance(confidence, int | float) and not isinstance(confidence, bool)
    expect_type(number, "confidence", "a number", type(confidence).__name__)
    expect(0 < confidence < 1, "confidence", "a number between 0 and 1", confidence)
    plan = plan_call(mechanism, call)
    sampled, population = sample_rows(call.real_queries, rows, seed)
    sums = _Sums(_Dense(call, sampled))
    options: dict[str, Any] = {"pair_mask": call.pair_mask, "scale": call.scale, "backend": call.backend}
    for columns, weights in engine_weights(call.q, call.k, plan, sampled, **options):
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
    call = replace(seen.call, q=seen.q.detach(), k=seen.k.detach(), v=seen.v.detach(), guests=None)
    return _errors(call, as_mechanism(mechanism), rows, seed, confidence)


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


# --- what the mechanism does ------------------------------------------------------------------------------------------


def engine_weights(
    q: Tensor,
    k: Tensor,
    plan: Plan,
    rows: Tensor,
    *,
    pair_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Iterator[tuple[slice, Tensor]]:
    """The weights ŵ that the engine gives the keys, for some queries (B, R): blocks of columns, each (B, H, R, block).

    An output is Σ_j ŵ_ij·v_j, so values that are columns of the identity make it the weights, whatever means the plan
    attends through. What stands for a row of −1 is of no meaning.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    if pair_mask is not None and pair_mask.is_floating_point():
        pair_mask = pair_mask.to(wide)
    small = restrict(plan, rows)
    index = rows.clamp(min=0)[:, None, :, None]
    each = max(1, plan.batch * max(plan.heads * plan.query_rows, plan.key_heads * plan.key_rows))
    for columns in _blocks(plan.num_keys, each):
        width = columns.stop - columns.start
        identity = torch.zeros(plan.num_keys, width, dtype=wide, device=q.device)
        identity[columns] = torch.eye(width, dtype=wide, device=q.device)
        values = identity.expand(plan.batch, plan.key_heads, -1, -1)
        out = grouped_attention(q, k, values, small, attn_mask=pair_mask, scale=scale, backend=backend).out
        yield columns, out.gather(2, index.expand(-1, plan.heads, -1, width)).double()


def _blocks(length: int, each: int) -> Iterator[slice]:
    size = max(1, _BUDGET // each)
    for start in range(0, length, size):
        yield slice(start, min(length, start + size))


def restrict(plan: Plan, rows: Tensor) -> Plan:
    """The same plan for some queries (B, R; −1 is none) alone: the others meet nobody."""
    keep = torch.zeros(plan.batch, plan.num_queries + 1, dtype=torch.bool, device=plan.device)
    keep.scatter_(-1, torch.where(rows < 0, plan.num_queries, rows), True)
    keep = keep[:, :-1]
    needed = torch.zeros(plan.batch, plan.heads, plan.query_rows + 1, dtype=torch.bool, device=plan.device)
    needed[..., : plan.num_queries] = keep[:, None]
    for virtual in (plan.answer, plan.mass):
        if virtual is not None:  # the mean queries that answer for those that are kept
            needed.scatter_(-1, torch.where(keep[:, None] & (virtual >= 0), virtual, plan.query_rows).long(), True)
    selves = None if plan.self_keys is None else torch.where(keep, plan.self_keys, -1)
    rounds = tuple(_restrict_round(each, needed[..., :-1]) for each in plan.rounds)
    return replace(plan, rounds=rounds, self_keys=selves)


def _restrict_round(each: Round, needed: Tensor) -> Round:
    """Groups keep the queries that are needed, in their order."""
    slots = torch.arange(each.query_order.shape[-1], device=needed.device)
    used = slots < each.query_offsets[..., -1:]
    kept = used & needed.gather(-1, torch.where(used, each.query_order, 0).long()) if needed.shape[-1] else used
    order, _ = compact(kept)
    before = torch.nn.functional.pad(kept.cumsum(-1), (1, 0))
    skip = each.skip
    if skip is not None:
        skip = skip.gather(2, order.long()[..., None].expand_as(skip))
    return replace(
        each,
        query_order=each.query_order.gather(-1, order.long()),
        query_offsets=before.gather(-1, each.query_offsets.long()).to(torch.int32),
        skip=skip,
    )


# --- what dense attention does ----------------------------------------------------------------------------------------


class _Dense:
    """Exact weights of the sampled queries, a block of columns at a time, in float64."""

    def __init__(self, call: Call, rows: Tensor) -> None:
        assert call.v is not None
        self.sizes, self.used, self._rows = call.sizes, rows >= 0, rows.clamp(min=0)
        self._q = call.scale * call.q.gather(2, self._index(call.q.shape[-1])).double()
        self._k, self._v, self._key_mask = call.k, call.v, call.key_mask
        self._pair_mask = None if call.pair_mask is None else self._of_rows(call.pair_mask)
        self._last = self._rows + call.offset[:, None] if call.causal else None
        self._lse: Tensor | None = None

    def _index(self, width: int) -> Tensor:
        return self._rows[:, None, :, None].expand(-1, self.sizes.heads, -1, width)

    def _of_rows(self, mask: Tensor) -> Tensor:
        """The rows of a (B | 1, H | 1, Nq | 1, Nk | 1) mask."""
        if mask.shape[2] == 1:
            return mask
        mask = mask.expand(self.sizes.batch, -1, -1, -1)
        index = self._rows[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
        return mask.gather(2, index)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, H, R)."""
        return (self.sizes.batch, self.sizes.heads, self.used.shape[1])

    def _per_head(self, x: Tensor, columns: slice) -> Tensor:
        """Some rows of k or v for every query head; those of masked keys are 0 and never matter."""
        part = x[:, :, columns].double()
        if self._key_mask is not None:
            part = part.masked_fill(~self._key_mask[:, None, columns, None], 0)
        return part.repeat_interleave(self.sizes.heads // self.sizes.key_heads, 1)

    def _scores(self, columns: slice) -> Tensor:
        scores = self._q @ self._per_head(self._k, columns).mT
        hidden = torch.zeros((), dtype=torch.bool, device=scores.device)
        if self._key_mask is not None:
            hidden = hidden | ~self._key_mask[:, None, None, columns]
        if self._last is not None:
            positions = torch.arange(columns.start, columns.stop, device=scores.device)
            hidden = hidden | (positions > self._last[:, None, :, None])
        if self._pair_mask is not None:
            mask = self._pair_mask[..., columns] if self._pair_mask.shape[-1] > 1 else self._pair_mask
            if mask.dtype == torch.bool:
                hidden = hidden | ~mask
            else:
                scores = scores + mask
        return scores.masked_fill(hidden, float("-inf"))

    @property
    def lse(self) -> Tensor:
        """log Σ_j e^{s_ij}, (B, H, R, 1); −inf for a query that sees nobody."""
        if self._lse is None:
            total = self._q.new_full((*self.shape, 1), float("-inf"))
            for columns in _blocks(self.sizes.keys, max(1, math.prod(self.shape))):
                total = torch.logaddexp(total, self._scores(columns).logsumexp(-1, keepdim=True))
            self._lse = total
        return self._lse

    def weights(self, columns: slice) -> Tensor:
        """w, (B, H, R, columns)."""
        seen = self.lse > float("-inf")
        return torch.where(seen, (self._scores(columns) - torch.where(seen, self.lse, 0)).exp(), 0)

    def answers(self, weights: Tensor, columns: slice) -> Tensor:
        """What weights on some keys take from their values, (B, H, R, Dv)."""
        return weights @ self._per_head(self._v, columns)


class _Sums:
    """What is summed over the columns."""

    def __init__(self, dense: _Dense) -> None:
        self._dense = dense
        zero = torch.zeros(dense.shape, dtype=torch.float64, device=dense.used.device)
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
        nothing = self._dense.lse.squeeze(-1) == float("-inf")
        tensors = {
            "weight_error": self._errors.sqrt(),
            "weight_norm": self._norms.sqrt(),
            "output_error": (out - exact).norm(dim=-1) if out.ndim else torch.zeros_like(self._norms),
            "output_norm": exact.norm(dim=-1) if out.ndim else torch.zeros_like(self._norms),
            "captured": torch.where(nothing, 1.0, self._captured),
            "variation": self._moved / 2,
        }
        return {name: x.masked_fill(~self._dense.used[:, None], math.nan) for name, x in tensors.items()}
