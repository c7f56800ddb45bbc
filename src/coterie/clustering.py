"""Lloyd's k-means on (B, H, N, D), batched, in Euclidean and in Hamming space.

Starts are drawn among the real tokens by rank, so a sample's clusters do not depend on its padding or its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream
from coterie.grouping import compact

_BUDGET = 1 << 22  # distances in memory at a time


def starts(mask: Tensor, heads: int, clusters: int, *, seed: int | Tensor, layer: int) -> Tensor:
    """Tokens to start from, (B, H, clusters): one drawn from each of `clusters` equal spans of the real tokens."""
    order, count = compact(mask)
    within = draws.uniform(Stream.STARTS, (heads, clusters), seed=seed, layer=layer, device=mask.device)
    step = torch.arange(clusters + 1, device=mask.device) * count[:, None, None] // clusters
    first, size = step[..., :-1], (step[..., 1:] - step[..., :-1]).clamp(min=1)
    ranks = torch.minimum(first + (within * size).long(), (count[:, None, None] - 1).clamp(min=0))
    return order[:, None, :].expand(-1, heads, -1).long().gather(-1, ranks)


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


def nearest(x: Tensor, centroids: Tensor) -> Tensor:
    """The nearest centroid of each row, ties to the first: (B, H, N)."""
    half_norms = (centroids * centroids).sum(-1)[:, :, None, :] / 2
    size = max(1, _BUDGET // max(1, x.shape[0] * x.shape[1] * centroids.shape[2]))
    # ‖x − c‖² is smallest where ‖c‖²/2 − x·c is.
    parts = [(half_norms - part @ centroids.mT).to(torch.float32).argmin(-1) for part in x.split(size, 2)]
    return torch.cat(parts, 2) if parts else x.new_zeros(x.shape[:3], dtype=torch.int64)


def euclidean_kmeans(
    x: Tensor, mask: Tensor, clusters: int, iterations: int, *, seed: int | Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Labels (B, H, N) and centroids (B, H, clusters, D); an empty cluster keeps its centroid. O(N·C·D) a pass."""
    if x.shape[2] == 0:
        return x.new_zeros(x.shape[:3], dtype=torch.int64), x.new_zeros(*x.shape[:2], clusters, x.shape[-1])
    centroids = _take(x, starts(mask, x.shape[1], clusters, seed=seed, layer=layer))
    for _ in range(iterations):
        sums, counts = member_sums(x, nearest(x, centroids), mask, clusters)
        centroids = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
    return nearest(x, centroids), centroids


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
