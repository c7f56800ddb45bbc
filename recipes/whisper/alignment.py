"""When each word and phone of a clip is said: a forced alignment by pocketsphinx."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from coterie.analysis import Segment
from coterie.cli.inputs import UserError
from recipes.whisper.clips import Clip

_FRAMES = 2  # of pocketsphinx, 10 ms each, in a token of Whisper's encoder, 20 ms
_SILENCE = ("<s>", "</s>", "<sil>", "SIL")


class Aligned(NamedTuple):
    """Words and phones in tokens of the encoder; silence is in neither."""

    words: list[Segment]
    phones: list[Segment]

    def before(self, end: int) -> Aligned:
        """Those that are over when a token begins."""
        return Aligned(*([each for each in part if each.end <= end] for part in self))


def align(clip: Clip) -> Aligned:
    """What of a clip is said when."""
    try:
        from pocketsphinx import Decoder
    except ImportError as error:
        raise UserError("words are found in time by the package pocketsphinx: pip install pocketsphinx") from error
    samples = (clip.samples.clamp(-1, 1).numpy() * 32767).astype(np.int16).tobytes()
    decoder = Decoder(lm=None, samprate=16_000, loglevel="FATAL")
    try:
        decoder.set_align_text(clip.text.lower())
        _listen(decoder, samples)
        decoder.set_alignment()  # once more, for the phones of each word
        _listen(decoder, samples)
        found = decoder.get_alignment()
    except RuntimeError as error:
        raise UserError(f"{clip.name}: pocketsphinx cannot find its words in time: {error}") from error
    if found is None:
        raise UserError(f"{clip.name}: pocketsphinx does not hear what its transcript says.")
    words = [(word.name, word.start, word.duration, [(p.name, p.start, p.duration) for p in word]) for word in found]
    return Aligned(
        in_tokens([each[:3] for each in words]),
        in_tokens([phone for each in words for phone in each[3] if each[0] not in _SILENCE]),
    )


def _listen(decoder: object, samples: bytes) -> None:
    decoder.start_utt()  # type: ignore[attr-defined]
    decoder.process_raw(samples, full_utt=True)  # type: ignore[attr-defined]
    decoder.end_utt()  # type: ignore[attr-defined]


def in_tokens(found: list[tuple[str, int, int]]) -> list[Segment]:
    """Names, first frames and numbers of frames as segments of tokens; one that is shorter than a token is left out.

    >>> in_tokens([("<sil>", 0, 20), ("he", 20, 11), ("was(2)", 31, 9)])
    [Segment(start=10, end=16, name='he'), Segment(start=16, end=20, name='was')]
    """
    segments = []
    for name, first, frames in found:
        start, end = _token(first), _token(first + frames)
        if name not in _SILENCE and end > start:
            segments.append(Segment(start, end, re.sub(r"\(\d+\)$", "", name)))
    return segments


def _token(frame: int) -> int:
    """The token that begins nearest to a frame; half-way, the later one."""
    return (frame + _FRAMES // 2) // _FRAMES
