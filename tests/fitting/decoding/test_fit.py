"""`coterie.fit(…, decode=True)`: what is chosen for new tokens, kept in the fit, and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from coterie.fitting.decoding import profile, steps  # noqa: E402
from coterie.fitting.decoding.speed import Rates  # noqa: E402
from coterie.fitting.dense import dense  # noqa: E402
from coterie.fitting.result import AtLength  # noqa: E402
from coterie.fitting.speed import Timed  # noqa: E402
from coterie.report import write  # noqa: E402
from tests.fitting.decoding.models import SIZES, texts, writer  # noqa: E402

EVERYONE, FEW = "near-far:near=999,chunk=8", "near-far:near=3,chunk=8"
NAMES = ["layers.0.self_attn", "layers.1.self_attn"]


@pytest.fixture
def cheap(monkeypatch):
    """Near–far pays when decoding, the less it looks at the more; whatever this machine is busy with."""

    def seconds(run):
        run()
        near = {EVERYONE: 0.5, FEW: 0.1}
        return next((near[str(each.options)] for each in getattr(run, "args", ())[:1]), 1.0)

    monkeypatch.setattr(profile, "_least_seconds", seconds)
    rates = {203: Rates(10.0, 20.0, 40.0)}
    monkeypatch.setattr(steps, "time_tokens", lambda *_: rates)
    return rates


@pytest.fixture
def cheap_prefill(monkeypatch):
    """Dense attention takes long where candidates for the prefill are tried, and in whole passes."""
    monkeypatch.setattr("coterie.fitting.profile.dense", lambda seen: dense(seen)._replace(seconds=1e3))
    monkeypatch.setattr("coterie.fitting.steps.time_passes", _timed)


def _timed(task, remembered, profiled, certified, before):
    return Timed((1.0, 0.5), [AtLength(203, 1.0, 1.0, 0.5)])


def fit(model: Any, fidelity: float = 0.9, **settings: Any) -> coterie.Fit:
    return coterie.fit(model, texts(), fidelity, **{"decode": True, "candidates": [EVERYONE, FEW], **settings})


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_cheapest_that_holds_is_certified_stored_and_applied(kind, cheap, tmp_path):
    model = writer(kind)
    before = model(texts()[0]["input_ids"]).logits
    found = fit(model)
    assert torch.equal(model(texts()[0]["input_ids"]).logits, before)
    assert found.decode is not None
    assert found.decode.choices == dict.fromkeys(NAMES, FEW)
    assert found.decode.certified
    (at,) = found.decode.lengths
    assert (at.tokens, at.documents, at.own_rate, at.fitted_rate) == (203, 4, 10.0, 40.0)
    assert at.fidelity >= at.bound >= 0.9
    assert found.decode_promise.startswith("New tokens: With 95% confidence: a mean fidelity of at least 0.9 on")
    for said in ("decoding 40.0 tokens a second instead of 10.0 (4.00×)", f"dense, decoding {FEW}"):
        assert said in str(found)
    assert "tokens/s, dynamic cache" in found._repr_html_()
    found.save(tmp_path / "fit.json")
    assert coterie.Fit.load(tmp_path / "fit.json") == found
    for each in (writer(kind), coterie.hf.load(writer(kind), tmp_path / "fit.json")):
        found.apply(each)
        assert [layer.runs for layer in coterie.hf.describe(each)] == [f"dense, new tokens {FEW}"] * 2
    write(tmp_path / "report.html", found, model="mine", command="coterie fit mine --decode")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h2>New tokens</h2>" in page
    assert "tokens a second when decoding, instead of 10.0" in page


def test_where_little_may_be_lost_a_more_exact_one_is_taken(cheap):
    found = fit(writer(), 1 - 1e-7, share=0.5, confidence=0.5)
    assert found.decode is not None
    assert FEW not in found.decode.choices.values()


def test_a_fit_of_old_is_read_and_decodes_densely(cheap, tmp_path):
    found = coterie.fit(writer(), texts(), 0.9, candidates=[FEW])
    assert (found.decode, found.decode_promise) == (None, "")
    found.save(tmp_path / "fit.json")
    assert "decode" not in json.loads((tmp_path / "fit.json").read_text())
    assert coterie.Fit.load(tmp_path / "fit.json") == found
    model = coterie.hf.load(writer(), tmp_path / "fit.json")
    assert [layer.runs for layer in coterie.hf.describe(model)] == list(found.choices.values())


@pytest.mark.parametrize("broken", [[], {}, {"modules": {"a": 1}}, None])
def test_a_file_whose_decoding_is_broken_is_refused(broken, cheap, tmp_path):
    fit(writer()).save(tmp_path / "fit.json")
    stored = json.loads((tmp_path / "fit.json").read_text()) | {"decode": broken}
    (tmp_path / "fit.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="path: expected a file that"):
        coterie.Fit.load(tmp_path / "fit.json")


def test_what_is_no_faster_over_the_same_cache_is_not_taken(cheap):
    cheap[203] = Rates(10.0, 20.0, 16.0)
    found = fit(writer())
    assert found.decode is not None
    assert found.decode.all_dense
    assert (
        found.decode.notes[0]
        == "The decoding that held is 0.80× as fast as dense over the same cache: it is not taken."
    )
    assert found.decode.lengths[0].fitted_rate == 20.0
    assert found.decode_promise == "New tokens: decoding is dense, and they do not change."
    assert found.holds


def test_behind_a_clustered_prefill_all_of_it_counts(cheap, cheap_prefill):
    found = fit(writer())
    assert set(found.choices.values()) == {FEW}
    assert found.decode is not None
    assert found.decode.choices == dict.fromkeys(NAMES, FEW)
    assert found.decode.certified
    assert found.decode.lengths[0].method in ("t", "betting")
    cheap[203] = Rates(10.0, 20.0, 16.0)
    dense_again = fit(writer())
    assert dense_again.decode is not None
    assert dense_again.decode.all_dense
    assert dense_again.decode.certified  # as it was tested, too
    assert dense_again.decode.lengths[0].method in ("t", "betting")
    assert dense_again.decode_promise.startswith("New tokens: With 95% confidence")


def test_a_prefill_that_costs_new_tokens_too_much_is_said_to(cheap, cheap_prefill, monkeypatch):
    monkeypatch.setattr("coterie.fitting.decoding.measure.Continued.score", lambda self, index: 0.5 + 0.01 * index)
    found = fit(writer())
    assert found.certified
    assert found.decode is not None
    assert not found.decode.certified
    assert not found.holds
    assert found.decode.all_dense
    assert found.decode.notes[0].startswith("No plan could be certified: at 203 tokens the most exact one")
    assert found.decode.notes[-1].startswith("New tokens stay dense, and even so they lose more than was allowed")
    assert found.decode_promise.startswith("New tokens: Nothing is promised: 0.5")


def test_several_lengths_and_several_fidelities(cheap):
    cheap[99] = Rates(10.0, 20.0, 40.0)
    data = [*texts(), *texts(6, 99)]
    found = coterie.trade_off(writer(), data, [0.8, 0.9], decode=True, candidates=[EVERYONE, FEW])
    for each in found:
        assert each.decode is not None
        assert [at.tokens for at in each.decode.lengths] == [99, 203]
        assert found[0].decode is not None
        assert each.decode.table == found[0].decode.table  # tried once
        assert all(spec.startswith("near-far") for spec in each.decode.choices.values())


def test_tokens_are_timed_in_every_way():
    found = coterie.fit(writer(), texts(), 0.9, decode=True, candidates=[FEW])
    assert found.decode is not None
    (at,) = found.decode.lengths
    assert at.own_rate > 0
    assert at.dense_rate > 0
    assert at.fitted_rate > 0


# --- a budget, and users who do not wait ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["profile", "search"])
def test_whoever_interrupts_keeps_the_prefill(where, cheap, monkeypatch):
    def impatient(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, where, impatient)
    found = coterie.trade_off(writer(), texts(), [0.8, 0.9], decode=True, candidates=[EVERYONE, FEW])
    assert [each.fidelity for each in found] == [0.9]  # the most exact one
    assert found[0].decode is not None
    assert found[0].decode.all_dense
    assert found[0].decode.notes == ["Interrupted before decoding was fitted. New tokens stay dense."]


def test_whoever_interrupts_the_certificate_keeps_what_held(cheap, monkeypatch):
    tested = []

    def score(self, index):
        tested.extend([index] if index >= 2 else [])  # those that certify
        if len(tested) > 4:  # of a second plan
            raise KeyboardInterrupt
        return 0.95 + 0.001 * index

    monkeypatch.setattr("coterie.fitting.decoding.measure.Continued.score", score)
    found = fit(writer())
    assert found.decode is not None
    assert not found.decode.all_dense
    assert found.decode.certified
    assert found.decode.notes == ["Interrupted: a cheaper plan may hold, too."]
    assert not math.isfinite(found.decode.rates[0])


def test_a_budget_that_is_over_leaves_decoding_dense(monkeypatch):
    over = fit(writer(), seconds=0)
    assert over.decode is not None
    assert (over.decode.all_dense, over.decode.certified) == (True, True)
    monkeypatch.setattr("coterie.fitting.decoding.steps._ANSWERS", -math.inf)
    late = fit(writer(), seconds=600)
    assert late.decode is not None
    assert late.decode.notes == ["The time budget was over before decoding was looked at. New tokens stay dense."]
    assert late.decode.certified  # as the prefill is dense, too
    assert not math.isfinite(late.decode.rates[0])
    assert "decoding was not timed" in str(late)


def test_what_a_user_has_put_comes_back(cheap):
    model = coterie.hf.use(writer(), "near-far:near=5", decode=EVERYONE)
    fit(model)
    assert [layer.runs for layer in coterie.hf.describe(model)] == [f"near-far:near=5, new tokens {EVERYONE}"] * 2


# --- what is refused, before anything is computed ---------------------------------------------------------------------


def never(model: torch.nn.Module) -> Any:
    def computed(*_):
        raise AssertionError("something was computed")

    model.register_forward_pre_hook(computed)
    return model.eval()


def small(name: str, **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**SIZES, **changes})


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (lambda: torch.nn.TransformerEncoderLayer(32, 4), "decode: expected a model of transformers that writes"),
        (lambda: transformers.BertModel(small("Bert")), "and no encoder before it, got BertModel"),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
            ),
            "a decoder, and no encoder before it, got T5ForConditionalGeneration",
        ),
        (lambda: writer().model, "decode: expected a model of transformers that writes.*got LlamaModel"),
        (
            lambda: transformers.MistralForCausalLM(small("Mistral", sliding_window=16)),
            "without a window of its own, got MistralForCausalLM",
        ),
    ],
    ids=["plain", "encoder", "encoder-decoder", "no head", "windows"],
)
def test_a_model_that_does_not_decode_is_refused(model, sentence):
    with pytest.raises(ValueError, match=sentence):
        coterie.fit(never(model()), texts(), decode=True)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"batches": texts(6, 40), "candidates": ["near-far:chunk=20"]},
            "a text of more than 40 tokens .* got 40 at most",
        ),
        ({"batches": texts(6, 256), "candidates": None}, "a text of more than 256 tokens .* got 256 at most"),
        ({"batches": texts(6, 30)}, "a text of more than 32 tokens with decode=True"),
        ({"candidates": ["local"]}, "candidates: expected 'near-far' among them with decode=True.* got local"),
        (
            {"batches": [each | {"position_ids": torch.arange(203)[None]} for each in texts()]},
            "input_ids and attention_mask alone with decode=True, got input_ids, position_ids",
        ),
        ({"batches": [{"inputs_embeds": torch.randn(1, 203, 32)}] * 3}, "alone with decode=True, got inputs_embeds"),
    ],
)
def test_what_cannot_be_decoded_is_refused(settings, sentence):
    given = {"batches": texts(), "candidates": [FEW], **settings}
    with pytest.raises(ValueError, match=sentence):
        coterie.fit(never(writer()), given.pop("batches"), decode=True, **given)
    with pytest.raises(TypeError, match="decode: expected True or False, got str"):
        coterie.fit(never(writer()), texts(), decode="near-far")  # type: ignore[arg-type]


def test_a_fit_for_decoding_is_for_models_of_transformers(cheap):
    found = replace(fit(writer()), choices={"self_attn": "dense"})
    with pytest.raises(ValueError, match="decode: expected a model of transformers, got TransformerEncoderLayer"):
        found.apply(torch.nn.TransformerEncoderLayer(32, 4))
