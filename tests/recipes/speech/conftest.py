"""Small data sets that sound like something: a telephone's touch tones for digits, a tone for each letter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = ["123", "456", "789", " 0 "]


def touch_tone(digit: int, seconds: float, rate: int = 8000, seed: int = 0) -> np.ndarray:
    """What a telephone sends for a digit, and some noise."""
    row, column = next((r, keys.index(str(digit))) for r, keys in enumerate(KEYS) if str(digit) in keys)
    t = np.arange(int(seconds * rate)) / rate
    sound = np.sin(2 * np.pi * ROWS[row] * t) + np.sin(2 * np.pi * COLUMNS[column] * t)
    return 0.3 * sound + 0.01 * np.random.default_rng(seed).standard_normal(len(t))


def write_digits(folder: Path, speakers: tuple[str, ...] = ("ann", "bob"), numbers: int = 8) -> Path:
    """Recordings as FSDD calls them."""
    folder.mkdir(parents=True, exist_ok=True)
    for speaker in speakers:
        for digit in range(10):
            for number in range(numbers):
                seed = 1000 * digit + number
                seconds = 0.15 + 0.02 * (seed % 5) + 0.03 * (speaker == "bob")
                soundfile.write(folder / f"{digit}_{speaker}_{number}.wav", touch_tone(digit, seconds, seed=seed), 8000)
    return folder


def write_an4(folder: Path, order: str = ">") -> Path:
    """Cepstra in which each letter has its own frames."""
    texts = {"train": ["YES", "NO", "GO ON", "A B", "YES YES", "NO GO"], "test": ["GO", "YES NO"]}
    (folder / "etc").mkdir(parents=True)
    for part, said in texts.items():
        names = [f"an{i}-ann-b" for i in range(len(said))]
        (folder / "etc" / f"an4_{part}.fileids").write_text("".join(f"an4_{part}/ann/{name}\n" for name in names))
        lines = [f"<s> {text} </s> ({name})\n" for text, name in zip(said, names, strict=True)]
        (folder / "etc" / f"an4_{part}.transcription").write_text("".join(lines))
        for text, name in zip(said, names, strict=True):
            write_cepstra(folder / "feat" / f"an4_{part}" / "ann" / f"{name}.mfc", text, order)
    return folder


def write_cepstra(file: Path, text: str, order: str = ">") -> None:
    """13 floats for each of 12 frames a letter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    frames = np.concatenate([np.random.default_rng(ord(letter)).standard_normal((12, 13)) for letter in text])
    file.write_bytes(np.array([frames.size], f"{order}i4").tobytes() + frames.astype(f"{order}f4").tobytes())


def write_librispeech(folder: Path, parts: tuple[str, ...] = ("train-a", "test-a"), kind: str = "flac") -> Path:
    """Two speakers in each part, two utterances each; a tone for each letter."""
    for p, part in enumerate(parts):
        for speaker in (10 * p + 1, 10 * p + 2):
            chapter = folder / part / str(speaker) / "7"
            chapter.mkdir(parents=True)
            lines = []
            for number, text in enumerate(("A BAD CAB", "dead bee")):
                name = f"{speaker}-7-{number:04d}"
                tones = [0.3 * np.sin(np.arange(1600) * 0.02 * (ord(letter.upper()) - 30)) for letter in text]
                soundfile.write(chapter / f"{name}.{kind}", np.concatenate(tones), 16000)
                lines.append(f"{name} {text}\n")
            (chapter / f"{speaker}-7.trans.txt").write_text("".join(lines))
    return folder


@pytest.fixture
def recordings(tmp_path) -> Path:
    return write_digits(tmp_path / "digits" / "recordings")
