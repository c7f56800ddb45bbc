"""The loss of what follows a text, and what a layer would have answered to new tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie.hf  # noqa: E402
from coterie.fitting.decoding import measure, profile  # noqa: E402
from coterie.fitting.decoding.measure import Continued, read_first  # noqa: E402
from coterie.fitting.task import Task  # noqa: E402
from coterie.hf.questions import Question, answering  # noqa: E402
from coterie.hosts import DENSE, HfHost  # noqa: E402
from coterie.mechanisms import as_mechanism  # noqa: E402
from coterie.mechanisms.near_far.decoding import Step  # noqa: E402
from tests.fitting.decoding.models import SIZES, texts, writer  # noqa: E402

EVERYONE, FEW = "near-far:near=999,chunk=8", "near-far:near=3,chunk=8"
MODELS = ["llama", "qwen2"]


def scale(kind: str = "llama", rows: int = 1, length: int = 203) -> Continued:
    return Continued(HfHost(writer(kind)), texts(2, length, rows))


def everywhere(found: Continued, spec: str) -> dict[str, str]:
    return dict.fromkeys(found.writer.names, spec)


def loss_of(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """In one pass, densely, token by token: what the tokens behind the first that is decoded cost."""
    with torch.no_grad():
        scores = model(input_ids=ids, attention_mask=mask).logits.double().log_softmax(-1)
    taken = [
        -float(scores[row, at - 1, ids[row, at]])
        for row in range(len(ids))
        for at in range(read_first(ids.shape[1]) + 1, ids.shape[1])
        if mask is None or mask[row, at]
    ]
    return sum(taken) / len(taken)


@pytest.mark.parametrize("kind", MODELS)
def test_the_dense_loss_is_that_of_one_pass(kind):
    found = scale(kind, rows=2)
    assert found.loss(0) == pytest.approx(loss_of(writer(kind), found.batches[0]["input_ids"]), rel=1e-5)


def test_padding_is_neither_read_nor_counted():
    found, mask = scale(rows=2), torch.ones(2, 203, dtype=torch.long)
    mask[0, -20:] = 0
    ids = found.batches[0]["input_ids"]
    found.batches = [{"input_ids": ids.where(mask.bool(), word), "attention_mask": mask} for word in (0, 7)]
    assert found.loss(0) == pytest.approx(loss_of(writer(), found.batches[0]["input_ids"], mask), rel=1e-5)
    found.writer.put(everywhere(found, FEW))
    assert found.loss(1) == pytest.approx(found.loss(0), rel=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_sixteen_tokens_at_a_time_are_what_single_ones_are(kind, monkeypatch):
    found = scale(kind)
    found.remember(0)
    found.writer.put(everywhere(found, FEW))
    together = found.score(0)
    assert abs(together - 1) > 1e-5  # clusters are not the keys themselves
    monkeypatch.setattr(measure, "FEW_QUERIES", 1)
    assert found.score(0) == pytest.approx(together, rel=1e-5)
    found.writer.put(everywhere(found, EVERYONE))
    assert found.score(0) == pytest.approx(1.0, rel=1e-5)


def test_another_prefill_changes_what_is_decoded_and_not_the_dense_answer():
    found = scale()
    found.remember(0)
    other = found.after(dict.fromkeys(found.writer.host.names, "local:window=9"))
    other.remember(0)  # is known
    other.writer.put(everywhere(other, DENSE))
    assert abs(other.score(0) - 1) > 1e-6  # the cache is another
    assert list(found.seconds) == [0]


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_a_text_that_is_kept_is_as_good_as_one_that_is_read_again(most, monkeypatch):
    monkeypatch.setattr("coterie.fitting.decoding.prefixes._MOST", most)
    found, read = scale("qwen2", rows=2), []
    once = found.writer.read

    def counted(*given: Any) -> None:
        read.append(1)
        once(*given)

    monkeypatch.setattr(found.writer, "read", counted)
    for spec in (DENSE, FEW, EVERYONE, FEW, DENSE):
        for index in (0, 1):
            fresh = scale("qwen2", rows=2)
            for each in (found, fresh):
                each.writer.put(everywhere(each, spec))
            assert found.loss(index) == pytest.approx(fresh.loss(index), rel=1e-6)
    assert len(read) == (2 if most else 10)


def test_a_text_with_sliding_windows_is_read_again():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {**SIZES, "head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    found = Continued(HfHost(Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()), texts(1))
    found.remember(0)
    assert found.writer.names == ["layers.1.self_attn"]
    found.writer.put(everywhere(found, EVERYONE))
    assert found.score(0) == pytest.approx(1.0, rel=1e-5)


def test_what_is_dense_is_exact():
    found = scale()
    assert found.exact(everywhere(found, DENSE), 203)
    assert found.exact(everywhere(found, FEW), 16)  # two chunks are met exactly
    assert not found.exact(everywhere(found, FEW), 17)
    assert found.exact(everywhere(found, f"{FEW}@100"), 99)
    assert not found.exact(everywhere(found, f"{FEW}@100"), 100)
    prefilled = found.after(dict.fromkeys(found.writer.host.names, "near-far@150"))
    assert (read_first(198), read_first(199)) == (149, 150)
    assert prefilled.exact({}, 198)
    assert not prefilled.exact({}, 199)


# --- what a layer would have answered ---------------------------------------------------------------------------------


def question(real: list[list[int]], rank: list[list[int]]) -> Question:
    batch, queries, keys = len(real), len(rank[0]), len(real[0])
    q, k, v = torch.randn(batch, 4, queries, 8), *torch.randn(2, batch, 2, keys, 8)
    step = Step(torch.tensor(real, dtype=torch.int32), torch.tensor(rank, dtype=torch.int32))
    return Question(None, q, k, v, step, 8**-0.5, 0)


def test_a_question_is_answered_densely_as_loops_would():
    real = [[*range(13)], [*range(4, 13), 0, 0, 0, 0]]  # the second begins with padding
    asked = question(real, [[10, 11, 12], [-1, 7, 8]])
    found = asked.dense()
    for b, ranks in enumerate(asked.step.rank.tolist()):
        for i, rank in enumerate(ranks):
            for h in range(4):
                seen = real[b][: rank + 1]
                q, k, v = (x.double() for x in (asked.q[b, h, i], asked.k[b, h // 2, seen], asked.v[b, h // 2, seen]))
                weights = [math.exp(float(q @ key) * 8**-0.5) for key in k]
                want = sum((w * value for w, value in zip(weights, v, strict=True)), torch.zeros(8).double())
                want = want / sum(weights) if weights else want
                torch.testing.assert_close(found[b, h, i].double(), want, rtol=1e-5, atol=1e-5)
    everyone = asked.clusters(as_mechanism("near-far:near=99,chunk=2"))
    torch.testing.assert_close(asked.near_far(everyone), found, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(asked.last().dense(), found[:, :, -1:])
    least = asked.clusters(as_mechanism("near-far:near=0,chunk=2"))
    torch.testing.assert_close(asked.near_far(least, 99), found, rtol=1e-4, atol=1e-5)


def test_candidates_are_tried_over_a_dense_cache_which_goes_on_densely():
    found, asked = scale("qwen2"), []
    candidates = [as_mechanism(each) for each in (EVERYONE, FEW)]
    task = Task(found.writer, found.batches, [], 0.9, 0.95, None, candidates, None, 0.0, 0.0, lambda *_: None)
    table = profile.profile(task, found).table
    errors = {(row.module, row.mechanism): row.error for row in table}
    assert len(errors) == 2 * 3
    for name in found.writer.names:
        assert errors[name, DENSE] == 0
        assert errors[name, EVERYONE] < 1e-5
        assert 1e-4 < errors[name, FEW] < 1

    def note(each: Question) -> torch.Tensor:
        asked.append(each)
        return each.dense()

    batch = found.batches[0]
    found.writer.put(everywhere(found, FEW))
    cache = coterie.hf.Cache(found.writer.model)
    found.writer.read(batch, 190, cache)
    with answering(note):
        logits = found.writer.write(batch, 190, 203, cache)
    with torch.no_grad():
        want = writer("qwen2")(batch["input_ids"]).logits[:, 190:]
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
    (first, second) = asked
    assert (first.layer, second.layer) == (0, 1)
    answer = second.near_far(second.clusters(candidates[1]))
    size = F.mse_loss(answer, second.dense()) / second.dense().square().mean()
    assert 1e-8 < float(size) < 1
