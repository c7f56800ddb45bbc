"""A reduction that holds: 3-dimensional matching → partition of a bipartite graph into K₂,₂ → attention biclustering.

docs/theory.md has the proofs. In short: give an edge a high score and a non-edge a lower one. Then no clustering with
2 queries and 2 keys in a cluster is as good as one whose clusters are all K₂,₂, under either objective, and for *any*
two scores. And whether a bipartite graph can be cut into K₂,₂ is as hard as 3-dimensional matching.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.cover import exact_cover
from coterie.analysis.biclustering.objectives import Objective, Problem, attention_map
from coterie.checks import expect

if TYPE_CHECKING:
    from coterie.analysis.biclustering.matching3d import Matching3D, Triple

Square = tuple[int, int, int, int]  # two queries and two keys, all four pairs joined
Vertex = tuple[str | int, ...]
SQUARES = 500_000
_CORNERS = "xyzw"


def k22_problem(edges: Any, objective: Objective = "softmax", *, high: float = 1.0, low: float = 0.0) -> Problem:
    """Biclustering for the question whether a bipartite graph can be partitioned into K₂,₂.

    Args:
        edges: (queries, keys) bool, as many queries as keys, an even number of each.
        objective: "softmax" or "mass".
        high, low: the scores of edges and of other pairs; any two numbers with high > low.

    Example:
        >>> k22_problem(np.eye(2, dtype=bool), "mass").scores.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    graph = _graph(edges)
    expect(bool(np.isfinite([high, low]).all()) and high > low, "high", "finite scores with high > low", (high, low))
    halves = (2,) * (len(graph) // 2)
    return Problem(np.where(graph, high, low), halves, halves, objective)


def k22_target(edges: Any, objective: Objective = "softmax", *, high: float = 1.0, low: float = 0.0) -> float:
    """The value that a partition into K₂,₂ has, and that no other clustering reaches.

    For the mass 4·high in each cluster; for the softmax Σ_q (½ − 2·h_q + ‖p_q‖²), with p the attention map and h_q the
    weight e^high / Σ_k e^{P[q, k]} of an edge.

    >>> k22_target(np.ones((4, 4)), "mass"), round(k22_target(np.ones((4, 4))), 12)      # 4·(½ − ½ + ¼)
    (8.0, 1.0)
    """
    problem = k22_problem(edges, objective, high=high, low=low)
    if problem.maximise:
        return 4 * problem.clusters * high
    p = attention_map(problem.scores)
    edge = p.max(axis=1) * np.exp(high - problem.scores.max(axis=1))  # also for a query that has none
    return float((0.5 - 2 * edge + (p**2).sum(axis=1)).sum())


def is_k22_partition(edges: Any, clustering: Clustering) -> bool:
    """Whether all pairs that are together are edges, in clusters of 2 + 2: when the value equals `k22_target`.

    >>> together = Clustering([0, 0], [0, 0])
    >>> is_k22_partition(np.ones((2, 2)), together), is_k22_partition(np.eye(2), together)
    (True, False)
    """
    graph = _graph(edges)
    k22_problem(graph).check(clustering)
    return bool(graph[clustering.together].all())


def squares(edges: Any) -> list[Square]:
    """Every K₂,₂ of a bipartite graph.

    >>> squares([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    [(0, 1, 0, 1), (1, 2, 1, 2)]
    """
    graph = np.asarray(edges, dtype=bool)
    expect(graph.ndim == 2, "edges", "a matrix (queries, keys)", graph.shape)
    count = sum(n * (n - 1) // 2 for a, b in combinations(graph, 2) for n in [int((a & b).sum())])
    expect(count <= SQUARES, "edges", f"a graph with at most {SQUARES:,} copies of K₂,₂ (a sparser one)", f"{count:,}")
    return [
        (i, j, k, m)
        for i, j in combinations(range(len(graph)), 2)
        for k, m in combinations(np.flatnonzero(graph[i] & graph[j]).tolist(), 2)
    ]


def k22_partition(edges: Any) -> Clustering | None:
    """A partition into K₂,₂ if there is one: an exact cover by the graph's squares, through SciPy's HiGHS.

    >>> k22_partition([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]])
    Clustering(queries=(0, 0, 1, 1), keys=(0, 0, 1, 1))
    >>> k22_partition(np.eye(4)) is None
    True
    """
    graph = _graph(edges)
    found = squares(graph)
    covered = np.zeros((2 * len(graph), len(found)), dtype=bool)
    for at, (i, j, k, m) in enumerate(found):
        covered[[i, j, len(graph) + k, len(graph) + m], at] = True
    chosen = exact_cover(covered)
    if chosen is None:
        return None
    queries, keys = [0] * len(graph), [0] * len(graph)
    for cluster, at in enumerate(chosen):
        i, j, k, m = found[at]
        queries[i] = queries[j] = keys[k] = keys[m] = cluster
    return Clustering(tuple(queries), tuple(keys)).canonical()


@dataclass(frozen=True, eq=False)
class Gadgets:
    """The bipartite graph of a 3-dimensional matching: it has a partition into K₂,₂ exactly if there is a matching.

    Vertices are the terminals ("x", i), ("y", i), ("z", i), ("w", i), and for each triple t and each of its corners
    u ∈ x, y, z, w four more: ("a", t, u), ("b", t, u), ("c", t, u), ("d", t, u). The edges:

        b and d of a corner with its a, its c and its terminal (with every w, in the corner w);
        the four a's of a triple in a ring x – y – z – w – x.

    So c can only be covered with b, d and either the terminal or a; and if one corner takes its terminal, its a needs
    the ring, so all four do: the triple is chosen, or it is not.

    Attributes:
        instance: the matching problem.
        queries, keys: the vertices of the two sides, `2·size + 8·|T|` each.
        edges: (queries, keys) bool.

    Example:
        >>> from coterie.analysis.biclustering.matching3d import Matching3D
        >>> gadgets = Gadgets.of(Matching3D(1, [(0, 0, 0)]))
        >>> gadgets.edges.shape, int(gadgets.edges.sum())
        ((10, 10), 28)
        >>> gadgets.matching_of(k22_partition(gadgets.edges))
        ((0, 0, 0),)
    """

    instance: Matching3D
    queries: tuple[Vertex, ...]
    keys: tuple[Vertex, ...]
    edges: NDArray[np.bool_]

    @staticmethod
    def of(instance: Matching3D) -> Gadgets:
        """Build the graph; linear in the instance but for the w's, which every triple can use."""
        sides: tuple[list[Vertex], list[Vertex]] = ([], [])
        for at, corner in enumerate(_CORNERS):  # x, z and their a, c with the queries; y, w and theirs with the keys
            sides[at % 2].extend((corner, i) for i in range(instance.size))
            for t in range(len(instance.triples)):
                sides[at % 2].extend((name, t, corner) for name in "ac")
                sides[1 - at % 2].extend((name, t, corner) for name in "bd")
        row = {vertex: i for i, vertex in enumerate(sides[0])}
        column = {vertex: j for j, vertex in enumerate(sides[1])}
        edges = np.zeros((len(row), len(column)), dtype=bool)
        for one, other in _joined(instance):
            query, key = (one, other) if one in row else (other, one)
            edges[row[query], column[key]] = True
        return Gadgets(instance, tuple(sides[0]), tuple(sides[1]), edges)

    def clusters_of(self, matching: Iterable[Triple]) -> Clustering:
        """The partition into K₂,₂ that a matching gives."""
        chosen = {self.instance.triples.index(triple): w for w, triple in enumerate(sorted(matching))}
        everyone = list(range(self.instance.size))
        ends = [sorted(self.instance.triples[t][axis] for t in chosen) for axis in range(3)]
        expect(ends == [everyone] * 3, "matching", "triples that cover everyone exactly once", sorted(matching))
        groups: list[list[Vertex]] = []
        for t, triple in enumerate(self.instance.triples):
            for at, u in enumerate(_CORNERS):
                fourth: Vertex = ("a", t, u)
                if t in chosen:
                    fourth = (u, (*triple, chosen[t])[at])
                groups.append([("b", t, u), ("c", t, u), ("d", t, u), fourth])
            if t in chosen:
                groups.append([("a", t, u) for u in _CORNERS])
        cluster = {vertex: at for at, group in enumerate(groups) for vertex in group}
        return Clustering(tuple(cluster[v] for v in self.queries), tuple(cluster[v] for v in self.keys))

    def matching_of(self, clustering: Clustering) -> tuple[Triple, ...]:
        """The matching that a partition into K₂,₂ gives: the triples whose a's are one cluster."""
        fits = is_k22_partition(self.edges, clustering)
        expect(fits, "clustering", "a partition into K₂,₂", "pairs that are no edges")
        labels = {**dict(zip(self.queries, clustering.queries, strict=True))}
        labels.update(zip(self.keys, clustering.keys, strict=True))
        rings = [{labels[("a", t, u)] for u in _CORNERS} for t in range(len(self.instance.triples))]
        return tuple(triple for triple, ring in zip(self.instance.triples, rings, strict=True) if len(ring) == 1)


def _joined(instance: Matching3D) -> Iterable[tuple[Vertex, Vertex]]:
    for t, triple in enumerate(instance.triples):
        for at, u in enumerate(_CORNERS):
            terminals = [triple[at]] if u != "w" else list(range(instance.size))
            for name in "bd":
                yield ("a", t, u), (name, t, u)
                yield ("c", t, u), (name, t, u)
                for i in terminals:
                    yield (u, i), (name, t, u)
            yield ("a", t, u), ("a", t, _CORNERS[(at + 1) % 4])


def _graph(edges: Any) -> NDArray[np.bool_]:
    graph = np.asarray(edges, dtype=bool)
    even = graph.ndim == 2 and graph.shape[0] == graph.shape[1] and len(graph) % 2 == 0 and len(graph) > 0
    expect(even, "edges", "as many queries as keys, an even number of each (pairs need partners)", graph.shape)
    return graph
