"""bfloat16: asked for, or where the machine multiplies it itself."""

from __future__ import annotations

import pytest
import torch
from recipes.common import models
from recipes.common.costs import inference, training_step
from recipes.common.precision import in_bf16
from recipes.common.training import predict
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

from tests.recipes.test_by_length import examples


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"avx512_bf16": False, "avx2": True}, False),
        ({}, False),
    ],
)
def test_the_machine_decides_unless_it_was_asked_for(monkeypatch, has, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert in_bf16(None) is expected
    assert in_bf16(True)
    assert not in_bf16(False)


@pytest.fixture
def classifier(tiny_bert):
    tokenizer = models.load_tokenizer(str(tiny_bert))
    set_seed(0)
    model = models.load(str(tiny_bert), AutoModelForSequenceClassification, num_labels=2).eval()
    return model, examples(tokenizer), DataCollatorWithPadding(tokenizer)


@pytest.mark.parametrize("mechanism", ["dense", "smyrf:rounds=2,cluster_size=8"])
def test_answers_in_bf16_are_near_those_in_float32(classifier, tmp_path, mechanism):
    model, rows, collate = classifier
    models.attend_by(model, mechanism)
    exact, _ = predict(model, rows, collate, 8, tmp_path)
    rounded, _ = predict(model, rows, collate, 8, tmp_path, bf16=True)
    assert rounded.dtype == exact.dtype  # whatever reads them next knows nothing of bfloat16
    apart = abs(rounded - exact).max()
    assert 0 < apart < 0.02


def test_steps_and_forwards_that_are_timed_run_in_that_precision(classifier):
    model, rows, collate = classifier
    batch, seen = collate([rows[i] for i in range(4)]), []
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    for run in (training_step, inference):
        for bf16 in (False, True):
            run(model, batch, "dense", bf16=bf16)
    assert seen == [torch.float32, torch.bfloat16] * 2
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
