"""3-dimensional matching, and the supplement's reduction from it (§9, Lemma 1), which does not hold.

The reduction writes an instance down as weights between queries (one for each x, one for each z) and keys (one for each
x, one for each y): r₁ between a query x and its own key, r₁ between x and y if some triple has both, r₂ ≪ r₁ between z
and y if some triple has both. The weights only know pairs, so a cluster may take (x, y) from one triple and (y, z) from
another. What the optimum really decides is `pairs_match`, and that is easy. A reduction that holds is in `partition`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.cover import exact_cover
from coterie.analysis.biclustering.exact import solve
from coterie.analysis.biclustering.objectives import Problem
from coterie.checks import expect, expect_int

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Matching3D:
    """X = Y = Z = {0, …, size − 1} and a set T of triples: is there a T′ ⊆ T that covers everyone exactly once?

    Example:
        >>> supplement = Matching3D(2, [(0, 0, 0), (0, 1, 1), (1, 0, 0)])       # the example of its Figure 3
        >>> supplement.matching()
        ((0, 1, 1), (1, 0, 0))
        >>> Matching3D(2, [(0, 0, 0), (1, 0, 1), (1, 1, 0)]).matching() is None
        True
    """

    size: int
    triples: tuple[Triple, ...]

    if TYPE_CHECKING:  # any triples come in, a sorted tuple is kept

        def __init__(self, size: int, triples: Iterable[Triple]) -> None: ...

    def __post_init__(self) -> None:
        expect_int("size", self.size, at_least=1)
        object.__setattr__(self, "triples", tuple(sorted(set(_triples(self.triples, self.size)))))

    def matching(self) -> tuple[Triple, ...] | None:
        """A matching, if there is one: an exact cover, by SciPy's HiGHS."""
        covered = np.zeros((3 * self.size, len(self.triples)), dtype=bool)
        for at, triple in enumerate(self.triples):
            for axis, vertex in enumerate(triple):
                covered[axis * self.size + vertex, at] = True
        chosen = exact_cover(covered)
        return None if chosen is None else tuple(self.triples[at] for at in chosen)

    def pairs_match(self) -> bool:
        """Whether X–Y and Y–Z, as two bipartite graphs of the pairs that triples hold, have perfect matchings.

        >>> Matching3D(2, [(0, 0, 0), (1, 0, 1), (1, 1, 0)]).pairs_match()
        True
        """
        for left, right in ((0, 1), (1, 2)):
            pairs = np.zeros((self.size, self.size), dtype=np.int8)
            for triple in self.triples:
                pairs[triple[left], triple[right]] = 1
            if (maximum_bipartite_matching(csr_array(pairs)) < 0).any():
                return False
        return True


def supplement_problem(instance: Matching3D, r1: float | None = None, r2: float = 1.0) -> Problem:
    """Lemma 1's instance: 2·size queries (x's, then z's), 2·size keys (x's, then y's), clusters of 2 + 2, max mass.

    Args:
        instance: of 3-dimensional matching.
        r1, r2: the weights. "r₁ ≫ r₂" has to mean r₁ > size·r₂ (else trading one r₁ for many r₂ can pay); 2·size·r₂ by
            default.

    Example:
        >>> supplement_problem(Matching3D(1, [(0, 0, 0)]), r1=9).scores.tolist()
        [[9.0, 9.0], [0.0, 1.0]]
    """
    n = instance.size
    r1 = 2 * n * r2 if r1 is None else r1
    expect(r2 > 0, "r2", "a number > 0", r2)
    expect(r1 > n * r2, "r1", f"more than size · r2 = {n * r2:g}", r1)
    weights = np.zeros((2 * n, 2 * n))
    weights[range(n), range(n)] = r1
    for x, y, z in instance.triples:
        weights[x, n + y] = r1
        weights[n + z, n + y] = r2
    return Problem(weights, (2,) * n, (2,) * n, "mass")


def supplement_target(instance: Matching3D, r1: float | None = None, r2: float = 1.0) -> float:
    """size·(2r₁ + r₂): a red, a blue and a green edge in every cluster, the most that any clustering can reach."""
    return instance.size * (2 * (2 * instance.size * r2 if r1 is None else r1) + r2)


def supplement_decides(instance: Matching3D, r1: float | None = None, r2: float = 1.0) -> bool:
    """What the supplement's reduction answers: whether the exact optimum reaches the target.

    >>> supplement_decides(Matching3D(2, [(0, 0, 0), (1, 0, 1), (1, 1, 0)]))     # yet there is no matching
    True
    """
    target = supplement_target(instance, r1, r2)
    return solve(supplement_problem(instance, r1, r2)).value >= target * (1 - 1e-12)


def clusters_of_matching(instance: Matching3D, matching: Iterable[Triple]) -> Clustering:
    """A matching's clusters: one for each triple, with the queries of x and z, and the keys of x and y.

    >>> clusters_of_matching(Matching3D(2, [(0, 1, 1), (1, 0, 0)]), [(0, 1, 1), (1, 0, 0)])
    Clustering(queries=(0, 1, 1, 0), keys=(0, 1, 1, 0))
    """
    n = instance.size
    chosen = sorted(_triples(matching, n))
    everyone = list(range(n))
    covers = all(sorted(triple[axis] for triple in chosen) == everyone for axis in range(3))
    expect(covers and set(chosen) <= set(instance.triples), "matching", "a matching of the instance", chosen)
    queries, keys = [0] * (2 * n), [0] * (2 * n)
    for cluster, (x, y, z) in enumerate(chosen):
        queries[x] = queries[n + z] = keys[x] = keys[n + y] = cluster
    return Clustering(tuple(queries), tuple(keys))


def triples_of_clusters(instance: Matching3D, clustering: Clustering) -> tuple[Triple, ...] | None:
    """The way back: (x, y, z) of every cluster, whether or not T has such a triple; None if a cluster is no such thing.

    >>> wrong = Matching3D(2, [(0, 0, 0), (1, 0, 1), (1, 1, 0)])
    >>> triples_of_clusters(wrong, solve(supplement_problem(wrong)).clustering)      # neither of them is in T
    ((0, 0, 1), (1, 1, 0))
    """
    n = instance.size
    supplement_problem(instance).check(clustering)
    found = []
    for cluster in range(clustering.clusters):
        queries = [i for i, c in enumerate(clustering.queries) if c == cluster]
        keys = [j for j, c in enumerate(clustering.keys) if c == cluster]
        if not (queries[0] < n <= queries[1] and keys[0] < n <= keys[1] and queries[0] == keys[0]):
            return None
        found.append((queries[0], keys[1] - n, queries[1] - n))
    return tuple(sorted(found))


def _triples(triples: Iterable[Triple], size: int) -> list[Triple]:
    found = []
    for triple in triples:
        inside = len(tuple(triple)) == 3 and all(0 <= vertex < size for vertex in triple)
        expect(inside, "triples", f"(x, y, z) with numbers from 0 to {size - 1}", triple)
        x, y, z = triple
        found.append((int(x), int(y), int(z)))
    return found
