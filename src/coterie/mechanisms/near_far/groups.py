"""Groups: similar queries that pick their near keys together, and parties of groups that search together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.planning.kmeans import Draws
from coterie.planning.orders import Parts
from coterie.planning.tokens import Tokens


class Groups(NamedTuple):
    """Groups of similar queries, equally many to a chunk; chunk by chunk, those that exist come first."""

    order: Tensor  # (B, H, Nq) int32
    offsets: Tensor  # (B, H, G + 1) int32
    queries: Tensor  # (B, H, G, D) float32: what stands for each when near keys are picked, scale included
    exist: Tensor  # (B, C): how many groups of a chunk
    together: Tensor  # (B, C): how many of them search together


def draws(tokens: Tokens, seed: int) -> Draws:
    """Heads share their draws, so that heads with the same keys have the same clusters."""
    return {"seed": seed, "layer": tokens.layer, "per_head": False}


def cluster(
    tokens: Tokens,
    x: Tensor,
    parts: Parts,
    of_row: Tensor,
    exist: Tensor,
    room: int,
    together: Tensor,
    iterations: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """A few similar rows of a part together, and similar clusters side by side.

    Args:
        x: (B, H, N, D) rows.
        of_row: (B, N) the part of each row.
        exist: (B, parts) how many clusters a part has, at most `room`.
        together: (B,) how many clusters are most alike.
        iterations: of Lloyd's algorithm.

    Returns:
        the cluster of each row (B, H, N), counted through all parts, and centroids (B, H, parts · room, D) float64.
    """
    labels, centroids = tokens.steps.kmeans(x, parts, room, iterations, counts=exist, **draws(tokens, seed))
    order = _side_by_side(tokens, centroids, exist, room, together)
    place = torch.empty_like(order)
    place.scatter_(-1, order, torch.arange(order.shape[-1], device=x.device).expand_as(order))
    labels = place.gather(-1, labels + (of_row * room)[:, None])
    return labels, centroids.gather(2, order[..., None].expand_as(centroids))


def _side_by_side(tokens: Tokens, centroids: Tensor, exist: Tensor, room: int, together: Tensor) -> Tensor:
    """The clusters of each part, (B, H, parts · room), those that are alike next to each other."""
    batch, count = exist.shape
    start = (torch.arange(count, device=exist.device) * room).expand_as(exist)
    rows = torch.arange(count * room, dtype=torch.int32, device=exist.device).expand(batch, -1)
    parts = Parts(rows, start.to(torch.int32), (start + exist).to(torch.int32), most=room)
    return tokens.steps.halve(centroids.to(torch.float32), parts, exist, room, together).long()
