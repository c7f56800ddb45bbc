"""Exact match and F1 by SQuAD v1.1's definition: of normalised texts, the best over all that annotators said."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation, articles, and more than one space.

    >>> normalized("The  U.S. — a Nation!")
    'us — nation'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """1 if it is one of them, 0 if not.

    >>> exact_match("the Panthers.", ["Broncos", "Panthers"])
    1.0
    """
    return float(any(normalized(answer) == normalized(truth) for truth in truths))


def f1(answer: str, truths: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of its words, each as often as both have it: the best over them.

    A text that holds only articles and punctuation has no words, so its F1 is 0, also beside itself.

    >>> f1("Denver Broncos", ["the Broncos", "Carolina"])
    0.6666666666666666
    """
    return max(_f1(normalized(answer).split(), normalized(truth).split()) for truth in truths)


def _f1(answer: list[str], truth: list[str]) -> float:
    same = (Counter(answer) & Counter(truth)).total()
    return 2 * same / (len(answer) + len(truth)) if same else 0.0
