"""Steps: the costly parts of planning, which each backend does in its own way.

`coterie.planning.reference` defines what they give, `coterie.planning.native` does the same in C++. Both are modules
that fulfil `Steps`, and the type checker sees to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

from torch import Tensor

from coterie.plan import Means
from coterie.planning.kmeans import Options
from coterie.planning.orders import Parts

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens


class Steps(Protocol):
    """What a mechanism plans with. Rows are those of `tokens`; draws follow from the seed and the tokens' layer."""

    def order_by(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Positions by ascending score, ties by position, masked ones last: int32 of the scores' shape."""
        ...

    def group_by(self, labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """Members of each label in order of position: order (…, N) and offsets (…, groups + 1), both int32."""
        ...

    def smyrf_orders(
        self, tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys by hash, (B, H, rounds, N) int32 each; `groups` (B,) is what E2LSH fits its buckets to."""
        ...

    def buckets(
        self, tokens: Tokens, columns: Tensor, capacity: int, rounds: int, transform: str, seed: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-polytope buckets of transformed queries and keys, (B, H, rounds, N) each.

        `columns` (B,): axes that a sample uses; `capacity`: the most that any could.
        """
        ...

    def hamming_clusters(self, tokens: Tokens, clusters: int, iterations: int, bits: int, seed: int) -> Tensor:
        """The cluster of each query, (B, H, Nq), by the signs of random projections."""
        ...

    def kmeans(
        self, x: Tensor, parts: Parts, clusters: int, iterations: int, **options: Unpack[Options]
    ) -> tuple[Tensor, Tensor]:
        """Euclidean k-means inside each of the parts of a sequence.

        Args:
            x: (B, heads, N, D) rows; what is not finite counts as 0.
            parts: which rows belong together.
            clusters: in a part, at most.
            options: `counts` is (B, parts), `centroids` (B, heads, parts · clusters, D).

        Returns:
            labels (B, heads, N) in [0, clusters), by row, 0 for rows of no part; centroids like those of the options.
        """
        ...

    def cluster_means(self, tokens: Tokens, labels: Tensor, clusters: int, *, mask: Tensor | None = None) -> Tensor:
        """The mean query of each cluster, (B, H, clusters, D) float64; an empty one is 0.

        `mask` (B, Nq): the queries that count, if not all real ones.
        """
        ...

    def routing_centroids(self, tokens: Tokens, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
        """Unit centroids of unit queries and keys together, (B, H, clusters, D); each query's nearest, (B, H, Nq)."""
        ...

    def top_keys(
        self, tokens: Tokens, queries: Tensor, count: int, *, unit: bool = False, causal: bool = False
    ) -> Tensor:
        """The `count` real keys with the largest product with each row of `queries` (B, H, C, D), by position.

        If there are fewer, the last are 0. `unit`: keys count by their direction. `causal`: row i sees what query i
        sees.
        """
        ...

    def near_keys(
        self, tokens: Tokens, queries: Tensor, clusters: Means, visible: Tensor, seen: Tensor, near: int, reach: int
    ) -> tuple[Tensor, Tensor]:
        """What each group of queries meets: the clusters that it sees, and its best keys.

        Args:
            queries: (B, H, G, D) float64, what stands for each group, scale included.
            clusters: the keys of each cluster, per key head; those that a group sees have no key in common.
            visible: (B, C, V) the clusters that the groups of a chunk see: the last `seen` (B, C) of them. Chunks have
                G / C groups each.
            near: how many keys to pick; fewer where a group sees fewer.
            reach: a group searches clusters until they hold so many keys, in the order of the product of its query
                with their mean key or with their outlier, whichever is larger. An outlier is the key farthest from the
                mean: what most queries look for, such as a text's first token, is unlike all other keys.

        Returns:
            (B, H, G, V + near) int32 key rows, those of clusters as in `visible`, behind the real ones; and their
            float32 biases: the log of how many keys a cluster has left, 0 for keys.
        """
        ...
