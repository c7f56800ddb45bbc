"""One-sided lower bounds on what documents score, of which some were seen: how sure a promise can be."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

_BET = 0.9  # the share of what could be lost on a document that is ever put at stake
_MOST = 1000  # documents that anybody would be asked for


class Bound(NamedTuple):
    """What `documents` scores say of all documents like them, with a confidence.

    Attributes:
        value: of the mean or of the share; −inf where so few documents say nothing.
        method: "t", "betting" or "binomial".
    """

    value: float
    method: str


def lower_bound(scores: Sequence[float], confidence: float, target: float, least: float | None) -> Bound:
    """A lower bound on the mean: free of assumptions where documents are many, by Student's t where they are few.

    Which of the two is decided by the number of documents, before a score is looked at: twice as many as could show
    the target at all.

    Args:
        least: the lowest score that there can be; None if there is no such thing. Scores above 1 count as 1.

    Example:
        >>> from coterie.fitting.bounds import lower_bound
        >>> found = lower_bound([0.991, 0.993, 0.992, 0.994], 0.95, 0.99, -1.0)
        >>> round(found.value, 4), found.method
        (0.991, 't')
    """
    if any(math.isnan(score) or score == math.inf for score in scores):
        return Bound(math.nan, "t")
    if -math.inf in scores:
        return Bound(-math.inf, "t")
    clipped = [min(score, 1.0) for score in scores]
    enough = least is not None and target < 1 and len(scores) >= 2 * fewest(confidence, target, least)
    if least is not None and enough:
        return Bound(betting(clipped, confidence, least), "betting")
    return Bound(student(clipped, confidence), "t")


def student(scores: Sequence[float], confidence: float) -> float:
    """mean − s / √n · (t + (1 + 2 t²) g / (6 √n)), where t is Student's quantile and g the skewness towards low scores.

    Without g it would be exact for normal scores. But a few documents lose much more than others, a mean of few has
    not seen them, and g corrects for what it has seen (Johnson 1978; Hall 1992); a skewness the other way is left out.
    """
    n = len(scores)
    if n < 2:
        return -math.inf
    mean, spread, t = statistics.fmean(scores), statistics.stdev(scores), t_quantile(confidence, n - 1)
    skewness = max(0.0, statistics.fmean(((mean - score) / spread) ** 3 for score in scores)) if spread else 0.0
    if n > 2:
        skewness *= n**2 / ((n - 1) * (n - 2))  # what a sample's own falls short of on average
    return mean - spread / math.sqrt(n) * (t + (1 + 2 * t**2) * skewness / (6 * math.sqrt(n)))


def betting(scores: Sequence[float], confidence: float, least: float) -> float:
    """The mean from which on nobody who bets against it gets rich (Waudby-Smith and Ramdas 2024), for scores in
    [least, 1] of any distribution.

    If the mean is at most m, a gambler who stakes λ on each score gains nothing on average: their capital
    Π (1 + λ_t (x_t − m)) reaches 1 / (1 − confidence) with a probability of at most 1 − confidence, whatever λ_t they
    make of x_1 … x_(t−1).
    """
    stakes = _stakes(scores, confidence)

    def rich(mean: float) -> bool:
        if mean <= least:
            return True  # no mean is lower
        capital = best = 0.0  # logarithms
        for score, stake in zip(scores, stakes, strict=True):
            capital += math.log1p(min(stake, _BET / (mean - least)) * (score - mean))
            best = max(best, capital)
        return best >= -math.log(1 - confidence)

    return _last(rich, least, 1.0)


def _stakes(scores: Sequence[float], confidence: float) -> list[float]:
    """The stakes that are best for normal scores, each from what was seen before it."""
    n, total, squares, found = len(scores), 0.5, 0.25, []
    for seen, score in enumerate(scores, start=1):
        found.append(math.sqrt(2 * -math.log(1 - confidence) / (n * squares / seen)))
        total += score
        squares += (score - total / (seen + 1)) ** 2
    return found


def fewest(confidence: float, target: float, least: float) -> int:
    """Documents without which no bet can show a target, even if each of them scores 1."""
    return math.ceil(-math.log(1 - confidence) / math.log1p(_BET * (1 - target) / (target - least)))


def share_bound(held: int, documents: int, confidence: float) -> float:
    """A lower bound on the share of documents that hold, of which so many did (Clopper and Pearson 1934)."""
    if not held:
        return 0.0
    whole = math.lgamma(documents + 1)  # logarithms: with a thousand documents numbers get too large
    ways = {k: whole - math.lgamma(k + 1) - math.lgamma(documents - k + 1) for k in range(held, documents + 1)}

    def unlikely(share: float) -> bool:
        """Whether so many would hold with a probability of at most 1 − confidence, if that were the share."""
        if share in (0.0, 1.0):
            return share == 0.0
        yes, no = math.log(share), math.log1p(-share)
        tail = (math.exp(ways[k] + k * yes + (documents - k) * no) for k in range(held, documents + 1))
        return math.fsum(tail) <= 1 - confidence

    return _last(unlikely, 0.0, 1.0)


def documents_for_share(confidence: float, share: float) -> int:
    """With which a share can be shown at all: all of them hold."""
    return math.ceil(math.log(1 - confidence) / math.log(share))


def documents_for_mean(scores: Sequence[float], confidence: float, target: float) -> int | None:
    """With which a mean would be shown by Student's t, if they scored like these; None if a thousand would not do."""
    if len(scores) < 2 or not all(map(math.isfinite, scores)):
        return None
    margin, spread = statistics.fmean(scores) - target, statistics.stdev(scores)
    few, enough = 1, _MOST + 1  # with more documents the margin only grows, and what it must reach only falls
    while enough - few > 1:
        middle = (few + enough) // 2
        shown = margin * math.sqrt(middle) >= t_quantile(confidence, middle - 1) * spread
        few, enough = (few, middle) if shown else (middle, enough)
    return enough if enough <= _MOST else None


@cache
def t_quantile(confidence: float, freedom: int) -> float:
    """Of Student's distribution with whole degrees of freedom; for a confidence above one half.

    >>> round(t_quantile(0.95, 3), 4)
    2.3534
    """
    upper = 1.0
    while _t_below(upper, freedom) < confidence:
        upper *= 2
    return _last(lambda t: _t_below(t, freedom) <= confidence, 0.0, upper)


def _t_below(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0: the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = 1.0 if freedom % 2 == 0 else math.cos(angle)
    total, k = 0.0, freedom % 2
    while k < freedom - 1:
        total += term
        term *= square * (k + 1) / (k + 2)
        k += 2
    within = sine * total if freedom % 2 == 0 else (angle + sine * total) * 2 / math.pi
    return 0.5 + within / 2


def _last(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The end of an interval from `low` on in which something holds, by halving."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
