"""Finished: the clusters of a cache's finished chunks, which near–far decoding meets through their means.

A mean is kept in 16 bits, and a key as its residual to the mean key of its cluster in 4, by which near keys are looked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, why_not
from coterie.mechanisms.near_far.codes import LEAST, MOST, PANEL, above, padded, whole, wide
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.levels import PER_MEAN, SAMPLE
from coterie.mechanisms.near_far.merged import TIMES, Clusters, Merged, blocks, clusters_of, needed_for, top_level
from coterie.planning import native as native_steps
from coterie.planning import reference as reference_steps
from coterie.planning.kmeans import Draws
from coterie.planning.orders import Parts, ceil_div

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

_QUAD, _CODED = 4, 8  # bytes of a key that do, and the numbers that they hold
_NARROW = 256  # keys of a chunk whose places fit into a byte
_PIECE = 1024  # keys that are clustered at a time, as each takes some memory
_MERGED = 16  # clusters of chunks that are merged at a time: more would take more memory than they need in the end


class Room(NamedTuple):
    """What is known of finished chunks, with room for more. Keys are counted in places: cluster by cluster."""

    codes: Tensor  # (B, Hk, places / 16, ⌈D / 16⌉ · 2, 16, 4) uint8: residuals to the mean key, in 4 bits
    tops: Tensor  # (B, Hk, places) bfloat16: the largest number of a residual, or a little more
    order: Tensor  # (B, Hk, places) uint8, int32 if chunks are long: where in its chunk the key is
    offsets: Tensor  # (B, Hk, clusters + 1) int32: the places of a cluster
    mean_keys: Tensor  # (B, Hk, clusters, ⌈D / 16⌉ · 16) int16
    mean_values: Tensor  # (B, Hk, clusters, ⌈Dv / 16⌉ · 16) int16
    key_steps: Tensor  # (B, Hk, clusters) float32: what mean keys are to be multiplied with
    value_steps: Tensor  # (B, Hk, clusters)

    @staticmethod
    def of(k: Tensor, v: Tensor, chunks: int, chunk: int, per: int) -> Room:
        """Room for so many chunks. What nobody has written to takes no memory, as in `Buffer`, so it is not filled."""
        lead = k.shape[:2]
        places, clusters = padded(chunks * chunk), chunks * per
        quads = padded(k.shape[3]) // _CODED
        return Room(
            k.new_empty(*lead, places // PANEL, quads, PANEL, _QUAD, dtype=torch.uint8),
            k.new_empty(*lead, places, dtype=torch.bfloat16),
            k.new_empty(*lead, places, dtype=torch.uint8 if chunk <= _NARROW else torch.int32),
            k.new_zeros(*lead, clusters + 1, dtype=torch.int32),  # the first cluster begins at 0
            *(k.new_empty(*lead, clusters, padded(x.shape[3]), dtype=torch.int16) for x in (k, v)),
            *(k.new_empty(*lead, clusters, dtype=torch.float32) for _ in (k, v)),
        )

    def native(self) -> tuple[Tensor, ...]:
        """As the kernels take it, who know nothing of bfloat16."""
        return tuple(self._replace(tops=self.tops.view(torch.uint16)))

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
        self.order[samples[:, None], :, place] = kept.places[order].transpose(1, 2).to(self.order.dtype)
        first, stop = kept.first_cluster, kept.first_cluster + clusters
        self.offsets[samples, :, first + 1 : stop + 1] = (kept.first_place + sizes.cumsum(-1)).to(torch.int32)
        for means, steps, x in (
            (self.mean_keys, self.key_steps, kept.keys),
            (self.mean_values, self.value_steps, kept.values),
        ):
            sums = torch.zeros(*labels.shape[:2], clusters, x.shape[-1], dtype=torch.float64, device=x.device)
            sums.scatter_add_(2, labels[..., None].expand_as(x), x.to(torch.float64))
            kept_means = whole(sums / sizes.clamp(min=1)[..., None])
            means[samples, :, first:stop], steps[samples, :, first:stop] = kept_means
        means = kept.means(self)
        keys = torch.where(kept.keys.isfinite(), kept.keys, 0).to(torch.float64)
        rest = torch.where(kept.keys.isfinite(), (keys - means).to(torch.float32), 0).gather(
            2, order[..., None].expand_as(keys)
        )
        tops = above(rest.abs().amax(-1).clamp(LEAST, MOST))
        halves = ((rest / tops.to(torch.float32)[..., None]).to(torch.float64) * 7.5 - 0.5).round().clamp(-8, 7) + 8
        halves = wide(halves, 8).to(torch.uint8).unflatten(-1, (-1, 2, _QUAD))
        quads = halves[..., 0, :] | halves[..., 1, :] << 4
        self.codes[samples[:, None], :, place // PANEL, :, place % PANEL] = quads.transpose(1, 2)
        self.tops[samples[:, None], :, place] = tops.transpose(1, 2)

    def residuals(self, b: int, g: int, places: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Residuals at places (n,) in whole numbers, −15, −13, … 15, (n, D) float64; and what 15 stands for."""
        quads = self.codes[b, g, places // PANEL, :, places % PANEL]  # (n, quads, 4)
        halves = torch.stack([quads & 15, quads >> 4], -2).flatten(1)[:, :dim]
        return 2 * halves.to(torch.float64) - 15, self.tops[b, g, places].to(torch.float32)


class Kept(NamedTuple):
    """Some chunks of some samples, in clusters."""

    samples: Tensor  # (b,) int64
    places: Tensor  # (n,) int64: where in its chunk each key is
    keys: Tensor  # (b, Hk, n, D)
    values: Tensor
    labels: Tensor  # (b, Hk, n) int64, below `clusters`
    first_place: int
    first_cluster: int
    clusters: int

    def means(self, room: Room) -> Tensor:
        """The mean of each key's cluster as it is kept, (b, Hk, n, D) float64; 0 for one that is not finite."""
        stop = self.first_cluster + self.clusters
        steps = room.key_steps[self.samples, :, self.first_cluster : stop]
        whole = room.mean_keys[self.samples, :, self.first_cluster : stop, : self.keys.shape[-1]]
        means = whole.to(torch.float64) * torch.where(steps.isfinite(), steps, 0)[..., None]
        return means.gather(2, self.labels[..., None].expand_as(self.keys))


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
        self.merged: Merged | None = None  # what there is room for with them

    def finish(self, k: Tensor, v: Tensor, real: Tensor, wanted: list[int]) -> tuple[Room, Merged]:
        """Make the clusters that are still missing of the first `wanted` chunks of each sample.

        Args:
            k, v: (B, Hk, N, D) all that is cached.
            real: (B, N) int32, the positions of real keys in order.
        """
        if self.room is not None and self.merged is not None and self.chunks == wanted:  # as for most tokens
            return self.room, self.merged
        if len(self.chunks) != k.shape[0]:
            self.chunks, self.room, self.merged = [0] * k.shape[0], None, None
        most, chunk = max(wanted, default=0), self.options.chunk
        if self.room is None or self.room.key_steps.shape[2] < most * self.per:
            larger = Room.of(k, v, 2 * most, chunk, self.per)
            if self.room is not None:
                larger.hold(self.room)
            self.room = larger
        needed = needed_for(most)
        if self.merged is None or self.merged.labels.shape[2] < needed:
            more = Merged.of(k, v, needed + needed // 4, self.per)
            if self.merged is not None:
                more.hold(self.merged)
            self.merged = more
        missing: dict[tuple[int, int], list[int]] = {}
        for sample, (done, stop) in enumerate(zip(self.chunks, wanted, strict=True)):
            if done < stop:
                missing.setdefault((done, stop), []).append(sample)
        some, few = max(1, _PIECE // chunk), max(1, _MERGED // (TIMES * self.per))
        for (done, stop), samples in missing.items():
            index = torch.tensor(samples, device=k.device)
            for first in range(done, stop, some):
                self._cluster(k, v, real, index, first, min(first + some, stop))
            for level in range(1, top_level(stop) + 1):
                last = blocks(level, stop)
                for first in range(blocks(level, done), last, few):
                    self._merge(k, v, index, level, first, min(first + few, last))
            for sample in samples:
                self.chunks[sample] = stop
        assert self.merged is not None
        return self.room, self.merged

    def crop(self, keys: list[int]) -> None:
        """Only so many real keys of each sample are left: what is not full any more is not finished."""
        self.chunks = [min(done, left // self.options.chunk) for done, left in zip(self.chunks, keys, strict=True)]

    def reorder(self, index: Tensor) -> None:
        """Let sample i be what sample index[i] was."""
        if self.room is not None:
            moved = (index != torch.arange(len(index), device=index.device)).nonzero()[:, 0]
            assert self.merged is not None
            for each in (*self.room, *self.merged):
                each[moved] = each[index[moved]]
        self.chunks = [self.chunks[i] for i in index.tolist()]

    def _cluster(self, k: Tensor, v: Tensor, real: Tensor, samples: Tensor, begin: int, stop: int) -> None:
        """Chunks `begin` to `stop` of some samples: k-means of their keys, and what is kept of it."""
        chunk, sinks, per = self.options.chunk, self.options.sinks, self.per
        edges = (torch.arange(begin, stop + 1, device=k.device) * chunk).clamp(min=sinks)
        first, count = int(edges[0]), int(edges[-1] - edges[0])
        rows = real[samples, first : first + count]
        keys, values = (_take(x, samples, rows) for x in (k, v))
        native = _native(k)
        parts = _pieces(edges - first, len(samples))
        labels = self._labels(keys, parts, self._count.of(parts.sizes))
        labels = labels + ((torch.arange(first, first + count, device=k.device) // chunk - begin) * per)
        places = torch.arange(first, first + count, device=k.device) % chunk
        kept = Kept(samples, places, keys, values, labels, first - sinks, begin * per, (stop - begin) * per)
        assert self.room is not None
        if native:
            kernels().finish(
                *(last_contiguous(keys), last_contiguous(values), labels, samples, kept.first_place, first),
                *(kept.first_cluster, kept.clusters, chunk, torch.get_num_threads(), *self.room.native()),
            )
        else:
            self.room.keep(kept)

    def _merge(self, k: Tensor, v: Tensor, samples: Tensor, level: int, begin: int, stop: int) -> None:
        """Blocks `begin` to `stop` of a level, of some samples: k-means of the mean keys of the level below."""
        assert self.room is not None
        assert self.merged is not None
        below = torch.arange(TIMES * begin, TIMES * stop, device=k.device)
        at = clusters_of(level - 1, below, self.per)
        inside = Clusters.at(self.room, self.merged, level - 1, samples, at, (k.shape[3], v.shape[3]))
        parts = _pieces(torch.arange(0, len(at) + 1, TIMES * self.per, device=k.device), len(samples))
        labels = self._labels(inside.keys.to(torch.float32), parts, torch.full_like(parts.sizes, self.per))
        self.merged.keep(samples, level, begin, inside, labels)

    def _labels(self, rows: Tensor, parts: Parts, counts: Tensor) -> Tensor:
        """The cluster of each row in its part, as a causal plan would have it."""
        steps = native_steps if _native(rows) else reference_steps
        draws: Draws = {"seed": self.options.seed, "layer": self.layer, "per_head": False}
        options = {"counts": counts, "sample": SAMPLE, **draws}
        return steps.kmeans(rows, parts, self.per, self.options.iterations, **options)[0]


def _native(rows: Tensor) -> bool:
    """Whether the kernels can work with these."""
    return rows.device.type == "cpu" and rows.dtype != torch.float64 and not why_not()


def _pieces(edges: Tensor, batch: int) -> Parts:
    """Rows that lie side by side, cut at these edges, which begin with 0."""
    everyone = torch.arange(int(edges[-1]), dtype=torch.int32, device=edges.device).expand(batch, -1)
    bounds = edges.to(torch.int32).expand(batch, -1)
    return Parts(everyone, bounds[:, :-1], bounds[:, 1:])


def _take(x: Tensor, samples: Tensor, rows: Tensor) -> Tensor:
    """These rows of these samples, (b, H, n, D); where nothing is padded, they lie side by side."""
    first, count = (int(rows[0, 0]), rows.shape[1]) if rows.numel() else (0, 0)
    together = torch.arange(first, first + count, dtype=rows.dtype, device=rows.device)
    if len(samples) == len(x) and bool((rows == together).all()):
        return x[:, :, first : first + count]
    return x[samples[:, None], :, rows.long()].transpose(1, 2)
