"""Rules of what comes again: the same plan, any layer and seed, the mechanism from its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

import torch

from coterie.checking.subject import LENGTH, Subject, draw, equal, working
from coterie.mechanisms import as_mechanism
from coterie.plan import Plan


def determinism(subject: Subject) -> Iterator[str]:
    q, k, _ = draw(2, 2, LENGTH)
    if subject.resample:
        if not equal(subject.plan(q, k), subject.plan(q, k)):
            yield "with resample, the same seed of torch gives two plans"
        return
    torch.manual_seed(1)
    first = subject.plan(q, k)
    state = torch.random.get_rng_state()
    second = subject.plan(q, k)
    if not torch.equal(state, torch.random.get_rng_state()):
        yield "planning draws from torch's generator"
        return
    torch.manual_seed(2)
    if not (equal(first, second) and equal(first, subject.plan(q, k))):
        yield "the same input gives two plans"


def layers(subject: Subject) -> Iterator[str]:
    q, k, _ = draw(1, 2, LENGTH)
    for layer in (1, 2**24 - 1):
        subject.plan(q, k, layer=layer)
    if not is_dataclass(subject.mechanism) or "seed" not in [f.name for f in fields(subject.mechanism)]:
        return
    for seed in (1, 2**63 - 1):
        reseeded = working(f"seed {seed}", replace, subject.mechanism, seed=seed)
        plan = subject.plan(q, k, mechanism=reseeded)
        if not isinstance(plan, Plan):
            yield f"seed {seed}: plan() gave {type(plan).__name__}, not a Plan"


def text(subject: Subject) -> Iterator[str]:
    mechanism = subject.whole
    if not (is_dataclass(mechanism) and type(mechanism).__dataclass_params__.frozen):
        yield f"{type(mechanism).__name__} is not a frozen dataclass"
        return
    for form, text in (("string", str(mechanism)), ("JSON form", working("to_json()", mechanism.to_json))):
        if not subject.mechanism.name:
            yield f"{type(subject.mechanism).__name__} has no name"
            return
        back = working(f"its {form} {text!r}", as_mechanism, text)
        if back != mechanism:
            yield f"its {form} {text!r} is read as another mechanism, {back!r}"
            return
