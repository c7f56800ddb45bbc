"""Slices of plans: the plan of one head, or of some queries alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from coterie.checks import expect, expect_int, expect_type
from coterie.plan.plan import Means, Plan, Round


def one_head(plan: Plan, *, head: int = 0, sample: int = 0) -> Plan:
    """The plan of a single head of a single sample, without a copy.

    Example:
        >>> import coterie, torch
        >>> from coterie.plan.slices import one_head
        >>> plan = coterie.Smyrf(cluster_size=16).plan(*torch.randn(2, 3, 4, 50, 8).unbind(0))
        >>> one = one_head(plan, head=3, sample=2)
        >>> one.batch, one.heads, torch.equal(one.to_dense()[0, 0], plan.to_dense()[2, 3])
        (1, 1, True)
    """
    expect_type(isinstance(plan, Plan), "plan", "a coterie.Plan", type(plan).__name__)
    expect_int("head", head, at_least=0)
    expect_int("sample", sample, at_least=0)
    expect(head < plan.heads, "head", f"one of the {plan.heads} heads, from 0", head)
    expect(sample < plan.batch, "sample", f"one of the {plan.batch} samples, from 0", sample)
    b, h = slice(sample, sample + 1), slice(head, head + 1)
    key_head = head // (plan.heads // plan.key_heads)

    def cut(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[b, h]

    rounds = tuple(
        replace(
            each,
            query_order=each.query_order[b, h],
            query_offsets=each.query_offsets[b, h],
            key_order=each.key_order[b, h],
            key_start=each.key_start[b, h],
            key_stop=each.key_stop[b, h],
            bias=cut(each.bias),
            skip=cut(each.skip),
            counts=cut(each.counts),
        )
        for each in plan.rounds
    )
    return replace(
        plan,
        key_heads=1,
        rounds=rounds,
        offset=plan.offset[b],
        self_keys=None if plan.self_keys is None else plan.self_keys[b],
        query_means=_cut_means(plan.query_means, b, h),
        key_means=_cut_means(plan.key_means, b, slice(key_head, key_head + 1)),
        answer=cut(plan.answer),
        mass=cut(plan.mass),
    )


def _cut_means(means: Means | None, b: slice, h: slice) -> Means | None:
    if means is None:
        return None
    positions = None if means.positions is None else means.positions[b, h]
    return Means(means.order[b, h], means.start[b, h], means.stop[b, h], positions)


def restrict(plan: Plan, rows: Tensor) -> Plan:
    """The same plan for some queries (B, R; −1 is none) alone: the others meet nobody.

    Example:
        >>> import coterie, torch
        >>> from coterie.plan.slices import restrict
        >>> plan = coterie.Local(window=5).plan(*torch.randn(2, 1, 1, 50, 8).unbind(0))
        >>> restrict(plan, torch.tensor([[0, 20]])).to_dense().sum(-1).nonzero()[:, 2].tolist()
        [0, 20]
    """
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
    first = torch.argsort(~kept, dim=-1, stable=True)
    before = torch.nn.functional.pad(kept.cumsum(-1), (1, 0))
    return replace(
        each,
        query_order=each.query_order.gather(-1, first),
        query_offsets=before.gather(-1, each.query_offsets.long()).to(torch.int32),
        skip=None if each.skip is None else each.skip.gather(2, first[..., None].expand_as(each.skip)),
    )
