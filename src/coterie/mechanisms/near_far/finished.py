"""Finished: the clusters of a cache's finished chunks, which near–far decoding meets through their means."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, why_not
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.levels import PER_MEAN, SAMPLE
from coterie.planning import native as native_steps
from coterie.planning import reference as reference_steps
from coterie.planning.bytes import Bytes
from coterie.planning.kmeans import Draws
from coterie.planning.orders import Parts, ceil_div

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

PANEL = 16  # keys whose bytes lie side by side
_QUAD = 4  # bytes of a key that do
_LIFT = 128  # bytes have no sign
_PIECE = 4096  # keys that are clustered at a time, as each takes some memory


class Room(NamedTuple):
    """What is known of finished chunks, with room for more. Keys are counted in places: cluster by cluster."""

    bytes: Tensor  # (B, Hk, places / 16, ⌈D / 16⌉ · 4, 16, 4) uint8
    scales: Tensor  # (B, Hk, places) float32
    order: Tensor  # (B, Hk, places) int32: where the key is in the cache
    offsets: Tensor  # (B, Hk, clusters + 1) int32: the places of a cluster
    mean_keys: Tensor  # (B, Hk, clusters, D) float32, float64 if the keys are
    mean_values: Tensor  # (B, Hk, clusters, Dv)

    @staticmethod
    def of(k: Tensor, v: Tensor, chunks: int, chunk: int, per: int) -> Room:
        """Room for so many chunks. What nobody has written to takes no memory, as in `Buffer`, so it is not filled."""
        lead = k.shape[:2]
        places, clusters = ceil_div(chunks * chunk, PANEL) * PANEL, chunks * per
        wide = torch.promote_types(k.dtype, torch.float32)
        quads = ceil_div(k.shape[3], PANEL) * PANEL // _QUAD
        return Room(
            k.new_empty(*lead, places // PANEL, quads, PANEL, _QUAD, dtype=torch.uint8),
            k.new_empty(*lead, places, dtype=torch.float32),
            k.new_empty(*lead, places, dtype=torch.int32),
            k.new_zeros(*lead, clusters + 1, dtype=torch.int32),  # the first cluster begins at 0
            k.new_empty(*lead, clusters, k.shape[3], dtype=wide),
            k.new_empty(*lead, clusters, v.shape[3], dtype=wide),
        )

    def hold(self, other: Room) -> None:
        """Begin with what another one holds."""
        for mine, theirs in zip(self, other, strict=True):
            mine[:, :, : theirs.shape[2]] = theirs

    def keep(self, kept: Kept) -> None:
        """Keep what is known of some chunks; the kernel `finish` does the same."""
        samples, labels, clusters = kept.samples, kept.labels, kept.clusters
        order = labels.argsort(dim=-1, stable=True)
        sizes = torch.zeros(*labels.shape[:2], clusters, dtype=torch.int64, device=labels.device)
        sizes.scatter_add_(-1, labels, torch.ones_like(labels))
        place = kept.first_place + torch.arange(labels.shape[-1], device=labels.device)
        rows = kept.rows[:, None].expand_as(order).gather(-1, order)
        self.order[samples[:, None], :, place] = rows.transpose(1, 2)
        first, stop = kept.first_cluster, kept.first_cluster + clusters
        self.offsets[samples, :, first + 1 : stop + 1] = (kept.first_place + sizes.cumsum(-1)).to(torch.int32)
        for means, x in ((self.mean_keys, kept.keys), (self.mean_values, kept.values)):
            sums = torch.zeros(*labels.shape[:2], clusters, x.shape[-1], dtype=torch.float64, device=x.device)
            sums.scatter_add_(2, labels[..., None].expand_as(x), x.to(torch.float64))
            means[samples, :, first:stop] = (sums / sizes.clamp(min=1)[..., None]).to(means.dtype)
        found = Bytes.of_keys(torch.where(kept.keys.isfinite(), kept.keys, 0))
        whole = found.whole.gather(2, order[..., None].expand_as(kept.keys))
        whole = torch.nn.functional.pad(whole, (0, self.bytes.shape[3] * _QUAD - whole.shape[-1])) + _LIFT
        quads = whole.to(torch.uint8).unflatten(-1, (-1, _QUAD)).transpose(1, 2)
        self.bytes[samples[:, None], :, place // PANEL, :, place % PANEL] = quads
        self.scales[samples[:, None], :, place] = found.scale.gather(-1, order).transpose(1, 2)

    def whole(self, b: int, places: int, dim: int) -> Bytes:
        """The keys of a sample as whole numbers, (Hk, places, D)."""
        rows = self.bytes[b].transpose(2, 3).flatten(3).flatten(1, 2)[:, :places, :dim]
        return Bytes(rows.to(torch.float64) - _LIFT, self.scales[b, :, :places])


class Kept(NamedTuple):
    """Some chunks of some samples, in clusters."""

    samples: Tensor  # (b,) int64
    rows: Tensor  # (b, n) int32: where their keys are in the cache
    keys: Tensor  # (b, Hk, n, D)
    values: Tensor
    labels: Tensor  # (b, Hk, n) int64, below `clusters`
    first_place: int
    first_cluster: int
    clusters: int


class Finished:
    """The clusters of the finished chunks of one layer's cache.

    A chunk is `options.chunk` real keys. Its clusters are those that a causal plan makes of it, whatever came before or
    comes after, so it does not matter when they are made. The first `sinks` keys are in none.
    """

    def __init__(self, options: NearFar, layer: int) -> None:
        self.options = options
        self.layer = layer
        chosen, in_chunk = options.key_clusters, ceil_div(options.chunk, PER_MEAN)
        self._count: Count = Rate(in_chunk, options.chunk, in_chunk) if isinstance(chosen, str) else Fixed(chosen)
        self.per = self._count.room
        self.chunks: list[int] = []  # that are finished, of each sample
        self.room: Room | None = None

    def finish(self, k: Tensor, v: Tensor, real: Tensor, wanted: list[int]) -> Room:
        """Make the clusters that are still missing of the first `wanted` chunks of each sample.

        Args:
            k, v: (B, Hk, N, D) all that is cached.
            real: (B, N) int32, the positions of real keys in order.
        """
        if len(self.chunks) != k.shape[0]:
            self.chunks, self.room = [0] * k.shape[0], None
        most, chunk = max(wanted, default=0), self.options.chunk
        if self.room is None or self.room.mean_keys.shape[2] < most * self.per:
            larger = Room.of(k, v, 2 * most, chunk, self.per)
            if self.room is not None:
                larger.hold(self.room)
            self.room = larger
        missing: dict[tuple[int, int], list[int]] = {}
        for sample, (done, stop) in enumerate(zip(self.chunks, wanted, strict=True)):
            if done < stop:
                missing.setdefault((done, stop), []).append(sample)
        step = max(1, _PIECE // chunk)
        for (done, stop), samples in missing.items():
            for first in range(done, stop, step):
                self._cluster(k, v, real, torch.tensor(samples, device=k.device), first, min(first + step, stop))
            for sample in samples:
                self.chunks[sample] = stop
        return self.room

    def crop(self, keys: list[int]) -> None:
        """Only so many real keys of each sample are left: what is not full any more is not finished."""
        self.chunks = [min(done, left // self.options.chunk) for done, left in zip(self.chunks, keys, strict=True)]

    def reorder(self, index: Tensor) -> None:
        """Let sample i be what sample index[i] was."""
        if self.room is not None:
            moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
            for each in self.room:
                each[moved] = each[index[moved]]
        self.chunks = [self.chunks[i] for i in index.tolist()]

    def _cluster(self, k: Tensor, v: Tensor, real: Tensor, samples: Tensor, begin: int, stop: int) -> None:
        """Chunks `begin` to `stop` of some samples: k-means of their keys, and what is kept of it."""
        chunk, sinks, per = self.options.chunk, self.options.sinks, self.per
        edges = (torch.arange(begin, stop + 1, device=k.device) * chunk).clamp(min=sinks)
        first, count = int(edges[0]), int(edges[-1] - edges[0])
        rows = real[samples, first : first + count]
        keys, values = (_take(x, samples, rows) for x in (k, v))
        native = k.device.type == "cpu" and k.dtype != torch.float64 and not why_not()
        labels = self._labels(keys, edges - first, native_steps.kmeans if native else reference_steps.kmeans)
        labels = labels + ((torch.arange(first, first + count, device=k.device) // chunk - begin) * per)
        kept = Kept(samples, rows, keys, values, labels, first - sinks, begin * per, (stop - begin) * per)
        assert self.room is not None
        if native:
            kernels().finish(
                *(last_contiguous(keys), last_contiguous(values), rows.contiguous(), labels, samples),
                *(kept.first_place, kept.first_cluster, kept.clusters, torch.get_num_threads()),
                *self.room,
            )
        else:
            self.room.keep(kept)

    def _labels(self, keys: Tensor, edges: Tensor, kmeans: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """The cluster of each key in its chunk, as a causal plan would have it."""
        batch, length = keys.shape[0], keys.shape[2]
        everyone = torch.arange(length, dtype=torch.int32, device=keys.device).expand(batch, -1)
        start, stop = (x.to(torch.int32).expand(batch, -1) for x in (edges[:-1], edges[1:]))
        parts = Parts(everyone, start, stop)
        counts = self._count.of(parts.sizes)
        draws: Draws = {"seed": self.options.seed, "layer": self.layer, "per_head": False}
        return kmeans(keys, parts, self.per, self.options.iterations, counts=counts, sample=SAMPLE, **draws)[0]


def _take(x: Tensor, samples: Tensor, rows: Tensor) -> Tensor:
    """These rows of these samples, (b, H, n, D); where nothing is padded, they lie side by side."""
    first, count = (int(rows[0, 0]), rows.shape[1]) if rows.numel() else (0, 0)
    together = torch.arange(first, first + count, dtype=rows.dtype, device=rows.device)
    if len(samples) == len(x) and bool((rows == together).all()):
        return x[:, :, first : first + count]
    return x[samples[:, None], :, rows.long()].transpose(1, 2)
