"""Rules of what a plan is: of any length, valid, of shapes that no data decide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.call import Sizes
from coterie.checking.subject import LENGTH, LENGTHS, Subject, case_of, draw, padded, working
from coterie.engine.api import check_plan
from coterie.mechanisms.base import Causality
from coterie.plan import Plan


def runs(subject: Subject) -> Iterator[str]:
    q, k, _ = draw(2, 2, LENGTH)
    plan = subject.plan(q, k)
    if not isinstance(plan, Plan):
        yield f"plan() gave {type(plan).__name__}, not a Plan"
        return
    sizes = Sizes(2, 2, 2, LENGTH, LENGTH)
    try:
        check_plan(plan, sizes, q.device)
    except ValueError as error:
        yield f"{LENGTH} queries and keys: {error}"
    if subject.level not in tuple(Causality):
        yield f'causality is {subject.level!r}, not "none", "mask" or "strict"'


def lengths(subject: Subject) -> Iterator[str]:
    for settings in subject.ways:
        for queries, keys in LENGTHS:
            q, k, _ = draw(2, 2, queries, keys)
            plan = subject.plan(q, k, **settings)
            if (plan.num_queries, plan.num_keys) != (queries, keys):
                yield f"{case_of(q, k, settings)}: the plan is for {plan.num_queries} and {plan.num_keys}"


def valid(subject: Subject) -> Iterator[str]:
    for settings in subject.ways:
        for queries, keys in (*LENGTHS, (LENGTH, LENGTH)):
            q, k, v = draw(2, 2, queries, keys)
            case = case_of(q, k, settings)
            plan = subject.plan(q, k, **settings)
            working(case, plan.validate)
            out = subject.attend(q, k, v, plan=plan, **settings)
            if not bool(out.isfinite().all()):
                yield f"{case}: the answer has inf or NaN, as a bias of the plan is +inf"


def shapes(subject: Subject) -> Iterator[str]:
    q, k, _ = draw(3, 2, LENGTH)
    others: dict[str, tuple[tuple[Tensor, Tensor], dict[str, Any]]] = {
        "other data": ((5 * q.flip(2), k.roll(3, 2)), {}),
        "equal tokens": ((torch.zeros_like(q), torch.zeros_like(k)), {}),
        "a key_mask": ((q, k), {"key_mask": padded((LENGTH, 20, 0), LENGTH, "right")}),
    }
    for settings in subject.ways:
        want = {name: tuple(x.shape) for name, x in subject.plan(q, k, **settings).to_dict().items()}
        for name, ((q2, k2), masks) in others.items():
            got = {name: tuple(x.shape) for name, x in subject.plan(q2, k2, **masks, **settings).to_dict().items()}
            for field in want.keys() | got.keys():
                if want.get(field) != got.get(field):
                    yield f"{field} has shape {want.get(field)} for some input and {got.get(field)} for {name}"
