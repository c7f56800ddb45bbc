"""Any folder that is laid out as LibriSpeech is.

    PART/SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt    a name and what was said, on each line
    PART/SPEAKER/CHAPTER/NAME.flac                    or .wav

Parts whose names begin with "train" are trained on, those with "test", or "dev" if there is none, are tested on. They
may have no folders for speakers and chapters. Where there are no such parts, a tenth of the speakers is held out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.audio import read_audio
from recipes.common.reading import read_text
from recipes.speech.corpus import Fixed, collected, fixed, some
from recipes.speech.features import log_mel, normalised

RATE = 16000
ENDING = ".trans.txt"
_PARTS = ("train", "test", "dev")


class Spoken(NamedTuple):
    """An utterance that was not read yet."""

    file: Path
    speaker: str
    part: str
    text: str


def load(folder: Path, *, utterances: int | None = None, tests: int | None = None) -> Fixed:
    """The corpus of a folder.

    Args:
        utterances, tests: at most so many of either part, drawn once and for all; features of all of them are in
            memory, 16 kB for each second.
    """
    left_out: list[str] = []
    train, test = split(listed(folder, left_out), folder)
    parts = [
        collected(str(folder), [_source(each) for each in some(part, count)], left_out)
        for part, count in ((train, utterances), (test, tests))
    ]
    return fixed(folder.name, parts[0], parts[1], left_out, 30)


def listed(folder: Path, left_out: list[str]) -> list[Spoken]:
    """All utterances that transcripts name and files hold."""
    found = []
    for file in sorted(folder.rglob(f"*{ENDING}")):
        part = _part(file, folder)
        beside = {path.name for path in file.parent.iterdir()}
        speaker = file.name.removesuffix(ENDING).split("-")[0]
        for line in read_text(file).splitlines():
            name, _, text = line.strip().partition(" ")
            if not name:
                continue
            audio = next((each for end in ("flac", "wav") if (each := f"{name}.{end}") in beside), None)
            if audio is None:
                left_out.append(f"{file.parent}: there is no {name}.flac and no {name}.wav.")
                continue
            found.append(Spoken(file.with_name(audio), speaker, part, text))
    return found


def _part(file: Path, folder: Path) -> str:
    """The part that a transcript is of; empty if no folder above it is one."""
    inside = file.relative_to(folder).parts
    return next((name for name in (*inside[-4:-3], *inside[:-1]) if name.startswith(_PARTS)), "")


def split(found: list[Spoken], folder: Path) -> tuple[list[Spoken], list[Spoken]]:
    """Utterances to train on, and to test on."""
    parts = {_part(file, folder) for file in folder.rglob(f"*{ENDING}")}  # those without a recording, too
    tests = {part for part in parts if part.startswith("test")} or {part for part in parts if part.startswith("dev")}
    trains = {part for part in parts if part.startswith("train")}
    if trains and tests:
        train, test = ([s for s in found if s.part in some] for some in (trains, tests))
        for name, some in ((", ".join(sorted(trains)), train), (", ".join(sorted(tests)), test)):
            if not some:
                raise UserError(f"{folder}: {name} has transcripts, and no recording beside any of them.")
        return train, test
    speakers = sorted({spoken.speaker for spoken in found})
    if len(speakers) < 2:
        raise UserError(
            f"{folder}: expected parts named train… and test…, or several speakers, of whom a tenth is held out; "
            f"got {len(speakers)} speaker{'s' * (len(speakers) != 1)}."
        )
    held_out = set(random.Random(0).sample(speakers, max(1, len(speakers) // 10)))
    return [s for s in found if s.speaker not in held_out], [s for s in found if s.speaker in held_out]


def _source(spoken: Spoken) -> tuple[str, str, Callable[[], Tensor]]:
    return str(spoken.file), spoken.text, partial(_features, spoken.file)


def _features(file: Path) -> Tensor:
    return normalised(log_mel(read_audio(file, RATE), RATE))
