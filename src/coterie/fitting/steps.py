"""The steps of a fit, each of which hands a record on: dense answers, candidates, search, certificate, timing."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch

from coterie._version import __version__
from coterie.checks import expect
from coterie.fitting.certify import all_dense, certify
from coterie.fitting.decoding.measure import Continued
from coterie.fitting.decoding.result import Decoding
from coterie.fitting.decoding.steps import Decoder
from coterie.fitting.lengths import shape_of, size_of
from coterie.fitting.measures import Fidelity, Measure, Remembered, least
from coterie.fitting.profile import Profiled, profile
from coterie.fitting.result import Fit
from coterie.fitting.search import Choices, Searched, search
from coterie.fitting.speed import Passes, time_passes
from coterie.fitting.task import Task
from coterie.hosts import DENSE, HfHost, Host
from coterie.machine import cpu
from coterie.mechanisms import Mechanism
from coterie.progress import ESTIMATE, Progress

_NO_WINDOWS = (
    "Windows were not tried: nothing in the model says that the order of its tokens means something (ordered=True "
    "tries them)."
)
# What a document costs, in dense passes over it: one for its dense answer, and one for every plan or its like.
_SEARCHED, _CERTIFIED = 6.0, 4.5  # usually
_SEARCHED_LEAST, _CERTIFIED_LEAST = 3.0, 2.0  # without which there is no promise
_FEWEST = 3  # documents of a shape that certify
_LATE = 1.2  # times what is left: what takes longer is not begun
_DECODING = 2.0  # times as much, if decoding is fitted, too
_PREFILL = 0.5  # of the time is the prefill's, then


@dataclass(frozen=True)
class Asked:
    """What a user has asked for, checked."""

    host: Host
    batches: list[Any]
    held_out: list[Any] | None
    targets: list[float]
    confidence: float
    share: float | None
    measure: Measure | None
    candidates: list[Mechanism]
    no_windows: bool  # among them, as nobody asked for any and the model does not look like it
    seed: int
    start: float  # on time.monotonic()
    seconds: float | None
    decoders: list[Mechanism] | None = None  # to try for new tokens; None: nobody asked


def fits(asked: Asked, tell: Progress) -> list[Fit]:
    """A fit for each target: they share dense answers, what candidates cost, and every plan that was run."""
    try:
        scale, fitted, checked, notes = answers(asked, tell)
    except _TooShortError as error:
        return [_nothing(asked, target, str(error)) for target in asked.targets]
    end = math.inf if asked.seconds is None else asked.start + asked.seconds
    found = {}
    timed: dict[frozenset[tuple[str, str]], Passes] = {}
    remembered, profiled, decoder = None, None, None
    if asked.decoders is not None:
        assert isinstance(asked.host, HfHost)
        decoder = Decoder(Continued(asked.host, scale.batches), asked.decoders, fitted, checked)
    for number, target in enumerate(sorted(asked.targets, reverse=True)):  # exact ones first: cheap ones may run out
        now = time.monotonic()
        until = now + (end - now) / (len(asked.targets) - number)
        task = Task(
            asked.host,
            [scale.batches[index] for index in fitted],
            [scale.batches[index] for index in checked],
            target,
            asked.confidence,
            asked.share,
            asked.candidates,
            asked.seconds,
            now,
            until if decoder is None else now + _PREFILL * (until - now),
            tell,
        )
        remembered = Remembered(task, scale, fitted, checked, {} if remembered is None else remembered.known)
        profiled = profile(task, scale.lengths) if profiled is None else profiled
        try:
            found[target] = _fit(task, remembered, profiled, asked, notes, timed)
        except KeyboardInterrupt:
            if not found:
                raise
            break
        if decoder is not None:
            decoder.interrupted = remembered.interrupted
            late = replace(task, start=time.monotonic(), end=until)
            found[target] = replace(found[target], decode=decoder.fit(late, found[target].choices))
            remembered.interrupted = decoder.interrupted
        if remembered.interrupted:
            break
    return [found[target] for target in asked.targets if target in found]


class _TooShortError(Exception):
    """There is no time for a fit."""


def _nothing(asked: Asked, target: float, why: str) -> Fit:
    """All dense, as nothing was tried."""
    return Fit(
        choices=dict.fromkeys(asked.host.names, DENSE),
        measure=Fidelity(asked.host, asked.measure, []).name,
        fidelity=target,
        calibrated=1.0,
        held_out=1.0,
        confidence=asked.confidence,
        share=asked.share,
        certified=True,
        windows=asked.host.windows(),
        table=[],
        attention_seconds=(math.nan, math.nan),
        lengths=[],
        seed=asked.seed,
        notes=[why],
        environment=environment(),
        decode=None if asked.decoders is None else Decoding.untouched(asked.host),
    )


def answers(asked: Asked, tell: Progress) -> tuple[Fidelity, list[int], list[int], list[str]]:
    """Run every batch densely, once; the largest first, as it tells how long everything will take.

    Returns:
        The answers; which batches are searched on and which certify; and what was left out.
    """
    batches = [*asked.batches, *(asked.held_out or ())]
    if asked.seconds is not None and time.monotonic() - asked.start >= asked.seconds:
        raise _TooShortError(
            "The time budget is too short: it was over before anything could be tried. All attention stays dense."
        )
    sizes = [size_of(batch) for batch in batches]
    order = sorted(range(len(batches)), key=lambda index: -sizes[index])
    scale = Fidelity(asked.host, asked.measure, batches)
    scale.remember(order[0])
    rate = scale.seconds[order[0]] / max(1, sizes[order[0]]) * (1.0 if asked.decoders is None else _DECODING)
    so_far = time.monotonic() - asked.start
    notes = []
    if asked.seconds is not None and asked.held_out is not None:
        left, first = asked.seconds - so_far, len(asked.batches)
        parts = affordable(batches, list(range(first)), list(range(first, len(batches))), rate, left)
        needed = least_time(batches, *parts, rate)
        if needed > _LATE * left:
            raise _TooShortError(
                f"The time budget is too short: a fit takes {math.ceil(so_far + needed)} s at least, as fast as this "
                "machine is now. All attention stays dense."
            )
        kept = {*parts[0], *parts[1]}
        if len(kept) < len(batches):
            notes.append(f"The time that was left is enough for {len(kept)} of {len(batches)} batches.")
            order = [index for index in order if index in kept]
    tell(ESTIMATE, 0, math.ceil(so_far + _expected(asked, sizes, rate)))
    for done, index in enumerate(order, start=1):
        if done > 1:
            scale.remember(index)
        tell("dense answers", done, len(order))
    scale.expect_worth()
    return scale, *_split(scale, None if asked.held_out is None else len(asked.batches)), notes


def _expected(asked: Asked, sizes: list[int], rate: float) -> float:
    """Seconds that a fit takes as a rule, and no more than there are."""
    first = to_search(len(sizes)) if asked.held_out is None else len(asked.batches)
    whole = sum(sizes)
    mine = whole * first / len(sizes) if asked.held_out is None else sum(sizes[:first])
    expected = rate * (_SEARCHED * mine + _CERTIFIED * (whole - mine)) * (1 + (len(asked.targets) - 1) / 2)
    return expected if asked.seconds is None else min(expected, asked.seconds - (time.monotonic() - asked.start))


def affordable(
    batches: list[Any], mine: list[int], others: list[int], rate: float, seconds: float
) -> tuple[list[int], list[int]]:
    """As many documents of each shape as there is time for: fewer to search on, and then fewer that certify.

    Decided by time alone, before anything is known of what they score, so that what is certified stays so.

    Args:
        mine, others: the batches to search on, and those that certify.
        rate: seconds of a dense pass for each number in a batch.

    Example:
        >>> import torch
        >>> documents = [torch.zeros(1, 100) for _ in range(6)]
        >>> affordable(documents, [0, 1], [2, 3, 4, 5], 0.01, 20.0)
        ([0, 1], [2, 3, 4, 5])
        >>> affordable(documents, [0, 1], [2, 3, 4, 5], 0.01, 11.0)
        ([0], [2, 3, 4])
    """
    for count in range(len(batches), 0, -1):
        if least_time(batches, mine, others, rate) > seconds:
            mine = _of_each_shape(batches, mine, count)
        if least_time(batches, mine, others, rate) > seconds:
            others = _of_each_shape(batches, others, max(count, _FEWEST))
    return mine, others


def least_time(batches: list[Any], mine: list[int], others: list[int], rate: float) -> float:
    """Seconds without which there is no promise."""
    searched, certified = (sum(size_of(batches[index]) for index in part) for part in (mine, others))
    return rate * (_SEARCHED_LEAST * searched + _CERTIFIED_LEAST * certified)


def _of_each_shape(batches: list[Any], indices: list[int], count: int) -> list[int]:
    """The first few of each shape."""
    seen: Counter[Any] = Counter()
    found = []
    for index in indices:
        shape = shape_of(batches[index])
        seen[shape] += 1
        if seen[shape] <= count:
            found.append(index)
    return found


def _fit(
    task: Task,
    remembered: Remembered,
    profiled: Profiled,
    asked: Asked,
    notes: list[str],
    before: dict[frozenset[tuple[str, str]], Passes],
) -> Fit:
    searched = search(task, remembered, profiled)
    certified = certify(task, remembered, searched)
    timed = time_passes(task, remembered, profiled, certified, before)
    if timed.speedup < 1:  # what saves time in attention alone may cost it elsewhere
        said = f"The plan that held makes the whole model {timed.speedup:.2f}× as fast: it is not taken."
        certified, timed = all_dense(task, remembered, [said]), timed.all_dense()
    choices = task.whole(certified.plan)
    notes = [*notes, *profiled.notes, *searched.notes, *certified.notes, *_remarks(choices, searched, profiled)]
    return Fit(
        choices=choices,
        measure=remembered.scale.name,
        fidelity=task.target,
        calibrated=certified.calibrated,
        held_out=least({tokens: each.fidelity for tokens, each in certified.judged.items()}),
        confidence=task.confidence,
        share=task.share,
        certified=certified.sure,
        windows=task.host.windows(),
        table=profiled.table,
        attention_seconds=timed.attention_seconds,
        lengths=timed.lengths,
        seed=asked.seed,
        notes=[*notes, _NO_WINDOWS] if asked.no_windows else notes,
        environment=environment(),
    )


def _remarks(choices: Choices, searched: Searched, profiled: Profiled) -> list[str]:
    """What the choices themselves give rise to."""
    if set(choices.values()) == {DENSE}:
        if len(searched.plans) > 1 or profiled.cut_short:  # something was faster, or might have been
            return ["Dense attention is kept everywhere."]
        return [f"Nothing pays at {', '.join(map(str, profiled.lengths))} tokens: dense attention is kept everywhere."]
    if any("@" in spec for spec in choices.values()):
        return ["Short inputs stay dense: the number after '@' is that of keys from which a mechanism runs."]
    return []


def _split(scale: Fidelity, first: int | None) -> tuple[list[int], list[int]]:
    """Which batches are searched on, the long ones first in case that time runs out, and which certify.

    Args:
        first: so many are searched on, if the user has said so.
    """
    everyone = sorted(scale.seconds)  # those that were answered
    fitted = [index for index in everyone if first is not None and index < first]
    checked = [index for index in everyone if first is not None and index >= first]
    if first is None:
        by_length: dict[int, list[int]] = {}
        for index in everyone:
            by_length.setdefault(scale.length(index), []).append(index)
        for tokens, some in by_length.items():
            got = f"1 of {tokens} tokens"
            expect(len(some) >= 2, "batches", "at least 2 of each length, as some are held out", got)
            fitted += some[: to_search(len(some))]
            checked += some[to_search(len(some)) :]
    return sorted(fitted, key=scale.length, reverse=True), checked


def to_search(documents: int) -> int:
    """How many of some documents plans are searched on: a third. A promise needs the others more.

    >>> to_search(2), to_search(6), to_search(20)
    (1, 2, 6)
    """
    return max(1, documents // 3)


def environment() -> dict[str, str]:
    """What a figure depends on."""
    found = {
        "coterie": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{cpu()}, {torch.get_num_threads()} threads",
    }
    try:
        import transformers
    except ImportError:
        return found
    return found | {"transformers": transformers.__version__}
