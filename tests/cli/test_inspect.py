"""`coterie inspect` and `coterie theory`, on the real demo model, an image and small instances."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from coterie.analysis import agreement
from tests.cases import padding, tensors
from tests.command import run as coterie

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = ("--length", "60")


def test_spectra_are_printed_drawn_and_json(tmp_path):
    said = coterie(
        "inspect", "demo", "spectra", *SMALL, "--mechanism", "smyrf:cluster_size=8", "--out", tmp_path / "a.png"
    )
    assert "Spearman of effective_rank and error" in said
    assert "72 heads" in said
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(coterie("inspect", "demo", "spectra", *SMALL, "--json"))
    assert len(rows) == 72
    assert all(1 <= row["effective_rank"] <= 60 for row in rows)


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.html"])
def test_memberships_of_text(tmp_path, name):
    module = "encoder.layer.2.attention.self"
    said = coterie(
        "inspect", "demo", "memberships", *SMALL, "--module", module, "--head", "3", "--out", tmp_path / name
    )
    assert "neighbours" in said
    assert (tmp_path / name).stat().st_size > 1000


def test_memberships_across_layers_and_heads(tmp_path):
    arguments = ("inspect", "demo", "memberships", *SMALL, "--mechanism", "clustered:clusters=6")
    said = coterie(*arguments, "--across", "layers", "--out", tmp_path / "a.png")
    assert "72 heads of 6 layers" in said
    assert "most alike: encoder.layer." in said
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    found = json.loads(coterie(*arguments, "--across", "layers", "--json"))
    index = np.array(found["index"])
    assert index.shape == (72, 72)
    assert found["heads"][13] == {"module": "encoder.layer.1.attention.self", "head": 1}
    assert found["layers"][0][1] == pytest.approx(index[:12, 12:24].mean())
    module = "encoder.layer.2.attention.self"
    said = coterie(*arguments, "--across", "heads", "--module", module)
    assert f"adjusted Rand index of the heads of {module}" in " ".join(said.split())


def test_memberships_of_speech(tmp_path):
    from recipes.common.audio import read_audio
    from recipes.whisper.clips import Clip
    from recipes.whisper.clusters import groups
    from recipes.whisper.listening import load

    from tests.recipes.whisper_files import write_folder, write_wav

    folder = write_folder(tmp_path)
    arguments = ("inspect", folder, "memberships", "--across", "layers", "--mechanism", "clustered:clusters=6")
    found = [
        json.loads(coterie(*arguments, "--audio", write_wav(tmp_path / f"{rate}.wav", 1.2, rate=rate), "--json"))
        for rate in (16_000, 48_000)
    ]
    modules = [head["module"] for head in found[0]["heads"]]
    assert modules == ["encoder.layers.0.self_attn"] * 2 + ["encoder.layers.1.self_attn"] * 2
    assert found[0]["index"][0][0] == 1
    assert found[0]["heads"] == found[1]["heads"]
    listener, clip = load(str(folder)), Clip("a", "", read_audio(tmp_path / "16000.wav", 16_000))
    expected = agreement(groups(listener, clip, "clustered:clusters=6"))  # of the sound, without its padding
    np.testing.assert_allclose(found[0]["index"], expected.index.numpy(), atol=1e-6)
    (tmp_path / "no.wav").write_text("hello")
    assert "no.wav is no WAV file" in coterie(*arguments, "--audio", tmp_path / "no.wav", fails=1)
    assert "gone.wav cannot be read" in coterie(*arguments, "--audio", tmp_path / "gone.wav", fails=1)


def test_memberships_of_an_image(tmp_path):
    from matplotlib.image import imsave

    imsave(tmp_path / "image.png", np.random.default_rng(0).random((20, 31, 3)))
    arguments = (
        "inspect",
        tmp_path / "image.png",
        "memberships",
        "--length",
        "15",
        "--mechanism",
        "smyrf:cluster_size=25",
    )
    found = json.loads(coterie(*arguments, "--json", "--out", tmp_path / "groups.png"))
    assert len(found["labels"]) == 10 * 15
    assert found["groups"] == 6
    assert (tmp_path / "groups.png").exists()


def test_errors_at_an_equal_number_of_keys():
    found = json.loads(coterie("inspect", "demo", "errors", *SMALL, "--keys", "16", "--json"))
    mass = {row["mechanism"].partition(":")[0]: row["mass"][0] for row in found["rows"]}
    assert 0 < mass["smyrf"] < mass["topk"] < mass["near-far"] == 1  # which hears everyone, through means
    assert "keys met" in coterie("inspect", "demo", "errors", *SMALL, "--keys", "16")


def test_a_module_without_a_dense_map_says_why(tmp_path):
    from transformers import AutoTokenizer, MistralConfig, MistralModel

    from coterie.cli.inputs import demo_folder

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(vocab_size=30522, num_key_value_heads=2, sliding_window=24, **sizes)
    MistralModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(tmp_path)
    said = coterie("inspect", tmp_path, "errors", *SMALL, fails=1)
    assert said == "error: layers.0.self_attn has its own window (24), and no dense map.\n"
    said = coterie("inspect", "demo", "errors", "--length", "9", fails=1)
    assert said == "error: encoder.layer.0.attention.self ran with few queries alone, and no dense map.\n"


def test_the_best_clusters_are_no_worse_than_heuristics(tmp_path):
    np.save(tmp_path / "scores.npy", np.random.default_rng(1).normal(size=(6, 6)))
    np.savetxt(tmp_path / "scores.csv", np.load(tmp_path / "scores.npy"), delimiter=",")
    for name in ("scores.npy", "scores.csv"):
        rows = json.loads(coterie("theory", "solve", tmp_path / name, "--clusters", "2", "--json"))
        assert rows[0]["value"] == min(row["value"] for row in rows)
    mass = json.loads(coterie("theory", "solve", "--size", "6", "--objective", "mass", "--json"))
    assert mass[0]["value"] == max(row["value"] for row in mass)
    assert "local search" in coterie("theory", "solve", "--size", "6")


def test_the_lemmas_counterexample_from_the_command_line():
    found = json.loads(coterie("theory", "matching", "1,1,1", "2,1,2", "2,2,1", "--json"))
    assert list(found["answers"].values()) == [False, True, False]
    assert "only know pairs" in coterie("theory", "matching", "1,1,1", "2,1,2", "2,2,1")
    assert "matching: 1,1,1 2,2,2" in coterie("theory", "matching", "1,1,1", "2,2,2")


def test_the_equivalence_of_theorem_1():
    found = json.loads(coterie("theory", "equivalence", "--seed", "3", "--json"))
    assert found["limit_claim"]
    assert "the limit holds" in coterie("theory", "equivalence", "--seed", "3")


def test_the_assumptions_of_theorem_2():
    found = json.loads(
        coterie("theory", "assumptions", "demo", *SMALL, "--mechanism", "topk:k=60", "--most", "60", "--json")
    )
    assert len(found) == 6
    assert all(share == 1 for row in found.values() for share in row.values())
    assert "effective" in coterie("theory", "assumptions", "demo", *SMALL)


@pytest.mark.parametrize("kind", ["keys", "pairs"])
def test_the_assumptions_see_the_masks_of_the_call(kind, monkeypatch):
    """A mask of keys that came as `attn_mask`, and a mask of pairs."""
    import torch

    import coterie as library
    from coterie.analysis.biclustering import assumptions

    q, k, v = (3 * x for x in tensors(2, 2, 23))
    real = padding(2, 23, [23, 9]) if kind == "keys" else torch.ones(2, 23, dtype=torch.bool)
    pairs = torch.rand(23, 23, generator=torch.Generator().manual_seed(0)) < 0.5
    given = real[:, None, None] if kind == "keys" else pairs[None, None]

    def one_call(model, batch, look):
        with library.observing(lambda seen: look("only", seen)):
            library.attention(q, k, v, "full", attn_mask=given)

    monkeypatch.setattr("coterie.hosts.watch_dense", one_call)
    monkeypatch.setattr("coterie.cli.inputs.load_model", lambda *_, **__: type("Loaded", (), {"model": None}))
    monkeypatch.setattr("coterie.cli.inputs.cut", lambda *_: [[None]])
    arguments = ("--mechanism", "smyrf:rounds=3,cluster_size=8", "--most", "2", "--tolerance", "0.05", "--json")
    found = json.loads(coterie("theory", "assumptions", "demo", *arguments))
    plan = library.Smyrf(rounds=3, cluster_size=8).plan(q, k, key_mask=real)
    if kind == "keys":
        want = assumptions(q, k, plan, most=2, tolerance=0.05, key_mask=real, query_mask=real)
        shares = [x.transpose(1, 2)[real].double().mean() for x in (want.sparse, want.fair, want.effective)]
    else:  # with loops
        weights = (8**-0.5 * q @ k.mT).masked_fill(~pairs, -math.inf).softmax(-1)
        counts, rows = plan.to_dense(), []
        for b, h, i in itertools.product(range(2), range(2), range(23)):
            large = [j for j in range(23) if weights[b, h, i, j] > 0.05]
            met = [int(counts[b, h, i, j]) for j in large]
            rows.append((1 <= len(large) <= 2, len(set(met)) <= 1, all(met)))
        shares = [sum(each) / len(rows) for each in zip(*rows, strict=True)]
    assert [found["only"][name] for name in ("sparse", "fair", "effective")] == pytest.approx(list(map(float, shares)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "demo", "heads", "--out", "x.png"), "there is no picture of heads"),
        (("inspect", "demo", "memberships", *SMALL, "--module", "layer.9"), "--module must be one of"),
        (("inspect", "demo", "memberships", *SMALL, "--head", "12"), "--head must be below 12"),
        (("inspect", "demo", "spectra", *SMALL, "--out", "x.pdf"), "--out must end in .png or .svg, not '.pdf'."),
        (("inspect", "demo", "heads", "--across", "layers"), "--across goes with the memberships of a model"),
        (("inspect", "no.png", "memberships", "--across", "heads"), "--across goes with the memberships of a model"),
        (("inspect", "demo", "memberships", "--audio", "a.wav"), "--audio goes with memberships --across layers"),
        (("inspect", "demo", "memberships", *SMALL, "--across", "heads", "--module", "x"), "--module must be one of"),
        (
            ("inspect", "demo", "memberships", *SMALL, "--across", "layers", "--module", "x"),
            "--module must be left out",
        ),
        (("inspect", "demo", "memberships", "--across", "layers", "--out", "a.html"), "--out must end in .png or .svg"),
        (("inspect", "no.png", "memberships"), "no.png cannot be read: No such file or directory."),
        (("inspect", "{folder}/text.png", "memberships"), "text.png is not an image."),
        (("inspect", "no.png"), "an image has no heads"),
        (("theory", "solve", "{folder}/missing.npy"), "missing.npy cannot be read: No such file or directory."),
        (("theory", "solve", "{folder}/text.png"), "text.png is not a matrix of numbers"),
        (("theory", "solve", "{folder}/nan.csv"), "scores: expected numbers, got NaN"),
        (("theory", "solve", "--size", "4", "--clusters", "5"), "clusters: expected"),
        (("theory", "solve", "--size", "200", "--clusters", "20"), "expected"),
        (("theory", "solve", "--objective", "speed"), "--objective must be 'softmax' or 'mass', not 'speed'."),
        (("theory", "assumptions", "demo", *SMALL, "--mechanism", "near-far"), "Theorem 2 says nothing about means"),
        (("theory", "matching", "1,2"), "triples must be three numbers from 1 on with commas"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message, tmp_path):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "nan.csv").write_text("1,nan\n2,3\n")
    said = coterie(*(part.format(folder=tmp_path) for part in arguments), fails=1)
    assert message in said
    assert len(said.strip().splitlines()) == 1
