"""`coterie.fit` with word errors as its measure: the cheapest encoder that hears the clips as the dense one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import coterie
from coterie.progress import Progress
from recipes.common.study import Result
from recipes.whisper.clips import Clip
from recipes.whisper.listening import Listener, encode, transcribe
from recipes.whisper.measure import batches, judge, windows_of


class Spoken(dict[str, Tensor]):
    """A batch as the model takes it, and the clips that it was made of."""

    clips: Sequence[Clip]


def parts(clips: Sequence[Clip]) -> tuple[list[Clip], list[Clip]]:
    """Clips to fit on and held-out ones, by turns.

    >>> parts("abcde")
    (['a', 'c', 'e'], ['b', 'd'])
    """
    return list(clips[::2]), list(clips[1::2])


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
        fidelity: the share of the dense model's word accuracy that is kept, on clips that were held out, too.
        most: windows in a batch.
        candidates: mechanisms to try; Coterie's own by default.
        seconds: a budget.
    """
    fitted, held_out = ([spoken(listener, some) for some in batches(listener, part, most)] for part in parts(clips))

    def words(model: Any, batch: Any) -> float:
        return word_accuracy(listener, batch)

    found = coterie.fit(
        listener.model,
        fitted,
        fidelity,
        measure=words,
        held_out=held_out,
        candidates=candidates,
        seconds=seconds,
        progress=progress,
    )
    return {
        "modules": found.choices,
        "calibrated": found.calibrated,
        "held out": found.held_out,
        "attention seconds": list(found.attention_seconds),
        "notes": found.notes,
    }
