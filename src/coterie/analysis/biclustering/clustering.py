"""A biclustering of attention: which cluster each query and each key is in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.checks import expect, expect_int, expect_type
from coterie.plan import Plan


@dataclass(frozen=True)
class Clustering:
    """Every query and every key in one cluster; a query meets the keys of its own cluster.

    Args:
        queries: the cluster of each query, numbered from 0. A list, an array or a tensor.
        keys: the cluster of each key. Each cluster has at least one query and one key.

    Example:
        >>> clustering = Clustering(queries=[0, 0, 1], keys=[1, 0, 1, 0])
        >>> clustering.sizes
        ((2, 2), (1, 2))
        >>> clustering.together.astype(int).tolist()
        [[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]]
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    if TYPE_CHECKING:  # any labels come in, tuples are kept

        def __init__(self, queries: Iterable[Any], keys: Iterable[Any]) -> None: ...

    def __post_init__(self) -> None:
        for name in ("queries", "keys"):
            object.__setattr__(self, name, _labels(name, getattr(self, name)))
        used = set(self.queries) | set(self.keys)
        clusters = max(used, default=-1) + 1
        expect(clusters > 0, "queries", "at least one query and one key", "none")
        for name, labels in (("queries", self.queries), ("keys", self.keys)):
            empty = sorted(set(range(clusters)) - set(labels))
            expect(not empty, name, f"a member in each of the clusters 0 … {clusters - 1}", f"none in {empty}")

    @property
    def clusters(self) -> int:
        """How many clusters there are."""
        return max(self.queries) + 1

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) in each cluster."""
        queries, keys = Counter(self.queries), Counter(self.keys)
        return tuple((queries[c], keys[c]) for c in range(self.clusters))

    @property
    def members(self) -> NDArray[np.bool_]:
        """(clusters, keys): whether a key is in a cluster."""
        return np.equal.outer(np.arange(self.clusters), np.array(self.keys))

    @property
    def together(self) -> NDArray[np.bool_]:
        """(queries, keys): whether a pair meets."""
        return np.equal.outer(np.array(self.queries), np.array(self.keys))

    def canonical(self) -> Clustering:
        """The same clusters, numbered by their first query, so that equal clusterings compare equal.

        >>> Clustering([1, 0], [1, 0]).canonical()
        Clustering(queries=(0, 1), keys=(0, 1))
        """
        number: dict[int, int] = {}
        for label in self.queries:
            number.setdefault(label, len(number))
        return Clustering(tuple(number[c] for c in self.queries), tuple(number[c] for c in self.keys))

    @staticmethod
    def of_plan(plan: Plan, *, round: int = 0, batch: int = 0, head: int = 0) -> Clustering:
        """The clusters of one round of a plan, in one head.

        The round must put every query and every key into exactly one group, as those of `Smyrf` do. Means, biases,
        windows and keys that several groups share are no biclustering, and are refused. In a causal plan the groups
        are taken as they are; the mask belongs into the scores, as −inf.

        Example:
            >>> import coterie, torch
            >>> q, k = torch.randn(2, 1, 1, 9, 4).unbind(0)
            >>> Clustering.of_plan(coterie.Smyrf(rounds=1, cluster_size=3).plan(q, k)).sizes
            ((3, 3), (3, 3), (3, 3))
        """
        expect_type(isinstance(plan, Plan), "plan", "a coterie.Plan", type(plan).__name__)
        for name, at, length in (("round", round, len(plan.rounds)), ("batch", batch, plan.batch)):
            expect_int(name, at, at_least=0, at_most=length - 1)
        expect_int("head", head, at_least=0, at_most=plan.heads - 1)
        chosen = plan.rounds[round]
        plain = "a round of plain groups, as Smyrf writes them"
        expect(plan.query_means is None and plan.key_means is None, "plan", plain, "means")
        special = [name for name in ("bias", "skip", "window") if getattr(chosen, name) is not None]
        expect(not special, "plan", plain, ", ".join(special))
        labels = []
        for name, order, start, stop, rows in (
            (
                "queries",
                chosen.query_order,
                chosen.query_offsets[..., :-1],
                chosen.query_offsets[..., 1:],
                "num_queries",
            ),
            ("keys", chosen.key_order, chosen.key_start, chosen.key_stop, "num_keys"),
        ):
            slots = order[batch, head].tolist()
            spans = zip(start[batch, head].tolist(), stop[batch, head].tolist(), strict=True)
            groups = [slots[first:last] for first, last in spans]
            count = Counter(row for group in groups for row in group)
            wrong = [row for row in range(getattr(plan, rows)) if count[row] != 1]
            expect(not wrong, "plan", f"all {name} in one group each (drop padding first)", f"not so: rows {wrong[:8]}")
            where = {row: g for g, group in enumerate(groups) for row in group}
            labels.append([where[row] for row in range(getattr(plan, rows))])
        return Clustering(tuple(labels[0]), tuple(labels[1]))


def _labels(name: str, labels: Iterable[Any]) -> tuple[int, ...]:
    found = []
    for label in labels:
        whole = not isinstance(label, bool) and int(label) == label and label >= 0
        expect(whole, name, "clusters numbered from 0", label)
        found.append(int(label))
    return tuple(found)
