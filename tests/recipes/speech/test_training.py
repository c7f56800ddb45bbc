"""Training: what is learned, what has no path, and a run that goes on where it was."""

from __future__ import annotations

import math

import pytest
import torch
from recipes.common.progress import Bar
from recipes.speech.corpus import Utterance, fixed
from recipes.speech.network import Config, attend_by
from recipes.speech.testing import Reader, errors, hear, milliseconds
from recipes.speech.training import Settings, Training, train, with_a_path

from coterie.cli.inputs import UserError
from recipes.speech import testing, training

LETTERS = "AB "
QUIET = Bar(lambda *_: None, 1)


def spoken(text, seed):
    """Each letter lights up a channel of its own for six frames."""
    torch.manual_seed(seed)
    lit = torch.eye(len(LETTERS))[[LETTERS.index(letter) for letter in text]].repeat_interleave(6, 0)
    return Utterance(text, 3 * lit + 0.1 * torch.randn(len(lit), len(LETTERS)), text)


def corpus(count=12):
    texts = ["AB", "BA", "A B", "B A", "ABAB", "BABA A", "BAB", "A", "B", "AB BA", "BA BA", "ABA"]
    utterances = [spoken(text, i) for i, text in enumerate(texts)]
    return fixed("toy", utterances[:count], [spoken("BAB A", 99), spoken("AB", 98)], [], 3)


CONFIG = Config(3, 3, layers=1, dim=16, heads=2, stride=2, dropout=0.1)


def new(mechanism="dense", **settings):
    return Training(CONFIG, Settings(**{"epochs": 3, "frames": 100, "rate": 1e-2, **settings}), corpus(), mechanism, 0)


def test_it_learns_what_can_be_learned(tmp_path):
    learning = new(epochs=24, augment=False)
    found = train(learning, tmp_path, QUIET, lambda model: 0.5)
    assert found["losses"][-1] < 0.2 < found["losses"][0]
    assert found["steps"] == learning.step
    assert len(found["losses"]) == 24
    assert found["looks"] == [[epoch, 0.5] for epoch in range(3, 25, 3)]
    wanted = corpus()
    heard = hear(learning.model, wanted.test, 1000)
    assert errors(wanted, heard, Reader(wanted))["character"] == 0
    assert errors(wanted, heard, Reader(wanted, 4)) == {
        "character": 0,
        "word": 0,
        "examples": [["BAB A", "BAB A"], ["AB", "AB"]],
    }


@pytest.mark.parametrize(
    ("mechanism", "bf16", "steps"),
    [("dense", False, 1), ("dense", True, 4), ("smyrf:rounds=2,cluster_size=4", False, 5), ("dense", False, 6)],
)
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path, monkeypatch, mechanism, bf16, steps):
    monkeypatch.setattr(training, "SAVE_EVERY", 0.0)

    def run(folder, dies_after=None):
        learning = new(mechanism, bf16=bf16)
        advance = learning.advance

        def dying(batch, progress):
            if learning.step == dies_after:
                raise RuntimeError("killed")
            return advance(batch, progress)

        learning.advance = dying
        return learning.model, train(learning, folder, QUIET, _fingerprint, looks=3)

    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, expected = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="killed"):
        run(tmp_path / "killed", steps)
    resumed, found = run(tmp_path / "killed")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert len(expected["looks"]) == 3
    for name in ("losses", "looks", "steps", "pathless"):
        assert found[name] == expected[name]


def _fingerprint(model):
    return float(sum(weight.detach().abs().sum() for weight in model.parameters()))


def test_labels_without_a_path_are_counted_and_left_out():
    utterances = [
        spoken("AB", 0),
        Utterance("AAAA", torch.randn(13, 3), "AAAA"),
        Utterance("AAAB", torch.randn(11, 3), "AAAB"),
    ]
    toy = fixed("toy", utterances, [spoken("A", 1)], [], 3)
    kept = with_a_path(utterances, toy, CONFIG)  # 4 labels and 3 blanks: 7 tokens; 4 and 2: 6 tokens
    assert [each.text for each in kept] == ["AB", "AAAA", "AAAB"]
    shorter = [utterance._replace(features=utterance.features[:-1]) for utterance in utterances[1:]]
    assert [each.text for each in with_a_path(shorter, toy, CONFIG)] == []
    learning = Training(CONFIG, Settings(1), fixed("toy", [utterances[0], *shorter], toy.test, [], 3), "dense", 0)
    learning.run_epoch()
    assert learning.pathless == 2
    assert all(map(math.isfinite, learning.losses))
    lost = Training(CONFIG, Settings(1), fixed("toy", shorter, toy.test, [], 3), "dense", 0)
    with pytest.raises(
        UserError, match="every transcript has more symbols than its speech has tokens: try a smaller --str"
    ):
        lost.run_epoch()


def test_training_that_diverges_is_said():
    learning = new()
    with torch.no_grad():
        learning.model.out.weight.fill_(float("nan"))
    with pytest.raises(UserError, match=r"the training diverged at step 1 .*: try a rate below 0\.01, or --no-bf16"):
        learning.run_epoch()
    with pytest.raises(UserError, match="answers are not finite numbers"):
        hear(learning.model, corpus().test, 100)


def test_what_is_heard_comes_in_order_and_times_are_of_each():
    toy, learning = corpus(), new()
    together = hear(learning.model, toy.utterances, 60)
    for each, found in zip(toy.utterances, together, strict=True):
        (alone,) = hear(learning.model, [each], 60)
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-4)
    ticks = []
    times = milliseconds(learning.model, toy.test, ["dense", "local:window=4"], 2, lambda: ticks.append(1))
    assert list(times) == ["dense", "local:window=4"]
    assert min(times.values()) > 0
    assert len(ticks) == 3
    assert testing.mean_tokens(learning.model, toy.test) == (15 + 6) / 2
    attend_by(learning.model, "dense")


def test_what_is_heard_does_not_depend_on_what_was_drawn_before():
    model, wanted = new("smyrf:rounds=2,cluster_size=4,resample=true").model, corpus()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(hear(model, wanted.test, 1000))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_errors_count_words_where_there_are_any():
    toy = fixed("toy", [spoken("AB", 0)], [spoken("AB", 1), spoken("BA", 2)], [], 3)
    sure = torch.eye(3).log()  # the blank, A, B
    found = errors(toy, [sure[[1, 2]], sure[[1, 1, 0]]], Reader(toy))
    assert found == {"character": 1 / 4, "examples": [["AB", "AB"], ["BA", "A"]]}
