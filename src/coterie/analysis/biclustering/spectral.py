"""Classical co-clustering as a baseline: Dhillon's spectral method, made to fit the cluster sizes."""

from __future__ import annotations

import warnings

import numpy as np

from coterie.analysis.biclustering.heuristics import balance
from coterie.analysis.biclustering.objectives import Problem, Solution
from coterie.checks import expect, expect_int


def spectral(problem: Problem, seed: int = 0) -> Solution:
    """scikit-learn's `SpectralCoclustering` of the attention map (or of the mass), balanced by two assignments.

    Args:
        problem: scores, cluster sizes and objective; weights of the mass must be ≥ 0.
        seed: of its k-means.

    Example:
        >>> weights = np.kron(np.eye(2), np.ones((3, 3)))
        >>> spectral(Problem.balanced(weights, 2, "mass")).value
        18.0
    """
    from sklearn.cluster import SpectralCoclustering
    from sklearn.exceptions import ConvergenceWarning

    expect_int("seed", seed, at_least=0, at_most=2**32 - 1)
    weights = problem.weights
    expect(bool((weights >= 0).all()), "problem", "weights ≥ 0 for spectral co-clustering", float(weights.min()))
    if problem.clusters == 1:
        return balance(problem, np.ones((1, weights.shape[1]), dtype=bool))
    # Its normalisation divides by row and column sums, and a mask can empty a column.
    padded = weights + 1e-6 * (float(weights.max()) or 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: `balance` fills them
        found = SpectralCoclustering(n_clusters=problem.clusters, random_state=seed).fit(padded)
    return balance(problem, np.equal.outer(np.arange(problem.clusters), found.column_labels_))
