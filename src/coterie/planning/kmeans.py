"""Lloyd's k-means on (B, H, N, D), batched, in Euclidean and in Hamming space.

Starts are drawn among the real tokens by rank, so a sample's clusters do not depend on its padding or its batch.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream
from coterie.planning.orders import compact

_BUDGET = 1 << 22  # distances in memory at a time


class Draws(TypedDict):
    """What the tokens to start from, and to train on, are drawn by."""

    seed: int | Tensor
    layer: int
    per_head: NotRequired[bool]


class Options(Draws, total=False):
    """How k-means runs, as in `euclidean_kmeans`."""

    counts: Tensor | None
    sample: int
    centroids: Tensor | None


def starts(
    mask: Tensor,
    heads: int,
    clusters: int,
    *,
    seed: int | Tensor,
    layer: int,
    counts: Tensor | None = None,
) -> Tensor:
    """Tokens to start from, (B, H, clusters): one drawn from each of `clusters` equal spans of the real tokens.

    `counts` (B,): how many of the clusters a sample uses; the rest are not meant to be read.
    """
    order, count = compact(mask)
    ranks = one_of_each_span(count, heads, clusters, counts, Stream.STARTS, seed, layer)
    return order[:, None, :].expand(-1, heads, -1).long().gather(-1, ranks)


def one_of_each_span(
    count: Tensor, heads: int, spans: int, used: Tensor | None, stream: Stream, seed: int | Tensor, layer: int
) -> Tensor:
    """A rank in each of `spans` equal spans of so many rows, (B, heads, spans); `used` (B,): of how many spans."""
    within = draws.uniform(stream, (heads, spans), seed=seed, layer=layer, device=count.device)
    each = torch.full_like(count, spans) if used is None else used
    step = torch.arange(spans + 1, device=count.device) * count[:, None, None] // each.clamp(min=1)[:, None, None]
    first, size = step[..., :-1], (step[..., 1:] - step[..., :-1]).clamp(min=1)
    return torch.minimum(first + (within * size).long(), (count[:, None, None] - 1).clamp(min=0))


def training_sample(
    mask: Tensor, heads: int, size: int, sizes: Tensor, *, seed: int | Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Tokens to train centroids on, (B, H, size), and which of these slots are used, (B, size).

    All real tokens of a sample that has at most `sizes` (B,) of them, otherwise one from each of so many equal spans.
    """
    order, count = compact(mask)
    drawn = one_of_each_span(count, heads, size, sizes, Stream.SAMPLE, seed, layer)
    slot = torch.arange(size, device=mask.device)
    ranks = torch.where((count <= sizes)[:, None, None], slot.clamp(max=max(0, mask.shape[-1] - 1)), drawn)
    rows = order[:, None, :].expand(-1, heads, -1).long().gather(-1, ranks)
    return rows, slot < torch.minimum(count, sizes)[:, None]


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))


def member_sums(x: Tensor, labels: Tensor, mask: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Sum and number of the real members of each cluster."""
    labels = torch.where(mask[:, None, :], labels, clusters)
    sums = x.new_zeros(*x.shape[:2], clusters + 1, x.shape[-1])
    sums.scatter_add_(2, labels[..., None].expand_as(x), x)
    counts = x.new_zeros(*x.shape[:2], clusters + 1)
    counts.scatter_add_(2, labels, torch.ones_like(labels, dtype=x.dtype))
    return sums[:, :, :-1], counts[:, :, :-1, None]


def nearest(x: Tensor, centroids: Tensor, counts: Tensor | None = None) -> Tensor:
    """The nearest centroid of each row, ties to the first: (B, H, N). `counts` (B,): how many centroids there are."""
    half_norms = (centroids * centroids).sum(-1)[:, :, None, :] / 2
    if counts is not None:
        unused = torch.arange(centroids.shape[2], device=x.device) >= counts[:, None]
        half_norms = half_norms.masked_fill(unused[:, None, None, :], float("inf"))
    size = max(1, _BUDGET // max(1, x.shape[0] * x.shape[1] * centroids.shape[2]))
    # ‖x − c‖² is smallest where ‖c‖²/2 − x·c is.
    parts = [(half_norms - part @ centroids.mT).to(torch.float32).argmin(-1) for part in x.split(size, 2)]
    return torch.cat(parts, 2) if parts else x.new_zeros(x.shape[:3], dtype=torch.int64)


def euclidean_kmeans(
    x: Tensor,
    mask: Tensor,
    clusters: int,
    iterations: int,
    *,
    seed: int | Tensor,
    layer: int,
    counts: Tensor | None = None,
    sample: int = 0,
    centroids: Tensor | None = None,
    per_head: bool = True,
) -> tuple[Tensor, Tensor]:
    """Labels (B, H, N) and centroids (B, H, clusters, D); an empty cluster keeps its centroid. O(N·C·D) a pass.

    Args:
        counts: (B,), how many of the clusters a sample uses; all by default.
        sample: train on at most so many tokens a cluster, and look at all of them once, at the end; 0 is no limit.
        centroids: to start from, in the place of tokens.
        per_head: each head draws its own tokens to start from and to train on.
    """
    if x.shape[2] == 0:
        return x.new_zeros(x.shape[:3], dtype=torch.int64), x.new_zeros(*x.shape[:2], clusters, x.shape[-1])
    heads = x.shape[1] if per_head else 1
    if centroids is None:
        first = starts(mask, heads, clusters, seed=seed, layer=layer, counts=counts)
        centroids = _take(x, first.expand(-1, x.shape[1], -1))
    rows, real = x, mask
    if sample and iterations:
        sizes = sample * (torch.full_like(mask.sum(-1), clusters) if counts is None else counts)
        room = min(sample * clusters, x.shape[2])
        chosen, real = training_sample(mask, heads, room, sizes, seed=seed, layer=layer)
        rows = _take(x, chosen.expand(-1, x.shape[1], -1))
    for _ in range(iterations):
        sums, sizes = member_sums(rows, nearest(rows, centroids, counts), real, clusters)
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    return nearest(x, centroids, counts), centroids


def hamming_kmeans(
    x: Tensor, mask: Tensor, clusters: int, iterations: int, bits: int, *, seed: int | Tensor, layer: int
) -> Tensor:
    """Labels (B, H, N) of Lloyd's iterations on the signs of `bits` random projections; centroid = majority."""
    shape = (x.shape[1], bits, x.shape[-1])
    planes = draws.normal(Stream.HYPERPLANE, shape, seed=seed, layer=layer, device=x.device)
    projections = torch.einsum("bhnd,hmd->bhnm", x, planes).to(torch.float32)
    signs = torch.where(projections >= 0, 1.0, -1.0).to(torch.float64)
    if x.shape[2] == 0:
        return x.new_zeros(x.shape[:3], dtype=torch.int64)
    centroids = _take(signs, starts(mask, x.shape[1], clusters, seed=seed, layer=layer))
    for _ in range(iterations):
        # All vectors of signs have one length, so the nearest in Hamming distance is the nearest in Euclidean.
        sums, counts = member_sums(signs, nearest(signs, centroids), mask, clusters)
        centroids = torch.where(counts > 0, torch.where(sums >= 0, 1.0, -1.0), centroids)
    return nearest(signs, centroids)
