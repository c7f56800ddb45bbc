"""Models inside wrappers: PEFT, sentence-transformers, compiled ones; and what is undone behind Coterie's back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402
from tests.hf.families import BY_NAME, _tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
NEAR_FAR = "near-far:near=9,chunk=16"


def test_use_reaches_the_model_inside_peft_and_its_adapters_learn():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ids = _tokens(2, 61)
    bare = coterie.hf.use(BY_NAME["bert"].build(), NEAR_FAR)
    model = peft.get_peft_model(BY_NAME["bert"].build(), peft.LoraConfig(target_modules=["query", "value"], r=2))
    dense = model(input_ids=ids).last_hidden_state
    assert coterie.hf.use(model, NEAR_FAR) is model
    assert {layer.runs for layer in coterie.hf.describe(model)} == {NEAR_FAR}
    found = model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, bare(input_ids=ids).last_hidden_state)  # an adapter starts as nothing
    assert not torch.allclose(found, dense, atol=1e-4)
    found.square().sum().backward()
    taught = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert len(taught) == 4
    assert all(bool((grad != 0).any()) for grad in taught)
    assert coterie.hf.undo(model) is model
    torch.testing.assert_close(model(input_ids=ids).last_hidden_state, dense)


@pytest.fixture
def sentences(tmp_path):
    """A sentence-transformers model of random weights, saved and loaded as users do."""
    st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    words = [f"w{i}" for i in range(92)]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    BY_NAME["bert"].build().save_pretrained(tmp_path)
    return st.SentenceTransformer(str(tmp_path), device="cpu")  # which adds a mean over tokens


def test_use_reaches_the_model_inside_sentence_transformers(sentences):
    texts = [" ".join(f"w{(7 * i + k) % 92}" for i in range(count)) for k, count in enumerate((120, 77, 30, 3))]
    dense = sentences.encode(texts)
    assert coterie.hf.use(sentences, "smyrf:rounds=2,cluster_size=16") is sentences
    together = sentences.encode(texts, batch_size=4)
    alone = sentences.encode(texts, batch_size=1)
    assert abs(together - alone).max() <= 1e-5  # a row in a padded batch is the row alone
    assert abs(together - dense)[:3].max() > 1e-4
    coterie.hf.undo(sentences)
    assert abs(sentences.encode(texts) - dense).max() <= 1e-5


def test_fit_takes_a_wrapped_model(sentences):
    batches = [{"input_ids": _tokens(1, 61, seed), "attention_mask": torch.ones(1, 61).long()} for seed in range(3)]
    found = coterie.fit(sentences, batches, fidelity=0.5, candidates=["local:window=9"], seconds=20)
    found.apply(sentences)
    coterie.hf.undo(sentences)


def test_a_plain_wrapper_and_a_compiled_model_are_looked_into():
    bert = BY_NAME["bert"].build()
    wrapper = nn.Sequential(nn.Identity(), nn.ModuleDict({"tower": bert}))
    coterie.hf.use(wrapper, "local:window=9")
    assert {layer.runs for layer in coterie.hf.describe(wrapper)} == {"local:window=9"}
    compiled: Any = torch.compile(bert)
    assert len(coterie.hf.attention_modules(compiled)) == 2
    coterie.hf.extend_positions(wrapper, 700)
    assert bert.config.max_position_embeddings == 700


def test_none_or_several_models_are_refused_by_name():
    two = nn.ModuleDict({"left": BY_NAME["bert"].build(), "right": BY_NAME["bert"].build()})
    with pytest.raises(
        ValueError, match="model: expected one model of transformers inside, got ModuleDict with left, r"
    ):
        coterie.hf.use(two, "full")
    without: list[Any] = [nn.Linear(2, 2), "a name"]
    for nothing in without:
        with pytest.raises(TypeError, match=r"model: expected a transformers.PreTrainedModel, or a module with one"):
            coterie.hf.use(nothing, "full")


@pytest.mark.parametrize("name", ["bert", "llama", "clip"])
def test_another_implementation_after_use_is_an_error_that_says_undo(name):
    family = BY_NAME[name]
    model = coterie.hf.use(family.build(), NEAR_FAR)
    with torch.no_grad():
        family.answers(model, "none")
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match=r"set_attn_implementation\('sdpa'\).*coterie.hf.undo"):
            family.answers(model, "none")
        coterie.hf.undo(model)
        assert model.config._attn_implementation == "sdpa"
        dense = family.answers(model, "none")
        coterie.hf.use(model, NEAR_FAR)
        model.set_attn_implementation("eager")
        coterie.hf.use(model, "full")  # or use again
        for got, want in zip(family.answers(model, "none"), dense, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_wrapper_that_calls_forward_itself_is_watched_all_the_same(sentences):
    """sentence-transformers does: what a model's own hooks would tell is told by those of its parts."""
    text = " ".join(f"w{i % 92}" for i in range(700))
    coterie.hf.use(sentences, NEAR_FAR)
    sentences.max_seq_length = 600
    with pytest.raises(ValueError, match=r"this model has 512 positions, and the input has 600 tokens"):
        sentences.encode([text])
    sentences.max_seq_length = 300
    sentences.encode([text])
    next(part for part in sentences.modules() if hasattr(part, "set_attn_implementation")).set_attn_implementation(
        "sdpa"
    )
    with pytest.raises(RuntimeError, match=r"set_attn_implementation\('sdpa'\).*coterie.hf.undo"):
        sentences.encode([text])


@pytest.mark.parametrize("outer_first", [True, False])
def test_a_model_and_a_part_of_it_are_not_both_taken(outer_first, tmp_path):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=99
    )
    model = transformers.BertForSequenceClassification(config).eval()
    first, second = (model, model.bert) if outer_first else (model.bert, model)
    coterie.hf.use(first, NEAR_FAR)
    with pytest.raises(ValueError, match=r"by way of a part of it, or of a model around it: undo it there, got Bert"):
        coterie.hf.use(second, "local:window=5")
    coterie.hf.undo(first)
    coterie.hf.use(second, "local:window=5")
    assert {layer.runs for layer in coterie.hf.describe(second)} == {"local:window=5"}
