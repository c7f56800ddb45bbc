"""`coterie.fit` with word errors as its measure: the cheapest encoder that hears the clips as the dense one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import coterie
from coterie.cli.inputs import UserError
from coterie.progress import Progress
from recipes.common.study import Result
from recipes.whisper.clips import Clip
from recipes.whisper.listening import Listener, encode, transcribe
from recipes.whisper.measure import batches, judge, windows_of


class Spoken(dict[str, Tensor]):
    """A batch as the model takes it, and the clips that it was made of."""

    clips: Sequence[Clip]


class Parts(NamedTuple):
    """Clips by what they are for: the search; the certificate, which says where to stop; and nothing at all."""

    fitted: list[Clip]
    checked: list[Clip]
    held_out: list[Clip]


def parts(clips: Sequence[Clip]) -> Parts:
    """By turns.

    >>> parts("abcde")
    Parts(fitted=['a', 'd'], checked=['b', 'e'], held_out=['c'])
    """
    return Parts(*(list(clips[first::3]) for first in range(3)))


def spoken(listener: Listener, clips: Sequence[Clip]) -> Spoken:
    """A batch of clips. The decoder gets its prompt alone: so few queries are always dense, and the encoder is what is
    fitted."""
    features = listener.heard(windows_of(listener, clips).samples)
    found = Spoken(input_features=features, decoder_input_ids=torch.tensor([listener.prompt] * len(features)))
    found.clips = clips
    return found


def word_accuracy(listener: Listener, batch: Spoken) -> float:
    """1 − word errors / words, of all clips of a batch together; below 0 if there are more errors than words."""
    said = transcribe(listener, encode(listener, batch["input_features"]))
    texts = windows_of(listener, batch.clips).joined(said)
    judged = [judge(listener, clip, text) for clip, text in zip(batch.clips, texts, strict=True)]
    return 1 - sum(each.errors for each in judged) / max(1, sum(each.words for each in judged))


def fit(
    listener: Listener,
    clips: Sequence[Clip],
    fidelity: float,
    most: int,
    *,
    candidates: Sequence[str] | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Result:
    """The cheapest mechanism for each layer of the encoder that keeps the share of right words.

    Args:
        fidelity: the share of the dense model's word accuracy that is kept, on the clips of the check, too.
        most: windows in a batch.
        candidates: mechanisms to try; Coterie's own by default.
        seconds: a budget.
    """
    mine = parts(clips)
    fitted = [spoken(listener, some) for some in batches(listener, mine.fitted, most)]
    checked = [spoken(listener, [clip]) for clip in mine.checked]  # each of them says something of its own

    def words(model: Any, batch: Any) -> float:
        return word_accuracy(listener, batch)

    try:
        found = coterie.fit(
            listener.model,
            fitted,
            fidelity,
            measure=words,
            held_out=checked,
            candidates=candidates,
            seconds=seconds,
            progress=progress,
        )
    except ValueError as error:
        if not str(error).startswith("measure: "):
            raise
        raise UserError(
            "the dense model's word accuracy on these clips is 0, so a fit has nothing to keep: give others or --fit 0."
        ) from error
    return {
        "modules": found.choices,
        "calibrated": found.calibrated,
        "checked": found.held_out,
        "promise": found.promise,
        "attention seconds": list(found.attention_seconds),
        "notes": found.notes,
    }
