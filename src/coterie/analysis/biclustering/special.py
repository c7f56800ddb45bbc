"""The cases that are easy: one query or one key in each cluster (supplement §9, after Eq. 7).

Once one side's clusters are known, the other side is an assignment to places: a minimum-cost flow whose capacities are
the cluster sizes. SciPy's `linear_sum_assignment` solves it with every cluster split into unit places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.objectives import Matrix, Problem, Solution, as_matrix
from coterie.checks import expect, expect_int


def assign(losses: Matrix, sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """The cheapest cluster of each row when cluster c has room for sizes[c] of them.

    >>> assign(np.array([[0.0, 9.0], [1.0, 9.0], [5.0, 0.0], [4.0, 2.0]]), (2, 2)).tolist()
    [0, 0, 1, 1]
    """
    places = np.repeat(np.arange(len(sizes)), sizes)
    rows, columns = linear_sum_assignment(losses[:, places])
    labels = np.empty(len(rows), dtype=np.int64)
    labels[rows] = places[columns]
    return labels


def one_to_one(weights: Any) -> Solution:
    """One query and one key in each cluster: weighted bipartite matching, the exact maximum of the mass.

    >>> one_to_one([[2.0, 3.0], [1.0, 9.0]])
    Solution(clustering=Clustering(queries=(0, 1), keys=(0, 1)), value=11.0)
    """
    return one_query_each(weights, 1)


def one_query_each(weights: Any, keys: int) -> Solution:
    """One query and `keys` keys in each cluster: a b-matching, the exact maximum of the mass.

    This is about the mass alone: the softmax objective is no sum over keys, so for `keys` > 1 it is not solved by this.

    Args:
        weights: (queries, keys · queries).
        keys: keys in each cluster.

    Example:
        >>> one_query_each([[5.0, 1.0, 4.0, 0.0], [5.0, 2.0, 0.0, 0.0]], 2).clustering.keys
        (0, 1, 0, 1)
    """
    matrix = as_matrix("weights", weights)
    expect_int("keys", keys, at_least=1)
    queries = matrix.shape[0]
    want = f"shape ({queries}, {queries * keys}): {keys} keys for each query"
    expect(matrix.shape[1] == queries * keys, "weights", want, matrix.shape)
    labels = assign(-matrix.T, (keys,) * queries)
    problem = Problem(matrix, (1,) * queries, (keys,) * queries, "mass")
    clustering = Clustering(tuple(range(queries)), tuple(labels.tolist()))
    return Solution(clustering, problem.value(clustering))


def one_key_each(problem: Problem) -> Solution:
    """One key and n queries in each cluster: exact for both objectives, the softmax's included.

    The clusters of the keys are then known, and the queries are an assignment. If clusters differ in their number of
    queries, which key gets which number is a choice of its own, and this is not for it.

    Example:
        >>> problem = Problem([[0.0, 4.0], [1.0, 0.0], [0.0, 9.0], [0.0, 0.5]], (2, 2), (1, 1))
        >>> one_key_each(problem).clustering.queries
        (1, 0, 1, 0)
    """
    equal = set(problem.key_sizes) == {1} and len(set(problem.query_sizes)) == 1
    sizes = f"query_sizes {problem.query_sizes}, key_sizes {problem.key_sizes}"
    expect(equal, "problem", "one key and equally many queries in each cluster (else use `solve`)", sizes)
    keys = tuple(range(problem.clusters))
    losses = problem.losses(np.eye(problem.clusters, dtype=bool))
    clustering = Clustering(tuple(assign(losses, problem.query_sizes).tolist()), keys)
    return Solution(clustering, problem.value(clustering))
