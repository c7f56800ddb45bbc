"""Data sets on files that the tests write: what is read, what is left out, what is refused."""

from __future__ import annotations

import io
import shutil
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, Dataset
from recipes.speech.digits import Digits, Range, grown
from recipes.speech.features import log_mel, normalised

from coterie.cli.inputs import UserError
from recipes.speech import from_hub, loading
from tests.recipes.speech.conftest import touch_tone, write_an4, write_cepstra, write_digits, write_librispeech


def load(data, **others):
    settings = {"first": Range(1, 2), "last": Range(4, 7), "held_out": [], "spelled": False, **others}
    return loading.load(str(data), **settings)


def zipped(folder, file):
    with zipfile.ZipFile(file, "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, path.relative_to(folder.parent))
    shutil.rmtree(folder)


@pytest.mark.parametrize("where", ["folder", "above", "zip"])
def test_strings_of_digits(recordings, where):
    if where == "zip":
        zipped(recordings, recordings.parent / "recordings.zip")
    corpus = load(recordings if where == "folder" else recordings.parent, tests=12)
    assert isinstance(corpus, Digits)
    assert (corpus.unit, corpus.symbols, corpus.channels, corpus.left_out) == ("digit", "0123456789", 40, [])
    assert len(corpus.recordings) == 2 * 10 * 3  # of 8, five are for tests
    assert len(corpus.test) == 12
    for each in corpus.test:
        assert 4 <= len(each.text) <= 7
        assert set(each.text) <= set("0123456789")
    assert corpus.labels("907") == [10, 1, 8]
    assert corpus.text([10, 1, 8]) == "907"


def test_features_are_those_of_the_joined_recordings(recordings):
    corpus = load(recordings)
    by_samples = {(r.digit, r.speaker, len(r.samples)) for r in corpus.recordings}
    for each in corpus.train(0, 0, 5):
        speaker = each.name.split()[0]
        lengths = [{n for d, s, n in by_samples if (d, s) == (int(digit), speaker)} for digit in each.text]
        assert len(each.features) <= 1 + (sum(map(max, lengths)) - 200) // 80
    soundfile.write(recordings / "5_eve_0.wav", touch_tone(5, 0.3), 8000)
    soundfile.write(recordings / "5_eve_9.wav", touch_tone(5, 0.2), 8000)
    eve = load(recordings, held_out=["eve"], last=Range(1, 1), tests=30).test
    sound = {len(each.features): each.features for each in eve}
    samples = torch.from_numpy(soundfile.read(recordings / "5_eve_0.wav", dtype="float32")[0])
    torch.testing.assert_close(sound[28], normalised(log_mel(samples, 8000)))


def test_an_epoch_has_each_recording_once_and_the_seed_decides(recordings):
    corpus = load(recordings)
    first, again, second = corpus.train(0, 0, 5), corpus.train(0, 0, 5), corpus.train(0, 1, 5)
    assert [each.text for each in first] == [each.text for each in again]
    assert [each.text for each in first] != [each.text for each in second]
    assert [each.text for each in first] != [each.text for each in corpus.train(1, 0, 5)]
    for epoch in (first, second, corpus.train(0, 4, 5)):
        said = "".join(each.text for each in epoch)
        assert sorted(said) == sorted("0123456789" * 6)
    assert max(len(each.text) for each in first) == 2
    longest = max(len(each.text) for each in corpus.train(0, 4, 5))
    assert longest in range(4, 8)
    assert load(recordings).digest() == corpus.digest() != load(recordings, tests=3).digest()


def test_strings_grow():
    ranges = [grown(Range(2, 5), Range(20, 40), epoch, 20) for epoch in range(20)]
    assert ranges[0] == Range(2, 5)
    assert ranges[12:] == [Range(20, 40)] * 8
    assert all(a.low <= b.low and a.high <= b.high for a, b in pairwise(ranges))
    assert grown(Range(2, 5), Range(20, 40), 0, 1) == Range(2, 5)


def test_speakers_are_held_out(recordings):
    corpus = load(recordings, held_out=["bob"])
    assert {recording.speaker for recording in corpus.recordings} == {"ann"}
    assert len(corpus.recordings) == 80
    assert all(each.name.endswith("bob") for each in corpus.test)


def test_few_recordings(recordings):
    corpus = load(recordings, utterances=7)
    assert len(corpus.recordings) == 7
    assert [each.text for each in corpus.test] == [each.text for each in load(recordings).test]


def test_digits_are_spelled(recordings):
    corpus = load(recordings, spelled=True)
    assert corpus.unit == "character"
    assert set(corpus.test[0].text.split()) <= {
        "ZERO",
        "ONE",
        "TWO",
        "THREE",
        "FOUR",
        "FIVE",
        "SIX",
        "SEVEN",
        "EIGHT",
        "NINE",
    }
    assert 4 <= len(corpus.test[0].text.split()) <= 7
    assert corpus.text(corpus.labels("SEVEN OF NINE".replace("OF ", ""))) == "SEVEN NINE"


def test_recordings_that_are_damaged_are_left_out(recordings):
    (recordings / "3_ann_6.wav").write_bytes(b"RIFF is no sound")
    data = (recordings / "4_bob_7.wav").read_bytes()
    (recordings / "4_bob_7.wav").write_bytes(data[:500])
    (recordings / "notes.txt").write_text("of the recordings")
    corpus = load(recordings)
    assert len(corpus.recordings) == 58
    assert [sentence.rpartition("/")[2].split(" is ")[0] for sentence in corpus.left_out] == [
        "3_ann_6.wav",
        "4_bob_7.wav",
    ]
    assert "is cut off" in corpus.left_out[1]


def test_refusals_of_digits(recordings):
    with pytest.raises(UserError, match=r"--held-out eve: .* has the speakers ann, bob"):
        load(recordings, held_out=["eve"])
    with pytest.raises(UserError, match="has no recording to train on"):
        load(recordings, held_out=["ann", "bob"])
    for file in recordings.iterdir():
        if file.stem[-1] in "01234":
            file.write_bytes(b"")
    with pytest.raises(
        UserError, match=r"has no recording to test on\. The first that was left out: .*0_ann_0\.wav is no audio"
    ):
        load(recordings)


def test_a_zip_file_that_is_damaged(recordings):
    file = recordings.parent / "recordings.zip"
    zipped(recordings, file)
    data = bytearray(file.read_bytes())
    at = data.index(b"0_bob_6.wav") + 200
    data[at : at + 50] = bytes(50)  # in the middle of its samples: the checksum tells
    file.write_bytes(data)
    (sentence,) = load(recordings.parent).left_out
    assert sentence.endswith("recordings/0_bob_6.wav cannot be unpacked: the zip file is damaged.")
    file.write_bytes(b"PK no zip")
    with pytest.raises(UserError, match=r"recordings\.zip is no zip file, or is damaged"):
        load(recordings.parent)


@pytest.mark.parametrize("order", [">", "<"])
@pytest.mark.parametrize("where", ["folder", "zip"])
def test_an4(tmp_path, order, where):
    write_an4(tmp_path / "an4", order)
    if where == "zip":
        zipped(tmp_path / "an4", tmp_path / "an4.zip")
    corpus = load(tmp_path)
    assert (corpus.name, corpus.unit, corpus.symbols, corpus.channels) == ("AN4", "character", " ABEGNOSY", 13)
    assert [each.text for each in corpus.train(0, 3, 9)] == ["YES", "NO", "GO ON", "A B", "YES YES", "NO GO"]
    assert [each.text for each in corpus.test] == ["GO", "YES NO"]
    frames = np.concatenate([np.random.default_rng(ord(letter)).standard_normal((12, 13)) for letter in "GO"])
    torch.testing.assert_close(corpus.test[0].features, normalised(torch.from_numpy(frames).float()))
    few = load(tmp_path, utterances=3, tests=1)
    assert (len(few.train(0, 0, 1)), len(few.test)) == (3, 1)
    assert few.digest() != corpus.digest() == load(tmp_path).digest()


def test_what_is_wrong_in_an4_is_left_out_by_name(tmp_path):
    root = write_an4(tmp_path)
    feat = root / "feat" / "an4_train" / "ann"
    (feat / "an0-ann-b.mfc").write_bytes(b"\0\0\1\0 too short")
    (feat / "an1-ann-b.mfc").unlink()
    write_cepstra(feat / "an2-ann-b.mfc", "GO ON")
    data = bytearray((feat / "an2-ann-b.mfc").read_bytes())
    data[8:12] = b"\x7f\xc0\0\0"  # NaN
    (feat / "an2-ann-b.mfc").write_bytes(data)
    lines = (root / "etc" / "an4_train.transcription").read_text().splitlines()
    lines[3] = "<s>  </s> (an3-ann-b)"
    (root / "etc" / "an4_train.transcription").write_text("\n".join(lines[:5]))
    corpus = load(tmp_path)
    assert [each.text for each in corpus.train(0, 0, 1)] == ["YES YES"]
    assert len(corpus.left_out) == 5
    for words in (
        "there is no transcript of an5-ann-b",
        "an0-ann-b.mfc is damaged: expected a count and as many floats, 13 for each frame",
        "there is no ",
        "an2-ann-b.mfc is damaged",
        "the transcript of an3-ann-b is empty",
    ):
        assert any(words in sentence for sentence in corpus.left_out), words
    (root / "etc" / "an4_test.transcription").write_text("YES\n")
    with pytest.raises(UserError, match=r"an4_test\.transcription: expected a text and \(a name\), got 'YES'"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["flac", "wav"])
@pytest.mark.parametrize("inside", ["", "LibriSpeech"])
def test_librispeech(tmp_path, kind, inside):
    write_librispeech(tmp_path / inside, kind=kind)
    (tmp_path / "README.TXT").write_text("of the data set")
    corpus = load(tmp_path)
    assert (corpus.unit, corpus.channels, corpus.symbols) == ("character", 40, " ABCDE")
    assert [each.text for each in corpus.train(0, 0, 1)] == ["A BAD CAB", "DEAD BEE"] * 2
    assert all("train-a" in each.name for each in corpus.train(0, 0, 1))
    assert all("test-a" in each.name for each in corpus.test)
    assert len(corpus.test[0].features) == 1 + (9 * 1600 - 400) // 160
    few = load(tmp_path, utterances=3, tests=1)
    assert (len(few.train(0, 0, 1)), len(few.test)) == (3, 1)


@pytest.mark.parametrize(("parts", "held_out"), [(("train-a", "dev-a"), "dev-a"), (("dev-a", "dev-b"), None)])
def test_parts_without_a_test(tmp_path, parts, held_out):
    write_librispeech(tmp_path, parts)
    corpus = load(tmp_path)
    if held_out:
        assert all(held_out in each.name for each in corpus.test)
    else:  # one of four speakers
        speakers = [{each.name.split("/")[-3] for each in part} for part in (corpus.train(0, 0, 1), corpus.test)]
        assert (len(speakers[0]), len(speakers[1])) == (3, 1)
        assert not speakers[0] & speakers[1]


@pytest.mark.parametrize("missing", ["chapters", "speakers"])
def test_parts_are_known_without_folders_for_speakers_or_chapters(tmp_path, missing):
    write_librispeech(tmp_path)
    for chapter in sorted(tmp_path.glob("*/*/7")):
        for file in chapter.iterdir():
            file.rename(chapter.parents[missing == "speakers"] / file.name)
    corpus = load(tmp_path)
    assert all("train-a" in each.name for each in corpus.train(0, 0, 1))
    assert all("test-a" in each.name for each in corpus.test)
    assert (len(corpus.train(0, 0, 1)), len(corpus.test)) == (4, 4)


@pytest.mark.parametrize("part", ["train-a", "test-a"])
def test_a_part_without_any_recording_is_no_reason_to_split_the_other(tmp_path, part):
    write_librispeech(tmp_path)
    for file in (tmp_path / part).rglob("*.flac"):
        file.unlink()
    with pytest.raises(UserError, match=f"{part} has transcripts, and no recording beside any of them"):
        load(tmp_path)


def test_what_is_wrong_in_librispeech_is_left_out_by_name(tmp_path):
    write_librispeech(tmp_path)
    chapter = tmp_path / "train-a" / "1" / "7"
    (chapter / "1-7-0000.flac").write_bytes(b"fLaC, or so it says")
    (chapter / "1-7.trans.txt").write_text("1-7-0000 A BAD CAB\n1-7-0001\n1-7-0002 NO FILE\n\n")
    corpus = load(tmp_path)
    assert len(corpus.train(0, 0, 1)) == 2
    assert len(corpus.left_out) == 3
    for words in (
        "1-7-0000.flac is no audio file",
        "1-7-0001.flac is empty",
        "there is no 1-7-0002.flac and no 1-7-0002.wav",
    ):
        assert any(words in sentence for sentence in corpus.left_out), words
    shutil.rmtree(tmp_path / "train-a" / "2")
    with pytest.raises(UserError, match=r"has no utterance to train on\. The first that was left out: "):
        load(tmp_path)
    shutil.rmtree(tmp_path / "test-a" / "12")
    shutil.rmtree(tmp_path / "train-a")
    with pytest.raises(UserError, match=r"expected parts named train… and test…, or several .* got 1 speaker"):
        load(tmp_path)


def test_names_that_are_no_files_beside_a_transcript(tmp_path):
    write_librispeech(tmp_path)
    chapter = tmp_path / "train-a" / "1" / "7"
    lines = ["\ufeff1-7-0001 DEAD BEE", "../../2/7/2-7-0000 NOT MINE", f"{'1' * 300} LONG"]
    (chapter / "1-7.trans.txt").write_text("\n".join(lines))
    corpus = load(tmp_path)
    assert (len(corpus.train(0, 0, 1)), len(corpus.left_out)) == (3, 2)
    assert "there is no ../../2/7/2-7-0000.flac" in corpus.left_out[0]


def test_layouts_that_nobody_knows(tmp_path):
    with pytest.raises(UserError, match="holds no speech that is known here: expected recordings"):
        load(tmp_path)
    (tmp_path / "file.wav").touch()
    with pytest.raises(UserError, match="holds no speech that is known here"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"file\.wav is no folder: expected recordings"):
        load(tmp_path / "file.wav")
    with pytest.raises(UserError, match="there are no data at 'nowhere'"):
        load("nowhere")
    write_digits(tmp_path)
    assert load(tmp_path).name == "FSDD"


def sound(seconds=0.5):
    held = io.BytesIO()
    soundfile.write(held, touch_tone(3, seconds, 16000), 16000, format="FLAC")
    return held.getvalue()


def test_from_the_hub(monkeypatch, tmp_path):
    (tmp_path / "a.flac").write_bytes(sound())
    rows = [
        {"audio": {"bytes": sound(), "path": None}, "text": "three  three"},
        {"audio": {"bytes": None, "path": str(tmp_path / "a.flac")}, "text": "tree"},
        {"audio": {"bytes": b"no sound", "path": None}, "text": "see"},
        {"audio": {"bytes": sound(), "path": None}, "text": " "},
    ]
    part = Dataset.from_list(rows).cast_column("audio", Audio(decode=False))
    asked = []

    def fetch(name, configuration):
        asked.append((name, configuration))
        return {"train.100": part, "validation": part.select(range(2))}

    monkeypatch.setattr(from_hub, "from_hub", fetch)
    corpus = load("openslr/librispeech_asr:clean")
    assert asked == [("openslr/librispeech_asr", "clean")]
    assert [each.text for each in corpus.train(0, 0, 1)] == ["THREE THREE", "TREE"]
    torch.testing.assert_close(*(each.features for each in corpus.train(0, 0, 1)))
    assert "row 3 is no audio file" in corpus.left_out[0] or "row 3 is no audio file" in corpus.left_out[1]
    assert any("train.100, row 4 is empty" in sentence for sentence in corpus.left_out)

    monkeypatch.setattr(from_hub, "from_hub", lambda name, configuration: {"train": part})
    with pytest.raises(UserError, match="a/b has no split 'test': it has train"):
        load("a/b")
    renamed = part.rename_column("text", "words")
    monkeypatch.setattr(from_hub, "from_hub", lambda name, configuration: {"train": renamed, "test": renamed})
    with pytest.raises(
        UserError, match=r"a/b, train: expected the column 'audio' and one of text, .*; it has audio, words"
    ):
        load("a/b")
