"""Halving: similar rows side by side, in leaves of equal size.

Two rows that are far apart are found; the rows nearer to the one and to the other have two means; and along the line
between these, all rows are cut in two at the middle. Each half is cut in the same way until leaves are left that
stay together. Unlike
k-means this gives groups of one size, whatever the data, at O(N·D) a level.

Where rows lie is measured on whole numbers, so small that products of them are exact even in float32: so no half
depends on the order of summation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.planning.orders import Parts, balanced_offsets


def halve(x: Tensor, parts: Parts, leaves: Tensor, room: int, together: Tensor) -> Tensor:
    """The definition of the planning step `halve`; `Steps` says what it gives."""
    batch, heads, _, dim = x.shape
    rows, used = parts.rows()
    count, longest = rows.shape[1:]
    order = parts.order[:, None].expand(-1, heads, -1).contiguous()
    if rows.numel() == 0:
        return order
    wide = torch.where(x.isfinite(), x, 0).to(torch.float64)
    values = wide.gather(2, rows.flatten(1)[:, None, :, None].expand(-1, heads, -1, dim))
    values = values.view(batch, heads, count, longest, dim).masked_fill(~used[:, None, :, :, None], 0)
    edges = balanced_offsets(parts.sizes, leaves, room).long()  # (B, P, room + 1)
    place = torch.arange(longest, device=x.device).expand(batch, count, -1)
    leaf = torch.searchsorted(edges[..., 1:].contiguous(), place.contiguous(), right=True)
    leaf = torch.where(used, leaf, room)  # of each place in a part, (B, P, longest)
    tree = _Tree(_whole(values, (-2, -1)), place[:, None].expand(-1, heads, -1, -1), room)
    first, last = torch.zeros_like(edges[..., 1:]), leaves[..., None].expand(-1, -1, room)  # the node of each leaf
    for _ in range(room.bit_length() + 1):
        tree.divide(torch.nn.functional.pad(first, (0, 1), value=room).gather(-1, leaf))
        middle = _middle(first, last, together[:, None, None])
        right = torch.arange(room, device=x.device) >= middle
        first, last = torch.where(right, middle, first), torch.where(right, last, middle)
    party = torch.where(used, leaf // together[:, None, None], room)[:, None].expand_as(tree.slots)
    slots = tree.slots.gather(-1, _sorted_by(tree.slots, party))
    # Unused places write behind the end.
    where = torch.where(used, parts.start[..., None].long() + place, order.shape[-1])
    found = rows[:, None].expand_as(slots).gather(-1, slots).flatten(2).to(torch.int32)
    padded = torch.nn.functional.pad(order, (0, 1)).scatter(-1, where[:, None].expand_as(slots).flatten(2), found)
    return padded[..., :-1]


def _middle(first: Tensor, last: Tensor, together: Tensor) -> Tensor:
    """The leaf at which the second half of each leaf's node begins; where it ends, if it is not to be split."""
    count = last - first
    middle = first + (count + 2 * together - 1) // (2 * together) * together
    return torch.where(count > together, middle, last)


def _whole(x: Tensor, over: tuple[int, ...]) -> Tensor:
    """x in whole numbers, of which the largest is at most 127 and the products of two rows are below 2²²."""
    most = min(127, max(1, math.floor(2048 / math.sqrt(max(1, x.shape[-1])))))
    longest = x.abs().amax(over, keepdim=True)
    return (x * most / torch.where(longest > 0, longest, 1)).round()


def _sorted_by(*keys: Tensor) -> Tensor:
    """The order by the last of the keys, ties by the one before it, and so on."""
    index = torch.argsort(keys[0], dim=-1, stable=True)
    for key in keys[1:]:
        index = index.gather(-1, torch.argsort(key.gather(-1, index), dim=-1, stable=True))
    return index


def _sums(values: Tensor, node: Tensor, room: int) -> Tensor:
    """Sums over the places of each node, (B, H, P, room + 1, D)."""
    shape = (*node.shape[:3], room + 1, values.shape[-1])
    return values.new_zeros(shape).scatter_add(3, node[..., None].expand_as(values), values)


class _Tree:
    """The rows of each part, (B, H, P, longest), in the order of the moment: nodes are runs of places."""

    def __init__(self, values: Tensor, slots: Tensor, room: int) -> None:
        self.values, self.slots, self.room = values, slots, room

    def divide(self, node: Tensor) -> None:
        """Put the rows of each node into order; (B, P, longest): the node of a place."""
        node = node[:, None].expand_as(self.slots)
        one = self._farthest(node, self._first(node, self.slots))
        other = self._farthest(node, one)
        rows = self._rows()
        mine = ((rows - one).square().sum(-1) < (rows - other).square().sum(-1))[..., None]
        counts, sums = (
            [self._at(node, _sums(x * side, node, self.room)) for side in (mine, ~mine)]
            for x in (torch.ones_like(rows[..., :1]), rows)
        )
        direction = _whole(counts[1] * sums[0] - counts[0] * sums[1], (-1,))
        along = (rows * direction).sum(-1)
        self.slots = self.slots.gather(-1, _sorted_by(self.slots, along, node))

    def _rows(self) -> Tensor:
        return self.values.gather(3, self.slots[..., None].expand_as(self.values))

    def _at(self, node: Tensor, of_node: Tensor) -> Tensor:
        """What belongs to a node, at each of its places."""
        return of_node.gather(3, node[..., None].expand(*node.shape, of_node.shape[-1]))

    def _first(self, node: Tensor, key: Tensor) -> Tensor:
        """The row of each node whose key is smallest, at each place."""
        limit = torch.iinfo(torch.int64).max
        least = torch.full((*node.shape[:3], self.room + 1), limit, device=key.device)
        slot = least.scatter_reduce(-1, node, key, "amin").gather(-1, node) % self.slots.shape[-1]
        return self.values.gather(3, slot[..., None].expand_as(self.values))

    def _farthest(self, node: Tensor, row: Tensor) -> Tensor:
        """The row of each node that is farthest from `row`, ties to the first, at each place."""
        distance = (self._rows() - row).square().sum(-1).long()
        return self._first(node, self.slots - distance * self.slots.shape[-1])
