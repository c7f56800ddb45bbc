"""Exact optima of small problems: all partitions of the keys, or an integer program.

Both rest on the same fact: a query's loss depends on the set of keys in its cluster alone, so given the clusters of the
keys, the best queries are an assignment (`special.assign`). What is hard is to partition the keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.objectives import Matrix, Problem, Solution
from coterie.analysis.biclustering.special import assign
from coterie.checks import expect, expect_choice

PARTITIONS = 100_000  # of the keys
VARIABLES = 60_000  # of the integer program
_INSTEAD = "`local_search` takes any size; exact solvers need fewer keys, or clusters of fewer keys"


def solve(problem: Problem, *, method: str = "auto", seconds: float = 60.0) -> Solution:
    """The best clustering there is.

    Args:
        problem: scores, cluster sizes and objective.
        method: "partitions" looks at the partitions of the keys in the order of a lower bound, and stops when the bound
            passes the best value; up to 100,000 partitions (12 keys in three clusters have 5,775). "ilp" lets SciPy's
            HiGHS choose the key sets; up to 60,000 variables, exact to 1e-9 of the range of the losses. "auto" takes
            the first that fits.
        seconds: what the integer program may take; if that is not enough, an error says so.

    Returns:
        The clustering, numbered by first query, and its value.

    Example:
        >>> import numpy as np
        >>> scores = np.log([[9, 8, 1, 1], [8, 9, 1, 1], [1, 1, 9, 8], [1, 1, 8, 9]])
        >>> solve(Problem.balanced(scores, 2)).clustering
        Clustering(queries=(0, 0, 1, 1), keys=(0, 0, 1, 1))
    """
    expect_choice("method", method, ("auto", "partitions", "ilp"))
    partitions, variables = count_partitions(problem), _count_variables(problem)
    fits = {"partitions": partitions <= PARTITIONS, "ilp": variables <= VARIABLES}
    fits["auto"] = fits["partitions"] or fits["ilp"]
    limits = f"at most {PARTITIONS:,} partitions of the keys or {VARIABLES:,} variables ({_INSTEAD})"
    expect(fits[method], "problem", limits, f"{partitions:,} partitions and {variables:,} variables")
    enumerates = method == "partitions" or (method == "auto" and fits["partitions"])
    clustering = _by_partitions(problem) if enumerates else _by_ilp(problem, seconds)
    return Solution(clustering.canonical(), problem.value(clustering))


def every_clustering(problem: Problem) -> Iterator[Clustering]:
    """All clusterings of the problem's sizes, each once; for very small problems.

    >>> len(list(every_clustering(Problem.balanced(np.zeros((4, 4)), 2))))
    18
    """
    order = _by_type(problem)
    places = [c for c in order for _ in range(problem.query_sizes[c])]
    for partition in _partitions(problem.scores.shape[1], _types(problem)):
        keys = _labels(partition, order, problem.scores.shape[1])
        for queries in _arrangements(tuple(sorted(places))):
            yield Clustering(queries, keys)


def count_partitions(problem: Problem) -> int:
    """In how many ways the keys can be cut into clusters; those of equal sizes are not told apart.

    >>> count_partitions(Problem.balanced(np.zeros((12, 12)), 3))
    5775
    """
    ways = math.factorial(problem.scores.shape[1])
    for size in problem.key_sizes:
        ways //= math.factorial(size)
    for count in Counter(_types(problem)).values():
        ways //= math.factorial(count)
    return ways


def _by_type(problem: Problem) -> list[int]:
    """Clusters with those of equal sizes next to each other."""
    sizes = list(zip(problem.query_sizes, problem.key_sizes, strict=True))
    return sorted(range(problem.clusters), key=lambda c: sizes[c])


def _types(problem: Problem) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(zip(problem.query_sizes, problem.key_sizes, strict=True)))


@lru_cache(maxsize=4)
def _partitions(keys: int, types: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, ...], ...]]:
    """All partitions of the keys; of two clusters of one type, the first holds the smaller first key."""
    found: list[tuple[tuple[int, ...], ...]] = []

    def extend(done: tuple[tuple[int, ...], ...], rest: tuple[int, ...]) -> None:
        at = len(done)
        if at == len(types):
            found.append(done)
            return
        twin = at > 0 and types[at] == types[at - 1]
        for chosen in combinations(rest, types[at][1]):
            if not twin or chosen[0] > done[-1][0]:
                extend((*done, chosen), tuple(key for key in rest if key not in chosen))

    extend((), tuple(range(keys)))
    return found


def _arrangements(places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All orders of a sorted multiset."""
    if not places:
        yield ()
    for at, first in enumerate(places):
        if at == 0 or places[at - 1] != first:
            for rest in _arrangements(places[:at] + places[at + 1 :]):
                yield (first, *rest)


def _labels(partition: tuple[tuple[int, ...], ...], order: list[int], keys: int) -> tuple[int, ...]:
    labels = [0] * keys
    for cluster, chosen in zip(order, partition, strict=True):
        for key in chosen:
            labels[key] = cluster
    return tuple(labels)


def _key_sets(keys: int, size: int) -> NDArray[np.bool_]:
    """(sets, keys): every set of `size` keys."""
    chosen = np.array(list(combinations(range(keys), size)))
    members = np.zeros((len(chosen), keys), dtype=bool)
    np.put_along_axis(members, chosen, True, axis=1)
    return members


def _by_partitions(problem: Problem) -> Clustering:
    keys, order = problem.scores.shape[1], _by_type(problem)
    partitions = _partitions(keys, _types(problem))
    number: dict[tuple[int, ...], int] = {}
    sets = [[number.setdefault(chosen, len(number)) for chosen in partition] for partition in partitions]
    members = np.zeros((len(number), keys), dtype=bool)
    for chosen, at in number.items():
        members[at, list(chosen)] = True
    losses = problem.losses(members)
    indices = np.array(sets)
    bounds = sum(row[indices].min(axis=1) for row in losses)  # every query where it likes best, however many do
    sizes = tuple(problem.query_sizes[c] for c in order)
    best, found = math.inf, (0, np.zeros(0, dtype=np.int64))
    for at in np.argsort(bounds, kind="stable"):
        if bounds[at] >= best:
            break
        here = losses[:, indices[at]]
        queries = assign(here, sizes)
        total = float(here[np.arange(len(here)), queries].sum())
        if total < best:
            best, found = total, (int(at), queries)
    return Clustering(tuple(order[g] for g in found[1]), _labels(partitions[found[0]], order, keys))


def _count_variables(problem: Problem) -> int:
    queries, keys = problem.scores.shape
    return sum((queries + 1) * math.comb(keys, size) for _, size in set(_types(problem)))


def _by_ilp(problem: Problem, seconds: float) -> Clustering:
    """Choose key sets S with y, and the queries of each with x:

        min Σ loss[q, S]·x[S, q],   Σ_{S∋k} y[S] = 1,   Σ_S x[S, q] = 1,   Σ_q x[S, q] = n·y[S],   0 ≤ x[S, q] ≤ y[S]

    with one block of sets for each kind of cluster (n queries, m keys), of which as many are chosen as there are
    clusters of the kind. Given integer y, x is a flow with integer capacities, so only y has to be declared integer.
    """
    kinds = Counter(_types(problem))
    blocks = [_key_sets(problem.scores.shape[1], size) for _, size in kinds]
    members = np.concatenate(blocks)
    losses = problem.losses(members).T.ravel()  # x is laid out by set, then query
    spread = float(np.ptp(losses)) or 1.0
    scaled = (losses - losses.min()) * (1000 / spread)  # HiGHS stops within 1e-6 of the optimum, whatever the scale
    found = milp(
        np.concatenate([np.zeros(len(members)), scaled]),
        integrality=np.concatenate([np.ones(len(members)), np.zeros(len(losses))]),
        bounds=Bounds(0, 1),
        constraints=_constraints(problem.scores.shape[0], kinds, blocks),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if found.status != 0:
        raise ValueError(f"problem: expected one that HiGHS solves in {seconds:g} s, got: {found.message} ({_INSTEAD})")
    return _read(problem, list(kinds), blocks, found.x[: len(members)])


def _constraints(
    queries: int, kinds: Counter[tuple[int, int]], blocks: list[NDArray[np.bool_]]
) -> list[LinearConstraint]:
    """The rows of `_by_ilp`: variables are y, then x by set and query."""
    members, lengths = np.concatenate(blocks), [len(block) for block in blocks]
    sets, keys = members.shape
    wanted = np.repeat([float(n) for n, _ in kinds], lengths)
    kind = np.repeat(np.arange(len(kinds)), lengths)
    of_kind = coo_array((np.ones(sets), (kind, np.arange(sets))), shape=(len(kinds), sets))
    each_set = kron(eye_array(sets), np.ones((1, queries)))
    equal = vstack(
        [
            hstack([csr_array(members.T.astype(float)), csr_array((keys, sets * queries))]),
            hstack([csr_array((queries, sets)), kron(np.ones((1, sets)), eye_array(queries))]),
            hstack([-_diagonal(wanted), each_set]),
            hstack([of_kind, csr_array((len(kinds), sets * queries))]),
        ]
    )
    right = np.concatenate([np.ones(keys + queries), np.zeros(sets), list(kinds.values())])
    below = hstack([-each_set.T, eye_array(sets * queries)])
    return [LinearConstraint(equal.tocsr(), right, right), LinearConstraint(below.tocsr(), -np.inf, 0)]


def _diagonal(values: Matrix) -> csr_array:
    return csr_array((values, (np.arange(len(values)), np.arange(len(values)))))


def _read(problem: Problem, kinds: list[tuple[int, int]], blocks: list[NDArray[np.bool_]], y: Matrix) -> Clustering:
    """The chosen key sets, and the best queries for them."""
    taken = []
    first = 0
    for (n, _), block in zip(kinds, blocks, strict=True):
        taken += [(n, block[s]) for s in np.flatnonzero(y[first : first + len(block)] > 0.5)]
        first += len(block)
    members = np.array([each for _, each in taken])
    queries = assign(problem.losses(members), tuple(n for n, _ in taken))
    return Clustering(tuple(queries.tolist()), tuple(members.argmax(axis=0).tolist()))
