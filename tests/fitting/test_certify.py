"""What is promised: which plans are tested, on what, and how often a promise is broken."""

import math
import random
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import coterie
from coterie.fitting import certify as certifying
from coterie.fitting.certify import judge, sequence_of
from coterie.fitting.search import Searched
from coterie.fitting.task import Task

TARGET = 0.99


def searched(scores, chosen, count=11):
    """A path of so many plans, of which some were run."""
    plans = [{"m": str(index)} for index in range(count)]
    return Searched(plans, chosen, {count - 1: 1.0, **scores}, [])


class Documents:  # what certify asks of Remembered
    """Documents whose scores are known for every plan: {length: {plan: scores}}."""

    def __init__(self, by_length, lowest=-1.0, dense_is_exact=True):
        self.dense_is_exact = dense_is_exact
        self.by_length, self.scale, self.tested = by_length, SimpleNamespace(lowest=lowest), []

    fitted, checked = (), ()

    def on_checked(self, plan):
        self.tested.append(int(plan["m"]))
        yield from ((length, plans[int(plan["m"])]) for length, plans in self.by_length.items())

    def on_fitted(self, plan):
        return dict.fromkeys(self.by_length, 0.5)

    def exact(self, plan, length):
        return not plan and self.dense_is_exact

    def doubts(self):
        return []

    interrupted = False

    def seconds(self, indices):
        return 0.0

    def documents(self):
        return {length: len(next(iter(plans.values()))) for length, plans in self.by_length.items()}


def certify(task: Task, some: Any, found: Searched) -> certifying.Certified:
    return certifying.certify(task, some, found)


def task(confidence=0.95, share=None, budget=None, start=0.0):
    host: Any = None
    return Task(host, [], [], TARGET, confidence, share, [], budget, start, start + (budget or 0), lambda *_: None)


# --- the sequence -----------------------------------------------------------------------------------------------------


def test_plans_are_tested_from_exact_to_cheap_and_the_last_is_what_the_search_chose():
    # 0.990 at 2, 1.000 at 12: a step is worth a tenth of the loss that is allowed
    found = sequence_of(searched({2: 0.99, 1: 0.98}, 2, 13), TARGET)
    assert found == [10, 8, 6, 4, 2]  # 0.2, 0.4, 0.6, 0.8 and 1.0 of it


def test_where_nothing_may_be_lost_plans_are_tested_evenly_along_the_path():
    assert sequence_of(searched({2: 1.0, 1: 0.9}, 2, 13), 1.0) == [10, 8, 6, 4, 2]
    kept = {index: [1.0, 1.0, 1.0] for index in (8, 10)}
    some = Documents({64: {index: [1.0, 0.8, 1.0] for index in range(13)} | kept}, lowest=None)
    found = certify(replace(task(), target=1.0), some, searched({2: 1.0, 1: 0.9}, 2, 13))
    assert (some.tested, found.plan) == ([10, 8, 6], {"m": "8"})


def test_plans_that_are_the_same_are_tested_once():
    assert sequence_of(searched({9: 0.9999, 8: 0.5}, 9), TARGET) == [9]
    assert sequence_of(searched({}, 10), TARGET) == []  # all dense: there is nothing to test


def test_the_search_knows_no_certifying_document():
    some = Documents({64: {index: [1.0, 1.0] for index in range(11)}})
    found = certify(task(), some, searched({2: 0.99, 1: 0.98}, 2))
    assert some.tested == sequence_of(searched({2: 0.99}, 2), TARGET)
    assert found.plan == {"m": "2"}
    assert found.calibrated == 0.99


# --- what is taken ----------------------------------------------------------------------------------------------------

SURE, UNSURE = [0.9951, 0.9953, 0.9952, 0.995], [0.9999, 0.98, 0.9999, 0.9998]  # both means are above 0.99
ALL = [*range(11)]


def test_the_last_that_held_before_one_failed():
    plans = dict.fromkeys(ALL, SURE) | {6: UNSURE}  # what is cheaper than 6 would hold, and is not looked at
    found = certify(task(), some := Documents({64: plans}), searched({2: 0.99, 1: 0.98}, 2, 13))
    assert some.tested == [10, 8, 6]
    assert (found.plan, found.sure, found.notes) == ({"m": "8"}, True, [])
    assert found.judged[64].fidelity == pytest.approx(statistics.fmean(SURE))
    assert found.judged[64].bound.method == "t"
    assert found.calibrated == 0.5  # the search had not run it


def test_where_dense_is_not_exact_it_is_tested_first():
    """As when new tokens are decoded densely behind a prefill that is not."""
    plans = dict.fromkeys(ALL, SURE) | {12: SURE, 11: SURE}
    found = certify(task(), some := Documents({64: plans}, dense_is_exact=False), searched({2: 0.99, 1: 0.98}, 2, 13))
    assert some.tested == [12, 10, 8, 6, 4, 2]
    assert (found.plan, found.sure) == ({"m": "2"}, True)
    some = Documents({64: plans | {12: UNSURE}}, dense_is_exact=False)
    found = certify(task(), some, searched({2: 0.99, 1: 0.98}, 2, 13))
    assert (some.tested, found.plan, found.sure) == ([12], {"m": "12"}, False)
    assert found.judged[64].fidelity == pytest.approx(statistics.fmean(UNSURE))
    assert found.notes[0].startswith("No plan could be certified: at 64 tokens the most exact one that was tested has")
    some = Documents({64: plans | {10: UNSURE}}, dense_is_exact=False)
    found = certify(task(), some, searched({2: 0.99, 1: 0.98}, 2, 13))
    assert (some.tested, found.plan, found.sure, found.notes) == ([12, 10], {"m": "12"}, True, [])


def test_every_length_must_hold():
    plans = dict.fromkeys(ALL, SURE)
    found = certify(task(), Documents({64: plans, 128: plans | {2: UNSURE}}), searched({2: 0.99, 1: 0.98}, 2))
    assert found.plan == {"m": "4"}


def test_nothing_that_fails_is_promised_and_what_is_missing_is_said():
    found = certify(task(), Documents({64: dict.fromkeys(ALL, UNSURE)}), searched({2: 0.99}, 2))
    assert found.plan == {"m": "10"}
    assert found.sure
    assert found.judged[64].bound == (1.0, "exact")
    (note,) = found.notes
    assert note.startswith("No plan could be certified: at 64 tokens the most exact one that was tested has a mean ")
    needed = int(note.split("About ")[1].split()[0]) + 4
    margin, spread = statistics.fmean(UNSURE) - TARGET, statistics.stdev(UNSURE)
    assert margin * math.sqrt(needed) == pytest.approx(1.7 * spread, rel=0.1)  # about t's quantile


def test_one_document_shows_nothing_and_it_says_so():
    found = certify(task(), Documents({64: {index: [0.995] for index in ALL}}), searched({2: 0.99, 1: 0.98}, 2))
    assert (found.plan, found.sure) == ({"m": "2"}, False)
    assert found.notes == [
        "Not certified: 1 document of 64 tokens can show nothing with 95% confidence; at least 2 are needed there, "
        "and better more."
    ]
    worse = certify(task(), Documents({64: {index: [0.5] for index in ALL}}), searched({2: 0.99, 1: 0.98}, 2))
    assert worse.plan == {"m": "10"}  # what did not even hold there


def test_no_number_is_no_promise():
    found = certify(task(), Documents({64: {index: [0.999, math.nan] for index in ALL}}), searched({2: 0.99}, 2))
    assert found.plan == {"m": "10"}


def test_without_time_for_a_test_the_choice_of_the_search_is_returned_and_nothing_promised():
    some = Documents({64: dict.fromkeys(ALL, SURE)})
    found = certify(task(budget=0.0, start=time.monotonic() - 1), some, searched({2: 0.99, 1: 0.98}, 2, 13))
    assert some.tested == []
    assert (found.plan, found.sure, found.judged, found.calibrated) == ({"m": "2"}, False, {}, 0.99)
    assert found.notes == ["The time budget was over before a plan could be certified. Nothing is promised."]


def test_whoever_is_interrupted_keeps_what_was_certified():
    class Impatient(Documents):
        patience = 0

        def on_checked(self, plan):
            if len(self.tested) == self.patience:
                raise KeyboardInterrupt
            return super().on_checked(plan)

    for patience, plan, sure in ((0, "2", False), (2, "8", True)):
        some = Impatient({64: dict.fromkeys(ALL, SURE)})
        some.patience = patience
        found = certify(task(), some, searched({2: 0.99, 1: 0.98}, 2, 13))
        assert (found.plan, found.sure) == ({"m": plan}, sure)
        assert found.notes[0].startswith("Interrupted")


def test_a_plan_that_fails_at_one_length_is_not_run_at_others():
    bad = {index: [0.5, 0.6] for index in ALL}
    seen = []

    class Watched(Documents):
        def on_checked(self, plan):
            for length, scores in super().on_checked(plan):
                seen.append(length)
                yield length, scores

    certify(task(), Watched({64: bad, 32: dict.fromkeys(ALL, SURE)}), searched({2: 0.99, 1: 0.98}, 2))
    assert seen == [64]


def test_a_test_that_would_break_the_budget_is_not_begun(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("time.monotonic", lambda: now.seconds)

    class Slow(Documents):
        def on_checked(self, plan):
            now.seconds += 20
            return super().on_checked(plan)

    some = Slow({64: dict.fromkeys(ALL, SURE)})
    found = certify(task(budget=100.0), some, searched({2: 0.99, 1: 0.98}, 2, 13))
    assert some.tested == [10, 8, 6, 4]  # a fifth would end at 100, after 85
    assert found.plan == {"m": "4"}


# --- a share of the documents -----------------------------------------------------------------------------------------


def test_a_share_of_documents_is_certified_by_counting():
    good = [0.995] * 59
    assert judge(good, TARGET, 0.95, 0.95, None).certified
    assert not judge([*good[:58], 0.98], TARGET, 0.95, 0.95, None).certified
    assert judge(good[:58], TARGET, 0.95, 0.95, None).few
    found = certify(task(share=0.95), Documents({64: dict.fromkeys(ALL, good[:20])}), searched({2: 0.99}, 2))
    assert not found.sure
    assert "20 documents of 64 tokens can show nothing with 95% confidence; at least 59 are needed" in found.notes[0]


def test_documents_that_all_score_the_same_by_a_measure_of_ones_own_certify_nothing_but_may_be_taken():
    """Right words are counted: three clips without a new error are no proof that there never will be one."""
    same = {7: {plan: [1.0, 1.0, 1.0] for plan in range(11)}}
    assert judge([1.0] * 3, 1.0, 0.95, None, None).few
    assert not judge([1.0] * 3, 1.0, 0.95, None, -1.0).few  # cosines differ in their last digits, if answers do
    found = certify(task(), Documents(same, lowest=None), searched({2: 0.99}, 2))
    assert (found.plan, found.sure) == ({"m": "2"}, False)
    assert found.notes == [
        "Not certified: the 3 documents of 7 tokens all score 1.0000, which does not say how much others may differ."
    ]


def test_a_bad_document_that_a_mean_hides_is_seen():
    scores = [0.999] * 99 + [0.5]
    assert judge(scores, 0.99, 0.95, None, -1.0).fidelity > 0.99
    assert judge(scores, 0.99, 0.95, 0.99, -1.0).bound.value < 0.99


# --- how often a promise is broken ------------------------------------------------------------------------------------


def test_promises_are_broken_as_seldom_as_they_say():
    """Plans whose true loss is known, and documents with noise: a search and a certificate on fresh ones each time."""
    draw, broken, trials = random.Random(1), 0, 400
    true = [1 - 0.002 * (12 - index) for index in range(13)]  # the target is at 7

    def some(count):
        return {index: [true[index] + draw.gauss(0, 0.004) for _ in range(count)] for index in range(13)}

    for _ in range(trials):
        seen = {index: statistics.fmean(scores) for index, scores in some(2).items()}
        chosen = next((index for index in range(12) if seen[index] >= TARGET), 12)
        found = certify(task(), Documents({64: some(6)}), searched(seen, chosen, 13))
        broken += true[int(found.plan["m"])] < TARGET - 1e-12
    assert broken / trials <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / trials)


# --- in a real fit ----------------------------------------------------------------------------------------------------


def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return torch.nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False).eval()


def documents(count, length=700):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(1, length, 32, generator=generator) for _ in range(count)]


def test_a_fit_says_what_it_promises(tmp_path):
    found = coterie.fit(encoder(), documents(9), 0.5, candidates=["local:window=9"])
    (at,) = found.lengths
    assert (at.documents, found.confidence, found.share) == (6, 0.95, None)
    if found.all_dense:  # a machine on which a window of 9 does not pay
        assert at.method == "exact"
    else:
        assert found.certified
        assert 0.5 <= at.bound <= at.fidelity == found.held_out
        assert found.promise == "With 95% confidence: a mean fidelity of at least 0.5 on documents like yours."
    assert found.promise in str(found)
    found.save(tmp_path / "fit.json")
    assert coterie.Fit.load(tmp_path / "fit.json") == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"confidence": 1.0}, r"confidence: expected a number in \[0.5, 1\), got 1.0"),
        ({"confidence": 0.4}, r"confidence: expected a number in \[0.5, 1\), got 0.4"),
        ({"share": 1.0}, r"share: expected a number in \(0, 1\), or None, got 1.0"),
        ({"share": 0}, r"share: expected a number in \(0, 1\), or None, got 0"),
    ],
)
def test_what_cannot_be_promised_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        coterie.fit(encoder(), documents(3, 40), **settings)


@pytest.mark.parametrize("settings", [{"confidence": "95 %"}, {"share": "half"}])
def test_what_is_no_number_is_refused(settings):
    with pytest.raises(TypeError, match=f"{next(iter(settings))}: expected a number"):
        coterie.fit(encoder(), documents(3, 40), **settings)
