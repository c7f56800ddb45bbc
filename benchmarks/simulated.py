"""Searches for near keys that Coterie does not ship, in plain PyTorch: what they would find, not what they would cost.

Queries and keys are grouped by near–far's own planning steps: leaves of similar queries pick near keys together, leaves
that are alike search together. Keys that are not picked are met through the means of their clusters, as near–far does;
if causal, through those of their chunk, which do not become fewer as chunks recede.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

import coterie
from benchmarks.models import Heads
from coterie.planning import native
from coterie.planning.orders import Parts, ceil_div

CHUNK, SINKS = coterie.NearFar.chunk, coterie.NearFar.sinks  # met in any case if causal: two chunks, the first keys
PARTY = coterie.NearFar.search.party
_ITERATIONS = coterie.NearFar.iterations
_PER_MEAN = 32  # keys of a chunk that share a mean
_SHORTLIST = 4  # times near


@dataclass(frozen=True, eq=False)
class Scene:
    """Some similar queries of a layer, and the keys that they see."""

    q: Tensor  # (H, n, D), scaled
    k: Tensor  # (H, N, D): one for each query head
    v: Tensor
    last: Tensor  # (n,): the last key that each sees
    pickable: slice  # the keys to choose from; all others that are seen are met in any case
    clusters: Tensor  # (H, P), of the keys to choose from

    @cached_property
    def scores(self) -> Tensor:
        """(H, n, N)."""
        return (self.q @ self.k.mT).masked_fill_(~_upto(self.last, self.k), -torch.inf)

    @cached_property
    def weights(self) -> Tensor:
        """Their softmax."""
        return self.scores.softmax(-1)

    @property
    def choice(self) -> Tensor:
        """The keys to choose from, (H, P, D)."""
        return self.k[:, self.pickable]

    def leaves(self, size: int) -> Tensor:
        """The leaf of each query, (H, n): about `size` of them in each, and leaves that are alike side by side."""
        count = ceil_div(self.q.shape[1], size)
        labels, centroids = _kmeans(self.q, Parts.whole(torch.ones(1, self.q.shape[1], dtype=torch.bool)), count)
        return _halved(centroids, count, PARTY).argsort(-1).gather(-1, labels)

    def members(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of each cluster's rows of `x` (H, P, D), and how many they are, (H, C)."""
        return _means(x, self.clusters)


class Caught(NamedTuple):
    """What some picks are worth."""

    picked: float  # keys a query
    recall: float  # of each query's own best keys, as many as were picked
    mass: float  # share of the softmax over all keys that is met exactly
    missed: float  # share that is met through means only
    error: float  # of the output, relative, means over heads


# --- scenes -----------------------------------------------------------------------------------------------------------


def places(length: int) -> list[int]:
    """The chunks of a causal layer that are looked at."""
    chunks = length // CHUNK
    return torch.linspace(min(8, chunks - 1), chunks - 1, 4).long().unique().tolist()


def scenes(heads: Heads) -> Iterator[Scene]:
    """Some chunks of a causal layer; of another one, some sets of similar queries that are as large."""
    q, k, v = heads.q[0] * heads.scale, heads.k[0], heads.v[0]
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    yield from _chunks(q, k, v) if heads.causal else _alike(q, k, v)


def _chunks(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Scene]:
    per_chunk = CHUNK // _PER_MEAN
    for place in places(k.shape[1]):
        rows, upto = torch.arange(place * CHUNK, (place + 1) * CHUNK), (place + 1) * CHUNK
        older = torch.arange(place, dtype=torch.int32)[None] * CHUNK
        order = torch.arange(upto, dtype=torch.int32)[None]
        labels, _ = _kmeans(k[:, :upto], Parts(order, older[:, :-1].clamp(min=SINKS), older[:, 1:]), per_chunk)
        labels = labels + torch.arange(upto) // CHUNK * per_chunk
        pickable = slice(SINKS, (place - 1) * CHUNK)
        yield Scene(q[:, rows], k[:, :upto], v[:, :upto], rows, pickable, labels[:, pickable])


def _alike(q: Tensor, k: Tensor, v: Tensor) -> Iterator[Scene]:
    length, sets = k.shape[1], max(1, q.shape[1] // CHUNK)
    order = _halved(q, sets, 1)
    clusters = math.ceil((2 * length) ** 0.5)
    labels, _ = _kmeans(k, Parts.whole(torch.ones(1, length, dtype=torch.bool)), clusters, sample=16)
    for each in torch.linspace(0, sets - 1, 4).long().unique().tolist():
        rows = order[:, each * q.shape[1] // sets : (each + 1) * q.shape[1] // sets]
        yield Scene(_rows(q, rows), k, v, torch.full(rows.shape[1:], length - 1), slice(0, length), labels)


def _kmeans(x: Tensor, parts: Parts, clusters: int, sample: int = 0) -> tuple[Tensor, Tensor]:
    """The cluster in its part of each row of (H, n, D), and centroids (H, parts · clusters, D)."""
    labels, centroids = native.kmeans(
        x[None].contiguous(), parts, clusters, _ITERATIONS, sample=sample, seed=0, layer=0, per_head=False
    )
    return labels[0], centroids[0]


def _halved(x: Tensor, count: int, together: int) -> Tensor:
    """An order of (H, n, D) in `count` leaves, in which similar rows are neighbours, (H, n)."""
    rows = Parts.whole(torch.ones(1, x.shape[1], dtype=torch.bool))
    return native.halve(x[None].float(), rows, torch.tensor([[count]]), count, torch.tensor([together]))[0].long()


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _upto(last: Tensor, k: Tensor) -> Tensor:
    """Which of the keys are seen by whom, (…, N)."""
    return torch.arange(k.shape[1]) <= last[..., None]


def _means(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the rows of x (H, n, D) with each label (H, n), and how many they are."""
    shape = x.shape[0], int(labels.max()) + 1
    count = torch.zeros(shape).scatter_add_(1, labels, torch.ones(labels.shape))
    sums = torch.zeros(*shape, x.shape[-1]).scatter_add_(1, labels[..., None].expand_as(x), x)
    return sums / count.clamp(min=1)[..., None], count


# --- which keys are picked: (H, n, P) bool ----------------------------------------------------------------------------


def best(scores: Tensor, count: int) -> Tensor:
    """The `count` best of each row, as a mask."""
    top = scores.topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, top, True)


def everything(scene: Scene, leaf: int, near: int) -> Tensor:
    """Each leaf looks at all keys."""
    leaves = scene.leaves(leaf)
    return _rows(best(_means(scene.q, leaves)[0] @ scene.choice.mT, near), leaves)


def by_mass(scene: Scene, leaf: int, share: float, most: int, *, least: int = 0, of_all: bool = False) -> Tensor:
    """As many as the leaf's mean query needs to catch a share of the softmax, from `least` to `most`.

    The softmax is that over the keys to choose from; with `of_all`, that over all keys which its last member sees.
    """
    leaves = scene.leaves(leaf)
    query, _ = _means(scene.q, leaves)
    scores = query @ scene.choice.mT
    total = mine = scores.logsumexp(-1, keepdim=True)
    if of_all:
        last = torch.zeros(query.shape[:2], dtype=torch.int64)
        last.scatter_reduce_(1, leaves, scene.last.expand_as(leaves), "amax", include_self=False)
        total = (query @ scene.k.mT).masked_fill_(~_upto(last, scene.k), -torch.inf).logsumexp(-1, keepdim=True)
    met_anyway = 1 - (mine - total).exp()
    ordered, order = (scores - total).exp().sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered + met_anyway
    rank = torch.arange(order.shape[-1])
    wanted = ((before < share) | (rank < least)) & (rank < most)
    return _rows(torch.zeros_like(wanted).scatter_(-1, order, wanted), leaves)


def low_precision(scene: Scene, leaf: int, near: int, kind: str) -> Tensor:
    """Each leaf scores all keys in `kind`, bfloat16 or int8 a row, and the best 2·near again exactly."""
    leaves, keys = scene.leaves(leaf), scene.choice
    query, _ = _means(scene.q, leaves)
    rounded = {"bfloat16": lambda x: x.bfloat16().float(), "int8": _int8}[kind]
    kept = best(rounded(query) @ rounded(keys).mT, 2 * near)
    return _rows(best((query @ keys.mT).masked_fill_(~kept, -torch.inf), near), leaves)


def _int8(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
    return (x / step).round() * step


def shortlist(scene: Scene, leaf: int, near: int) -> Tensor:
    """The mean query of leaves that are alike keeps some of all keys; each leaf picks from those."""
    leaves = scene.leaves(leaf)
    kept = best(_means(scene.q, leaves // PARTY)[0] @ scene.choice.mT, _SHORTLIST * near)
    query, _ = _means(scene.q, leaves)
    return _rows(_among(kept.repeat_interleave(PARTY, 1)[:, : query.shape[1]], scene, query, near), leaves)


def in_clusters(scene: Scene, leaf: int, near: int, rank: str, reach: int) -> Tensor:
    """Leaves that are alike search the clusters that one of them likes best, by any rank: near–far has one of them."""
    leaves, (_, count) = scene.leaves(leaf), scene.members(scene.choice)
    query, _ = _means(scene.q, leaves)
    likes = RANKS[rank](scene, query).masked_fill((count == 0)[:, None], -torch.inf)
    parties = (likes - likes.amax(-1, keepdim=True)).split(PARTY, 1)
    likes = torch.cat([each.amax(1, keepdim=True).expand_as(each) for each in parties], 1)
    order = likes.argsort(dim=-1, descending=True, stable=True)  # what leaves like best are ties
    sizes = count[:, None].expand_as(likes).gather(-1, order)
    open_ = (sizes.cumsum(-1) - sizes < reach * near) & (sizes > 0)
    open_ = torch.zeros_like(open_).scatter_(-1, order, open_)
    searched = open_.gather(-1, scene.clusters[:, None].expand(-1, open_.shape[1], -1))
    return _rows(_among(searched, scene, query, near), leaves)


def _among(kept: Tensor, scene: Scene, query: Tensor, near: int) -> Tensor:
    return best((query @ scene.choice.mT).masked_fill_(~kept, -torch.inf), near) & kept


def _mean(scene: Scene, query: Tensor) -> Tensor:
    return query @ scene.members(scene.choice)[0].mT


def _mean_or_outlier(scene: Scene, query: Tensor) -> Tensor:
    means, count = scene.members(scene.choice)
    away = (scene.choice - _rows(means, scene.clusters)).square().sum(-1)
    farthest = away.new_zeros(count.shape).scatter_reduce_(1, scene.clusters, away, "amax")
    is_outlier = away == farthest.gather(1, scene.clusters)
    scores = (query @ scene.choice.mT).masked_fill_(~is_outlier[:, None], -torch.inf)
    outlier = torch.full((*query.shape[:2], count.shape[1]), -torch.inf)
    outlier.scatter_reduce_(2, scene.clusters[:, None].expand_as(scores), scores, "amax")
    return torch.maximum(query @ means.mT, outlier)


def _bounds(scene: Scene, query: Tensor) -> Tensor:
    """Σ_d max(q_d·max_d, q_d·min_d): no member of the cluster scores more (Quest ranks pages so)."""
    shape = (*scene.members(scene.choice)[1].shape, scene.k.shape[-1])
    index = scene.clusters[..., None].expand_as(scene.choice)
    low, high = (
        torch.zeros(shape).scatter_reduce_(1, index, scene.choice, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    return query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT


RANKS: dict[str, Callable[[Scene, Tensor], Tensor]] = {
    "mean": _mean,
    "mean or outlier": _mean_or_outlier,
    "bounds": _bounds,
}

# --- what the picks are worth -----------------------------------------------------------------------------------------


def caught(scene: Scene, picked: Tensor) -> Caught:
    """Recall, mass and error of what is picked, (H, n, P)."""
    scores, weights = scene.scores, scene.weights
    own, choice = weights[..., scene.pickable], scores[..., scene.pickable]
    missed = own.masked_fill(picked, 0).sum(-1).mean()
    count = picked.sum(-1, keepdim=True)
    least = choice.topk(max(1, int(count.max())), -1).values.gather(-1, (count - 1).clamp(min=0))
    recall = (picked & (choice >= least)).sum(-1, keepdim=True) / count.clamp(min=1)
    exact = weights @ scene.v
    off = (_attend(scene, scores, picked) - exact).flatten(1).norm(dim=-1) / exact.flatten(1).norm(dim=-1)
    return Caught(
        float(count.float().mean()),
        float(recall.mean()),
        float(1 - missed),
        float(missed),
        float(off.mean()),
    )


def _attend(scene: Scene, scores: Tensor, picked: Tensor) -> Tensor:
    """Picked keys exactly, all others to choose from through the means of their clusters."""
    means, count = scene.members(scene.choice)
    values, _ = scene.members(scene.v[:, scene.pickable])
    index = scene.clusters[:, None].expand_as(picked)
    left = count[:, None] - torch.zeros(*picked.shape[:2], count.shape[1]).scatter_add_(2, index, picked.float())
    exact = scores.clone()
    exact[..., scene.pickable].masked_fill_(~picked, -torch.inf)
    both = torch.cat([exact, scene.q @ means.mT + left.log()], -1).softmax(-1)
    return both[..., : exact.shape[-1]] @ scene.v + both[..., exact.shape[-1] :] @ values
