"""Recordings, and what is said in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.audio import read_audio
from recipes.common.reading import read_text

RATE = 16_000  # Hz, Whisper's
DEBIAN = Path("/usr/share/pocketsphinx/test/data")  # where Debian's package puts its clips
_KINDS = (".wav", ".flac")
_SPHINX = re.compile(r"(?:<s>)?\s*(.*?)\s*(?:</s>)?\s*\(([^()\s]+)\)\s*")  # <s> words </s> (name)
_GET = (
    "sudo apt-get install pocketsphinx-testdata, or apt-get download pocketsphinx-testdata && dpkg -x "
    "pocketsphinx-testdata*.deb clips, and --data clips"
)


class Clip(NamedTuple):
    """A recording and its transcript."""

    name: str
    text: str
    samples: Tensor  # (samples,) at 16 kHz

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / RATE


def load(folder: Path | None, most: int | None = None) -> list[Clip]:
    """Every recording below a folder that has a transcript, by name.

    A transcript is a line `<s> words </s> (name)` of a file whose name ends in "transcription", as CMU Sphinx has them;
    a line `name words` of a file *.trans.txt, as LibriSpeech has them; or a file name.txt beside the recording.

    Args:
        folder: None is where Debian's package pocketsphinx-testdata puts its clips.
        most: take the first so many.
    """
    if folder is None and not DEBIAN.is_dir():
        raise UserError(f"there are no clips: give a folder as --data, or get Debian's: {_GET}.")
    where = folder or DEBIAN
    if not where.is_dir():
        raise UserError(f"{where} is no folder of recordings with transcripts.")
    texts = _transcripts(where)
    if not texts:
        raise UserError(
            f"{where} has no recording with a transcript: expected *.wav or *.flac, and files *transcription, "
            "*.trans.txt, or a .txt beside each."
        )
    return [
        Clip(str(file.relative_to(where).with_suffix("")), text, read_audio(file, RATE))
        for file, text in sorted(texts.items())[:most]
    ]


def _transcripts(where: Path) -> dict[Path, str]:
    """What is said in each recording."""
    found: dict[Path, str] = {}
    for file in sorted(each for each in where.rglob("*") if each.is_file()):
        if file.name.endswith("transcription"):
            lines = _sphinx(file)
        elif file.name.endswith(".trans.txt"):
            lines = _librispeech(file)
        elif file.suffix == ".txt" and any(file.with_name(each).exists() for each in _names(file.stem)):
            lines = iter([(file.stem, " ".join(read_text(file).split()))])
        else:
            continue
        beside = {each.name for each in file.parent.iterdir()}
        for name, text in lines:
            recording = next((file.with_name(each) for each in _names(name) if each in beside), None)
            if recording is None:
                raise UserError(f"{file} tells what is said in {name}, and there is no {name}.wav or .flac beside it.")
            if not text:
                raise UserError(f"{file}: the transcript of {name} is empty.")
            if found.get(recording, text) != text:
                raise UserError(f"{file}: {name} has two transcripts, {found[recording]!r} and {text!r}.")
            found[recording] = text
    return found


def _names(name: str) -> list[str]:
    """What the recording of a transcript may be called."""
    return [name + kind for kind in _KINDS]


def _sphinx(file: Path) -> Iterator[tuple[str, str]]:
    for number, line in _lines(file):
        found = _SPHINX.fullmatch(line)
        if found is None:
            raise UserError(f"{file}, line {number}: expected '<s> words </s> (name)', got {line!r}.")
        yield found[2], " ".join(found[1].split())


def _librispeech(file: Path) -> Iterator[tuple[str, str]]:
    for _, line in _lines(file):
        name, *words = line.split()
        yield name, " ".join(words)


def _lines(file: Path) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(read_text(file).splitlines(), start=1) if line.strip()]
