"""Oracles of the theory: every clustering by brute force, the objectives with loops. Nothing here imports coterie."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import Any

Labels = Sequence[int]
Matrix = Any  # rows of numbers: lists or an array
Vertex = tuple[str, int]


def labellings(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every way to put sum(sizes) things into clusters of these sizes, in order."""
    return sorted(set(permutations([c for c, size in enumerate(sizes) for _ in range(size)])))


def clusterings(query_sizes: Sequence[int], key_sizes: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every pair of labellings, clusters of equal sizes told apart (so each clustering comes several times)."""
    return [(a, b) for a in labellings(query_sizes) for b in labellings(key_sizes)]


def mass(weights: Matrix, queries: Labels, keys: Labels) -> float:
    return sum(float(weights[i][j]) for i in range(len(queries)) for j in range(len(keys)) if queries[i] == keys[j])


def softmax(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    if top == -math.inf:
        return [0.0] * len(scores)
    raised = [math.exp(s - top) for s in scores]
    return [r / sum(raised) for r in raised]


def softmax_error(scores: Matrix, queries: Labels, keys: Labels) -> float:
    """‖σ(P̂₀) − σ(P)‖²_F as it is written."""
    total = 0.0
    for i, row in enumerate(scores):
        row = [float(s) for s in row]
        dense = softmax(row)
        within = softmax([s if queries[i] == keys[j] else -math.inf for j, s in enumerate(row)])
        total += sum((a - b) ** 2 for a, b in zip(within, dense, strict=True))
    return total


def best(
    value: Callable[..., float], scores: Matrix, query_sizes: Sequence[int], key_sizes: Sequence[int], largest: bool
) -> float:
    found = [value(scores, a, b) for a, b in clusterings(query_sizes, key_sizes)]
    return max(found) if largest else min(found)


def has_matching(size: int, triples: Sequence[tuple[int, int, int]]) -> bool:
    """3-dimensional matching by trying all sets of `size` triples."""
    everyone = set(range(size))
    return any(
        all({t[axis] for t in chosen} == everyone for axis in range(3)) for chosen in combinations(triples, size)
    )


def has_squares(edges: Matrix) -> bool:
    """Whether a bipartite graph can be cut into K₂,₂: cover the first vertex in all ways, and go on."""
    n = len(edges)

    def cover(queries: list[int], keys: list[int]) -> bool:
        if not queries:
            return True
        first = queries[0]
        for other in queries[1:]:
            common = [k for k in keys if edges[first][k] and edges[other][k]]
            for pair in combinations(common, 2):
                left = [q for q in queries if q not in (first, other)]
                if cover(left, [k for k in keys if k not in pair]):
                    return True
        return False

    return cover(list(range(n)), list(range(n)))


def gadget_graph_has_squares(edges: Matrix) -> bool:
    """The same for large sparse graphs: always cover the vertex with the fewest squares."""
    n = len(edges)
    squares = [
        frozenset([("q", i), ("q", j), ("k", k), ("k", m)])
        for i, j in combinations(range(n), 2)
        for k, m in combinations([k for k in range(n) if edges[i][k] and edges[j][k]], 2)
    ]
    everyone = frozenset([("q", i) for i in range(n)] + [("k", i) for i in range(n)])

    def cover(left: frozenset[Vertex], usable: list[frozenset[Vertex]]) -> bool:
        if not left:
            return True
        count = Counter(v for s in usable for v in s)
        vertex = min(sorted(left), key=lambda v: count[v])
        return any(cover(left - s, [u for u in usable if not u & s]) for s in usable if vertex in s)

    return cover(everyone, squares)
