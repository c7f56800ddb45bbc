"""Levels: the means of finished chunks, which become fewer as the chunks recede.

Level 0 has a block for each chunk, level l blocks of 2^l chunks with 2^l times fewer means, but at least one. A chunk
sees 32 blocks of each level, more or less: what is farther away is seen through the next one, the last shows the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.mechanisms.near_far.chunks import Chunks
from coterie.mechanisms.near_far.counts import Count, Fixed, Rate
from coterie.mechanisms.near_far.groups import draws
from coterie.mechanisms.near_far.meeting import Far
from coterie.plan import Means
from coterie.planning.orders import Parts, ceil_div
from coterie.planning.tokens import Tokens

if TYPE_CHECKING:
    from coterie.mechanisms.near_far import NearFar

PER_MEAN = 32  # keys of a finished chunk that share a mean
SAMPLE = 16 * PER_MEAN  # tokens a mean that centroids are trained on
_BLOCKS = 32  # of one size, before blocks of twice the size follow


class Level(NamedTuple):
    """Chunks in blocks of one size, with means of their own."""

    size: int  # chunks of a block
    blocks: int
    in_block: Count  # how many means
    first: int  # how many means the levels before have
    listed: int  # how many keys they list

    @property
    def most(self) -> int:
        """How many blocks a chunk sees at most."""
        return min(self.blocks, _BLOCKS + 1)

    def edge(self, older: Tensor) -> Tensor:
        """(B, chunks): the chunk where this level takes over from the one before: a multiple of its size."""
        return ((older - _BLOCKS * (self.size - 1)) // self.size * self.size).clamp(min=0)

    def shown(self, begin: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """The means of the blocks from chunk `begin` up to `stop`, (B, chunks, V) each: which, and whether used."""
        room, most = self.in_block.room, self.most
        block = stop[..., None] // self.size - most + torch.arange(most, device=stop.device)
        used = block * self.size >= begin[..., None]
        each = torch.arange(room, device=stop.device)
        which = self.first + block[..., None] * room + each
        return which.flatten(2), used[..., None].expand(*used.shape, room).flatten(2)

    def means(self, options: NearFar, tokens: Tokens, chunks: Chunks) -> Means:
        """k-means inside each block, with offsets for all levels; a mean stands at the last key of its block."""
        keys, room = self.size * chunks.size, self.in_block.room
        edges = torch.arange(self.blocks + 1, device=tokens.device) * keys
        sinks = chunks.num_keys.clamp(max=options.sinks)[:, None]
        edges = torch.minimum(edges, chunks.num_keys[:, None]).maximum(sinks).to(torch.int32)
        parts = Parts(chunks.keys, edges[:, :-1], edges[:, 1:], most=keys)
        counts = self.in_block.of(parts.sizes)
        labels, _ = tokens.steps.kmeans(
            tokens.raw_k, parts, room, options.iterations, counts=counts, sample=SAMPLE, **draws(tokens, options.seed)
        )
        labels = labels + (chunks.rank_of_key.clamp(min=0) // keys * room)[:, None]
        clustered = tokens.key_mask & (chunks.rank_of_key >= sinks)
        order, offsets = tokens.steps.group_by(labels, clustered[:, None], self.blocks * room)
        last = (parts.stop - 1).clamp(min=0).long()
        position = chunks.keys.gather(-1, last) if tokens.sizes.keys else last.to(torch.int32)
        position = position.repeat_interleave(room, 1)[:, None].expand(-1, tokens.sizes.key_heads, -1)
        offsets = offsets + self.listed
        return Means(order, offsets[..., :-1], offsets[..., 1:], position)


def finished_chunks(options: NearFar, tokens: Tokens, chunks: Chunks) -> Far:
    """The means of all finished blocks of chunks, and those that each chunk sees."""
    levels, older = list(all_levels(options, tokens.sizes.keys)), chunks.older()
    edges = [older, *(level.edge(older) for level in levels[1:]), torch.zeros_like(older)]
    shown = [level.shown(begin, stop) for level, (stop, begin) in zip(levels, pairwise(edges), strict=True)]
    which, used = torch.cat([x for x, _ in shown], -1), torch.cat([x for _, x in shown], -1)
    used_first = torch.argsort((~used).to(torch.uint8), dim=-1, stable=True)
    visible = torch.where(used, which, 0).gather(-1, used_first)
    means = _joined([level.means(options, tokens, chunks) for level in levels])
    keys = older * chunks.size
    sinks = chunks.keys[:, : min(options.sinks, tokens.sizes.keys)]
    met = keys.clamp(max=sinks.shape[-1])
    largest = min(levels[-1].size * chunks.size, tokens.sizes.keys)
    return Far(means, visible, used.sum(-1), keys - met, sinks, met, largest)


def all_levels(options: NearFar, length: int) -> Iterator[Level]:
    """As many as the keys need."""
    chunks = max(2, ceil_div(length, options.chunk))  # 1 would be a graph of its own
    size, first, listed = 1, 0, 0
    while size == 1 or chunks > _BLOCKS * (size - 1):
        level = Level(size, ceil_div(chunks, size), _count(options, size, length), first, listed)
        yield level
        size, first, listed = 2 * size, first + level.blocks * level.in_block.room, listed + length


def _count(options: NearFar, size: int, length: int) -> Count:
    """The means of a block of so many chunks."""
    if not isinstance(options.key_clusters, str):
        return Fixed(ceil_div(options.key_clusters, size))
    block, in_chunk = size * options.chunk, ceil_div(options.chunk, PER_MEAN)
    return Rate.upto(length, block, clusters=ceil_div(in_chunk, size), tokens=block)


def _joined(levels: list[Means]) -> Means:
    """The means of all levels."""
    return Means(
        torch.cat([each.order for each in levels], -1),
        torch.cat([each.start for each in levels], -1),
        torch.cat([each.stop for each in levels], -1),
        torch.cat([each.positions for each in levels if each.positions is not None], -1),
    )
