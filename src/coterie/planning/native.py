"""Planning steps in C++, as torch custom ops: the draws, the arithmetic and the sorting happen inside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, mask_bytes
from coterie.plan import Means
from coterie.planning import hashing
from coterie.planning.orders import Parts

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

__all__ = [
    "buckets",
    "cluster_means",
    "group_by",
    "hamming_clusters",
    "kmeans",
    "near_keys",
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


def hamming_clusters(tokens: Tokens, clusters: int, iterations: int, bits: int, seed: int) -> Tensor:
    """The cluster of each query, (B, H, Nq), by the signs of random projections."""
    labels: Tensor = hamming_kmeans_op(
        tokens.raw_q, tokens.query_mask, _seed(seed), clusters, iterations, bits, tokens.layer
    )
    return labels


def _kmeans(
    x: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    counts: Tensor | None,
    given: Tensor | None,
    seed: Tensor,
    clusters: int,
    iterations: int,
    sample: int,
    unit: bool,
    per_head: bool,
    layer: int,
) -> tuple[Tensor, Tensor]:
    labels, centroids = _clusters(x, order, start, stop, counts, given, seed, clusters)
    kernels().kmeans(
        last_contiguous(x),
        order.contiguous(),
        start.contiguous(),
        stop.contiguous(),
        None if counts is None else counts.contiguous(),
        None if given is None else given.contiguous(),
        clusters,
        iterations,
        sample,
        unit,
        per_head,
        int(seed),
        layer,
        torch.get_num_threads(),
        labels,
        centroids,
    )
    return labels, centroids


def _clusters(
    x: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    counts: Tensor | None,
    given: Tensor | None,
    seed: Tensor,
    clusters: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape[:3], dtype=torch.int64),
        x.new_empty((*x.shape[:2], start.shape[1] * clusters, x.shape[3]), dtype=torch.float64),
    )


kmeans_op = torch.library.custom_op("coterie::kmeans", _kmeans, mutates_args=())
kmeans_op.register_fake(_clusters)


def kmeans(
    x: Tensor,
    parts: Parts,
    clusters: int,
    iterations: int,
    *,
    seed: int | Tensor,
    layer: int,
    counts: Tensor | None = None,
    sample: int = 0,
    centroids: Tensor | None = None,
    unit: bool = False,
    per_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Euclidean k-means inside each of the parts of a sequence; `unit`: rows and centroids are scaled to length 1."""
    bounds = (parts.order, parts.start, parts.stop)
    found: tuple[Tensor, Tensor] = kmeans_op(
        x, *bounds, counts, centroids, _seed(seed), clusters, iterations, sample, unit, per_head, layer
    )
    return found


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


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int, *, mask: Tensor | None = None) -> Tensor:
    """The mean query of each cluster, (B, H, clusters, D) float64; an empty one is 0."""
    means: Tensor = cluster_means_op(tokens.raw_q, tokens.query_mask if mask is None else mask, labels, clusters)
    return means


def routing_centroids(tokens: Tokens, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    """Unit centroids of unit queries and keys together, (B, H, clusters, D), and each query's nearest, (B, H, Nq)."""
    keys = tokens.raw_k.repeat_interleave(tokens.sizes.heads // tokens.sizes.key_heads, 1)
    parts = Parts.whole(torch.cat([tokens.query_mask, tokens.key_mask], -1))
    both = torch.cat([tokens.raw_q, keys], 2)
    labels, centroids = kmeans(both, parts, clusters, iterations, seed=seed, layer=tokens.layer, unit=True)
    return centroids, labels[:, :, : tokens.sizes.queries]


@torch.library.custom_op("coterie::top_keys", mutates_args=())
def top_keys_op(queries: Tensor, k: Tensor, mask: Tensor, limits: Tensor | None, count: int, unit: bool) -> Tensor:
    top = _empty_top(queries, k, mask, limits, count, unit)
    kernels().top_keys(
        queries.contiguous(),
        last_contiguous(k),
        mask_bytes(mask),
        None if limits is None else limits.contiguous(),
        count,
        unit,
        torch.get_num_threads(),
        top,
    )
    return top


@top_keys_op.register_fake
def _empty_top(queries: Tensor, k: Tensor, mask: Tensor, limits: Tensor | None, count: int, unit: bool) -> Tensor:
    return queries.new_empty((*queries.shape[:3], count), dtype=torch.int64)


def top_keys(tokens: Tokens, queries: Tensor, count: int, *, unit: bool = False, causal: bool = False) -> Tensor:
    """The `count` real keys with the largest product with each row of `queries` (B, H, C, D), by position."""
    limits = tokens.query_positions.long() + 1 if causal else None
    top: Tensor = top_keys_op(queries, tokens.raw_k, tokens.key_mask, limits, count, unit)
    return top


@torch.library.custom_op("coterie::near_keys", mutates_args=())
def near_keys_op(
    queries: Tensor, k: Tensor, clusters: list[Tensor], visible: Tensor, seen: Tensor, near: int, reach: int
) -> tuple[Tensor, Tensor]:
    found = _empty_near(queries, k, clusters, visible, seen, near, reach)
    kernels().near_keys(
        queries.contiguous(),
        last_contiguous(k),
        [last_contiguous(x) for x in clusters],
        visible.contiguous(),
        seen.contiguous(),
        near,
        reach,
        torch.get_num_threads(),
        *found,
    )
    return found


@near_keys_op.register_fake
def _empty_near(
    queries: Tensor, k: Tensor, clusters: list[Tensor], visible: Tensor, seen: Tensor, near: int, reach: int
) -> tuple[Tensor, Tensor]:
    shape = (*queries.shape[:3], visible.shape[-1] + near)
    return queries.new_empty(shape, dtype=torch.int32), queries.new_empty(shape, dtype=torch.float32)


def near_keys(
    tokens: Tokens, queries: Tensor, clusters: Means, visible: Tensor, seen: Tensor, near: int, reach: int
) -> tuple[Tensor, Tensor]:
    """What each group of queries meets, (B, H, G, V + near): clusters, then its best keys; and the biases."""
    members = [clusters.order, clusters.start, clusters.stop]
    found: tuple[Tensor, Tensor] = near_keys_op(
        queries, tokens.raw_k, members, visible, seen.to(torch.int32), near, reach
    )
    return found


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


@torch.library.custom_op("coterie::group_by", mutates_args=())
def group_by_op(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    found = _empty_groups(labels, mask, groups)
    kernels().group_by(labels.contiguous(), mask_bytes(mask), groups, *found, torch.get_num_threads())
    return found


@group_by_op.register_fake
def _empty_groups(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return (
        labels.new_empty(labels.shape, dtype=torch.int32),
        labels.new_empty((*labels.shape[:-1], groups + 1), dtype=torch.int32),
    )


def group_by(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Members of each label in order of position: order (…, N) and offsets (…, groups + 1), both int32."""
    found: tuple[Tensor, Tensor] = group_by_op(labels.long(), mask.expand(labels.shape), groups)
    return found
