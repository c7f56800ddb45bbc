"""What a recogniser writes, how wrong it is, and how long it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from coterie.cli.inputs import UserError
from coterie.timing import interleaved
from recipes.common.draws import begin_step
from recipes.common.errors import error_rate
from recipes.common.precision import autocast
from recipes.common.processes import processes
from recipes.common.study import Result
from recipes.speech.batches import by_frames, padded
from recipes.speech.corpus import Corpus, Utterance
from recipes.speech.decoding import greedy, prefix_beam
from recipes.speech.network import Recogniser, attend_by

_FLOOR = 1e-4  # symbols that are less probable at a token are passed over in beam search


@dataclass(frozen=True)
class Reader:
    """How probabilities become text.

    Attributes:
        width: of the beam; 0 takes the most probable path.
    """

    corpus: Corpus
    width: int = 0

    def __call__(self, log_probabilities: Tensor) -> str:
        """(tokens, symbols) → what was heard."""
        if not self.width:
            return self.corpus.text(greedy(log_probabilities))
        return self.corpus.text(prefix_beam(log_probabilities, self.width, _FLOOR)[0].labels)


@torch.no_grad()
def hear(model: Recogniser, utterances: Sequence[Utterance], frames: int, *, bf16: bool = False) -> list[Tensor]:
    """Log probabilities (tokens, symbols) of each utterance, in batches of so many frames."""
    model.eval()
    begin_step(0, -1)  # mechanisms that resample draw the same whatever ran before
    found: dict[int, Tensor] = {}
    for rows in by_frames([len(each.features) for each in utterances], frames, 0, 0):
        features, lengths = (part.to(processes().device) for part in padded([utterances[i] for i in rows]))
        with autocast(model, bf16):
            heard = model(features, lengths)
        if not heard.log_probabilities.isfinite().all():
            raise UserError("the recogniser's answers are not finite numbers: its training diverged.")
        for i, row, length in zip(rows, heard.log_probabilities.cpu(), heard.lengths.tolist(), strict=True):
            found[i] = row[:length]
    return [found[i] for i in range(len(utterances))]


def errors(corpus: Corpus, heard: Sequence[Tensor], read: Callable[[Tensor], str]) -> Result:
    """The error rate in the corpus's unit, that of words if it has words, and the first two texts as they were read."""
    wanted, written = [each.text for each in corpus.test[: len(heard)]], [read(each) for each in heard]
    found: Result = {corpus.unit: error_rate(wanted, written)}
    if any(" " in text for text in wanted):
        found["word"] = error_rate([text.split() for text in wanted], [text.split() for text in written])
    return {**found, "examples": [list(pair) for pair in zip(wanted[:2], written, strict=False)]}


def milliseconds(
    model: Recogniser,
    utterances: Sequence[Utterance],
    mechanisms: Sequence[str],
    repeats: int,
    tick: Callable[[], None] = lambda: None,
    *,
    bf16: bool = False,
) -> dict[str, float]:
    """Of one utterance at a time with each mechanism, all taking turns; decoding, the same for all, is not in it."""
    alone = [tuple(part.to(processes().device) for part in padded([utterance])) for utterance in utterances]

    @torch.no_grad()
    def run(mechanism: str) -> None:
        attend_by(model, mechanism).eval()
        for features, lengths in alone:
            with autocast(model, bf16):
                model(features, lengths)

    seconds = interleaved({name: partial(run, name) for name in mechanisms}, repeats, tick)
    return {name: 1000 * found / len(alone) for name, found in seconds.items()}


def mean_tokens(model: Recogniser, utterances: Sequence[Utterance]) -> float:
    """Of an utterance."""
    return statistics.fmean(model.config.tokens(len(each.features)) for each in utterances)
