"""Strings of digits, joined from recordings of single ones: the Free Spoken Digit Dataset.

A recording is called {digit}_{speaker}_{number}.wav. A string is spoken by one speaker. An epoch of training has each
recording once, in strings that are drawn anew and grow: CTC finds out where symbols are on short strings first.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.audio import decode_audio
from recipes.speech.archive import Files
from recipes.speech.corpus import Corpus, Utterance, some
from recipes.speech.features import frame_at, log_mel, normalised

RATE = 8000
RECORDING = re.compile(r"(?:.*/)?(\d)_([^_/]+)_(\d+)\.wav")
NAMES = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
_TESTS = 5  # the first recordings of each digit and speaker are for tests, by convention
_GROWN = 0.6  # share of the training after which strings are as long as in the test


class Range(NamedTuple):
    """From so many digits to so many."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


class Recording(NamedTuple):
    """One digit."""

    digit: int
    speaker: str
    samples: Tensor


@dataclass(frozen=True)
class Digits(Corpus):
    """Strings of digits.

    Attributes:
        recordings: those to train on.
        first: how many digits strings have at the beginning of the training.
        last: how many they have at its end, and in the test.
        spelled: whether digits are written as words.
    """

    recordings: list[Recording]
    first: Range
    last: Range
    spelled: bool

    def train(self, seed: int, epoch: int, epochs: int) -> list[Utterance]:
        draw = random.Random(f"{seed} {epoch}")
        low, high = grown(self.first, self.last, epoch, epochs)
        found = []
        for speaker, mine in by_speaker(self.recordings).items():
            draw.shuffle(mine)
            while mine:
                count = draw.randint(low, high)
                found.append(string(f"{speaker} {len(mine)}", mine[:count], spelled=self.spelled))
                mine = mine[count:]
        return found

    def digest(self) -> str:
        found = hashlib.sha256()
        for digit, speaker, samples in self.recordings:
            found.update(f"{digit} {speaker} ".encode() + samples.numpy().tobytes())
        for utterance in self.test:
            found.update(utterance.text.encode() + utterance.features.numpy().tobytes())
        return found.hexdigest()[:12]


def load(
    files: Files,
    *,
    first: Range,
    last: Range,
    held_out: Sequence[str] = (),
    spelled: bool = False,
    recordings: int | None = None,
    tests: int | None = None,
) -> Digits:
    """The corpus of some files.

    Args:
        held_out: speakers of the test; without them, it has the first recordings of everybody.
        recordings: at most so many to train on, drawn once and for all.
        tests: how many strings the test has, 60 by default.
    """
    left_out: list[str] = []
    train: list[Recording] = []
    test: list[Recording] = []
    for name in files.names:
        parts = RECORDING.fullmatch(name)
        if parts is None:
            continue
        digit, speaker, number = int(parts[1]), parts[2], int(parts[3])
        try:
            recording = Recording(digit, speaker, decode_audio(files.read(name), RATE, files.shown(name)))
        except UserError as error:
            left_out.append(str(error))
            continue
        (test if (speaker in held_out if held_out else number < _TESTS) else train).append(recording)
    _check(files, train, test, held_out, left_out)
    strings = drawn(test, last, tests or 60, spelled)
    symbols = "".join(sorted(set(" ".join(NAMES)))) if spelled else "0123456789"
    unit = "character" if spelled else "digit"
    return Digits("FSDD", unit, symbols, strings, left_out, 30, some(train, recordings), first, last, spelled)


def _check(
    files: Files, train: list[Recording], test: list[Recording], held_out: Sequence[str], left_out: list[str]
) -> None:
    speakers = {recording.speaker for recording in [*train, *test]}
    for name in held_out:
        if name not in speakers:
            raise UserError(f"--held-out {name}: {files.where} has the speakers {', '.join(sorted(speakers))}.")
    for part, found in (("train", train), ("test", test)):
        if not found:
            why = f" The first that was left out: {left_out[0]}" if left_out else ""
            raise UserError(f"{files.where} has no recording to {part} on.{why}")


def grown(first: Range, last: Range, epoch: int, epochs: int) -> Range:
    """How many digits strings have in an epoch.

    >>> [str(grown(Range(2, 5), Range(20, 40), epoch, 11)) for epoch in (0, 3, 6, 10)]
    ['2-5', '11-22', '20-40', '20-40']
    """
    share = min(1.0, epoch / max(1.0, _GROWN * (epochs - 1)))
    low, high = (round(a + share * (b - a)) for a, b in zip(first, last, strict=True))
    return Range(low, high)


def by_speaker(recordings: Sequence[Recording]) -> dict[str, list[Recording]]:
    """The recordings of each speaker."""
    found: dict[str, list[Recording]] = {}
    for recording in recordings:
        found.setdefault(recording.speaker, []).append(recording)
    return found


def drawn(recordings: Sequence[Recording], digits: Range, count: int, spelled: bool = False) -> list[Utterance]:
    """Strings of random digits, of all speakers in turn; always the same."""
    draw, speakers = random.Random(0), by_speaker(recordings)
    names = sorted(speakers)
    found = []
    for number in range(count):
        speaker = names[number % len(names)]
        chosen = draw.choices(speakers[speaker], k=draw.randint(*digits))
        found.append(string(f"test {number}, {speaker}", chosen, spelled=spelled))
    return found


def string(name: str, recordings: Sequence[Recording], *, spelled: bool = False) -> Utterance:
    """Recordings one after the other."""
    samples = torch.cat([recording.samples for recording in recordings])
    said = [NAMES[r.digit] if spelled else str(r.digit) for r in recordings]
    features = normalised(log_mel(samples, RATE))
    ends = list(accumulate(len(recording.samples) for recording in recordings))
    frames = (*(frame_at(end, RATE) for end in ends[:-1]), len(features))
    return Utterance(name, features, (" " if spelled else "").join(said), frames)
