"""Guests: queries that nobody plans with, and that are answered all the same.

A padded token must not change whom the real ones meet, yet some models read what it says. So a plan is made without it,
and it then sits down in the groups of its host: the last planned query before it, or the first one if there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from coterie.plan.plan import Plan, Round

GroupBy = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def seat(plan: Plan, query_mask: Tensor, guests: Tensor, group_by: GroupBy) -> Plan:
    """The plan with its guests seated; no planned query meets anyone else than before.

    Args:
        query_mask: (B, Nq) bool, the queries that the plan was made with.
        guests: (B, Nq) bool, others to be answered too.
        group_by: the planning step of the backend.
    """
    if plan.num_queries == 0:
        return plan
    host = _hosts(query_mask)
    seated = guests & (host >= 0)
    host = host.clamp(min=0)[:, None].expand(-1, plan.heads, -1)
    seated = seated[:, None].expand_as(host)

    def borrowed(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else torch.where(seated, rows.gather(-1, host), rows)

    return replace(
        plan,
        rounds=tuple(_seat_in_round(plan, each, host, seated, group_by) for each in plan.rounds),
        answer=borrowed(plan.answer),
        mass=borrowed(plan.mass),
    )


def _hosts(query_mask: Tensor) -> Tensor:
    """(B, Nq): the host of each query, itself if it is planned; −1 where nobody is."""
    length = query_mask.shape[-1]
    place = torch.arange(length, device=query_mask.device)
    before = torch.where(query_mask, place, -1).cummax(-1).values
    first = torch.where(query_mask, place, length).amin(-1, keepdim=True)
    return torch.where(before >= 0, before, torch.where(first < length, first, -1))


def _seat_in_round(plan: Plan, each: Round, host: Tensor, seated: Tensor, group_by: GroupBy) -> Round:
    nowhere = each.groups
    if nowhere == 0 or each.query_order.shape[-1] == 0:
        return each
    slots = torch.arange(each.query_order.shape[-1], device=plan.device).expand_as(each.query_order)
    used = slots < each.query_offsets[..., -1:]
    # A guest that the plan has named all the same gives up its seat.
    real = used & (each.query_order < plan.num_queries)
    used = used & ~(real & seated.gather(-1, torch.where(real, each.query_order, 0).long()))
    edges = each.query_offsets.to(torch.int64).contiguous()
    group = torch.where(used, torch.searchsorted(edges, slots.contiguous(), right=True) - 1, nowhere)
    # What a slot that is not used would write goes behind the end.
    row = torch.where(used, each.query_order, plan.query_rows).long()
    lead = (plan.batch, plan.heads, plan.query_rows + 1)
    slot_of_row = torch.full(lead, -1, device=plan.device).scatter(-1, row, slots)
    host_slot = slot_of_row.gather(-1, host)
    here = seated & (host_slot >= 0)
    host_slot = host_slot.clamp(min=0)
    labels = torch.cat([group, torch.where(here, group.gather(-1, host_slot), nowhere)], -1)
    order, offsets = group_by(labels, labels < nowhere, nowhere)
    order = order.long()
    rows = torch.arange(plan.num_queries, dtype=torch.int32, device=plan.device).expand_as(host)
    skip = each.skip
    if skip is not None:
        width = (*host_slot.shape, skip.shape[-1])
        both = torch.cat([skip, skip.gather(2, host_slot[..., None].expand(width))], 2)
        skip = both.gather(2, order[..., None].expand(*order.shape, skip.shape[-1]))
    return replace(
        each, query_order=torch.cat([each.query_order, rows], -1).gather(-1, order), query_offsets=offsets, skip=skip
    )
