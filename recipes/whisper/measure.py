"""What an encoder that attends in another way hears: word errors, cosines of its states, and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import coterie
from coterie import as_mechanism
from coterie.observe import Seen
from coterie.timing import interleaved
from recipes.common.errors import edit_distance
from recipes.common.study import Result
from recipes.whisper.clips import Clip
from recipes.whisper.listening import Listener, attend_by, encode, tokens_of, transcribe

DENSE = "dense"
Tick = Callable[[], None]


class Windows(NamedTuple):
    """The windows of some clips, one after the other."""

    samples: list[Tensor]
    counts: list[int]  # of each clip

    def joined(self, texts: Sequence[str]) -> list[str]:
        """The text of each clip, from those of its windows."""
        found, at = [], 0
        for count in self.counts:
            found.append(" ".join(texts[at : at + count]).strip())
            at += count
        return found


def windows_of(listener: Listener, clips: Sequence[Clip]) -> Windows:
    """Those of every clip."""
    cut = [listener.cut(clip.samples) for clip in clips]
    return Windows([each for pieces in cut for each in pieces], [len(pieces) for pieces in cut])


def batches(listener: Listener, clips: Sequence[Clip], most: int) -> Iterator[list[Clip]]:
    """Clips of at most so many windows together; one that has more is a batch of its own."""
    some: list[Clip] = []
    count = 0
    for clip in clips:
        mine = len(listener.cut(clip.samples))
        if some and count + mine > most:
            yield some
            some, count = [], 0
        some.append(clip)
        count += mine
    if some:
        yield some


class Judged(NamedTuple):
    """What was heard in a clip."""

    said: str
    errors: int  # words to be inserted, deleted or replaced
    words: int  # that were said


def judge(listener: Listener, clip: Clip, said: str) -> Judged:
    """Count its word errors."""
    wanted = listener.words(clip.text)
    return Judged(said, edit_distance(wanted, listener.words(said)), len(wanted))


def cosines(dense: Tensor, found: Tensor, samples: Sequence[Tensor]) -> list[float]:
    """The mean cosine of a window's states with the dense ones, over the tokens of its sound, without its padding."""
    cosine = F.cosine_similarity(dense.double(), found.double(), dim=-1)
    return [float(row[: tokens_of(each)].mean()) for row, each in zip(cosine, samples, strict=True)]


def listen(listener: Listener, clips: Sequence[Clip], choice: Any, most: int, tick: Tick = lambda: None) -> Result:
    """Every clip by an encoder that attends so: what was said, its errors and its cosine with the dense encoder.

    Args:
        choice: "dense", a mechanism's string, or a mechanism for each module.
        most: windows that are in memory together.
    """
    rows: list[Result] = []
    with torch.no_grad():
        for some in batches(listener, clips, most):
            windows = windows_of(listener, some)
            features = listener.heard(windows.samples)
            attend_by(listener, DENSE)
            dense = encode(listener, features)
            attend_by(listener, choice)
            states = dense if choice == DENSE else encode(listener, features)
            near = cosines(dense, states, windows.samples)
            said = windows.joined(transcribe(listener, states))
            for clip, text, count in zip(some, said, windows.counts, strict=True):
                mine, near = near[:count], near[count:]
                judged = judge(listener, clip, text)
                rows.append({"clip": clip.name, **judged._asdict(), "cosine": sum(mine) / count})
                tick()
    return {"clips": rows}


def keys_met(listener: Listener, clip: Clip, choice: Any) -> Result:
    """How many scores a query computes in the encoder, means of clusters among them; and how many densely."""
    met: list[float] = []
    tokens = int(listener.model.config.max_source_positions)

    def look(seen: Seen) -> None:
        plan = as_mechanism(seen.mechanism).plan(seen.q, seen.k, **seen.planning())
        met.append(float(plan.pairs_met().double().mean()) / tokens)

    attend_by(listener, choice)
    with coterie.observing(look):
        encode(listener, listener.heard(listener.cut(clip.samples)[:1]))
    layers = int(listener.model.config.encoder_layers)
    met += [float(tokens)] * (layers - len(met))  # those where Coterie is not called are dense
    return {"scores": sum(met) / layers, "dense_scores": tokens}


def times(listener: Listener, clip: Clip, ways: dict[str, Any], repeats: int, tick: Tick = lambda: None) -> Result:
    """Seconds of the encoder on one window in each way, planning included; all take turns."""
    features = listener.heard(listener.cut(clip.samples)[:1])

    def run(choice: Any) -> None:
        attend_by(listener, choice)
        encode(listener, features)

    return dict(interleaved({name: partial(run, choice) for name, choice in ways.items()}, repeats, tick))
