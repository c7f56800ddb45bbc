"""Steps: the costly parts of planning, which each backend does in its own way.

`coterie.planning.reference` defines what they give, `coterie.planning.native` does the same in C++ and
`coterie.planning.triton` on a GPU. They are modules that fulfil `Steps`, and the type checker sees to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, Unpack

from torch import Tensor

from coterie.plan import Means
from coterie.planning.kmeans import Options
from coterie.planning.orders import Parts

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens


class Seen(NamedTuple):
    """What groups of queries see of clusters of keys. Groups come chunk by chunk, G / C to each."""

    clusters: Tensor  # (B, C, V) int32, ascending: the groups of a chunk see the first `shown` of these
    shown: Tensor  # (B, C)
    groups: Tensor  # (B, C) int64: so many of a chunk's groups exist
    together: Tensor  # (B, C) int64: so many groups, from a chunk's first on, search together
    room: int  # for the clusters that a group sees, at least V


class NearSearch(NamedTuple):
    """How many keys a group picks, at most all there are, and of how many at least, if it sees so many."""

    near: int
    reach: int
    wide: bool  # clusters may have more keys than an int16 counts


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

    def halve(self, x: Tensor, parts: Parts, leaves: Tensor, room: int, together: Tensor) -> Tensor:
        """Similar rows of a part side by side, in leaves of equal size.

        The rows are cut in two, along a direction in which they differ much, and so on. Leaf l of a part of n rows is
        what lies between l·n // leaves and (l + 1)·n // leaves. Leaves that stay together are in order of position.

        Args:
            x: (B, heads, N, D) rows; what is not finite counts as 0.
            parts: which rows belong together.
            leaves: (B, parts) how many leaves a part has, at most `room`.
            together: (B,) so many leaves, from a part's first on, are most alike: they are not split.

        Returns:
            (B, heads, M) int32: `parts.order` with similar rows of each part side by side.
        """
        ...

    def near_keys(
        self, tokens: Tokens, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
    ) -> tuple[Tensor, Tensor]:
        """The best keys of each group of queries.

        Groups that search together look at the same clusters, those that they like best, until these hold `reach` keys;
        and each picks the `near` keys among them whose products with its query are largest. A group likes a cluster by
        the product with its mean key or with its outlier, whichever is larger, less the largest that it has with any;
        together they like it as much as the one who likes it most. An outlier is the key farthest from the mean: what
        some queries look for may be unlike the rest of its cluster. Products are those of `coterie.planning.bytes`.

        Args:
            queries: (B, H, G, D) float32, what stands for each group, scale included.
            clusters: the keys of each cluster, per key head, one cluster behind the other; those that a group sees have
                no key in common.
            seen: the clusters that each group sees, and which groups search together.
            search: how many keys are looked at.

        Returns:
            (B, H, G · near) int32 keys, 0 where a group sees fewer; and how many keys are left in each cluster that the
            group sees, and 1 behind those, (B, H, G, `seen.room`), int32 if `search.wide`, otherwise int16. Groups that
            do not exist have 0 in both.
        """
        ...
