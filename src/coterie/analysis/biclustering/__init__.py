"""Attention biclustering: the optimisation problem behind clustered attention, and what is true about it.

Queries and keys of one head are to be put into clusters so that attention within clusters is as near to dense attention
as can be. docs/theory.md states the results; every number there is checked here.
"""

from coterie.analysis.biclustering.clustering import Clustering
from coterie.analysis.biclustering.exact import count_partitions, every_clustering, solve
from coterie.analysis.biclustering.heuristics import balance, greedy, local_search, random_clustering
from coterie.analysis.biclustering.matching3d import (
    Matching3D,
    clusters_of_matching,
    supplement_decides,
    supplement_problem,
    supplement_target,
    triples_of_clusters,
)
from coterie.analysis.biclustering.objectives import (
    Problem,
    Solution,
    attention_map,
    max_mass,
    product_error,
    realise,
    softmax_error,
)
from coterie.analysis.biclustering.partition import (
    Gadgets,
    is_k22_partition,
    k22_partition,
    k22_problem,
    k22_target,
    squares,
)
from coterie.analysis.biclustering.special import one_key_each, one_query_each, one_to_one
from coterie.analysis.biclustering.spectral import spectral
from coterie.analysis.biclustering.theorem1 import (
    Equivalence,
    copies_that_suffice,
    equivalence,
    limit_error,
    special_at_home,
    special_problem,
    squared_mass,
    with_special_keys,
)
from coterie.analysis.biclustering.theorem2 import Assumptions, assumptions

__all__ = [
    "Assumptions",
    "Clustering",
    "Equivalence",
    "Gadgets",
    "Matching3D",
    "Problem",
    "Solution",
    "assumptions",
    "attention_map",
    "balance",
    "clusters_of_matching",
    "copies_that_suffice",
    "count_partitions",
    "equivalence",
    "every_clustering",
    "greedy",
    "is_k22_partition",
    "k22_partition",
    "k22_problem",
    "k22_target",
    "limit_error",
    "local_search",
    "max_mass",
    "one_key_each",
    "one_query_each",
    "one_to_one",
    "product_error",
    "random_clustering",
    "realise",
    "softmax_error",
    "solve",
    "special_at_home",
    "special_problem",
    "spectral",
    "squared_mass",
    "squares",
    "supplement_decides",
    "supplement_problem",
    "supplement_target",
    "triples_of_clusters",
    "with_special_keys",
]
