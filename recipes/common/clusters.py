"""The clusters of an image's pixels in one hashing round of SMYRF, and how local they are (supplement, Figure 7)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from coterie.analysis import Locality, groups_of, locality
from coterie.mechanisms import Smyrf
from coterie.observe import Seen
from coterie.plan import Plan
from recipes.common.results import Table
from recipes.common.scores import shown
from recipes.common.study import Result

CLUSTERS = (2, 128)  # Figure 7 of the supplement


def hashed(seen: Seen, clusters: int, seed: int) -> Plan:
    """A single hashing round of SMYRF into so many clusters, or as many as there are pixels that ask."""
    size = max(1, seen.q.shape[2] // clusters)
    return Smyrf(rounds=1, cluster_size=size, seed=seed).plan(seen.q, seen.k, **seen.planning())


def grid_of(seen: Seen) -> tuple[int, int]:
    """The rows and columns of pixels that ask in a block."""
    side = math.isqrt(seen.q.shape[2])
    return side, side


def memberships(seen: Seen, seed: int, head: int = 0) -> dict[str, Tensor]:
    """The cluster of each pixel, as query and as key, for the panels of a picture.

    Where a key stands for a square of pixels, as in BigGAN, all of them have its cluster.
    """
    panels = {}
    for clusters in CLUSTERS:
        plan = hashed(seen, clusters, seed)
        for side in ("queries", "keys"):
            labels = groups_of(plan, head=head, side=side)
            panels[f"{len(labels.unique())} clusters, {side}"] = _over(labels, grid_of(seen)[0])
    return panels


def _over(labels: Tensor, side: int) -> Tensor:
    """Labels of a smaller grid, each repeated over the pixels that it stands for."""
    each = side // math.isqrt(len(labels))
    return labels.view(side // each, -1).repeat_interleave(each, 0).repeat_interleave(each, 1).flatten()


def localities(blocks: Mapping[str, Seen], seed: int) -> dict[int, Locality]:
    """By the number of clusters: how often pixels at a distance are in one, the mean over all heads of these blocks."""
    found = {}
    for clusters in CLUSTERS:
        each = []
        for seen in blocks.values():
            plan = hashed(seen, clusters, seed)
            each += [locality(plan, grid=grid_of(seen), head=head) for head in range(plan.heads)]
        found[clusters] = mean_of(each)
    return found


def mean_of(found: list[Locality]) -> Locality:
    """The mean of several over the same distances.

    >>> one, two = (Locality("groups", (1, 2), shares, (9, 8), 0.5) for shares in ((1.0, 0.5), (0.5, 0.5)))
    >>> mean_of([one, two]).shares
    (0.75, 0.5)
    """
    shares = zip(*(each.shares for each in found), strict=True)
    chance = statistics.fmean(each.chance for each in found)
    return replace(found[0], shares=tuple(statistics.fmean(some) for some in shares), chance=chance)


def rows(found: Mapping[int, Locality]) -> list[Result]:
    """The same for JSON."""
    return [
        {
            "clusters": clusters,
            "near": each.near,
            "far": each.far,
            "chance": each.chance,
            "shares": dict(zip(map(str, each.distances), each.shares, strict=True)),
        }
        for clusters, each in found.items()
    ]


def table(images: list[list[Result]], tokens: int) -> Table:
    """How often pixels are in one cluster: mean and standard error over images, each of which has its `rows`."""
    cells = []
    for mine in zip(*images, strict=True):
        part = [shown([each[name] for each in mine], 100, 1) for name in ("near", "far", "chance")]
        cells.append([str(mine[0]["clusters"]), *part])
    columns = ["clusters", "neighbours together, %", "distant pixels together, %", "any two, %"]
    count = f"{len(images)} image{'s' * (len(images) > 1)}"
    return f"one hashing round of SMYRF over {tokens:,} tokens: {count}", columns, cells
