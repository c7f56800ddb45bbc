"""What can be promised of documents that nobody has seen: plans are tested once each, on data that chose none of them.

Fixed-sequence testing: from an exact plan to cheap ones, each is tested at the full level, up to the first that fails.
A false promise needs a first false one, and that one is tested once: no correction is needed (cf. Learn then Test,
Angelopoulos, Bates, Candès, Jordan and Lei 2021). Of several lengths all must hold, each at the full level.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import NamedTuple

from coterie.fitting.bounds import Bound, documents_for_mean, documents_for_share, lower_bound, share_bound
from coterie.fitting.measures import Remembered, least
from coterie.fitting.search import Choices, Searched
from coterie.fitting.task import Task

# How much of the loss that is allowed the plans of the sequence had on the documents of the search.
_LOSSES = (0.2, 0.4, 0.6, 0.8, 1.0)
_FEW = 3  # plans that losses must tell apart
_FASTER = 0.85  # of the dense model's time is what a plan takes that is any good
_CERTIFY = 0.9  # of a budget is over when plans have been tested: whole passes are to be timed yet


class Judged(NamedTuple):
    """What the certifying documents of one length say of a plan.

    Attributes:
        scores: of each of them.
        seen: their mean, or the share of them that hold.
        bound: of the mean, or of the share of documents that hold.
        wanted: what the bound must reach.
        few: whether these documents can certify nothing: whatever so few scored, or as all score the same by a measure
            of which nobody knows how low it gets.
    """

    scores: list[float]
    seen: float
    bound: Bound
    wanted: float
    few: bool

    @property
    def fidelity(self) -> float:
        """Their mean."""
        return statistics.fmean(self.scores)

    @property
    def certified(self) -> bool:
        """NaN certifies nothing."""
        return self.bound.value >= self.wanted

    @property
    def held(self) -> bool:
        """Whether a plan may be taken: it is certified, or it did well on documents that cannot certify."""
        return self.seen >= self.wanted if self.few else self.certified


class Certified(NamedTuple):
    """The plan that is promised, if `sure`; or the one that held on average, on documents too few to be sure of it."""

    plan: Choices
    judged: dict[int, Judged]  # by length
    calibrated: float  # on the documents of the search, the worst of all lengths; NaN if there was no time for it
    sure: bool
    notes: list[str]


def certify(task: Task, remembered: Remembered, searched: Searched) -> Certified:
    """Test the plans of a sequence, and take the last that held; all dense if none did."""
    plans, chosen = searched.plans, len(searched.plans) - 1
    exact = all(remembered.exact({}, length) for length in remembered.documents())
    judged, failed, sure = _exact(task, remembered) if exact else {}, None, True
    sequence = [*([] if exact else [chosen]), *sequence_of(searched, task.target)]  # what is not exact is tested, too
    ahead = _FASTER * remembered.seconds(remembered.checked)
    notes: list[str] = []
    try:
        for number, index in enumerate(sequence):
            if task.out_of_time(_CERTIFY if number else 1.0, ahead):
                if not number:
                    return _untested(searched, "The time budget was over before a plan could be certified.")
                break  # whoever stops early has promised less, and nothing false
            task.tell("certify", number, len(sequence))
            start = time.monotonic()
            found = _judge(task, remembered, plans[index])
            ahead = time.monotonic() - start
            if not all(each.held for each in found.values()):
                failed = found
                judged, sure = (judged, sure) if judged else (found, False)
                break
            # a plan that was passed without being certified certifies none of those after it
            chosen, judged, sure = index, found, sure and not any(each.few for each in found.values())
        task.tell("certify", 1, 1)
        calibrated = searched.scores.get(chosen, math.nan)
        if chosen not in searched.scores and not task.out_of_time(ahead=remembered.seconds(remembered.fitted)):
            calibrated = least(remembered.on_fitted(plans[chosen]))
    except KeyboardInterrupt:
        remembered.interrupted = True
        if not judged or all(each.bound.method == "exact" for each in judged.values()):
            return _untested(searched, "Interrupted before a plan was certified.")
        notes.append("Interrupted: a cheaper plan may hold, too.")
        calibrated = searched.scores.get(chosen, math.nan)
    doubts = remembered.doubts() if chosen < len(plans) - 1 or not exact else []
    notes += doubts or _notes(task, judged, failed, sure)
    return Certified(plans[chosen], judged, calibrated, sure and not doubts, notes)


def _untested(searched: Searched, why: str) -> Certified:
    """What the search chose, of which no more is known."""
    plan = searched.plans[searched.chosen]
    return Certified(plan, {}, searched.scores[searched.chosen], False, [f"{why} Nothing is promised."])


def all_dense(task: Task, remembered: Remembered, notes: list[str]) -> Certified:
    """What needs no promise."""
    return Certified({}, _exact(task, remembered), 1.0, True, notes)


def sequence_of(searched: Searched, target: float) -> list[int]:
    """Plans of a path that are worth a test, from exact to cheap: the search's own choice last.

    What others cost in fidelity is read off the plans that the search has run, in between by a line. Where that tells
    hardly any apart, as where nothing may be lost at all, plans are taken evenly along the path.
    """
    known = sorted(searched.scores.items())
    found: list[int] = []
    for share in _LOSSES:
        allowed = 1 - share * (1 - target)
        index = next((i for i in range(searched.chosen, known[-1][0]) if _between(known, i) >= allowed), None)
        if index is not None and index not in found:
            found.append(index)
    last = known[-1][0]
    if len(found) < _FEW:
        evenly = {searched.chosen + (last - searched.chosen) * part // len(_LOSSES) for part in range(len(_LOSSES))}
        found = sorted({*found, *evenly} - {last}, reverse=True)
    return found


def _between(known: list[tuple[int, float]], at: int) -> float:
    """The fidelity at an index of the path, from those on either side of it."""
    before = max((each for each in known if each[0] <= at), default=known[0])
    after = min((each for each in known if each[0] >= at), default=known[-1])
    if before[0] == after[0]:
        return before[1]
    share = (at - before[0]) / (after[0] - before[0])
    return before[1] + share * (after[1] - before[1])


def judge(scores: list[float], target: float, confidence: float, share: float | None, lowest: float | None) -> Judged:
    """What documents say of a plan.

    Args:
        share: of documents that must score at least the target; None: their mean must.
        lowest: the lowest score that there can be, if there is one.

    Example:
        >>> from coterie.fitting.certify import judge
        >>> found = judge([0.991, 0.993, 0.992, 0.994], 0.99, 0.95, None, -1.0)
        >>> round(found.fidelity, 4), round(found.bound.value, 4), found.bound.method, found.certified
        (0.9925, 0.991, 't', True)
        >>> found = judge([0.991, 0.993, 0.992, 0.994], 0.99, 0.95, 0.5, -1.0)  # half of all documents
        >>> round(found.bound.value, 4), found.bound.method, found.certified
        (0.4729, 'binomial', False)
    """
    count = len(scores)
    if share is None:
        mean = statistics.fmean(scores)
        alike = lowest is None and len(set(scores)) == 1  # right words are counted: others will differ, nobody saw how
        bound = Bound(-math.inf, "t") if alike else lower_bound(scores, confidence, target, lowest)
        return Judged(scores, mean, bound, target, count < 2 or alike)
    held = sum(score >= target for score in scores)
    bound = Bound(share_bound(held, count, confidence), "binomial")
    return Judged(scores, held / count, bound, share, count < documents_for_share(confidence, share))


def _judge(task: Task, remembered: Remembered, plan: Choices) -> dict[int, Judged]:
    """Every length in turn, up to the first that does not hold: a plan must hold at all of them."""
    found: dict[int, Judged] = {}
    for length, scores in remembered.on_checked(plan):
        if remembered.exact(plan, length):
            found[length] = _dense(task, len(scores))
            continue
        found[length] = judge(scores, task.target, task.confidence, task.share, remembered.scale.lowest)
        if not found[length].held:
            break
    return dict(sorted(found.items()))


def _exact(task: Task, remembered: Remembered) -> dict[int, Judged]:
    """All dense."""
    return {length: _dense(task, count) for length, count in remembered.documents().items()}


def _dense(task: Task, documents: int) -> Judged:
    """Where attention is dense, nothing is to be tested."""
    wanted = task.target if task.share is None else task.share
    return Judged([1.0] * documents, 1.0, Bound(1.0, "exact"), wanted, False)


def _notes(task: Task, judged: dict[int, Judged], failed: dict[int, Judged] | None, sure: bool) -> list[str]:
    """What a user should know of a promise that is missing."""
    few = {length: each for length, each in judged.items() if each.few}
    if not sure and few:
        length, worst = min(few.items(), key=lambda item: len(item[1].scores))
        enough = 2 if task.share is None else documents_for_share(task.confidence, task.share)
        if len(worst.scores) >= enough:
            return [
                f"Not certified: the {_documents(len(worst.scores))} of {length:,} tokens all score "
                f"{worst.fidelity:.4f}, which does not say how much others may differ."
            ]
        return [
            f"Not certified: {_documents(len(worst.scores))} of {length:,} tokens can show nothing with "
            f"{100 * task.confidence:g}% confidence; at least {enough} are needed there, and better more."
        ]
    exact = all(each.bound.method == "exact" for each in judged.values())
    if failed is None or not (exact or failed is judged):
        return []
    length, worst = min(failed.items(), key=lambda item: item[1].bound.value - item[1].wanted)
    said = (
        f"No plan could be certified: at {length:,} tokens the most exact one that was tested has a mean fidelity of "
        f"{worst.fidelity:.4f} on {_documents(len(worst.scores))}"
    )
    if worst.few or task.share is not None:
        return [f"{said}." if worst.few else f"{said}; {worst.bound.value:.1%} of all documents at least hold."]
    said += f", and {worst.bound.value:.4f} at least is sure."
    needed = documents_for_mean(worst.scores, task.confidence, task.target)
    more = 0 if needed is None else needed - len(worst.scores)
    return [f"{said} About {_documents(more)} more of that length would do." if more > 0 else said]


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"
