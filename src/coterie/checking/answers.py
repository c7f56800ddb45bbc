"""Rules of answers: shared heads, gradients, the native backend, compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from coterie.backend import backends
from coterie.checking.subject import LENGTH, Subject, case_of, close, draw, padded
from coterie.functional import attention


def heads(subject: Subject) -> Iterator[str]:
    q, k, v = draw(1, 4, LENGTH, 111, key_heads=2)
    k2, v2 = (x.repeat_interleave(2, 1) for x in (k, v))
    for settings in subject.ways:
        if not close(subject.attend(q, k, v, **settings), subject.attend(q, k2, v2, **settings)):
            yield "4 heads on 2 key heads do not give what they give on these repeated"


def gradients(subject: Subject) -> Iterator[str]:
    step = 1e-6
    for seed in range(3):
        inputs = draw(1, 2, 63, seed=seed)
        toward = draw(1, 2, 63, seed=seed + 10)
        weight = draw(1, 2, 63, seed=20)[0]
        moved = [[x + sign * step * t for x, t in zip(inputs, toward, strict=True)] for sign in (-1, 1)]
        plans = [subject.plan(*x[:2]).to_dense() for x in (inputs, *moved)]
        if not (torch.equal(plans[0], plans[1]) and torch.equal(plans[0], plans[2])):
            continue  # on an edge between two plans there is no derivative
        leaves = [x.clone().requires_grad_() for x in inputs]
        grads = torch.autograd.grad((subject.attend(*leaves) * weight).sum(), leaves, allow_unused=True)
        grads = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True))
        if not all(bool(g.isfinite().all()) for g in grads):
            yield "a gradient has inf or NaN"
            return
        slope = sum(float((g * t).sum()) for g, t in zip(grads, toward, strict=True))
        low, high = (float((subject.attend(*x) * weight).sum()) for x in moved)
        found = (high - low) / (2 * step)
        if abs(slope - found) > 1e-4 * max(1.0, abs(found)):
            yield f"the gradient's slope is {slope:.6g}, differences say {found:.6g}"
        return
    subject.skipped["gradients"] = "every point that was tried lies on an edge between two plans"


def _has_native(subject: Subject, rule: str) -> bool:
    """Whether the native backend can run; if not, the rule is skipped."""
    state = backends()["native"]
    available = state.startswith("available")
    if not available:
        subject.skipped[rule] = state
    return available


def native_plans(subject: Subject) -> Iterator[str]:
    if not _has_native(subject, "backends"):
        return
    for settings in subject.ways:
        for side in ("right", "left", ""):
            for queries, keys in ((LENGTH, LENGTH),) if side else ((LENGTH, LENGTH), (17, 111), (0, 5), (5, 0), (1, 1)):
                q, k, _ = (x.float() for x in draw(3, 2, queries, keys))
                masks: dict[str, Any] = {"key_mask": padded((LENGTH, 97, 3), LENGTH, side)} if side else {}
                native, reference = (
                    subject.plan(q, k, backend=backend, **masks, **settings) for backend in ("native", "reference")
                )
                if not torch.equal(native.to_dense(), reference.to_dense()):
                    yield f"{case_of(q, k, {**masks, **settings})}: the native plan differs from the reference's"
                    return


def compiles(subject: Subject) -> Iterator[str]:
    if not _has_native(subject, "compile"):
        return
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    q, k, v = (x.float() for x in draw(2, 2, 63))
    for settings in ({}, {**subject.ways[-1], "key_mask": padded((63, 20), 63, "right")}):
        settings = {**settings, "backend": "native"}
        out = subject.attend(q, k, v, run=compiled, **settings)
        if not close(out, subject.attend(q, k, v, **settings), 1e-4):
            yield f"{case_of(q, k, settings)}: the compiled graph gives another answer"
