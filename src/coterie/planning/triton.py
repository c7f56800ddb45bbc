"""Planning steps on a GPU: in float32, and without anything that the host waits for. `Steps` says what each one gives.

Draws are those of the other backends. On inputs that float32 computes with exactly, plans are equal to theirs;
elsewhere they differ only where two hashes or distances tie to rounding. Triton is imported when a step first needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream
from coterie.plan import Means
from coterie.planning import hashing
from coterie.planning.halving import halve as halve_rows
from coterie.planning.kmeans import Options, one_of_each_span
from coterie.planning.largest import largest_seen
from coterie.planning.lloyd import Listed, lloyd
from coterie.planning.lloyd import kmeans as lloyds_kmeans
from coterie.planning.near_keys import near_keys as near_keys_of_few
from coterie.planning.orders import Parts
from coterie.planning.orders import group_by as group_by  # steps as they are
from coterie.planning.orders import order_by as order_by
from coterie.planning.search import near_keys as search_near_keys
from coterie.planning.steps import NearSearch, Seen

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_BUDGET = 1 << 23  # scores in memory at a time, however many rows there are


def _single(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """float32; padded rows and numbers that are not finite are 0."""
    x = x.to(torch.float32)
    x = x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)
    return torch.where(x.isfinite(), x, 0)


def _queries(tokens: Tokens) -> Tensor:
    return _single(tokens.raw_q, tokens.query_mask)


def _keys(tokens: Tokens) -> Tensor:
    """One for each query head."""
    return _single(tokens.raw_k, tokens.key_mask).repeat_interleave(tokens.sizes.heads // tokens.sizes.key_heads, 1)


def _transformed(tokens: Tokens, name: str) -> tuple[Tensor, Tensor]:
    masks = tokens.query_mask[:, None], tokens.key_mask[:, None]
    return hashing.transform(name, _queries(tokens), _keys(tokens), *masks)


def smyrf_orders(
    tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    query_masks, key_masks = tokens.query_mask[:, None, None], tokens.key_mask[:, None, None]
    f, g = _transformed(tokens, transform)
    shape = (tokens.sizes.heads, rounds, f.shape[-1])
    directions = draws.normal(Stream.PROJECTION, shape, seed=_on(seed, f), layer=tokens.layer, device=f.device).float()
    hashes = [hashing.project(f, directions), hashing.project(g, directions)]
    if hash_name == "e2lsh" and tokens.sizes.queries + tokens.sizes.keys > 0:
        real, both = torch.cat([query_masks, key_masks], -1), torch.cat(hashes, -1)
        low = both.masked_fill(~real, float("inf")).amin(-1, keepdim=True)
        high = both.masked_fill(~real, float("-inf")).amax(-1, keepdim=True)
        width = ((high - low) / groups[:, None, None, None]).clamp(min=torch.finfo(torch.float32).tiny)
        shift = draws.uniform(Stream.OFFSET, shape[:2], seed=_on(seed, f), layer=tokens.layer, device=f.device)
        hashes = [torch.floor(h / width + shift[..., None]) for h in hashes]
    return order_by(hashes[0], query_masks), order_by(hashes[1], key_masks)


def _on(seed: int | Tensor, like: Tensor) -> int | Tensor:
    """A seed where it is drawn from; a fresh one is made on the host, which does not wait to send it."""
    return seed.to(like.device, non_blocking=True) if isinstance(seed, Tensor) else seed


def buckets(
    tokens: Tokens, columns: Tensor, capacity: int, rounds: int, transform: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    f, g = _transformed(tokens, transform)
    heads = tokens.sizes.heads
    shape = (heads * rounds, f.shape[-1], capacity)
    drawn = draws.normal(Stream.ROTATION, shape, seed=_on(seed, f), layer=tokens.layer, device=tokens.device)
    each = drawn.float().view(rounds, heads, f.shape[-1], capacity)
    found = [torch.stack([hashing.cross_polytope(x, rotation, columns) for rotation in each], 2) for x in (f, g)]
    return found[0], found[1]


def _whole(x: Tensor, mask: Tensor) -> Listed:
    """All real rows of each head as one part."""
    parts = Parts.whole(mask)
    return Listed(x, parts.order[:, None].expand(-1, x.shape[1], -1), parts.start, parts.stop)


def _starts(rows: Listed, clusters: int, counts: Tensor, *, seed: int | Tensor, layer: int, per_head: bool) -> Tensor:
    """Rows to start from, (B, heads, P, clusters, D): one drawn from each of equal spans of a part."""
    batch, parts = rows.start.shape
    heads = rows.x.shape[1] if per_head else 1
    sizes = (rows.stop - rows.start).long().flatten()
    ranks = one_of_each_span(sizes, heads, clusters, counts.flatten(), Stream.STARTS, seed, layer)
    slots = _slots(rows, ranks.view(batch, parts, heads, clusters))
    return _at_slots(rows, slots)


def _slots(rows: Listed, ranks: Tensor) -> Tensor:
    """The slots of ranks (B, P, heads | 1, N) in each part, for every head: (B, heads, P, N)."""
    slots = (rows.start.long()[:, :, None, None] + ranks).transpose(1, 2)
    return slots.expand(-1, rows.x.shape[1], -1, -1).clamp(max=max(0, rows.order.shape[-1] - 1))


def _at_slots(rows: Listed, slots: Tensor) -> Tensor:
    """The rows that sit in slots (B, heads, P, N): (B, heads, P, N, D)."""
    index = rows.order.gather(-1, slots.flatten(2)).long()
    found = rows.x.gather(2, index[..., None].expand(*index.shape, rows.x.shape[-1]))
    return found.unflatten(2, slots.shape[2:])


def hamming_clusters(tokens: Tokens, clusters: int, iterations: int, bits: int, seed: int) -> Tensor:
    x = _queries(tokens)
    if x.shape[2] == 0:
        return torch.zeros(x.shape[:3], dtype=torch.int64, device=x.device)
    shape = (x.shape[1], bits, x.shape[-1])
    planes = draws.normal(Stream.HYPERPLANE, shape, seed=seed, layer=tokens.layer, device=x.device).float()
    signs = torch.where(torch.einsum("bhnd,hmd->bhnm", x, planes) >= 0, 1.0, -1.0)
    rows = _whole(signs, tokens.query_mask)
    counts = torch.full_like(rows.start, clusters)
    centroids = _starts(rows, clusters, counts, seed=seed, layer=tokens.layer, per_head=True).double()
    centroids = lloyd(rows, centroids, counts, iterations, majority=True)
    return _by_row(rows, rows.nearest(centroids, counts), x.shape[2])


def _by_row(rows: Listed, labels: Tensor, length: int) -> Tensor:
    """Labels of slots (B, heads, M), by row: (B, heads, N), 0 for rows of no part."""
    used = (rows.part_of_slot() >= 0)[:, None].expand_as(labels)
    target = torch.where(used, rows.order.long(), length)  # unused slots write behind the end
    return labels.new_zeros(*labels.shape[:2], length + 1).scatter(-1, target, labels)[..., :-1]


def kmeans(
    x: Tensor, parts: Parts, clusters: int, iterations: int, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    batch, heads, length, dim = x.shape
    count = parts.start.shape[1]
    if 0 in (batch, heads, length, count, parts.order.shape[-1]):
        shape = (batch, heads, count * clusters, dim)
        return torch.zeros(x.shape[:3], dtype=torch.int64, device=x.device), x.new_zeros(shape, dtype=torch.float64)
    rows = Listed(_single(x), parts.order[:, None].expand(-1, heads, -1), parts.start, parts.stop)
    given, sample = options.get("counts"), options.get("sample", 0)
    counts = torch.full_like(parts.start, clusters) if given is None else given
    drawn = {"seed": options["seed"], "layer": options["layer"], "per_head": options.get("per_head", True)}
    started = options.get("centroids")
    if started is None:
        centroids = _starts(rows, clusters, counts, **drawn).double()  # type: ignore[arg-type]
    else:
        centroids = started.view(batch, heads, count, clusters, dim).double()
    trained, few = rows, parts.most is not None and parts.most <= sample  # a part has one cluster at least
    if sample and iterations and not few:
        trained = _training_sample(rows, sample, clusters, counts, **drawn)  # type: ignore[arg-type]
    labels, centroids = lloyds_kmeans(rows, trained, centroids, counts, iterations)
    return _by_row(rows, labels, length), centroids.flatten(2, 3)


def _training_sample(
    rows: Listed, sample: int, clusters: int, counts: Tensor, *, seed: int | Tensor, layer: int, per_head: bool
) -> Listed:
    """At most `sample` rows a cluster, one from each of so many equal spans of a part; all of a part that has fewer."""
    batch, parts = rows.start.shape
    heads, room = rows.x.shape[1] if per_head else 1, min(sample * clusters, rows.order.shape[-1])
    size, wanted = (rows.stop - rows.start).long().flatten(), sample * counts.long().flatten()
    ranks = one_of_each_span(size, heads, room, wanted, Stream.SAMPLE, seed, layer)
    ranks = torch.where((size <= wanted)[:, None, None], torch.arange(room, device=size.device), ranks)
    slots = _slots(rows, ranks.view(batch, parts, heads, room))
    order = rows.order.gather(-1, slots.flatten(2))
    start = (torch.arange(parts, device=size.device) * room).expand(batch, -1).to(torch.int32)
    used = torch.minimum(torch.minimum(size, wanted), torch.full_like(size, room)).view(batch, parts)
    return Listed(rows.x, order, start, (start + used).to(torch.int32))


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int, *, mask: Tensor | None = None) -> Tensor:
    x, real = _queries(tokens), tokens.query_mask if mask is None else mask
    rows = _whole(x, torch.ones_like(real))
    sums, sizes = rows.sums(torch.where(real[:, None], labels, -1), clusters)
    return sums / sizes.clamp(min=1)


def routing_centroids(tokens: Tokens, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    q, mask = hashing.unit(_queries(tokens)), torch.cat([tokens.query_mask, tokens.key_mask], -1)
    rows = _whole(torch.cat([q, hashing.unit(_keys(tokens))], 2), mask)
    counts = torch.full_like(rows.start, clusters)
    if rows.x.shape[2] == 0:
        return q.new_zeros(*q.shape[:2], clusters, q.shape[-1]), q.new_zeros(q.shape[:3], dtype=torch.int64)
    centroids = _starts(rows, clusters, counts, seed=seed, layer=tokens.layer, per_head=True).double()
    centroids = hashing.unit(lloyd(rows, centroids, counts, iterations))
    asked = _whole(q, torch.ones_like(tokens.query_mask))
    return centroids[:, :, 0], asked.nearest(centroids, counts)


def top_keys(tokens: Tokens, queries: Tensor, count: int, *, unit: bool = False, causal: bool = False) -> Tensor:
    sizes, keys = tokens.sizes, tokens.k  # float64: mean queries tie in float32 where they do not in truth
    keys = hashing.unit(keys) if unit else keys
    position, limit = torch.arange(sizes.keys, device=tokens.device), tokens.query_positions
    some = max(1, _BUDGET // max(1, sizes.batch * sizes.heads * sizes.keys))
    tops = [queries.new_zeros(*queries.shape[:2], 0, count, dtype=torch.int64)]
    for first in range(0, queries.shape[2], some):
        part = slice(first, first + some)
        seen = tokens.key_mask[:, None]
        if causal:
            seen = seen & (position <= limit[:, part, None])
        tops.append(largest_seen(queries[:, :, part].double() @ keys.mT, seen, count))
    return torch.cat(tops, 2)


@dataclass(frozen=True, eq=False)
class _Room(Parts):
    """Parts that have room for `longest` rows each, so that nobody must look how many there are."""

    longest: int = 0

    def rows(self) -> tuple[Tensor, Tensor]:
        slot = self.start[..., None].long() + torch.arange(self.longest, device=self.order.device)
        used = slot < self.stop[..., None]
        slot = torch.where(used, slot, 0)
        return self.order[:, None, :].expand(-1, slot.shape[1], -1).gather(-1, slot).long(), used


def halve(x: Tensor, parts: Parts, leaves: Tensor, room: int, together: Tensor) -> Tensor:
    if 0 in (parts.order.numel(), parts.start.numel()):
        return parts.order[:, None].expand(-1, x.shape[1], -1).contiguous()
    longest = parts.most if parts.most is not None else parts.order.shape[-1]
    wide = _Room(parts.order, parts.start, parts.stop, longest=min(longest, parts.order.shape[-1]))
    return halve_rows(x, wide, leaves, room, together)


def near_keys(
    tokens: Tokens, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    if 0 in (tokens.sizes.keys, clusters.order.numel(), clusters.start.numel()):
        return near_keys_of_few(tokens, queries, clusters, seen, search)
    return search_near_keys(tokens, _single(tokens.raw_k, tokens.key_mask), queries, clusters, seen, search)
