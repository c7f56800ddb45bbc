"""Planning steps in plain PyTorch: the definition of what a plan holds. `Steps` says what each one gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream
from coterie.planning import hashing
from coterie.planning.halving import halve as halve  # steps as they are
from coterie.planning.kmeans import Options, euclidean_kmeans, hamming_kmeans, member_sums, nearest
from coterie.planning.near_keys import near_keys as near_keys
from coterie.planning.orders import Parts, top_indices
from coterie.planning.orders import group_by as group_by
from coterie.planning.orders import order_by as order_by

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_BUDGET = 1 << 22  # scores in memory at a time


def smyrf_orders(
    tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
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
    f, g = hashing.transform(transform, tokens.q, tokens.k, tokens.query_mask[:, None], tokens.key_mask[:, None])
    heads = tokens.sizes.heads
    shape = (heads * rounds, f.shape[-1], capacity)
    rotations = draws.normal(Stream.ROTATION, shape, seed=seed, layer=tokens.layer, device=tokens.device)
    each = rotations.view(rounds, heads, f.shape[-1], capacity)
    found = [torch.stack([hashing.cross_polytope(x, rotation, columns) for rotation in each], 2) for x in (f, g)]
    return found[0], found[1]


def hamming_clusters(tokens: Tokens, clusters: int, iterations: int, bits: int, seed: int) -> Tensor:
    return hamming_kmeans(tokens.q, tokens.query_mask, clusters, iterations, bits, seed=seed, layer=tokens.layer)


def kmeans(
    x: Tensor, parts: Parts, clusters: int, iterations: int, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = x.shape
    rows, used = parts.rows()
    count = rows.shape[1]
    if rows.numel() == 0:
        return x.new_zeros(x.shape[:3], dtype=torch.int64), x.new_zeros(
            batch, heads, count * clusters, dim, dtype=torch.float64
        )
    index = rows.flatten(1)[:, None, :, None].expand(-1, heads, -1, dim)
    wide = torch.where(x.isfinite(), x, 0).to(torch.float64)
    inside = wide.gather(2, index).view(batch, heads, count, -1, dim).transpose(1, 2).flatten(0, 1)
    inside = inside.masked_fill(~used.flatten(0, 1)[:, None, :, None], 0)
    if (counts := options.get("counts")) is not None:
        options["counts"] = counts.flatten()
    if (centroids := options.get("centroids")) is not None:
        options["centroids"] = centroids.view(batch, heads, count, clusters, dim).transpose(1, 2).flatten(0, 1)
    found, means = euclidean_kmeans(inside, used.flatten(0, 1), clusters, iterations, **options)
    found = found.view(batch, count, heads, -1).transpose(1, 2).flatten(2)
    # Unused slots write behind the end.
    target = torch.where(used, rows, length).flatten(1)[:, None].expand_as(found)
    labels = found.new_zeros(batch, heads, length + 1).scatter(2, target, found)[..., :-1]
    return labels, means.view(batch, count, heads, clusters, dim).transpose(1, 2).flatten(2, 3)


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int, *, mask: Tensor | None = None) -> Tensor:
    sums, counts = member_sums(tokens.q, labels, tokens.query_mask if mask is None else mask, clusters)
    return sums / counts.clamp(min=1)


def routing_centroids(tokens: Tokens, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    q, mask = hashing.unit(tokens.q), torch.cat([tokens.query_mask, tokens.key_mask], -1)
    both = torch.cat([q, hashing.unit(tokens.k)], 2)
    _, centroids = euclidean_kmeans(both, mask, clusters, iterations, seed=seed, layer=tokens.layer)
    centroids = hashing.unit(centroids)
    return centroids, nearest(q, centroids)


def top_keys(tokens: Tokens, queries: Tensor, count: int, *, unit: bool = False, causal: bool = False) -> Tensor:
    keys = hashing.unit(tokens.k) if unit else tokens.k
    positions = torch.arange(tokens.sizes.keys, device=tokens.device)
    rows = max(1, _BUDGET // max(1, tokens.sizes.batch * tokens.sizes.heads * tokens.sizes.keys))
    tops = []
    for part in torch.arange(queries.shape[2], device=tokens.device).split(rows):
        seen = tokens.key_mask[:, None, :]
        if causal:
            seen = seen & (positions <= tokens.query_positions[:, part, None])
        best = top_indices(queries[:, :, part] @ keys.mT, seen[:, None], count)
        there = torch.arange(count, device=tokens.device) < seen.sum(-1)[:, None, :, None]
        best = torch.where(there, best, tokens.sizes.keys).sort(-1).values
        tops.append(torch.where(best < tokens.sizes.keys, best, 0))
    if not tops:
        return torch.zeros(*queries.shape[:3], count, dtype=torch.int64, device=tokens.device)
    return torch.cat(tops, 2)
