"""Planning steps in C++, as torch custom ops: the draws, the arithmetic and the sorting happen inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie import hashing
from coterie.engine.native import kernels, last_contiguous, mask_bytes

if TYPE_CHECKING:
    from coterie.mechanisms.base import Tokens

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


def _seed(seed: int | Tensor) -> Tensor:
    """A seed as a tensor, so that a fresh one and a fixed one are the same to a compiled graph."""
    return seed.to("cpu") if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64)


@torch.library.custom_op("coterie::smyrf_orders", mutates_args=())
def smyrf_orders_op(
    q: Tensor,
    k: Tensor,
    query_mask: Tensor,
    key_mask: Tensor,
    groups: Tensor,
    seed: Tensor,
    rounds: int,
    transform: int,
    e2lsh: bool,
    layer: int,
) -> tuple[Tensor, Tensor]:
    orders = _orders(q, k, rounds)
    kernels().smyrf_orders(
        last_contiguous(q),
        last_contiguous(k),
        mask_bytes(query_mask),
        mask_bytes(key_mask),
        groups.contiguous(),
        rounds,
        transform,
        e2lsh,
        int(seed),
        layer,
        torch.get_num_threads(),
        *orders,
    )
    return orders


def _orders(q: Tensor, k: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    lead = (q.shape[0], q.shape[1], rounds)
    return (
        q.new_empty((*lead, q.shape[2]), dtype=torch.int32),
        q.new_empty((*lead, k.shape[2]), dtype=torch.int32),
    )


@smyrf_orders_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    query_mask: Tensor,
    key_mask: Tensor,
    groups: Tensor,
    seed: Tensor,
    rounds: int,
    transform: int,
    e2lsh: bool,
    layer: int,
) -> tuple[Tensor, Tensor]:
    return _orders(q, k, rounds)


def smyrf_orders(
    tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys by hash, (B, H, rounds, N) int32 each."""
    found: tuple[Tensor, Tensor] = smyrf_orders_op(
        tokens.raw_q,
        tokens.raw_k,
        tokens.query_mask,
        tokens.key_mask,
        groups,
        _seed(seed),
        rounds,
        hashing.TRANSFORMS.index(transform),
        hash_name == "e2lsh",
        tokens.layer,
    )
    return found


@torch.library.custom_op("coterie::cross_polytope", mutates_args=())
def cross_polytope_op(
    x: Tensor, mask: Tensor, columns: Tensor, seed: Tensor, heads: int, rounds: int, layer: int
) -> Tensor:
    found = x.new_empty((x.shape[0], heads, rounds, x.shape[2]), dtype=torch.int64)
    kernels().cross_polytope(
        last_contiguous(x),
        mask_bytes(mask),
        columns.contiguous(),
        heads,
        rounds,
        int(seed),
        layer,
        torch.get_num_threads(),
        found,
    )
    return found


@cross_polytope_op.register_fake
def _(x: Tensor, mask: Tensor, columns: Tensor, seed: Tensor, heads: int, rounds: int, layer: int) -> Tensor:
    return x.new_empty((x.shape[0], heads, rounds, x.shape[2]), dtype=torch.int64)


def buckets(
    tokens: Tokens, columns: Tensor, capacity: int, rounds: int, transform: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-polytope buckets of transformed queries and keys, (B, H, rounds, N) each."""
    if transform == "none":
        f, g = tokens.raw_q, tokens.raw_k
    else:  # an ablation: the transformed vectors are rounded to float32
        masks = tokens.query_mask[:, None], tokens.key_mask[:, None]
        f, g = (x.float() for x in hashing.transform(transform, tokens.q, tokens.k, *masks))
    heads, drawn = tokens.sizes.heads, _seed(seed)
    return (
        cross_polytope_op(f, tokens.query_mask, columns, drawn, heads, rounds, tokens.layer),
        cross_polytope_op(g, tokens.key_mask, columns, drawn, heads, rounds, tokens.layer),
    )


@torch.library.custom_op("coterie::hamming_kmeans", mutates_args=())
def hamming_kmeans_op(
    x: Tensor, mask: Tensor, seed: Tensor, clusters: int, iterations: int, bits: int, layer: int
) -> Tensor:
    labels = x.new_empty(x.shape[:3], dtype=torch.int64)
    kernels().hamming_kmeans(
        last_contiguous(x),
        mask_bytes(mask),
        clusters,
        iterations,
        bits,
        int(seed),
        layer,
        torch.get_num_threads(),
        labels,
    )
    return labels


@hamming_kmeans_op.register_fake
def _(x: Tensor, mask: Tensor, seed: Tensor, clusters: int, iterations: int, bits: int, layer: int) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=torch.int64)


@torch.library.custom_op("coterie::euclidean_kmeans", mutates_args=())
def euclidean_kmeans_op(
    x: Tensor, mask: Tensor, seed: Tensor, clusters: int, iterations: int, layer: int
) -> tuple[Tensor, Tensor]:
    labels, centroids = _clusters(x, clusters)
    if x.shape[2] == 0:
        return labels, centroids.zero_()
    kernels().euclidean_kmeans(
        x.contiguous(),
        mask_bytes(mask),
        clusters,
        iterations,
        int(seed),
        layer,
        torch.get_num_threads(),
        labels,
        centroids,
    )
    return labels, centroids


def _clusters(x: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:3], dtype=torch.int64), x.new_empty((*x.shape[:2], clusters, x.shape[3]))


@euclidean_kmeans_op.register_fake
def _(x: Tensor, mask: Tensor, seed: Tensor, clusters: int, iterations: int, layer: int) -> tuple[Tensor, Tensor]:
    return _clusters(x, clusters)


def cluster_queries(tokens: Tokens, clusters: int, iterations: int, space: str, bits: int, seed: int) -> Tensor:
    """The cluster of each query, (B, H, Nq)."""
    mask, layer, drawn = tokens.query_mask, tokens.layer, _seed(seed)
    if space == "hamming":
        labels: Tensor = hamming_kmeans_op(tokens.raw_q, mask, drawn, clusters, iterations, bits, layer)
    else:
        labels = euclidean_kmeans_op(tokens.q, mask, drawn, clusters, iterations, layer)[0]
    return labels


@torch.library.custom_op("coterie::cluster_means", mutates_args=())
def cluster_means_op(x: Tensor, mask: Tensor, labels: Tensor, clusters: int) -> Tensor:
    means = x.new_empty((*x.shape[:2], clusters, x.shape[3]), dtype=torch.float64)
    kernels().cluster_means(
        last_contiguous(x), mask_bytes(mask), labels.contiguous(), clusters, torch.get_num_threads(), means
    )
    return means


@cluster_means_op.register_fake
def _(x: Tensor, mask: Tensor, labels: Tensor, clusters: int) -> Tensor:
    return x.new_empty((*x.shape[:2], clusters, x.shape[3]), dtype=torch.float64)


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int) -> Tensor:
    """The mean query of each cluster, (B, H, clusters, D) float64; an empty one is 0."""
    means: Tensor = cluster_means_op(tokens.raw_q, tokens.query_mask, labels, clusters)
    return means


def routing_centroids(
    tokens: Tokens, q: Tensor, k: Tensor, clusters: int, iterations: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Unit centroids of unit queries and keys together, (B, H, clusters, D), and each query's nearest, (B, H, Nq)."""
    mask = torch.cat([tokens.query_mask, tokens.key_mask], -1)
    both = torch.cat([q, k], 2)
    _, centroids = euclidean_kmeans_op(both, mask, _seed(seed), clusters, iterations, tokens.layer)
    centroids = hashing.unit(centroids)
    return centroids, (0.5 * (centroids * centroids).sum(-1)[:, :, None] - q @ centroids.mT).float().argmin(-1)


@torch.library.custom_op("coterie::top_keys", mutates_args=())
def top_keys_op(queries: Tensor, k: Tensor, mask: Tensor, limits: Tensor | None, count: int) -> Tensor:
    top = queries.new_empty((*queries.shape[:3], count), dtype=torch.int64)
    kernels().top_keys(
        queries.contiguous(),
        last_contiguous(k),
        mask_bytes(mask),
        None if limits is None else limits.contiguous(),
        count,
        torch.get_num_threads(),
        top,
    )
    return top


@top_keys_op.register_fake
def _(queries: Tensor, k: Tensor, mask: Tensor, limits: Tensor | None, count: int) -> Tensor:
    return queries.new_empty((*queries.shape[:3], count), dtype=torch.int64)


def top_keys(
    tokens: Tokens, queries: Tensor, count: int, *, keys: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The `count` real keys with the largest product with each row of `queries` (B, H, C, D), best first."""
    keys = tokens.raw_k if keys is None else keys.float()
    limits = tokens.query_positions.long() + 1 if causal else None
    top: Tensor = top_keys_op(queries, keys, tokens.key_mask, limits, count)
    return top


@torch.library.custom_op("coterie::order_by", mutates_args=())
def order_by_op(scores: Tensor, mask: Tensor) -> Tensor:
    order = scores.new_empty(scores.shape, dtype=torch.int32)
    kernels().order_by(scores.contiguous(), mask_bytes(mask), order, torch.get_num_threads())
    return order


@order_by_op.register_fake
def _(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int32)


def order_by(scores: Tensor, mask: Tensor) -> Tensor:
    """Positions by ascending score, ties by position, masked ones last: int32 of the scores' shape."""
    order: Tensor = order_by_op(scores.to(torch.float32), mask.expand(scores.shape))
    return order


def group_by(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Members of each label in order of position: order (…, N) and offsets (…, groups + 1), both int32.

    Labels below 2^24, which float32 holds exactly, are sorted as numbers.
    """
    mask = mask.expand(labels.shape)
    counts = torch.zeros(*labels.shape[:-1], groups + 1, dtype=torch.int64)
    counts.scatter_add_(-1, torch.where(mask, labels, groups).long(), torch.ones_like(labels, dtype=torch.int64))
    stops = counts[..., :-1].cumsum(-1)
    return order_by(labels, mask), torch.nn.functional.pad(stops, (1, 0)).to(torch.int32)
