"""How well sections are found: nDCG and recall, for each query."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOP = 10


class Found(NamedTuple):
    """One number for each query."""

    ndcg: list[float]  # @10
    recall_1: list[float]
    recall_10: list[float]


def relevance(queries: list[str], headings: list[str]) -> NDArray[np.bool_]:
    """Which sections a query is to find, (queries, sections): all that have it as their heading.

    >>> relevance(["owls"], ["Owls", "Bats"]).tolist()
    [[True, False]]
    """
    return np.array([[query.casefold() == heading.casefold() for heading in headings] for query in queries])


def judge(similarity: NDArray[np.floating], relevant: NDArray[np.bool_]) -> Found:
    """Rank sections by their similarity, of equal ones the first first, and judge the ranking of each query.

    nDCG@10 = DCG / the best DCG there could be, DCG = Σ over the relevant among the first 10 of 1 / log₂(rank + 1).
    Recall@n is the share of the relevant ones that are among the first n.

    Args:
        similarity, relevant: (queries, sections); each query has a relevant section.

    >>> judge(np.array([[0.1, 0.9, 0.5]]), np.array([[False, False, True]]))
    Found(ndcg=[0.6309297535714575], recall_1=[0.0], recall_10=[1.0])
    """
    order = np.argsort(-similarity, axis=1, kind="stable")
    hits = np.take_along_axis(relevant, order, axis=1)
    weights = 1 / np.log2(np.arange(relevant.shape[1]) + 2)
    weights[TOP:] = 0
    count = relevant.sum(1)
    best = np.cumsum(weights)[count - 1]
    return Found(
        (hits @ weights / best).tolist(), (hits[:, 0] / count).tolist(), (hits[:, :TOP].sum(1) / count).tolist()
    )
