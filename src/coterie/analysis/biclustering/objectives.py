"""Attention biclustering as an optimisation problem: what a clustering loses.

With P the scores and P̂ the scores whose pairs of different clusters are taken away (supplement §9):

    mass      maximise Σ_{(q,k) together} W[q, k]                                  (Eq. 7; W any matrix)
    softmax   minimise ‖σ(P̂₀) − σ(P)‖²_F,  P̂₀ with −∞ between clusters             (Theorem 1)
    product   minimise ‖P̂_ε − P‖²_F,  P̂_ε with −a between clusters, ε = e^{−a}     (Lemma 1)

The third is the first with W = (P + a)². All three are sums over queries of a loss that depends only on the keys of the
query's cluster, which is what the solvers use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from coterie.analysis.biclustering.clustering import Clustering
from coterie.checks import expect, expect_choice, expect_int

Matrix = NDArray[np.float64]
Objective = Literal["mass", "softmax"]
_TINY = 1e-100  # below this a cluster's share of the softmax is computed by its own scores: squares would underflow


class Solution(NamedTuple):
    """A clustering and its value under the problem's objective."""

    clustering: Clustering
    value: float


@dataclass(frozen=True, eq=False)
class Problem:
    """One head's scores, the sizes that clusters must have, and what counts.

    Args:
        scores: (queries, keys). For "mass" the weights themselves, finite; for "softmax" the scores P, where −inf is a
            pair that a mask hides. A tensor or an array.
        query_sizes, key_sizes: how many of each a cluster holds; cluster c has query_sizes[c] and key_sizes[c].
        objective: "softmax" (smaller is better) or "mass" (larger is better).

    Example:
        >>> problem = Problem.balanced([[2.0, 0.0], [0.0, 1.0]], 2, "mass")
        >>> problem.value(Clustering([0, 1], [0, 1])), problem.value(Clustering([0, 1], [1, 0]))
        (3.0, 0.0)
    """

    scores: Matrix
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]
    objective: Objective = "softmax"

    if TYPE_CHECKING:  # anything that is a matrix comes in, an array is kept

        def __init__(
            self, scores: Any, query_sizes: Iterable[int], key_sizes: Iterable[int], objective: Objective = "softmax"
        ) -> None: ...

    def __post_init__(self) -> None:
        expect_choice("objective", self.objective, ("mass", "softmax"))
        object.__setattr__(self, "scores", as_matrix("scores", self.scores, hidden=self.objective == "softmax"))
        for name, count in (("query_sizes", self.scores.shape[0]), ("key_sizes", self.scores.shape[1])):
            sizes = tuple(getattr(self, name))
            for size in sizes:
                expect_int(name, size, at_least=1)
            expect(sum(sizes) == count, name, f"sizes that add up to {count}", sizes)
            object.__setattr__(self, name, sizes)
        same = len(self.query_sizes) == len(self.key_sizes)
        expect(same, "key_sizes", f"{len(self.query_sizes)} clusters, as many as query_sizes", len(self.key_sizes))

    @staticmethod
    def balanced(scores: Any, clusters: int, objective: Objective = "softmax") -> Problem:
        """Clusters of equal sizes, to within one, on both sides: cut as `Smyrf` cuts them."""
        hidden = objective == "softmax"
        matrix = as_matrix("scores", scores, hidden=hidden)
        most = min(matrix.shape)
        expect_int("clusters", clusters, at_least=1)
        expect(clusters <= most, "clusters", f"at most {most}, so that each has a query and a key", clusters)
        cut = [tuple((c + 1) * n // clusters - c * n // clusters for c in range(clusters)) for n in matrix.shape]
        return Problem(matrix, cut[0], cut[1], objective)

    @property
    def clusters(self) -> int:
        """How many clusters there are."""
        return len(self.query_sizes)

    @property
    def maximise(self) -> bool:
        """Whether a larger value is better."""
        return self.objective == "mass"

    @property
    def weights(self) -> Matrix:
        """What the heuristics follow: the weights of "mass", the attention map σ(P) of "softmax"."""
        return self.scores if self.maximise else attention_map(self.scores)

    def losses(self, members: NDArray[np.bool_]) -> Matrix:
        """What each query loses with each set of keys, (queries, sets), for `members` (sets, keys); minus the mass."""
        if self.maximise:
            return -(self.scores @ members.T.astype(np.float64))
        return _softmax_losses(self.scores, members)

    def value(self, clustering: Clustering) -> float:
        """The objective at a clustering of the right sizes."""
        self.check(clustering)
        losses = self.losses(clustering.members)
        total = float(losses[np.arange(len(losses)), list(clustering.queries)].sum())
        return 0.0 - total if self.maximise else total  # 0 − 0 is not −0

    def check(self, clustering: Clustering) -> None:
        """Raise ValueError unless the clustering has this problem's length and cluster sizes."""
        shape = (len(clustering.queries), len(clustering.keys))
        expect(shape == self.scores.shape, "clustering", f"(queries, keys) = {self.scores.shape}", shape)
        wanted = Counter(zip(self.query_sizes, self.key_sizes, strict=True))
        expect(
            Counter(clustering.sizes) == wanted,
            "clustering",
            f"clusters of (queries, keys) {sorted(wanted.elements())}",
            sorted(clustering.sizes),
        )


def max_mass(weights: Any, clustering: Clustering) -> float:
    """Σ of the weights of all pairs that are together (Eq. 7 of the supplement).

    >>> max_mass([[2.0, 5.0], [1.0, 1.0]], Clustering([0, 1], [0, 1]))
    3.0
    """
    return float(as_matrix("weights", weights)[_together(weights, clustering)].sum())


def product_error(scores: Any, clustering: Clustering, a: float) -> float:
    """‖P̂_ε − P‖²_F with −a in the place of the scores between clusters (Eq. 6).

    >>> product_error([[2.0, 1.0], [0.0, 1.0]], Clustering([0, 1], [0, 1]), a=1.0)   # (1 + 1)² + (0 + 1)²
    5.0
    """
    matrix = as_matrix("scores", scores)
    expect(bool(np.isfinite(a)), "a", "a finite number", a)
    return float(((matrix + a)[~_together(scores, clustering)] ** 2).sum())


def softmax_error(scores: Any, together: Clustering | NDArray[np.bool_]) -> float:
    """‖σ(P̂₀) − σ(P)‖²_F: attention within clusters against dense attention (Theorem 1).

    A query that meets no key gives 0, as in the engine.

    Args:
        scores: (queries, keys); −inf is a pair that a mask hides.
        together: a clustering, or any (queries, keys) bool matrix of who meets whom.

    Example:
        >>> import numpy as np
        >>> round(softmax_error(np.zeros((2, 2)), Clustering([0, 1], [0, 1])), 12)   # 1 against ½ ½, twice
        1.0
    """
    matrix = as_matrix("scores", scores, hidden=True)
    met = _together(scores, together) if isinstance(together, Clustering) else np.asarray(together, dtype=bool)
    expect(met.shape == matrix.shape, "together", f"shape {matrix.shape}", met.shape)
    return float(sum(_softmax_losses(matrix[i : i + 1], met[i : i + 1])[0, 0] for i in range(len(matrix))))


def attention_map(scores: Matrix) -> Matrix:
    """σ(P), row by row."""
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))


def realise(weights: Any, a: float = 0.0) -> tuple[Matrix, Matrix]:
    """Queries and keys with (q·k + a)² = W for any W ≥ 0: the max-mass problem as an instance of Lemma 1's.

    The hardness of ‖P̂_ε − P‖²_F needs this direction; the supplement gives the other, from (q·k + a)² to q′·k′.

    Example:
        >>> import numpy as np
        >>> q, k = realise([[4.0, 0.0], [1.0, 9.0]], a=2.0)
        >>> np.round((q @ k.T + 2.0) ** 2, 12).tolist()
        [[4.0, 0.0], [1.0, 9.0]]
    """
    matrix = as_matrix("weights", weights)
    expect(bool((matrix >= 0).all()), "weights", "weights ≥ 0", float(matrix.min()))
    return np.sqrt(matrix) - a, np.eye(matrix.shape[1])


def as_matrix(name: str, x: Any, *, hidden: bool = False) -> Matrix:
    """A float64 matrix with at least one row and column; −inf only where it may hide a pair, never a whole row."""
    raw = x.detach().cpu().double().numpy() if isinstance(x, Tensor) else x
    matrix = np.asarray(raw, dtype=np.float64)
    expect(matrix.ndim == 2 and matrix.size > 0, name, "a matrix (queries, keys) of one head", matrix.shape)
    expect(not bool(np.isnan(matrix).any()), name, "numbers", "NaN")
    if hidden:
        expect(not bool((matrix == np.inf).any()), name, "scores below inf", "inf")
        alone = np.flatnonzero((matrix == -np.inf).all(axis=1))
        expect(alone.size == 0, name, "a key for every query (drop padded queries first)", f"none in row {alone[:1]}")
    else:
        expect(bool(np.isfinite(matrix).all()), name, "finite numbers", "inf")
    return matrix


def _together(scores: Any, clustering: Clustering) -> NDArray[np.bool_]:
    shape, got = tuple(np.shape(scores)), (len(clustering.queries), len(clustering.keys))
    expect(got == shape, "clustering", f"(queries, keys) = {shape}", got)
    return clustering.together


def _softmax_losses(scores: Matrix, members: NDArray[np.bool_]) -> Matrix:
    """‖c − p‖² of each row with each set of keys: p the row's softmax, c its softmax over the set.

    With o the softmax mass outside the set, c − p = o·c inside it, so the loss is Σ_out p² + o²·Σ_in c². Nothing is
    subtracted, so that a loss of 1e-70 (Theorem 1 with a = 80) still has all its digits.
    """
    p = attention_map(scores)
    inside = members.T.astype(np.float64)
    outside = 1.0 - inside
    kept, lost = p @ inside, p @ outside
    squares = np.divide(p**2 @ inside, kept**2, out=np.zeros_like(kept), where=kept > _TINY)
    for row, column in np.argwhere(kept <= _TINY):
        own = scores[row, members[column]]
        if own.size and own.max() > -np.inf:  # else the query meets nobody: c = 0
            squares[row, column] = (attention_map(own[None]) ** 2).sum()
    return np.asarray(p**2 @ outside + lost**2 * squares)
