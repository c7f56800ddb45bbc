"""Candidates for decoding in every layer, over a dense cache: what a token costs, and what its answer changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coterie.fitting.decoding.measure import Continued, read_first
from coterie.fitting.profile import Profile, Profiled, Shape
from coterie.fitting.task import Task
from coterie.hosts import DENSE
from coterie.mechanisms import AtLeast
from coterie.mechanisms.by_sample import FEW_QUERIES

PROFILE = 0.5  # of a budget is over when candidates have been tried
_REPEATS = 3  # of a token that is timed


def profile(task: Task, scale: Continued) -> Profiled:
    """Try every candidate in every layer on the last tokens of each document of the search."""
    import coterie.hf
    from coterie.hf.questions import answering

    found, reached = Profile(), 0
    modules = {id(module): name for name, module in coterie.hf.attention_modules(task.host.model).items()}
    writer = scale.after(dict.fromkeys(scale.writer.host.names, DENSE)).writer
    writer.put(dict.fromkeys(writer.names, str(task.candidates[0])))  # whatever it is: a trial answers in its place
    for batch in task.fitted:
        if reached and task.out_of_time(PROFILE):
            break
        length = batch["input_ids"].shape[1]
        cache = coterie.hf.Cache(writer.model)
        writer.read(batch, length - FEW_QUERIES, cache)
        with answering(Trial(task, found, modules, read_first(length))):
            writer.write(batch, length - FEW_QUERIES, length, cache)
        reached += 1
        task.tell("candidates", reached, len(task.fitted))
    tokens = sorted({batch["input_ids"].shape[1] for batch in task.fitted[:reached]})
    notes = []
    if reached < len(task.fitted):
        notes.append(f"The time was enough to try candidates for decoding on {reached} of {len(task.fitted)} batches.")
    return Profiled(found.table(task.candidates), tokens, notes, bool(notes))


class Trial:
    """Answers densely, and notes what every candidate would have answered, and how fast.

    Args:
        first: the number of tokens from which on a document is decoded; a candidate that pays there runs from there on.
    """

    def __init__(self, task: Task, found: Profile, modules: dict[int, str], first: int) -> None:
        self.task, self.found, self.modules, self.first = task, found, modules, first

    def __call__(self, question: Any) -> Tensor:
        module, alone = self.modules[id(question.module)], question.last()
        queries, keys = tuple(question.q.shape), tuple(question.k.shape)
        shape = Shape(queries, (*keys[:2], self.first, keys[3]), True)
        self.found.shapes.setdefault(module, []).append(shape)
        exact: Tensor = question.dense()
        size = float(exact.double().square().sum())
        self.found.times.setdefault((shape, DENSE), []).append(_least_seconds(alone.attend))
        for mechanism in self.task.candidates:
            least, finished = mechanism.length if isinstance(mechanism, AtLeast) else 0, question.clusters(mechanism)
            answer = question.near_far(finished, least)
            error = float((answer.double() - exact.double()).square().sum()) / max(size, torch.finfo().tiny)
            self.found.errors.setdefault((module, str(mechanism)), {}).setdefault(shape, []).append(error)
            seconds = _least_seconds(partial(alone.near_far, finished, least))
            self.found.times.setdefault((shape, str(mechanism)), []).append(seconds)
        return exact


def _least_seconds(run: Callable[[], object]) -> float:
    """The least of a few, as other work only ever adds."""
    taken = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)
