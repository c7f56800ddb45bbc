"""Clusterings of problems of any size: random, greedy, local search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.objectives import Problem, Solution
from coterie.analysis.biclustering.special import assign
from coterie.checks import expect, expect_int

_Labels = NDArray[np.int64]


def random_clustering(problem: Problem, seed: int = 0) -> Solution:
    """Queries and keys in random places: what any method should beat.

    >>> random_clustering(Problem.balanced(np.zeros((6, 9)), 3)).clustering.sizes
    ((2, 3), (2, 3), (2, 3))
    """
    expect_int("seed", seed, at_least=0)
    draw = np.random.default_rng(seed)
    sides = (problem.query_sizes, problem.key_sizes)
    return _solution(problem, *(draw.permutation(_places(sizes)) for sizes in sides))


def greedy(problem: Problem) -> Solution:
    """One cluster after the other: the heaviest pair that is left, then whoever adds most weight, until it is full.

    O(N² · clusters). The weights are the mass, or the attention map for the softmax objective.

    >>> greedy(Problem.balanced(np.eye(4)[[0, 1, 1, 0]] + np.eye(4)[[3, 2, 2, 3]], 2, "mass"))
    Solution(clustering=Clustering(queries=(0, 1, 1, 0), keys=(0, 1, 1, 0)), value=8.0)
    """
    weights = problem.weights
    queries, keys = (np.full(n, -1, dtype=np.int64) for n in weights.shape)
    for cluster in np.argsort([-n * m for n, m in zip(problem.query_sizes, problem.key_sizes, strict=True)]):
        free = np.where((queries < 0)[:, None] & (keys < 0), weights, -np.inf)
        query, key = np.unravel_index(int(free.argmax()), free.shape)
        queries[query], keys[key] = cluster, cluster
        missing = {"queries": problem.query_sizes[cluster] - 1, "keys": problem.key_sizes[cluster] - 1}
        while any(missing.values()):
            # The emptier side goes first, so that both sides are chosen by what the other has.
            side = max(missing, key=lambda name: missing[name])
            labels, others = (queries, keys) if side == "queries" else (keys, queries)
            table = weights if side == "queries" else weights.T
            gain = np.where(labels < 0, table[:, others == cluster].sum(axis=1), -np.inf)
            labels[int(gain.argmax())] = cluster
            missing[side] -= 1
    return _solution(problem, queries, keys)


def balance(problem: Problem, members: NDArray[np.bool_]) -> Solution:
    """Fit the clusters of another method to the problem's sizes: `members` (clusters, keys), keys shared or not.

    Queries go where the keys that they attend to are, as many as there is room for; then keys go where those queries
    are. Both are assignments.

    Example:
        >>> problem = Problem.balanced([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1], [0, 1, 1, 1]], 2, "mass")
        >>> balance(problem, np.array([[1, 0, 0, 0], [0, 1, 1, 1]], dtype=bool)).clustering.queries
        (0, 0, 1, 1)
    """
    shape = (problem.clusters, problem.scores.shape[1])
    expect(np.shape(members) == shape, "members", f"shape {shape}", np.shape(members))
    share = np.maximum(1, members.sum(axis=1))
    queries = assign(-(problem.weights @ members.T) / share, problem.query_sizes)
    return _solution(problem, queries, _best_keys(problem, queries))


def local_search(problem: Problem, start: Clustering | None = None, *, restarts: int = 0, seed: int = 0) -> Solution:
    """Improve a clustering until no step helps: all queries anew given the keys, the best swap of two keys.

    The queries' step is exact (an assignment), so no swap of queries can help at the end either. A pass takes O(N²·m)
    time and O(m²·N) memory for clusters of m keys.

    Args:
        problem: scores, cluster sizes and objective.
        start: where to begin; the greedy clustering by default.
        restarts: also begin at this many random clusterings, and take the best of all.
        seed: of those.

    Example:
        >>> scores = np.random.default_rng(0).normal(size=(7, 11))
        >>> problem = Problem.balanced(scores, 2)
        >>> local_search(problem, restarts=3).value <= greedy(problem).value
        True
    """
    expect_int("restarts", restarts, at_least=0)
    starts = [greedy(problem).clustering if start is None else start]
    starts += [random_clustering(problem, seed + i).clustering for i in range(restarts)]
    sign = -1 if problem.maximise else 1
    return min((_descend(problem, each) for each in starts), key=lambda found: sign * found.value)


def _descend(problem: Problem, start: Clustering) -> Solution:
    problem.check(start)
    queries, keys = np.array(start.queries), np.array(start.keys)
    sizes = [size for size, _ in start.sizes]
    spread = float(np.abs(problem.losses(start.members)).max())
    least = 1e-12 * max(spread, np.finfo(float).tiny)  # smaller gains are rounding, and could go round in circles
    improved = True
    while improved:
        improved = False
        losses = problem.losses(np.equal.outer(np.arange(len(sizes)), keys))
        better = assign(losses, tuple(sizes))
        rows = np.arange(len(queries))
        if losses[rows, queries].sum() - losses[rows, better].sum() > least:
            queries, improved = better, True
        for a in range(len(sizes)):
            for b in range(a):
                improved |= _swap_keys(problem, queries, keys, a, b, least)
    return _solution(problem, queries, keys)


def _swap_keys(problem: Problem, queries: _Labels, keys: _Labels, a: int, b: int, least: float) -> bool:
    """Make the best swap of a key of cluster a with one of cluster b, in place; whether there was one that helps."""
    of_a, of_b = np.flatnonzero(keys == a), np.flatnonzero(keys == b)
    give, take = (side.ravel() for side in np.meshgrid(of_a, of_b, indexing="ij"))
    change = np.zeros(len(give))
    for cluster, out, into in ((a, give, take), (b, take, give)):
        members = np.repeat((keys == cluster)[None], len(give) + 1, axis=0)
        members[np.arange(len(give)), out] = False
        members[np.arange(len(give)), into] = True
        total = _of_rows(problem, queries == cluster).losses(members).sum(axis=0)
        change += total[:-1] - total[-1]
    best = int(change.argmin())
    if change[best] >= -least:
        return False
    keys[give[best]], keys[take[best]] = b, a
    return True


def _of_rows(problem: Problem, rows: NDArray[np.bool_]) -> Problem:
    """Some queries of a problem, in one cluster with all keys: only its losses are asked for."""
    return Problem(problem.scores[rows], (int(rows.sum()),), (problem.scores.shape[1],), problem.objective)


def _best_keys(problem: Problem, queries: _Labels) -> _Labels:
    """The keys' places of the most weight, given the queries' clusters."""
    heard = np.equal.outer(np.arange(problem.clusters), queries).astype(float) @ problem.weights
    return assign(-heard.T, problem.key_sizes)


def _places(sizes: tuple[int, ...]) -> _Labels:
    return np.repeat(np.arange(len(sizes)), sizes)


def _solution(problem: Problem, queries: _Labels, keys: _Labels) -> Solution:
    clustering = Clustering(tuple(queries.tolist()), tuple(keys.tolist())).canonical()
    return Solution(clustering, problem.value(clustering))
