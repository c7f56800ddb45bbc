"""Recordings: what is read, and what is refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import soundfile
import torch
from recipes.common.audio import decode_audio, read_audio, resample

from coterie.cli.inputs import UserError


def tone(rate, seconds=0.5, hertz=440.0):
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_samples_come_back(tmp_path, kind):
    soundfile.write(tmp_path / f"a.{kind}", tone(8000), 8000)
    found = read_audio(tmp_path / f"a.{kind}", 8000)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), tone(8000), atol=1e-4)  # 16 bits


def test_channels_are_averaged(tmp_path):
    both = np.stack([tone(8000), -0.5 * tone(8000)], 1)
    soundfile.write(tmp_path / "a.wav", both, 8000, subtype="FLOAT")
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav", 8000).numpy(), 0.25 * tone(8000), atol=1e-6)


@pytest.mark.parametrize(("own", "rate"), [(8000, 16000), (16000, 8000), (44100, 16000), (16000, 11025)])
def test_a_tone_stays_the_same_tone(tmp_path, own, rate):
    soundfile.write(tmp_path / "a.wav", tone(own), own, subtype="FLOAT")
    found, expected = read_audio(tmp_path / "a.wav", rate).numpy(), tone(rate)
    assert abs(len(found) - len(expected)) <= 1
    middle = slice(len(expected) // 4, -len(expected) // 4)  # filters need what is before and after
    np.testing.assert_allclose(found[: len(expected)][middle], expected[: len(found)][middle], atol=2e-3)


def test_what_a_lower_rate_cannot_hold_is_removed():
    high = torch.from_numpy(tone(16000, hertz=6000.0)).float()
    assert resample(high, 16000, 8000)[500:-500].abs().max() < 0.01


def refused(path, words):
    with pytest.raises(UserError, match=words):
        read_audio(path, 8000)


def test_refusals(tmp_path):
    refused(tmp_path / "none.wav", r"none\.wav cannot be read: No such file")
    refused(tmp_path, "cannot be read: Is a directory")
    (tmp_path / "text.wav").write_text("these are no samples")
    refused(tmp_path / "text.wav", r"text\.wav is no audio file, or is damaged: expected WAV or FLAC")
    (tmp_path / "nothing.flac").touch()
    refused(tmp_path / "nothing.flac", r"nothing\.flac is no audio file")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 8000)
    refused(tmp_path / "empty.wav", r"empty\.wav holds no samples")
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, math.nan]), 8000, subtype="FLOAT")
    refused(tmp_path / "nan.wav", r"nan\.wav holds samples that are not finite")
    soundfile.write(tmp_path / "loud.wav", np.array([0.0, 1e25]), 8000, subtype="FLOAT")
    refused(tmp_path / "loud.wav", r"loud\.wav is damaged: it holds samples as large as 1e\+25")
    soundfile.write(tmp_path / "fast.wav", tone(8000), 8000)
    data = (tmp_path / "fast.wav").read_bytes()
    (tmp_path / "fast.wav").write_bytes(data[:24] + (2**31 - 1).to_bytes(4, "little") + data[28:])
    refused(tmp_path / "fast.wav", r"fast\.wav is damaged: its header says 2,147,483,647 samples a second")


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_a_file_that_is_cut_off(tmp_path, kind):
    soundfile.write(tmp_path / "a.wav", tone(8000), 8000) if kind == "wav" else soundfile.write(
        tmp_path / "a.flac", np.random.default_rng(0).uniform(-1, 1, 20000), 8000
    )
    data = (tmp_path / f"a.{kind}").read_bytes()
    with pytest.raises(UserError, match=r"a clip (is cut off|is no audio file, or is damaged)"):
        decode_audio(data[: len(data) // 2], 8000, "a clip")
    decode_audio(data, 8000, "a clip")


def test_a_stream_whose_length_was_unknown(tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(8000), 8000)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    assert len(decode_audio(bytes(data), 8000, "a stream")) == 4000
