"""Merged: finished chunks that are far away, in blocks of 4, 16, 64 … chunks, whose clusters are clustered once more.

Level 0 are the chunks themselves, level l has blocks of 4^l of them. A block has as many clusters as a chunk; each is
made of clusters of its four blocks of the level below. A query sees 64 blocks of each level, or a few more: what is
farther away it sees through the next one. So it sees O(log N) clusters, and finds the others inside of those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from coterie.mechanisms.near_far.codes import padded, whole

if TYPE_CHECKING:
    from coterie.mechanisms.near_far.finished import Room

TIMES = 4  # blocks that are one of the next level
SHOWN = 64  # blocks of a level that are seen before those of the next one follow

_Int = TypeVar("_Int", int, Tensor)


def blocks(level: int, chunks: int) -> int:
    """How many blocks of a level stand for the first of so many finished chunks: the level below shows the rest."""
    size = TIMES**level
    return max(0, (chunks - SHOWN * (size - 1) // (TIMES - 1)) // size)


def top_level(chunks: int) -> int:
    """The last level that so many finished chunks are seen through."""
    level = 0
    while blocks(level + 1, chunks):
        level += 1
    return level


def complete(chunks: _Int) -> _Int:
    """How many blocks of all levels but the first there are in so many chunks."""
    found = chunks // TIMES
    for level in range(2, 16):  # places are numbers of 32 bits
        found = found + chunks // TIMES**level
    return found


def needed_for(chunks: int) -> int:
    """Room for how many blocks so many finished chunks need."""
    return complete(max(0, chunks - SHOWN))


def number(level: int, block: _Int) -> _Int:
    """Where a block is kept: in the order in which their last chunks come. Those of the first level are kept apart."""
    return complete((block + 1) * TIMES**level - 1) + level - 1 if level else block


class Merged(NamedTuple):
    """The blocks of all levels but the first, with room for more; those that no token sees yet are not made."""

    labels: Tensor  # (B, Hk, blocks, 4 · per) int32: in which cluster each one of its four blocks is
    sizes: Tensor  # (B, Hk, blocks · per) int32: how many keys a cluster has
    mean_keys: Tensor  # (B, Hk, blocks · per, ⌈D / 16⌉ · 16) int16, as in `Room`
    mean_values: Tensor
    key_steps: Tensor  # (B, Hk, blocks · per) float32
    value_steps: Tensor

    @staticmethod
    def of(k: Tensor, v: Tensor, room: int, per: int) -> Merged:
        """Room for so many blocks. It is small: in large pages, room that is not used takes memory, too."""
        lead = k.shape[:2]
        return Merged(
            k.new_empty(*lead, room, TIMES * per, dtype=torch.int32),
            k.new_empty(*lead, room * per, dtype=torch.int32),
            *(k.new_empty(*lead, room * per, padded(x.shape[3]), dtype=torch.int16) for x in (k, v)),
            *(k.new_empty(*lead, room * per, dtype=torch.float32) for _ in (k, v)),
        )

    def hold(self, other: Merged) -> None:
        """Begin with what another one holds."""
        for mine, theirs in zip(self, other, strict=True):
            mine[:, :, : theirs.shape[2]] = theirs

    def keep(self, samples: Tensor, level: int, first: int, inside: Clusters, labels: Tensor) -> None:
        """Keep the blocks of some samples from the `first` on, (b, Hk, n) labels of the clusters that are inside."""
        per = self.labels.shape[3] // TIMES
        each = labels.unflatten(2, (-1, TIMES * per))
        block = torch.arange(first, first + each.shape[2], device=labels.device)
        into = (each + torch.arange(each.shape[2], device=labels.device)[:, None] * per).flatten(2)
        lead, count = labels.shape[:2], each.shape[2] * per
        sizes = torch.zeros(*lead, count, dtype=torch.int64, device=labels.device).scatter_add_(2, into, inside.sizes)
        at, one = clusters_of(level, block, per), (samples[:, None, None], _heads(labels)[:, None])
        self.labels[(*one, number(level, block))] = each.to(torch.int32)
        self.sizes[(*one, at)] = sizes.to(torch.int32)
        for means, steps, x in (
            (self.mean_keys, self.key_steps, inside.keys),
            (self.mean_values, self.value_steps, inside.values),
        ):
            sums = torch.zeros(*lead, count, x.shape[-1], dtype=torch.float64, device=labels.device)
            weighted = torch.where(inside.sizes[..., None] > 0, x * inside.sizes[..., None], 0)
            sums.scatter_add_(2, into[..., None].expand_as(x), weighted)
            means[(*one, at)], steps[(*one, at)] = whole(sums / sizes.clamp(min=1)[..., None])


class Clusters(NamedTuple):
    """Clusters of one level, of some samples."""

    sizes: Tensor  # (b, Hk, n) int64
    keys: Tensor  # (b, Hk, n, D) float64, their means
    values: Tensor

    @staticmethod
    def at(room: Room, merged: Merged, level: int, samples: Tensor, at: Tensor, dims: tuple[int, int]) -> Clusters:
        """Those that are kept at places (n,)."""
        index = (samples[:, None, None], _heads(room.offsets)[:, None], at)
        source: Room | Merged = merged if level else room
        sizes = merged.sizes[index] if level else room.offsets[(*index[:2], at + 1)] - room.offsets[index]
        keys, values = (
            means[index][..., :dim].to(torch.float64) * steps[index][..., None]
            for means, steps, dim in (
                (source.mean_keys, source.key_steps, dims[0]),
                (source.mean_values, source.value_steps, dims[1]),
            )
        )
        return Clusters(sizes.long(), keys, values)


def clusters_of(level: int, block: Tensor, per: int) -> Tensor:
    """Where the clusters of some blocks are kept, (blocks · per,)."""
    return (number(level, block)[:, None] * per + torch.arange(per, device=block.device)).flatten()


def _heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)
