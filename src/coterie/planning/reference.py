"""Planning steps in plain PyTorch: the definition of what a plan holds. `Steps` says what each one gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream
from coterie.plan import Means
from coterie.planning import hashing
from coterie.planning.halving import halve as halve  # a step as it is
from coterie.planning.kmeans import Options, euclidean_kmeans, hamming_kmeans, member_sums, nearest
from coterie.planning.orders import Parts, rounded, top_indices
from coterie.planning.orders import group_by as group_by  # steps as they are
from coterie.planning.orders import order_by as order_by
from coterie.planning.steps import NearSearch, Seen

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


def near_keys(
    tokens: Tokens, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    sizes, (chunks, width) = tokens.sizes, seen.clusters.shape[1:]
    share = sizes.heads // sizes.key_heads
    start, stop = (x.repeat_interleave(share, 1).long() for x in (clusters.start, clusters.stop))
    order = clusters.order.repeat_interleave(share, 1).long()
    keys, groups = tokens.k, queries.shape[2] // max(1, chunks)
    means, outliers = _means_and_outliers(keys, order, start, stop)
    queries = queries.unflatten(2, (chunks, groups))
    exists = torch.arange(groups, device=tokens.device) < seen.groups[:, None, :, None]
    some = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * sizes.keys * groups))
    picks, left = [], []
    for part in torch.arange(chunks, device=tokens.device).split(some):
        count, mine = part.numel(), queries[:, :, part]
        used = torch.arange(width, device=tokens.device) < seen.shown[:, part, None]
        which = torch.where(used, seen.clusters[:, part].long(), 0)[:, None].expand(-1, sizes.heads, -1, -1)
        first, last = (x[:, :, None].expand(-1, -1, count, -1).gather(-1, which) for x in (start, stop))
        members = torch.where(used[:, None], last - first, 0)
        likes = torch.maximum(mine @ means.mT[:, :, None], mine @ outliers.mT[:, :, None])
        likes = likes.gather(-1, which[..., None, :].expand(-1, -1, -1, groups, -1))
        each = members[..., None, :].expand_as(likes)
        likes = _best_of_party(likes, each > 0, exists[:, :, part], seen.together)
        ranked = top_indices(likes, each > 0, width)
        before = each.gather(-1, ranked).cumsum(-1) - each.gather(-1, ranked)
        chosen = torch.zeros_like(each, dtype=torch.bool).scatter(-1, ranked, before < search.reach) & (each > 0)
        slot = _slot_of_key(order, first, members, sizes.keys)
        slot = slot[..., None, :].expand(-1, -1, -1, groups, -1)
        wanted = chosen.gather(-1, slot.clamp(min=0)) & (slot >= 0)
        top = top_indices(mine @ keys.mT[:, :, None], wanted, search.near)
        real = torch.arange(search.near, device=tokens.device) < each.sum(-1, keepdim=True)
        real = real & exists[:, :, part, :, None]
        counts = torch.where(used[:, None], members, 1)[..., None, :].expand_as(each)
        counts = torch.nn.functional.pad(counts, (0, seen.room - width), value=1)
        counts = counts.scatter_add(-1, slot.gather(-1, top).clamp(min=0), -real.long())
        counts = torch.where(exists[:, :, part, :, None], counts, 0)
        picks.append(torch.where(real, top, 0).to(torch.int32).flatten(2, 3))
        left.append(counts.to(torch.int32 if search.wide else torch.int16).flatten(2, 3))
    return torch.cat(picks, 2).flatten(2), torch.cat(left, 2)


def _best_of_party(likes: Tensor, used: Tensor, exists: Tensor, together: Tensor) -> Tensor:
    """For each group (B, H, C, G, V), how much the party that it belongs to likes each cluster."""
    none = float("-inf")
    likes = likes.masked_fill(~used, none)
    relative = (likes - likes.amax(-1, keepdim=True)).masked_fill(~(used & exists[..., None]), none)
    party = (torch.arange(likes.shape[3], device=likes.device) // together[:, None])[:, None, None, :, None]
    party = party.expand_as(likes)
    best = torch.full_like(likes, none).scatter_reduce(3, party, rounded(relative).double(), "amax")
    return best.gather(3, party)


def _means_and_outliers(x: Tensor, order: Tensor, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each segment of rows and the row that is farthest from it, (B, H, S, D) each; 0 if it is empty."""
    shape = (*x.shape[:2], start.shape[-1])
    batch, heads, _, slot, segment = _expand(start[:, :, None], (stop - start)[:, :, None])
    row = order[batch, heads, slot]
    members = x[batch, heads, row]
    sums = x.new_zeros(*shape, x.shape[-1]).index_put_((batch, heads, segment), members, accumulate=True)
    means = sums / (stop - start).clamp(min=1)[..., None]
    distance = rounded((members - means[batch, heads, segment]).square().sum(-1))
    flat = (batch * shape[1] + heads) * shape[2] + segment
    farthest = distance.new_zeros(means[..., 0].numel()).scatter_reduce(0, flat, distance, "amax")
    first = torch.where(distance == farthest[flat], slot, order.shape[-1])
    chosen = torch.full_like(farthest, order.shape[-1], dtype=torch.int64).scatter_reduce(0, flat, first, "amin")
    chosen = chosen.view(shape).clamp(max=max(0, order.shape[-1] - 1))
    outliers = x.gather(2, order.gather(-1, chosen)[..., None].expand_as(means)) if x.shape[2] else means
    return means, torch.where((stop > start)[..., None], outliers, 0)


def _slot_of_key(order: Tensor, first: Tensor, members: Tensor, keys: int) -> Tensor:
    """For each group, the visible cluster that a key belongs to, (B, H, G, Nk); −1 for those it does not see."""
    batch, heads, group, row, slot = _expand(first, members)
    found = torch.full((*first.shape[:3], keys), -1, dtype=torch.int64, device=order.device)
    found[batch, heads, group, order[batch, heads, row]] = slot
    return found


def _expand(first: Tensor, members: Tensor) -> tuple[Tensor, ...]:
    """Indices (b, h, g, row, v) of every member: rows first … first + members of each entry of (B, H, G, V)."""
    flat = members.reshape(-1)
    entry = torch.arange(flat.numel(), device=flat.device).repeat_interleave(flat)
    within = torch.arange(entry.numel(), device=flat.device) - (flat.cumsum(0) - flat).repeat_interleave(flat)
    b, h, g, v = torch.unravel_index(entry, members.shape)
    return b, h, g, first.reshape(-1)[entry] + within, v
