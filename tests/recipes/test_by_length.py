"""Batches by length: their order, and a run that goes on in the middle of an epoch."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset
from recipes.common import models
from recipes.common.by_length import ByLength
from recipes.common.progress import Bar, bar
from recipes.common.training import Schedule, _pieces, predict, train
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

from coterie.cli.inputs import UserError


@pytest.mark.parametrize("count", [1, 7, 64, 1003])
def test_every_example_once_and_batches_of_like_lengths(count):
    lengths = random.Random(0).choices(range(5, 500), k=count)
    order = list(ByLength(lengths, 8, seed=1))
    assert sorted(order) == list(range(count))
    batches = [order[i : i + 8] for i in range(0, count - count % 8, 8)]
    waste = sum(8 * max(lengths[i] for i in batch) - sum(lengths[i] for i in batch) for batch in batches)
    assert waste <= 0.2 * sum(lengths)


def test_seed_and_epoch_decide():
    lengths = random.Random(0).choices(range(5, 500), k=100)
    order = list(ByLength(lengths, 8, 1, lambda: 2))
    torch.rand(3)  # the global generator does not matter
    assert list(ByLength(lengths, 8, 1, lambda: 2)) == order
    assert list(ByLength(lengths, 8, 1, lambda: 3)) != order
    assert list(ByLength(lengths, 8, 2, lambda: 2)) != order


class Killed(Bar):
    """It ends a run after so many steps."""

    steps_to_live = 0

    def on_step_end(self, args, state, control, **rest):
        super().on_step_end(args, state, control, **rest)
        if state.global_step == self.steps_to_live:
            raise RuntimeError("killed")


def examples(tokenizer):
    draw = random.Random(0)
    texts = ["".join(draw.choices("ab ", k=draw.randint(3, 50))) for _ in range(15)]
    return Dataset.from_dict({**tokenizer(texts), "labels": [text.count("a") % 2 for text in texts]})


# Of 2 epochs of 4 steps: in the first, at its end, in the second.
@pytest.mark.parametrize(
    ("dies_after", "at_once", "bf16"), [(2, None, False), (4, None, False), (6, 2, False), (6, None, True)]
)
def test_a_run_that_was_killed_ends_with_the_same_bits(tiny_bert, tmp_path, at_once, dies_after, bf16):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    rows, collate = examples(tokenizer), DataCollatorWithPadding(tokenizer)
    schedule = Schedule(2, 4, 1e-3, by_length=True, at_once=at_once, bf16=bf16)

    def trained(folder, *lives):
        for steps in lives:
            set_seed(0)
            model = models.load(str(tiny_bert), AutoModelForSequenceClassification, num_labels=2)
            models.attend_by(model, "smyrf:rounds=2,cluster_size=8")
            with bar(1) as shown:
                shown.__class__ = Killed
                shown.steps_to_live = steps
                if steps:
                    with pytest.raises(RuntimeError, match="killed"):
                        train(model, rows, collate, schedule, 0, folder, shown)
                else:
                    train(model, rows, collate, schedule, 0, folder, shown)
        return model

    whole, resumed = trained(tmp_path / "whole", 0), trained(tmp_path / "killed", dies_after, 0)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_answers_come_in_the_order_of_the_examples(tiny_bert, tmp_path):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    rows, collate = examples(tokenizer), DataCollatorWithPadding(tokenizer)
    set_seed(0)
    model = models.load(str(tiny_bert), AutoModelForSequenceClassification, num_labels=2).eval()
    answers, labels = predict(model, rows, collate, 8, tmp_path)
    assert labels.tolist() == rows["labels"][:]
    with torch.no_grad():
        alone = torch.cat([model(**collate([row])).logits for row in rows])
    torch.testing.assert_close(torch.tensor(answers), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [4, 3])  # 3: the last piece of a batch is smaller
@pytest.mark.parametrize("at_once", [1, 2])
def test_a_step_is_the_same_however_many_are_in_memory(tiny_bert, tmp_path, count, at_once):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    rows, collate = examples(tokenizer).select(range(count)), DataCollatorWithPadding(tokenizer)

    def trained(at_once):
        set_seed(0)
        model = models.load(
            str(tiny_bert),
            AutoModelForSequenceClassification,
            num_labels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        with bar(1) as shown:
            schedule = Schedule(1, 4, 1e-3, by_length=True, at_once=at_once)
            found = train(model, rows, collate, schedule, 0, tmp_path / str(at_once), shown)
        return model, found.losses

    (whole, loss), (pieces, loss_of_pieces) = trained(None), trained(at_once)
    assert loss_of_pieces[0][1] == pytest.approx(loss[0][1], rel=1e-4)
    moved = 0.0
    for name, weight in whole.state_dict().items():
        if weight.is_floating_point():
            torch.testing.assert_close(pieces.state_dict()[name], weight, rtol=1e-4, atol=2e-5)
            moved = max(moved, float(weight.abs().max()))
    assert moved > 0


def test_training_that_diverges_is_said(tiny_bert, tmp_path):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    rows, collate = examples(tokenizer), DataCollatorWithPadding(tokenizer)
    model = models.load(str(tiny_bert), AutoModelForSequenceClassification, num_labels=2)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    with bar(1) as shown, pytest.raises(UserError, match=r"the training diverged .*: try a rate below 0\.001"):
        train(model, rows, collate, Schedule(1, 4, 1e-3), 0, tmp_path, shown)
    with pytest.raises(UserError, match="answers are not finite numbers"):
        predict(model, rows, collate, 8, tmp_path)


def test_batches_are_shared_out_to_processes():
    assert _pieces(Schedule(1, 16, 1e-3), 2) == (8, 1)
    assert _pieces(Schedule(1, 16, 1e-3, at_once=2), 2) == (2, 4)
    assert _pieces(Schedule(1, 4, 1e-3, at_once=4), 2) == (2, 1)
    with pytest.raises(UserError, match="--batch 16 must be a multiple of the number of processes, 3"):
        _pieces(Schedule(1, 16, 1e-3), 3)
    with pytest.raises(UserError, match="--batch 12 must be a multiple of --at-once 4 × 2 processes"):
        _pieces(Schedule(1, 12, 1e-3, at_once=4), 2)
