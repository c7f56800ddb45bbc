"""Several fidelities at once, a budget of time, and users who do not wait."""

from __future__ import annotations

import re

import pytest
import torch

import coterie
from coterie.fitting.dense import dense
from coterie.fitting.measures import Fidelity
from coterie.progress import ESTIMATE
from tests.fitting.models import batches, encoder

# --- several fidelities, a budget, and impatience ---------------------------------------------------------------------


def test_several_fidelities_are_each_what_one_would_be_and_share_their_work():
    ran = []

    def score(model, batch):
        ran.append(1)
        return float(model(batch).abs().mean())

    windows = ["local:window=9", "local:window=65"]
    found = coterie.trade_off(encoder(), batches(6, 300), [0.9, 0.5, 0.99], measure=score, candidates=windows)
    together = len(ran)
    assert [each.fidelity for each in found] == [0.9, 0.5, 0.99]
    assert all(each.holds for each in found)
    assert all(each.table == found[0].table for each in found)
    ran.clear()
    for fidelity in (0.9, 0.5, 0.99):
        coterie.fit(encoder(), batches(6, 300), fidelity, measure=score, candidates=windows)
    assert together < len(ran)
    with pytest.raises(ValueError, match="fidelities: expected at least one, got none"):
        coterie.trade_off(encoder(), batches(), [])
    with pytest.raises(TypeError, match="fidelities: expected a list of numbers, got float"):
        coterie.trade_off(encoder(), batches(), 0.9)  # type: ignore[arg-type]


def test_one_plan_for_two_fidelities_is_timed_once():
    def score(model, batch):
        return 1.0

    found = coterie.trade_off(encoder(), batches(), [0.5, 0.6], measure=score, candidates=["local:window=9"])
    assert found[0].choices == found[1].choices
    first, second = ([(at.dense_seconds, at.fitted_seconds) for at in each.lengths] for each in found)
    assert first == second


def test_a_budget_leaves_documents_out_and_says_so(monkeypatch):
    told = []
    data = batches(9, 300)

    def one_second(self, index):  # a dense pass takes that long
        remember(self, index)
        self.seconds[index] = 1.0

    remember = Fidelity.remember
    monkeypatch.setattr(Fidelity, "remember", one_second)
    found = coterie.fit(
        *(encoder(), data[:3], 0.9),
        held_out=data[3:],
        candidates=["local:window=9"],
        seconds=11.0,  # 1 document to search on and 3 that certify take 3 + 6
        progress=lambda *said: told.append(said),
    )
    assert found.notes[0] == "The time that was left is enough for 4 of 9 batches."
    (estimate,) = (said for said in told if said[0] == ESTIMATE)
    assert estimate == (ESTIMATE, 0, 11)  # no longer than the budget
    told.clear()
    short = coterie.fit(
        *(encoder(), data[:3], 0.9),
        held_out=data[3:],
        candidates=["local:window=9"],
        seconds=5.0,
        progress=lambda *said: told.append(said),
    )
    assert told == []  # no estimate that the note would contradict
    (note,) = short.notes
    assert re.match(r"The time budget is too short: a fit takes \d\d+ s at least", note)  # 10, and what went before
    assert short.all_dense


def test_an_estimate_comes_after_the_first_batch():
    told = []
    coterie.fit(encoder(), batches(), 0.9, candidates=["local:window=9"], progress=lambda *said: told.append(said[0]))
    assert told[0] == ESTIMATE
    assert told.count(ESTIMATE) == 1


def test_whoever_interrupts_the_timing_keeps_the_plan(monkeypatch, tmp_path):
    def impatient(self, batch):
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.hosts.Host.attend", impatient)

    def slow(seen):
        return dense(seen)._replace(seconds=1e3)

    monkeypatch.setattr("coterie.fitting.profile.dense", slow)

    def score(model, batch):
        return 1.0 + float(model(batch).mean()) * 1e-6

    model = encoder(1)
    found = coterie.fit(model, batches(9, 300), 0.5, measure=score, candidates=["local:window=9"])
    assert found.choices == {"layers.0.self_attn": "local:window=9"}
    assert found.certified
    assert "the whole model was not timed" in str(found)
    assert type(model.layers[0].self_attn) is torch.nn.MultiheadAttention
    found.save(tmp_path / "fit.json")
    assert str(coterie.Fit.load(tmp_path / "fit.json")) == str(found)


def test_before_there_is_a_plan_an_interrupt_is_one():
    def score(model, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        coterie.fit(encoder(1), batches(), 0.5, measure=score, candidates=["local:window=9"])
