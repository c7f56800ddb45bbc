"""Theorem 1: from the softmax objective to the mass, through special keys. What holds, and what does not.

The supplement gives every query a key of its own with score a (and −∞ with all other queries), lets a grow, and says
that the best clusterings of ‖σ(P̂₀) − σ(P)‖²_F become those of max Σ_{together} e^{2q·k}. They do not: with S_q the sum
of e^{q·k} over all keys and s_q that over the cluster's, r²·e^{2a} times the error tends to

    Σ_q [ (S_q − s_q)² / r + Σ_{k not with q} e^{2q·k} ]        for r special keys a query; the supplement has r = 1

The special keys themselves lose the first term, which is of the same order as the second for every a. More of them make
it small: with r large enough, for the instance at hand, the claim is true. docs/theory.md has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.exact import PARTITIONS, count_partitions, every_clustering
from coterie.analysis.biclustering.objectives import Matrix, Problem, as_matrix, softmax_error
from coterie.checks import expect, expect_int

_SAME = 1e-9  # values this close, relatively, are one value


def with_special_keys(scores: Any, a: float, copies: int = 1, *, hidden: float = -np.inf) -> Matrix:
    """Scores with `copies` special keys for each query behind the others: a with their own query, `hidden` with others.

    >>> with_special_keys([[1.0, 2.0], [3.0, 4.0]], 9.0, hidden=-9.0).tolist()
    [[1.0, 2.0, 9.0, -9.0], [3.0, 4.0, -9.0, 9.0]]
    """
    matrix = as_matrix("scores", scores)
    expect(bool(np.isfinite(a)), "a", "a finite number", a)
    expect_int("copies", copies, at_least=1)
    expect(hidden < a, "hidden", f"less than a = {a:g}", hidden)
    own = np.where(np.eye(len(matrix), dtype=bool), a, hidden)
    return np.hstack([matrix, *[own] * copies])


def special_at_home(clustering: Clustering, copies: int = 1) -> Clustering:
    """A clustering of queries and keys, with each query's special keys in its own cluster.

    >>> special_at_home(Clustering([0, 1], [1, 0])).keys
    (1, 0, 0, 1)
    """
    return Clustering(clustering.queries, clustering.keys + clustering.queries * copies)


def special_problem(problem: Problem, a: float, copies: int = 1) -> Problem:
    """The softmax problem with special keys: each cluster has room for those of its queries.

    >>> special_problem(Problem.balanced(np.zeros((4, 4)), 2), 9.0).key_sizes
    (4, 4)
    """
    sizes = tuple(m + copies * n for n, m in zip(problem.query_sizes, problem.key_sizes, strict=True))
    return Problem(with_special_keys(problem.scores, a, copies), problem.query_sizes, sizes, "softmax")


def squared_mass(scores: Any, clustering: Clustering) -> float:
    """Σ_{together} e^{2q·k}: what the supplement says the softmax objective becomes.

    >>> round(squared_mass(np.log([[1.0, 2.0], [3.0, 4.0]]), Clustering([0, 1], [0, 1])), 9)
    17.0
    """
    return float((np.exp(2 * as_matrix("scores", scores)) * clustering.together).sum())


def limit_error(scores: Any, clustering: Clustering, copies: int = 1) -> float:
    """Σ_q [(S_q − s_q)²/r + Σ_{k not with q} e^{2q·k}]: what e^{2a}·r² times the error does become as a grows.

    >>> round(limit_error(np.log([[1.0, 2.0], [3.0, 4.0]]), Clustering([0, 1], [0, 1])), 9)      # 2·(2² + 3²)
    26.0
    """
    expect_int("copies", copies, at_least=1)
    lost = np.where(clustering.together, 0.0, np.exp(as_matrix("scores", scores)))
    return float((lost.sum(axis=1) ** 2 / copies + (lost**2).sum(axis=1)).sum())


@dataclass(frozen=True)
class Equivalence:
    """The best clusterings under the three objectives, over all clusterings of a problem without its special keys.

    Attributes:
        softmax: of the true error, with special keys of score a at home.
        mass: of Σ e^{2q·k}, the supplement's claim.
        limit: of the limit.
        claim: whether the softmax's best is a best one of the mass.
        limit_claim: whether it is a best one of the limit.
    """

    softmax: Clustering
    mass: Clustering
    limit: Clustering
    claim: bool
    limit_claim: bool


def equivalence(problem: Problem, a: float, copies: int = 1) -> Equivalence:
    """Compare the optima by looking at every clustering.

    Args:
        problem: scores and sizes; small, its objective does not matter.
        a: the score of a special key with its own query. Special keys are taken to be at home, which `solve` of
            `special_problem` confirms for large a.
        copies: special keys for each query.

    Example:
        >>> problem = Problem(np.log([[4, 3, 4, 4], [1, 1, 3, 4]]), (1, 1), (2, 2))     # whole numbers, unique optima
        >>> found = equivalence(problem, a=40.0)
        >>> found.mass.keys, found.softmax.keys, found.claim, found.limit_claim
        ((0, 0, 1, 1), (0, 1, 0, 1), False, True)
        >>> equivalence(problem, a=40.0, copies=50).claim
        True
    """
    count = count_partitions(problem)
    expect(count <= PARTITIONS // 100, "problem", f"at most {PARTITIONS // 100:,} partitions of the keys", f"{count:,}")
    augmented = with_special_keys(problem.scores, a, copies)
    candidates = list(every_clustering(problem))
    error = np.array([softmax_error(augmented, special_at_home(c, copies)) for c in candidates])
    mass = np.array([squared_mass(problem.scores, c) for c in candidates])
    limit = np.array([limit_error(problem.scores, c, copies) for c in candidates])
    best = int(error.argmin())
    return Equivalence(
        softmax=candidates[best].canonical(),
        mass=candidates[int(mass.argmax())].canonical(),
        limit=candidates[int(limit.argmin())].canonical(),
        claim=bool(mass[best] >= mass.max() * (1 - _SAME)),
        limit_claim=bool(limit[best] <= limit.min() * (1 + _SAME)),
    )


def copies_that_suffice(problem: Problem) -> int:
    """How many special keys for each query make the claim true for large a: more than Σ_q (S_q − s_q)² / gap.

    The sum is that of a clustering with the largest Σ e^{2q·k}, the gap is how much less the next one has: then the
    first term of the limit cannot make up for the second. Sufficient, not always necessary.

    >>> copies_that_suffice(Problem(np.log([[4, 3, 4, 4], [1, 1, 3, 4]]), (1, 1), (2, 2)))
    69
    """
    candidates = list(every_clustering(problem))
    mass = np.array([squared_mass(problem.scores, c) for c in candidates])
    best = mass >= mass.max() * (1 - _SAME)
    if best.all():
        return 1
    raised = np.exp(problem.scores)
    lost = [
        np.where(c.together, 0.0, raised).sum(axis=1) for c, is_best in zip(candidates, best, strict=True) if is_best
    ]
    least = min(float((each**2).sum()) for each in lost)
    return int(np.floor(least / float(mass.max() - mass[~best].max()))) + 1
