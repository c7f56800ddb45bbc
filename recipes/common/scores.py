"""How answers are judged, by scikit-learn and SciPy; the higher the better."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Score = Callable[[Any, Any], float]


def accuracy(logits: Any, labels: Any) -> float:
    """The share of right answers.

    >>> accuracy([[2.0, 1.0], [0.0, 1.0]], [0, 0])
    0.5
    """
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, np.argmax(logits, -1)))


def mcc(logits: Any, labels: Any) -> float:
    """Matthews' correlation, CoLA's score; 0 if one class is all that was answered.

    >>> mcc([[2.0, 1.0], [0.0, 1.0]], [0, 1])
    1.0
    """
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, np.argmax(logits, -1)))


def f1(logits: Any, labels: Any) -> float:
    """F1 of class 1, as for MRPC and QQP.

    >>> f1([[2.0, 1.0], [0.0, 1.0]], [0, 1])
    1.0
    """
    from sklearn.metrics import f1_score

    return float(f1_score(labels, np.argmax(logits, -1), zero_division=0.0))


def spearman(answers: Any, labels: Any) -> float:
    """Spearman's rank correlation, STS-B's score; 0 if all answers, or all labels, are equal.

    >>> round(spearman([[1.0], [2.0], [5.0]], [0.1, 0.2, 0.3]), 6)
    1.0
    """
    from scipy.stats import spearmanr

    answers = np.asarray(answers).reshape(-1)
    return float(spearmanr(answers, labels).statistic) if np.ptp(answers) and np.ptp(labels) else 0.0


def pearson(answers: Any, labels: Any) -> float:
    """Pearson's correlation, for STS-B; 0 if all answers, or all labels, are equal.

    >>> round(pearson([[1.0], [2.0], [3.0]], [0.1, 0.2, 0.3]), 6)
    1.0
    """
    from scipy.stats import pearsonr

    answers = np.asarray(answers).reshape(-1)
    return float(pearsonr(answers, labels).statistic) if np.ptp(answers) and np.ptp(labels) else 0.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some seeds, and its standard error; NaN for a single one.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def of_seeds(count: int) -> str:
    """What a title says of the figures below it.

    >>> of_seeds(1), of_seeds(3)
    ('one seed', '3 seeds, ± standard error')
    """
    return "one seed" if count == 1 else f"{count} seeds, ± standard error"


def shown(values: Sequence[float], unit: float = 100, digits: int = 1, sign: str = "") -> str:
    """Mean ± standard error.

    >>> shown([0.5, 0.7]), shown([0.5]), shown([0.01, 0.01], sign="+")
    ('60.0 ± 10.0', '50.0', '+1.0 ± 0.0')
    """
    mean, error = mean_and_error(values)
    text = f"{unit * mean:{sign}.{digits}f}"
    return text if math.isnan(error) else f"{text} ± {unit * error:.{digits}f}"
