"""Which corpus a folder holds, or a name means."""

from __future__ import annotations

from pathlib import Path

from coterie.cli.inputs import UserError
from recipes.speech import an4, digits, from_hub, librispeech
from recipes.speech.archive import Files
from recipes.speech.corpus import Corpus
from recipes.speech.digits import Range

ARCHIVES = ("recordings.zip", "an4.zip")
_EXPECTED = (
    "expected recordings {digit}_{speaker}_{number}.wav or recordings.zip (FSDD), etc/an4_train.fileids or an4.zip "
    f"(AN4), or texts *{librispeech.ENDING} beside FLAC or WAV files (LibriSpeech)"
)


def load(
    data: str,
    *,
    first: Range,
    last: Range,
    held_out: list[str],
    spelled: bool,
    utterances: int | None = None,
    tests: int | None = None,
) -> Corpus:
    """The corpus of a folder or of a hub name; what only strings of digits have is ignored by others.

    Args:
        utterances, tests: at most so many of either part; of digits, recordings to train on.
    """
    folder = Path(data)
    if not folder.exists():
        return from_hub.load(data, utterances=utterances, tests=tests)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: {_EXPECTED}.")
    files = Files(folder, ARCHIVES)
    if any(map(digits.RECORDING.fullmatch, files.names)):
        return digits.load(
            files, first=first, last=last, held_out=held_out, spelled=spelled, recordings=utterances, tests=tests
        )
    if any(name.endswith(an4.LISTED) for name in files.names):
        return an4.load(files, utterances=utterances, tests=tests)
    if any(name.endswith(librispeech.ENDING) for name in files.names):
        return librispeech.load(folder, utterances=utterances, tests=tests)
    raise UserError(f"{files.where} holds no speech that is known here: {_EXPECTED}.")
