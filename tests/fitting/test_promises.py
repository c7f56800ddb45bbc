"""Promises that would mean nothing are not made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import coterie
from coterie.fitting.dense import dense
from coterie.fitting.measures import Fidelity
from coterie.fitting.profile import profile
from coterie.fitting.result import Fit
from coterie.fitting.task import Task
from coterie.hosts import host_of
from tests.fitting.models import batches, encoder

# --- promises that would mean nothing ---------------------------------------------------------------------------------


def fast(monkeypatch):
    """Attention alone gains much, whatever this machine thinks of it, and the model as much."""

    def slow(seen):
        return dense(seen)._replace(seconds=1e3)

    def seconds(best, task, first, scale, ways):
        best |= {(name, tokens): {"dense": 1.0, "fitted": 0.5}[name] for name in ways for tokens in first}

    monkeypatch.setattr("coterie.fitting.profile.dense", slow)
    monkeypatch.setattr("coterie.fitting.speed._time", seconds)


class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = encoder(1), torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def test_the_cosine_of_one_number_is_refused():
    with pytest.raises(ValueError, match=r"measure: expected a callable, as the cosine of a single number is a sign, "):
        coterie.fit(Mean().eval(), batches(3, 60), 0.9, candidates=["local:window=9"])


def test_a_model_that_writes_its_answers_into_the_same_memory_is_compared_with_what_it_said(monkeypatch):
    fast(monkeypatch)

    class Reuses(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.kept = encoder(1), torch.zeros(1, 60, 32)

        def forward(self, x):
            return self.kept.copy_(self.encoder(x))

    found = coterie.fit(Reuses().eval(), batches(6, 60), 0.2, candidates=["local:window=1"])
    assert found.held_out < 1


def test_documents_that_are_the_same_certify_nothing(monkeypatch):
    fast(monkeypatch)
    (one, *others) = batches(5, 60)
    settings: dict[str, Any] = {"candidates": ["local:window=9"]}
    twice = coterie.fit(encoder(1), [one, one.clone(), one.clone()], 0.2, **settings)
    overlap = coterie.fit(encoder(1), [one], 0.2, held_out=[*others, one.clone()], **settings)
    apart = coterie.fit(encoder(1), [one], 0.2, held_out=others, **settings)
    for found in (twice, overlap):
        assert not found.certified
        assert any("some of the documents are the same" in note for note in found.notes)
    assert apart.certified


def test_a_length_that_nothing_certifies_is_not_promised(monkeypatch):
    fast(monkeypatch)
    data = [*batches(1, 60), *batches(1, 30)]
    found = coterie.fit(encoder(1), data, 0.2, held_out=batches(5, 60)[1:], candidates=["local:window=9"])
    assert not found.certified
    assert "Not certified: no held-out document has 30 tokens." in found.notes


def test_batches_of_a_users_own_class_have_their_own_lengths():
    @dataclass
    class Batch:
        x: torch.Tensor

    class Takes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder(1)

        def forward(self, batch):
            return self.encoder(batch.x)

    data = [Batch(torch.randn(1, n, 32)) for n in (60, 60, 60, 30, 30, 30)]
    found = coterie.fit(Takes().eval(), data, 0.2, candidates=["local:window=9"])
    assert [(at.tokens, at.documents) for at in found.lengths] == [(30, 2), (60, 2)]


def test_whoever_interrupts_several_keeps_those_that_are_done(monkeypatch):
    fast(monkeypatch)
    told = []

    def impatient(what, done, total):
        told.append(what)
        if told.count("certify") > 0 and what == "search":
            raise KeyboardInterrupt  # in the search for the second

    windows = ["local:window=5", "local:window=21", "local:window=45"]
    found = coterie.trade_off(encoder(2), batches(6, 60), [0.3, 0.9999], candidates=windows, progress=impatient)
    assert [each.fidelity for each in found] in ([0.9999], [0.3, 0.9999])  # the exact one first


def test_a_module_is_screened_where_it_meets_most_keys(monkeypatch):
    fast(monkeypatch)

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(96, 12, batch_first=True)

        def forward(self, x):
            short = self.attention(x[:, :20], x[:, :20], x[:, :20], need_weights=False)[0]
            long = self.attention(x, x, x, need_weights=False)[0]
            return long + short.mean(1, keepdim=True)

    data = [torch.randn(1, 600, 96) for _ in range(3)]
    host = host_of(Twice().eval())
    task = Task(host, data, [], 0.5, 0.95, None, [coterie.Local(window=9)], None, 0.0, 0.0, lambda *_: None)
    scale = Fidelity(host, None, data)
    scale.remember(0)

    def slow_with_many(seen):
        return dense(seen)._replace(seconds=1e3 if seen.k.shape[2] == 600 else 0.0)

    monkeypatch.setattr("coterie.fitting.profile.dense", slow_with_many)
    row = next(row for row in profile(task, scale.lengths).table if row.mechanism.startswith("local"))
    host.restore()
    assert row.mechanism == "local:window=9@600"
    assert math.isfinite(row.error)


@pytest.mark.parametrize(("seconds", "kind"), [("soon", TypeError), (-1.0, ValueError), (math.nan, ValueError)])
def test_a_budget_is_a_number(seconds, kind):
    with pytest.raises(kind, match="seconds: expected a number"):
        coterie.fit(encoder(1), batches(), seconds=seconds)


def test_no_confidence_is_rounded_up():
    found = Fit({"a": "local"}, "hidden", 0.9, 1.0, 1.0, [], (1.0, 1.0), [], 0, confidence=0.999, certified=True)
    assert found.promise.startswith("With 99.9% confidence: ")
