"""The attention maps of one image: their singular values, and how local the groups of its pixels are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from coterie.analysis import AttentionErrors, Locality, Spectra, groups_of, head_spectra, locality
from coterie.analysis.errors import call_errors
from coterie.mechanisms import Smyrf
from coterie.observe import Seen
from coterie.plan import Plan
from recipes.common.study import Result
from recipes.terrain.attending import Choice, Way, by_tokens

CLUSTERS = (2, 128)  # Figure 7 of the supplement


def errors_of(seen: Mapping[str, Seen], choice: Choice) -> dict[str, AttentionErrors]:
    """What mechanisms change in each block of the dense generator."""
    return {name: call_errors(each, choice[name]) for name, each in seen.items()}


def spectra_of(seen: Mapping[str, Seen], way: Way, errors: Mapping[str, AttentionErrors]) -> Spectra:
    """The singular values of every head of these blocks, and the error of a mechanism in each."""
    heads = []
    for name, each in seen.items():
        wrong = errors[name].output().value
        found = head_spectra(each.q, each.k, module=name)
        heads += [replace(head, error=float(wrong[head.sample, head.head])) for head in found]
    return Spectra(str(way), tuple(heads))


def ranks(found: Spectra, seen: Mapping[str, Seen], errors: Mapping[str, AttentionErrors]) -> list[Result]:
    """A row for each number of tokens: medians over the heads, and the mean mass on the keys that a mechanism meets."""
    rows = []
    for tokens, blocks in by_tokens(seen).items():
        heads = [each for each in found.heads if each.module in blocks]
        rows.append(
            {
                "tokens": tokens,
                "blocks": len(blocks),
                "heads": len(heads),
                "effective rank": statistics.median(each.effective_rank for each in heads),
                "largest rank": max(each.effective_rank for each in heads),
                "90 %": _median([each.rank_90 for each in heads]),
                "99 %": _median([each.rank_99 for each in heads]),
                "R²": statistics.median(each.r2 for each in heads),
                "slow": sum(each.slow for each in heads),
                "mass": statistics.fmean(float(errors[name].mean("mass").value) for name in blocks),
            }
        )
    return rows


def _median(ranks: list[int | None]) -> float:
    """NaN if some map is so large that only its largest values were found."""
    known = [rank for rank in ranks if rank is not None]
    return statistics.median(known) if len(known) == len(ranks) else math.nan


# --- memberships ------------------------------------------------------------------------------------------------------


def hashed(seen: Seen, clusters: int, seed: int) -> Plan:
    """A single hashing round of SMYRF into so many clusters, or as many as there are tokens."""
    size = max(1, seen.q.shape[2] // clusters)
    return Smyrf(rounds=1, cluster_size=size, seed=seed).plan(seen.q, seen.k, **seen.planning())


def grid_of(seen: Seen) -> tuple[int, int]:
    """The rows and columns of pixels that a block attends over."""
    side = math.isqrt(seen.q.shape[2])
    return side, side


def mean_locality(seen: Mapping[str, Seen], clusters: int, seed: int) -> Locality:
    """How often pixels at a distance are in one cluster, the mean over all heads of these blocks."""
    found = []
    for each in seen.values():
        plan = hashed(each, clusters, seed)
        found += [locality(plan, grid=grid_of(each), head=head) for head in range(plan.heads)]
    return mean_of(found)


def mean_of(found: list[Locality]) -> Locality:
    """The mean of several over the same distances.

    >>> one, two = (Locality("groups", (1, 2), shares, (9, 8), 0.5) for shares in ((1.0, 0.5), (0.5, 0.5)))
    >>> mean_of([one, two]).shares
    (0.75, 0.5)
    """
    shares = zip(*(each.shares for each in found), strict=True)
    chance = statistics.fmean(each.chance for each in found)
    return replace(found[0], shares=tuple(statistics.fmean(some) for some in shares), chance=chance)


def memberships(seen: Seen, seed: int, head: int) -> dict[str, Tensor]:
    """The cluster of each pixel, as query and as key, for the panels of a picture."""
    panels = {}
    for clusters in CLUSTERS:
        plan = hashed(seen, clusters, seed)
        for side in ("queries", "keys"):
            labels = groups_of(plan, head=head, side=side)
            panels[f"{len(labels.unique())} clusters, {side}"] = labels
    return panels
