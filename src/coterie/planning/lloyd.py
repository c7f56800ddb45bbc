"""Lloyd's iterations on a GPU: no tensor of rows × centroids, and nothing that the host waits for.

One program does all iterations of a small part, such as a chunk. Of a large one, the two halves of an iteration are
launched one after the other. All are torch custom ops; Triton is imported when one first runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.launching import launch
from coterie.planning.orders import ceil_div

_ROWS, _CENTROIDS, _SUMS = 32, 32, 16  # of a program
_SHORT = 1024  # rows that a part may have on average, for one program to run over them
_SHORT_ROWS = 16  # that it takes at a time


def _nearest(
    x: Tensor, order: Tensor, part: Tensor, slot: Tensor, stop: Tensor, counts: Tensor, centroids: Tensor
) -> Tensor:
    from coterie.planning.kernels.clusters import nearest

    batch, heads, parts, clusters, dim = centroids.shape
    labels = _no_labels(x, order, part, slot, stop, counts, centroids)
    half_norms = (centroids * centroids).sum(-1) / 2
    launch(
        nearest,
        (part.shape[-1] * batch * heads,),
        *_rows(x, order),
        *(part, slot, stop, counts, centroids, half_norms, labels),
        *(heads, part.shape[-1], parts, clusters, order.shape[-1]),
        **_width(dim),
        ROWS=_ROWS,
        CENTROIDS=_CENTROIDS,
    )
    return labels


def _no_labels(
    x: Tensor, order: Tensor, part: Tensor, slot: Tensor, stop: Tensor, counts: Tensor, centroids: Tensor
) -> Tensor:
    return torch.zeros(order.shape, dtype=torch.int32, device=x.device)


def _member_sums(x: Tensor, order: Tensor, members: Tensor, first: Tensor) -> Tensor:
    from coterie.planning.kernels.clusters import member_sums

    sums, count = _no_sums(x, order, members, first), first.shape[-1] - 1
    tensors = (*_rows(x, order), members, first, sums, count, order.shape[-1])
    grid = (ceil_div(count, _SUMS) * x.shape[0] * x.shape[1],)
    launch(member_sums, grid, *tensors, **_width(x.shape[-1]), ROWS=_SUMS)
    return sums


def _no_sums(x: Tensor, order: Tensor, members: Tensor, first: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], first.shape[-1] - 1, x.shape[-1]), dtype=torch.float64)


def _rows(x: Tensor, order: Tensor) -> tuple[Any, ...]:
    return x, x.stride(1), x.stride(2), order, order.stride(1)


def _width(dim: int) -> dict[str, int]:
    return {"DIM": dim, "BLOCK": padded(dim)}


def padded(size: int) -> int:
    """The power of two that a row is padded to, at least the 16 that a tensor core multiplies."""
    return max(16, 1 << (size - 1).bit_length())


nearest_op = torch.library.custom_op(
    "coterie::nearest_triton",
    _nearest,
    mutates_args=(),
    schema="(Tensor x, Tensor order, Tensor part, Tensor slot, Tensor stop, Tensor counts, Tensor centroids) -> Tensor",
)
nearest_op.register_fake(_no_labels)
member_sums_op = torch.library.custom_op(
    "coterie::member_sums_triton",
    _member_sums,
    mutates_args=(),
    schema="(Tensor x, Tensor order, Tensor members, Tensor first) -> Tensor",
)
member_sums_op.register_fake(_no_sums)


def _cluster_parts(
    x: Tensor,
    trained: Tensor,
    trained_start: Tensor,
    trained_stop: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    counts: Tensor,
    centroids: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    from coterie.planning.kernels.clusters import cluster_parts

    batch, heads, parts, clusters, dim = centroids.shape
    labels = torch.zeros(order.shape, dtype=torch.int32, device=x.device)
    found = centroids.clone()
    launch(
        cluster_parts,
        (parts * batch * heads,),
        *_rows(x, trained),
        *(trained_start, trained_stop, order, order.stride(1), start, stop, counts, found, labels),
        *(heads, parts, clusters, order.shape[-1], iterations),
        **_width(dim),
        ROWS=_SHORT_ROWS,
        CENTROIDS=padded(clusters),
        num_stages=1,
    )
    return labels, found


cluster_parts_op = torch.library.custom_op(
    "coterie::cluster_parts_triton",
    _cluster_parts,
    mutates_args=(),
    schema="(Tensor x, Tensor trained, Tensor trained_start, Tensor trained_stop, Tensor order, Tensor start, "
    "Tensor stop, Tensor counts, Tensor centroids, int iterations) -> (Tensor, Tensor)",
)


@cluster_parts_op.register_fake
def _nothing_clustered(
    x: Tensor,
    trained: Tensor,
    trained_start: Tensor,
    trained_stop: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    counts: Tensor,
    centroids: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty(order.shape, dtype=torch.int32, device=x.device), torch.empty_like(centroids)


@dataclass(frozen=True, eq=False)
class Listed:
    """Rows in parts: part p of sample b holds the rows order[b, h, start[b, p] : stop[b, p]] of each head."""

    x: Tensor  # (B, heads, N, D) float32
    order: Tensor  # (B, heads, M) int32
    start: Tensor  # (B, P) int32
    stop: Tensor

    def nearest(self, centroids: Tensor, counts: Tensor) -> Tensor:
        """The centroid of (B, heads, P, C, D) that each slot of the order is nearest to: (B, heads, M) int64.

        `counts` (B, P): how many of its C centroids a part has.
        """
        tiles, ends = self._tiles(), self.stop.contiguous()
        single, counts = centroids.to(torch.float32).contiguous(), counts.to(torch.int32).contiguous()
        return nearest_op(self.x.contiguous(), self.order.contiguous(), *tiles, ends, counts, single).long()

    def sums(self, clusters: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Sums (B, heads, count, D) float64 of the slots (B, heads, M) of each cluster, and how many; −1 is none."""
        keys = torch.where(clusters < 0, count, clusters)
        ordered, members = keys.sort(dim=-1, stable=True)
        edges = torch.arange(count + 1, device=keys.device).expand(*keys.shape[:2], -1).contiguous()
        first = torch.searchsorted(ordered, edges, out_int32=True)
        sums = member_sums_op(self.x.contiguous(), self.order.contiguous(), members.to(torch.int32), first)
        return sums, (first[..., 1:] - first[..., :-1])[..., None]

    def _tiles(self) -> tuple[Tensor, Tensor]:
        """The part of each tile of up to _ROWS slots, −1 for none, and its first slot: (B, tiles) int32 each."""
        tiles = (self.stop - self.start + _ROWS - 1) // _ROWS
        ends = tiles.cumsum(-1)
        count = ceil_div(self.order.shape[-1], _ROWS) + self.start.shape[-1]
        place = torch.arange(count, device=ends.device).expand(ends.shape[0], -1).contiguous()
        part = torch.searchsorted(ends, place, right=True)
        inside = part < ends.shape[-1]
        part = part.clamp(max=ends.shape[-1] - 1)
        slot = self.start.long().gather(-1, part) + (place - (ends - tiles).gather(-1, part)) * _ROWS
        return torch.where(inside, part, -1).to(torch.int32), slot.to(torch.int32)

    def part_of_slot(self) -> Tensor:
        """(B, M) int64: the part of each slot; −1 for slots of none. Parts lie one behind the other."""
        slots = torch.arange(self.order.shape[-1], device=self.stop.device, dtype=torch.int32)
        slots = slots.expand(self.stop.shape[0], -1).contiguous()
        part = torch.searchsorted(self.stop.contiguous(), slots, right=True)
        last = part.clamp(max=self.stop.shape[-1] - 1)
        inside = (part < self.stop.shape[-1]) & (slots >= self.start.gather(-1, last))
        return torch.where(inside, part, -1)


def _small(rows: Listed, centroids: Tensor) -> bool:
    """Whether there are many short parts, each with centroids that fit into the registers of a program."""
    parts, clusters, dim = centroids.shape[2:]
    most = 32 if dim <= 64 else 16 if dim <= 128 else 0  # more would spill
    return parts > 1 and clusters <= most and rows.order.shape[-1] <= _SHORT * parts


def kmeans(rows: Listed, trained: Listed, centroids: Tensor, counts: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """The labels of all rows, (B, heads, M) int64, and centroids (B, heads, P, C, D) that were trained on some."""
    if not _small(rows, centroids):
        centroids = lloyd(trained, centroids, counts, iterations)
        return rows.nearest(centroids, counts), centroids
    bounds = (trained.start, trained.stop, rows.start, rows.stop, counts.to(torch.int32))
    first, last, start, stop, exist = (each.contiguous() for each in bounds)
    orders = trained.order.contiguous(), rows.order.contiguous()
    single = centroids.to(torch.float32).contiguous()
    labels, single = cluster_parts_op(
        rows.x.contiguous(), orders[0], first, last, orders[1], start, stop, exist, single, iterations
    )
    return labels.long(), single.double()


def lloyd(rows: Listed, centroids: Tensor, counts: Tensor, iterations: int, *, majority: bool = False) -> Tensor:
    """Centroids (B, heads, P, C, D) float64 after some iterations; an empty cluster keeps its own.

    `majority`: of signs, in the place of means.
    """
    shape, part = centroids.shape, rows.part_of_slot()[:, None]
    for _ in range(iterations):
        labels = rows.nearest(centroids, counts)
        sums, sizes = rows.sums(torch.where(part < 0, -1, labels + part * shape[3]), shape[2] * shape[3])
        means = torch.where(sums >= 0, 1.0, -1.0).double() if majority else sums / sizes.clamp(min=1)
        centroids = torch.where(sizes.view(*shape[:4], 1) > 0, means.view(shape), centroids)
    return centroids
