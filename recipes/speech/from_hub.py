"""Speech from the hub: a data set with the columns `audio` and `text`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.audio import decode_audio, read_audio
from recipes.common.hub import from_hub
from recipes.speech.corpus import Fixed, collected, fixed, some
from recipes.speech.features import log_mel, normalised
from recipes.speech.librispeech import RATE

_TEXTS = ("text", "sentence", "transcription", "transcript")


def load(data: str, *, utterances: int | None = None, tests: int | None = None) -> Fixed:
    """The corpus of a hub name, `owner/name` or `owner/name:configuration`.

    Splits whose names begin with "train" are trained on; those with "test", or "validation" if there is none, are
    tested on.
    """
    name, _, configuration = data.partition(":")
    splits = from_hub(name, configuration or None)
    left_out: list[str] = []
    parts = []
    for part, count in (
        (_named(splits, name, "train"), utterances),
        (_named(splits, name, "test", "validation"), tests),
    ):
        rows = [(split, i) for split in part for i in range(len(splits[split]))]
        parts.append(collected(name, _sources(splits, name, some(rows, count)), left_out))
    return fixed(name, parts[0], parts[1], left_out, 30)


def _named(splits: Any, name: str, *beginnings: str) -> list[str]:
    for beginning in beginnings:
        if found := [split for split in splits if split.startswith(beginning)]:
            return found
    raise UserError(f"{name} has no split {beginnings[0]!r}: it has {', '.join(splits)}.")


def _sources(splits: Any, name: str, rows: list[tuple[str, int]]) -> Iterator[tuple[str, str, Callable[[], Tensor]]]:
    from datasets import Audio

    undecoded = {}
    for split, number in rows:
        if split not in undecoded:
            columns = splits[split].column_names
            text = next((column for column in _TEXTS if column in columns), None)
            if text is None or "audio" not in columns:
                raise UserError(
                    f"{name}, {split}: expected the column 'audio' and one of {', '.join(_TEXTS)}; it has "
                    f"{', '.join(columns)}."
                )
            undecoded[split] = splits[split].cast_column("audio", Audio(decode=False)), text
        dataset, text = undecoded[split]
        row, where = dataset[number], f"{name}, {split}, row {number + 1}"
        yield where, str(row[text] or ""), partial(_features, row["audio"], where)


def _features(audio: Any, where: str) -> Tensor:
    if audio and audio.get("bytes"):
        samples = decode_audio(audio["bytes"], RATE, where)
    elif audio and audio.get("path"):
        samples = read_audio(Path(audio["path"]), RATE)
    else:
        raise UserError(f"{where} has no audio.")
    return normalised(log_mel(samples, RATE))
