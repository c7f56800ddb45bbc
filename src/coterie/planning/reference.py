"""Planning steps in plain PyTorch: the definition of what a plan holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie import clustering, draws, hashing
from coterie.draws import Stream
from coterie.grouping import group_by, order_by, top_indices

if TYPE_CHECKING:
    from coterie.mechanisms.base import Tokens

_BUDGET = 1 << 22  # scores in memory at a time

__all__ = [
    "buckets",
    "cluster_means",
    "cluster_queries",
    "group_by",
    "order_by",
    "routing_centroids",
    "smyrf_orders",
    "top_keys",
]


def smyrf_orders(
    tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys by hash, (B, H, rounds, N) int32 each; `groups` (B,) is what E2LSH fits its buckets to."""
    query_masks, key_masks = tokens.query_mask[:, None, None], tokens.key_mask[:, None, None]
    f, g = hashing.transform(transform, tokens.q, tokens.k, tokens.query_mask[:, None], tokens.key_mask[:, None])
    shape = (tokens.sizes.heads, rounds, f.shape[-1])
    directions = draws.normal(Stream.PROJECTION, shape, seed=seed, layer=tokens.layer, device=f.device)
    hashes = [hashing.project(f, directions), hashing.project(g, directions)]
    if hash_name == "e2lsh" and tokens.sizes.queries + tokens.sizes.keys > 0:
        real, both = torch.cat([query_masks, key_masks], -1), torch.cat(hashes, -1)
        low = both.masked_fill(~real, float("inf")).amin(-1, keepdim=True)
        high = both.masked_fill(~real, float("-inf")).amax(-1, keepdim=True)
        width = ((high - low) / groups[:, None, None, None]).clamp(min=torch.finfo(torch.float32).tiny)
        shift = draws.uniform(Stream.OFFSET, shape[:2], seed=seed, layer=tokens.layer, device=f.device)[..., None]
        hashes = [torch.floor(h / width + shift) for h in hashes]
    return order_by(hashes[0], query_masks), order_by(hashes[1], key_masks)


def buckets(
    tokens: Tokens, columns: Tensor, capacity: int, rounds: int, transform: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-polytope buckets of transformed queries and keys, (B, H, rounds, N) each.

    `columns` (B,): axes that a sample uses; `capacity`: the most that any could.
    """
    f, g = hashing.transform(transform, tokens.q, tokens.k, tokens.query_mask[:, None], tokens.key_mask[:, None])
    heads = tokens.sizes.heads
    shape = (heads * rounds, f.shape[-1], capacity)
    rotations = draws.normal(Stream.ROTATION, shape, seed=seed, layer=tokens.layer, device=tokens.device)
    each = rotations.view(rounds, heads, f.shape[-1], capacity)
    found = [torch.stack([hashing.cross_polytope(x, rotation, columns) for rotation in each], 2) for x in (f, g)]
    return found[0], found[1]


def cluster_queries(tokens: Tokens, clusters: int, iterations: int, space: str, bits: int, seed: int) -> Tensor:
    """The cluster of each query, (B, H, Nq)."""
    mask, layer = tokens.query_mask, tokens.layer
    if space == "hamming":
        return clustering.hamming_kmeans(tokens.q, mask, clusters, iterations, bits, seed=seed, layer=layer)
    return clustering.euclidean_kmeans(tokens.q, mask, clusters, iterations, seed=seed, layer=layer)[0]


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int) -> Tensor:
    """The mean query of each cluster, (B, H, clusters, D) float64; an empty one is 0."""
    sums, counts = clustering.member_sums(tokens.q, labels, tokens.query_mask, clusters)
    return sums / counts.clamp(min=1)


def routing_centroids(
    tokens: Tokens, q: Tensor, k: Tensor, clusters: int, iterations: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Unit centroids of unit queries and keys together, (B, H, clusters, D), and each query's nearest, (B, H, Nq)."""
    mask = torch.cat([tokens.query_mask, tokens.key_mask], -1)
    both = torch.cat([q, k], 2)
    _, centroids = clustering.euclidean_kmeans(both, mask, clusters, iterations, seed=seed, layer=tokens.layer)
    centroids = hashing.unit(centroids)
    return centroids, clustering.nearest(q, centroids)


def top_keys(
    tokens: Tokens, queries: Tensor, count: int, *, keys: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The `count` real keys with the largest product with each row of `queries` (B, H, C, D), best first.

    `keys` (B, H, Nk, D): other vectors in the place of the keys. `causal`: row i sees what query i sees.
    """
    keys = tokens.k if keys is None else keys
    positions = torch.arange(tokens.sizes.keys, device=tokens.device)
    rows = max(1, _BUDGET // max(1, tokens.sizes.batch * tokens.sizes.heads * tokens.sizes.keys))
    tops = []
    for part in torch.arange(queries.shape[2], device=tokens.device).split(rows):
        seen = tokens.key_mask[:, None, :]
        if causal:
            seen = seen & (positions <= tokens.query_positions[:, part, None])
        tops.append(top_indices(queries[:, :, part] @ keys.mT, seen[:, None], count))
    if not tops:
        return torch.zeros(*queries.shape[:3], count, dtype=torch.int64, device=tokens.device)
    return torch.cat(tops, 2)
