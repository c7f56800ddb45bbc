"""Rules of what must not matter: padding, other samples, the future."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.checking.subject import LENGTH, REAL, Subject, case_of, close, draw, padded
from coterie.engine.api import check_padding
from coterie.mechanisms.base import Causality
from coterie.plan import Plan


def padding(subject: Subject) -> Iterator[str]:
    for settings in subject.ways:
        for side in ("right", "left", "scattered"):
            mask = padded(REAL, LENGTH, side)
            yield from _padded_batch(subject, mask, side, settings)
    yield from _padded_cross_attention(subject)


def _names_padding(plan: Plan, query_mask: Tensor, key_mask: Tensor) -> str | None:
    try:
        check_padding(plan, key_mask, query_mask)
    except ValueError as error:
        return f"a mean holds padded tokens ({error})"
    counts = plan.to_dense()
    if bool(counts.permute(0, 3, 1, 2)[~key_mask].any()):
        return "padded keys are in its groups"
    if bool(counts.transpose(1, 2)[~query_mask].any()):
        return "padded queries are in its groups, or borrow an answer"
    return None


def _padded_batch(subject: Subject, mask: Tensor, side: str, settings: dict[str, Any]) -> Iterator[str]:
    q, k, v = draw(len(REAL), 2, LENGTH)
    case = f"a batch padded to {LENGTH} ({side}{', causal' if settings else ''})"
    plan = subject.plan(q, k, key_mask=mask, **settings)
    if named := _names_padding(plan, mask, mask):
        yield f"{case}: {named}"
        return
    out, dense = subject.attend(q, k, v, key_mask=mask, plan=plan, **settings), plan.to_dense()
    for b, real in enumerate(mask):
        own = [x[b : b + 1, :, real] for x in (q, k, v)]
        alone = subject.plan(*own[:2], **settings)
        same_plan = torch.equal(dense[b][:, real][:, :, real], alone.to_dense()[0])
        if same_plan and close(out[b, :, real], subject.attend(*own, plan=alone, **settings)[0]):
            continue
        if side == "scattered" and subject.positional():
            subject.skipped["padding in the midst of a sequence, against the sequence alone"] = "holes are distances"
            return
        what = "answer" if same_plan else "plan"
        yield f"{case}: the {what} of the sample with {int(real.sum())} tokens is not the one that it gets alone"


def _padded_cross_attention(subject: Subject) -> Iterator[str]:
    queries, keys = (60, 11, 3), (33, 90, 1)
    q, k, v = draw(3, 2, 60, 90)
    query_mask, key_mask = padded(queries, 60, "left"), padded(keys, 90, "right")
    settings: dict[str, Any] = {
        "query_mask": query_mask,
        "key_mask": key_mask,
        "causal_offset": torch.tensor(keys) - 60,
    }
    plan = subject.plan(q, k, **settings)
    if named := _names_padding(plan, query_mask, key_mask):
        yield f"cross-attention with padding: {named}"
        return
    out = subject.attend(q, k, v, plan=plan, **settings)
    for b in range(3):
        own = q[b : b + 1, :, query_mask[b]], k[b : b + 1, :, key_mask[b]], v[b : b + 1, :, key_mask[b]]
        if not close(out[b, :, query_mask[b]], subject.attend(*own)[0]):
            alone = f"{queries[b]} queries and {keys[b]} keys"
            yield f"cross-attention with padding: the answer of {alone} is not the one that they get alone"


def isolation(subject: Subject) -> Iterator[str]:
    q, k, v = draw(3, 2, LENGTH)
    before = q.clone(), k.clone()
    for settings in subject.ways:
        plan = subject.plan(q, k, **settings)
        if not (torch.equal(q, before[0]) and torch.equal(k, before[1])):
            yield "planning changes q or k in place"
            return
        changed = [x.clone() for x in (q, k)]
        for x in changed:
            x[1] = 50 * x[1].roll(3, 1)
        others = [0, 2]
        if not torch.equal(plan.to_dense()[others], subject.plan(*changed, **settings).to_dense()[others]):
            yield "the plan of one sample changes with another sample of the batch"
            return
        if subject.mechanism.per_query:
            half = torch.cat([q[:, :, : LENGTH // 2], 50 * q[:, :, LENGTH // 2 :].roll(3, 2)], 2)
            met = (each.to_dense()[:, :, : LENGTH // 2] for each in (plan, subject.plan(half, k, **settings)))
            if not torch.equal(*met):
                yield "it declares per_query, and whom a query meets changes with other queries"
                return
        mask = padded((LENGTH, 97, 20), LENGTH, "right")
        settings = {**settings, "key_mask": mask}
        want, out = subject.plan(q, k, **settings), subject.attend(q, k, v, **settings)
        for wild in (float("nan"), float("inf"), 1e30):
            dirty = [torch.where(mask[:, None, :, None], x, wild) for x in (q, k, v)]
            same = torch.equal(want.to_dense(), subject.plan(*dirty[:2], **settings).to_dense())
            if not same or not torch.equal(out, subject.attend(*dirty, **settings)):
                yield f"{wild} in the padding changes {'the answer' if same else 'the plan'}"
                return


def causality(subject: Subject) -> Iterator[str]:
    q, k, v = draw(1, 2, LENGTH)
    if subject.level == Causality.NONE:
        try:
            subject.mechanism.plan(q, k, is_causal=True, backend="reference")
        except ValueError:
            return
        yield 'it declares "none" and does not refuse is_causal'
        return
    for queries in (LENGTH, 60):  # alone, and with a cache in front
        tail = q[:, :, LENGTH - queries :]
        plan = subject.plan(tail, k, is_causal=True)
        out = subject.attend(tail, k, v, is_causal=True)
        for cut in (LENGTH - queries + 1, LENGTH - queries // 2, LENGTH - 1):  # the first key that is changed
            earlier = cut - (LENGTH - queries)
            other = torch.where(torch.arange(LENGTH)[:, None] < cut, v, float("nan"))
            if not close(subject.attend(tail, k, other, is_causal=True)[:, :, :earlier], out[:, :, :earlier]):
                yield f"values from key {cut} on reach queries before it ({case_of(tail, k, {'is_causal': True})})"
                return
            if subject.level != Causality.STRICT:
                continue
            late = torch.arange(LENGTH)[:, None] >= cut
            drawn = draw(1, 2, LENGTH, seed=cut)
            q2, k2, v2 = (torch.where(late, 3 * y, x) for x, y in zip((q, k, v), drawn, strict=True))
            q2 = q2[:, :, LENGTH - queries :]
            after = subject.plan(q2, k2, is_causal=True)
            if not torch.equal(after.to_dense()[:, :, :earlier], plan.to_dense()[:, :, :earlier]):
                yield f'it declares "strict", and tokens from {cut} on change the plan of queries before them'
                return
            if not close(subject.attend(q2, k2, v2, is_causal=True)[:, :, :earlier], out[:, :, :earlier]):
                yield f'it declares "strict", and tokens from {cut} on change the answers of queries before them'
                return
