"""Theorem 2: when merging hashing rounds gives dense attention. Its assumptions as predicates on a plan.

For a query q with dense weights w, and n_k the number of rounds in which it meets key k (supplement §13.3):

    1  sparsity        at most T keys, and at least one, have w_k ≠ 0
    2  fairness        all keys with w_k ≠ 0 are met equally often
    3  effectiveness   every key with w_k ≠ 0 is met

With finite scores no weight is 0, so "≠ 0" has to mean "more than a tolerance", and the theorem becomes a bound: with
N the common number of meetings, δ the dense weight of the keys at or below the tolerance and
δ′ = M / (N·(1 − δ) + M), M = Σ_{those keys} n_k·w_k, the weights of the merge differ from the dense ones by
2·max(δ, δ′) in the 1-norm, and the output by as much times the largest ‖v‖. With δ = 0 that is Theorem 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.call import Call
from coterie.checks import expect, expect_int, expect_type
from coterie.engine.api import check_plan
from coterie.exact import ExactRows, softmax
from coterie.plan import Plan


@dataclass(frozen=True, eq=False)
class Assumptions:
    """For every query of every head, (B, H, Nq): which assumptions hold, and what follows.

    Attributes:
        real: the queries that count; the others are padding.
        sparse, fair, effective: Assumptions 1, 2 and 3. Without a weight above the tolerance the first fails, and the
            others hold for want of keys.
        bound: 2·max(δ, δ′), how far the merged weights can be from the dense ones in the 1-norm; inf unless 2 and 3
            hold. Times the largest ‖v‖ it bounds the output's error.
    """

    real: Tensor
    sparse: Tensor
    fair: Tensor
    effective: Tensor
    bound: Tensor

    @property
    def hold(self) -> Tensor:
        """(B, H, Nq): all three."""
        return self.sparse & self.fair & self.effective

    def describe(self) -> str:
        """The share of queries for which each assumption holds."""
        real = self.real.double()
        count = max(1.0, float(real.sum()))
        shares = [("sparse", self.sparse), ("fair", self.fair), ("effective", self.effective), ("all", self.hold)]
        return ", ".join(f"{name} {float((x * real).sum()) / count:.1%}".replace("%", " %") for name, x in shares)


def assumptions(
    q: Tensor,
    k: Tensor,
    plan: Plan,
    *,
    most: int | None = None,
    tolerance: float = 0.0,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
) -> Assumptions:
    """Check the assumptions of Theorem 2 for a plan. Quadratic in memory, as `plan.to_dense()` is.

    Args:
        q, k: (B, H, Nq, D), (B, Hk, Nk, D), what the plan was made from.
        plan: of keys met directly: any mechanism without means.
        most: T; no limit by default.
        tolerance: dense weights up to this count as 0.
        key_mask, query_mask: (B, Nk), (B, Nq) bool, True for real tokens.
        scale: of the scores; 1/√D by default.

    Example:
        >>> import coterie
        >>> q = k = 40 * torch.eye(6, dtype=torch.float64)[None, None]      # each query has one key
        >>> plan = coterie.Local(window=3).plan(q, k)
        >>> assumptions(q, k, plan, most=1, tolerance=1e-9).describe()
        'sparse 100.0 %, fair 100.0 %, effective 100.0 %, all 100.0 %'
    """
    expect_type(isinstance(plan, Plan), "plan", "a coterie.Plan", type(plan).__name__)
    call = Call.of(q, k, key_mask=key_mask, query_mask=query_mask, scale=scale, runs=False, same_tokens=False)
    return call_assumptions(call, plan, most=most, tolerance=tolerance)


@torch.no_grad()
def call_assumptions(call: Call, plan: Plan, *, most: int | None = None, tolerance: float = 0.0) -> Assumptions:
    """`assumptions` of a checked call, with all its masks; causality is the plan's."""
    check_plan(plan, call.sizes, call.q.device)
    plain = all(each.bias is None and each.counts is None for each in plan.rounds)
    direct = plan.query_means is None and plan.key_means is None and plain
    expect(
        direct, "plan", "keys that are met directly; Theorem 2 says nothing about means and biases", "means or biases"
    )
    expect(0.0 <= tolerance < 1.0, "tolerance", "a number in [0, 1)", tolerance)
    if most is not None:
        expect_int("most", most, at_least=1)
    everyone = torch.arange(plan.num_queries, device=plan.device).expand(plan.batch, -1)
    exact = ExactRows(replace(call, causal=plan.causal, offset=plan.offset, guests=None), everyone)
    weights = softmax(exact.scores())
    real = call.real_queries[:, None].expand(exact.shape)
    counts = plan.to_dense().to(weights.dtype)
    if plan.duplicates == "once":
        counts = counts.clamp(max=1)  # a pair counts once, so Assumption 2 follows from 3
    return _judge(weights, counts, real, most, tolerance)


def _judge(weights: Tensor, counts: Tensor, real: Tensor, most: int | None, tolerance: float) -> Assumptions:
    kept = weights > tolerance
    number = kept.sum(-1)
    sparse = (number >= 1) if most is None else (number >= 1) & (number <= most)
    fewest = counts.masked_fill(~kept, float("inf")).amin(-1)
    often = counts.masked_fill(~kept, 0).amax(-1)
    fair = (fewest == often) | (number == 0)
    effective = (fewest >= 1) | (number == 0)
    small = weights.masked_fill(kept, 0)
    delta, extra = small.sum(-1), (small * counts).sum(-1)
    merged = extra / (often * (1 - delta) + extra)
    bound = torch.where(fair & effective & (number >= 1), 2 * torch.maximum(delta, merged), float("inf"))
    return Assumptions(real, sparse & real, fair & real, effective & real, bound)
