"""Tree: the clusters that a query sees, and how those inside of them are found. The definition of native/tree.h."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie.mechanisms.near_far.merged import TIMES, Clusters, blocks, number, top_level

if TYPE_CHECKING:
    from coterie.mechanisms.near_far.finished import Finished

WIDER = 4  # times as many keys as are looked at are in the clusters of each level that are looked into


class Nodes(NamedTuple):
    """Some clusters of all levels, those of the oldest keys first."""

    level: Tensor  # (n,)
    block: Tensor  # (n,)
    which: Tensor  # (n,): of the clusters of its block
    seen: Tensor  # (n,): which of the clusters that the query sees it is, or is inside of

    def take(self, index: Tensor) -> Nodes:
        """Those with an index, or of a mask."""
        return Nodes(*(x[index] for x in self))


class Tree:
    """The clusters of one key head of one sample, as a query sees them that comes behind so many finished chunks."""

    def __init__(self, finished: Finished, b: int, g: int, dims: tuple[int, int], chunks: int) -> None:
        assert finished.room is not None
        self.finished, self.b, self.g, self.dims = finished, b, g, dims
        self.chunks, self.top = chunks, top_level(chunks)
        self.device = finished.room.offsets.device

    def seen(self) -> Nodes:
        """Those that it sees."""
        found, per = [], self.finished.per
        for level in range(self.top, -1, -1):
            first, stop = TIMES * blocks(level + 1, self.chunks), blocks(level, self.chunks)
            each = torch.arange(first * per, stop * per, device=self.device)
            found.append((torch.full_like(each, level), each // per, each % per))
        levels, block, which = (torch.cat(each) for each in zip(*found, strict=True))
        return Nodes(levels, block, which, torch.arange(len(levels), device=self.device))

    def kept(self, nodes: Nodes) -> Clusters:
        """Their sizes (n,) and means (n, D), float64."""
        found = []
        for level in range(self.top + 1):
            mine = nodes.level == level
            at = number(level, nodes.block[mine]) * self.finished.per + nodes.which[mine]
            found.append((mine.nonzero()[:, 0], self._at(level, at)))
        order = torch.cat([at for at, _ in found]).argsort()
        return Clusters(*(torch.cat(x)[order] for x in zip(*(each for _, each in found), strict=True)))

    def search(self, query: Tensor, scale: float, reach: int) -> Nodes:
        """Chunks' own clusters (n,) that queries (share, D) like best, until they hold `reach` keys.

        They are looked for from the top: of each level, clusters are opened that hold `WIDER` times as many.
        """
        nodes = self._used(self.seen())
        for level in range(self.top, 0, -1):
            nodes = self._opened(self._best(nodes, query, scale, WIDER * reach), level)
        return self._best(nodes, query, scale, reach)

    def likes(self, nodes: Nodes, query: Tensor, scale: float) -> Tensor:
        """The scores of their means, (share, n)."""
        return query @ self.kept(nodes).keys.to(query.dtype).mT * scale

    def _used(self, nodes: Nodes) -> Nodes:
        return nodes.take(self.kept(nodes).sizes > 0)

    def _at(self, level: int, at: Tensor) -> Clusters:
        room, merged = self.finished.room, self.finished.merged
        assert room is not None
        assert merged is not None
        found = Clusters.at(room, merged, level, torch.tensor([self.b], device=self.device), at, self.dims)
        return Clusters(*(x[0, self.g] for x in found))

    def _best(self, nodes: Nodes, query: Tensor, scale: float, enough: int) -> Nodes:
        """Those that one of the heads likes best, until they hold enough keys."""
        likes = self.likes(nodes, query, scale)
        likes = torch.where(likes.isfinite(), likes, 0)
        if not len(nodes.level):
            return nodes
        likes = (likes - likes.amax(-1, keepdim=True)).amax(0)
        ranked = likes.sort(descending=True, stable=True).indices
        held = self.kept(nodes).sizes[ranked]
        return nodes.take(ranked[held.cumsum(-1) - held < enough].sort().values)

    def _opened(self, nodes: Nodes, level: int) -> Nodes:
        """What is inside of those of a level, in their place."""
        per, merged = self.finished.per, self.finished.merged
        assert merged is not None
        here = (nodes.level == level).nonzero()[:, 0]
        labels = merged.labels[self.b, self.g, number(level, nodes.block[here])]
        row, inside = (labels == nodes.which[here][:, None]).nonzero(as_tuple=True)
        block = TIMES * nodes.block[here][row] + inside // per
        children = Nodes(torch.full_like(block, level - 1), block, inside % per, nodes.seen[here][row])
        rest = (nodes.level != level).nonzero()[:, 0]
        order = torch.cat([rest, here[row]]).argsort(stable=True)
        together = (torch.cat(pair)[order] for pair in zip(nodes.take(rest), children, strict=True))
        return self._used(Nodes(*together))
