"""How much of the dense score is kept, and how sure that is."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from recipes.common.scores import mean_and_error
from recipes.common.study import Result
from recipes.common.templates import Point
from recipes.common.tuning import DENSE, Answers

_RESAMPLES = 400


class Estimate(NamedTuple):
    """A mean over seeds; its standard error over test examples, and over seeds, NaN for a single one."""

    value: float
    over_examples: float
    over_seeds: float

    @property
    def error(self) -> float:
        """The larger one."""
        return self.over_examples if math.isnan(self.over_seeds) else max(self.over_examples, self.over_seeds)

    def shown(self, sign: str = "") -> str:
        """In hundredths.

        >>> Estimate(0.5, 0.01, float("nan")).shown(), Estimate(-0.1, 0.01, 0.02).shown("+")
        ('50.0 ± 1.0', '-10.0 ± 1.0 (seeds ± 2.0)')
        """
        text = f"{100 * self.value:{sign}.1f} ± {100 * self.over_examples:.1f}"
        return text if math.isnan(self.over_seeds) else f"{text} (seeds ± {100 * self.over_seeds:.1f})"


class Kept(NamedTuple):
    """One mechanism of a sweep beside dense attention on the same examples."""

    point: Point
    score: Estimate
    difference: Estimate

    @property
    def within(self) -> bool:
        """Whether it is not below dense attention by more than one standard error of their difference."""
        return self.difference.value >= -self.difference.error - 1e-12


def resampled(answers: Answers) -> list[float]:
    """The scores of examples drawn with replacement (bootstrap); what examples share, such as the paragraph that
    questions are about, is drawn as a whole. The draws depend on the examples alone, so that those of two models on the
    same examples are pairs."""
    of = np.arange(answers.examples) if answers.drawn_together is None else np.asarray(answers.drawn_together)
    members = [np.flatnonzero(of == each) for each in np.unique(of)]
    draws = np.random.default_rng(0).integers(len(members), size=(_RESAMPLES, len(members)))
    return [answers.score(np.concatenate([members[each] for each in draw])) for draw in draws]


def dense(results: list[Result]) -> Estimate:
    """The dense score."""
    return _estimate(_of(results, DENSE))


def kept(results: list[Result], points: list[Point]) -> list[Kept]:
    """Each mechanism's score, and what it is apart from dense attention, seed by seed and draw by draw."""
    base = _of(results, DENSE)
    found = []
    for point in points:
        mine = _of(results, point.mechanism)
        apart = [
            {"score": a["score"] - b["score"], "resampled": np.subtract(a["resampled"], b["resampled"])}
            for a, b in zip(mine, base, strict=True)
        ]
        found.append(Kept(point, _estimate(mine), _estimate(apart)))
    return found


def _of(results: list[Result], mechanism: str) -> list[Result]:
    return sorted((r for r in results if r["mechanism"] == mechanism), key=lambda r: r["seed"])


def _estimate(results: list[Result]) -> Estimate:
    mean, over_seeds = mean_and_error([r["score"] for r in results])
    draws = np.mean([r["resampled"] for r in results], axis=0)
    return Estimate(mean, float(np.std(draws, ddof=1)), over_seeds)
