"""Who is grouped with whom, and how local that is: read from a plan, never as N × N numbers.

The SMYRF supplement (§12, Figure 7) looks at the groups of the pixels of an image: neighbours are mostly together,
distant pixels sometimes are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.checks import expect, expect_choice, expect_int, expect_type
from coterie.plan import Plan, Round
from coterie.plan.slices import one_head, restrict
from coterie.plan.tiles import PlanTiles, Tile
from coterie.tables import Table, output, paragraph

_BAND = 1 << 24  # pairs that are looked at together
SIDES = ("queries", "keys")
RELATIONS = ("groups", "meetings")


def groups_of(plan: Plan, *, round: int = 0, head: int = 0, sample: int = 0, side: str = "queries") -> Tensor:
    """The group of each query (or key) in one round of one head, (N,) int64; −1 is in none, or in one without keys.

    Where a round groups means of queries (`Clustered`), a query belongs to the mean that answers for it.

    Args:
        plan: of any mechanism.
        round, head, sample: which.
        side: "queries", or "keys" if no key is in two groups, as in Smyrf.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.memberships import groups_of
        >>> q = torch.tensor([[[[1.0], [-1.0], [1.1], [-1.1]]]])
        >>> group = groups_of(coterie.Smyrf(rounds=1, cluster_size=2).plan(q, q))
        >>> bool(group[0] == group[2]), bool(group[1] == group[3]), group.unique().tolist()
        (True, True, [0, 1])
    """
    one = one_head(plan, head=head, sample=sample)
    expect_choice("side", side, SIDES)
    each = _round(plan, one, round)
    if side == "keys":
        return _key_groups(each, plan.num_keys)
    order, group = _query_slots(each)
    real = (order < plan.num_queries) & (each.key_sizes[0, 0] > 0)[group]
    if one.answer is not None and not bool(real.any()):
        answer = one.answer[0, 0].long()
        return torch.where(answer >= 0, answer - plan.num_queries, -1)
    labels = torch.full((plan.num_queries,), -1, device=plan.device)
    labels[order[real]] = group[real]
    return labels


def _round(plan: Plan, one: Plan, index: int) -> Round:
    expect_int("round", index, at_least=0)
    expect(index < len(plan.rounds), "round", f"one of the {len(plan.rounds)} rounds, from 0", index)
    return one.rounds[index]


def _query_slots(each: Round) -> tuple[Tensor, Tensor]:
    """The query rows of a single head's round, virtual ones included, and the group of each."""
    offsets = each.query_offsets[0, 0].long()
    group = torch.arange(each.groups, device=offsets.device).repeat_interleave(offsets.diff())
    return each.query_order[0, 0, : len(group)].long(), group


def _key_groups(each: Round, num_keys: int) -> Tensor:
    sizes = each.key_sizes[0, 0].long()
    instead = "a round whose groups share no keys, as Smyrf's (look at side='queries', or at meetings())"
    expect(int(sizes.sum()) <= each.key_order.shape[-1], "round", instead, "keys in several groups")
    group = torch.arange(each.groups, device=sizes.device).repeat_interleave(sizes)
    first = each.key_start[0, 0].long() - (sizes.cumsum(0) - sizes)
    keys = each.key_order[0, 0][torch.arange(len(group), device=sizes.device) + first[group]].long()
    group, keys = group[keys < num_keys], keys[keys < num_keys]
    twice = int(keys.bincount(minlength=1).max())
    expect(twice <= 1, "round", instead, f"a key {twice} times")
    labels = torch.full((num_keys,), -1, device=sizes.device)
    labels[keys] = group
    return labels


# --- who meets whom ---------------------------------------------------------------------------------------------------


def meetings(plan: Plan, *, head: int = 0, sample: int = 0, cells: int = 160) -> Tensor:
    """Who meets whom in one head, shrunk: the share of pairs that meet in each cell, (rows, columns) float64.

    A cell stands for about N / cells queries × keys. Pairs count once however often they meet, and only those that
    meet directly: what is heard through a mean is not drawn. A band of rows is looked at at a time, so that memory is
    bounded whatever the plan.

    Args:
        plan: of any mechanism.
        head, sample: which.
        cells: rows and columns, at most; fewer where there are fewer tokens.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.memberships import meetings
        >>> q = torch.randn(1, 1, 8, 4)
        >>> meetings(coterie.Local(window=4).plan(q, q, is_causal=True), cells=2)
        tensor([[0.6250, 0.0000],
                [0.3750, 0.6250]], dtype=torch.float64)
    """
    expect_int("cells", cells, at_least=1)
    one = one_head(plan, head=head, sample=sample)
    row_cell, rows_in = _cells(one.num_queries, cells, plan.device)
    key_cell, keys_in = _cells(one.num_keys, cells, plan.device)
    counts = torch.zeros(len(rows_in) * len(keys_in), dtype=torch.int64, device=plan.device)
    for rows, met in bands(one):
        row, key = met.nonzero(as_tuple=True)
        cell = row_cell[rows][row].mul_(len(keys_in)).add_(key_cell[key])
        counts += cell.bincount(minlength=len(counts))
    return counts.view(len(rows_in), len(keys_in)).double() / (rows_in[:, None] * keys_in)


def _cells(length: int, cells: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The cell of each row, (length,), and how many rows each cell has."""
    expect(length > 0, "plan", "one with queries and keys", "none")
    cells = min(cells, length)
    cell = torch.arange(length, device=device) * cells // length
    return cell, cell.bincount(minlength=cells)


def bands(one: Plan) -> Iterator[tuple[slice, Tensor]]:
    """Who meets whom, directly, for the queries of a single head's plan: some rows at a time, (rows, Nk) bool.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.memberships import bands
        >>> q = torch.randn(1, 1, 100, 8)
        >>> sum(int(met.sum()) for rows, met in bands(coterie.Smyrf(rounds=1, cluster_size=25).plan(q, q)))
        2500
    """
    expect((one.batch, one.heads) == (1, 1), "plan", "one of a single head: one_head(plan, …)", (one.batch, one.heads))
    step = max(1, _BAND // max(1, one.num_keys))
    for first in range(0, one.num_queries, step):
        rows = slice(first, min(first + step, one.num_queries))
        yield rows, _band(one, rows)


def _band(one: Plan, rows: slice) -> Tensor:
    met = torch.zeros(rows.stop - rows.start, one.num_keys, dtype=torch.bool, device=one.device)
    lonely = torch.zeros(one.num_queries, dtype=torch.bool, device=one.device)
    lonely[rows] = True
    # The plan of these queries alone, so that `tiles` stays the one place that says which pairs meet.
    part = restrict(replace(one, answer=None, mass=None), torch.arange(rows.start, rows.stop, device=one.device)[None])
    tiles = PlanTiles(replace(part, query_means=None))

    def add(tile: Tile) -> None:
        t, i, j = tile.meets.nonzero(as_tuple=True)
        query, key = tile.rows[t, i], tile.keys[t, j]
        lonely[query] = False
        real = key < one.num_keys
        met[query[real] - rows.start, key[real]] = True

    for tile in tiles():
        add(tile)
    for tile in tiles.of_selves(lonely[None, None].clone()):
        add(tile)
    return met


# --- locality ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Locality:
    """How often tokens at a distance are together.

    Attributes:
        of: "groups" (two queries are in one group) or "meetings" (a query meets a key).
        distances: in tokens, or along the rows and columns of a grid.
        shares: of the pairs at each distance, those that are together.
        pairs: how many pairs there are at each distance; the share of none is NaN.
        chance: the share of all pairs, at whatever distance.
    """

    of: str
    distances: tuple[int, ...]
    shares: tuple[float, ...]
    pairs: tuple[int, ...]
    chance: float

    @property
    def near(self) -> float:
        """The share of the nearest pairs."""
        return self.shares[0]

    @property
    def far(self) -> float:
        """The share of the pairs at no less than half the largest distance."""
        distant = [i for i, distance in enumerate(self.distances) if 2 * distance >= self.distances[-1]]
        together = sum(self.shares[i] * self.pairs[i] for i in distant if self.pairs[i])
        return _share(together, sum(self.pairs[i] for i in distant))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        together = "in one group" if self.of == "groups" else "that meet"
        numbers = zip(self.distances, self.shares, self.pairs, strict=True)
        rows = [[f"{distance:,}", _percent(share), f"{pairs:,}"] for distance, share, pairs in numbers]
        table = Table(["distance", f"pairs {together}", "of pairs"], rows, words=())
        return output(table.html(), paragraph(f"of all pairs, at whatever distance: {_percent(self.chance)}"))


def locality(
    plan: Plan,
    *,
    of: str = "groups",
    grid: tuple[int, int] | None = None,
    distances: Sequence[int] | None = None,
    round: int | None = None,
    head: int = 0,
    sample: int = 0,
) -> Locality:
    """How often neighbours are together and how often distant tokens are, by distance.

    Args:
        plan: of any mechanism.
        of: "groups": two queries share a group, averaged over rounds; queries that are in none do not count.
            "meetings": a query meets the key at that distance from its own position, in some round; of a causal plan,
            only the keys before it count, and queries that meet nobody do not.
        grid: (H, W) with H·W = N: token i sits in row i // W, column i % W, and distances run along both axes.
        distances: ascending; by default 1, 2, 4, … up to the longest side.
        round: one round alone; for groups.
        head, sample: which.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.memberships import locality
        >>> q = torch.arange(64.0).view(1, 1, 64, 1)            # neighbours are alike
        >>> found = locality(coterie.Smyrf(rounds=1, cluster_size=16).plan(q, q), distances=[1, 32])
        >>> found.near > 0.9, found.shares[1], round(found.chance, 3)
        (True, 0.0, 0.238)
    """
    expect_choice("of", of, RELATIONS)
    expect(of == "groups" or round is None, "round", "None for meetings, which are of all rounds", round)
    one = one_head(plan, head=head, sample=sample)
    if grid is not None:
        check_grid(grid, plan.num_queries)
    longest = plan.num_queries if grid is None else max(grid)
    chosen = _check_distances(distances, longest)
    if of == "meetings":
        return _meeting_locality(one, grid, chosen)
    indices = range(len(plan.rounds)) if round is None else [round]
    labels = [groups_of(one, round=index) for index in indices]
    labels = [each for each in labels if bool((each >= 0).any())]  # a round may group virtual rows alone
    expect(bool(labels), "plan", "a round that groups queries", "none")
    return _group_locality(labels, grid, chosen)


def check_grid(grid: tuple[int, int], tokens: int) -> None:
    """(H, W) must hold as many cells as there are tokens.

    >>> check_grid((5, 4), 24)
    Traceback (most recent call last):
    ValueError: grid: expected (H, W) with H · W = 24, such as (4, 6), got (5, 4)
    """
    pair = isinstance(grid, tuple) and len(grid) == 2 and all(isinstance(side, int) for side in grid)
    expect_type(pair, "grid", "two ints (H, W)", grid)
    height = max((h for h in range(1, int(tokens**0.5) + 1) if tokens % h == 0), default=0)
    such = f", such as ({height}, {tokens // height})" if height else ""
    fits = grid[0] > 0 and grid[1] > 0 and grid[0] * grid[1] == tokens
    expect(fits, "grid", f"(H, W) with H · W = {tokens}{such}", grid)


def _check_distances(distances: Sequence[int] | None, longest: int) -> tuple[int, ...]:
    expect(longest > 1, "plan", "at least two tokens in a row", longest)
    if distances is None:
        return tuple(2**power for power in range((longest - 1).bit_length()) if 2**power < longest)
    for distance in distances:
        expect_int("distances", distance, at_least=1, at_most=longest - 1)
    ascending = len(distances) > 0 and list(distances) == sorted(set(distances))
    expect(ascending, "distances", "different ints that ascend", list(distances))
    return tuple(distances)


def _pairs_at(distance: int, tokens: int, grid: tuple[int, int] | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and second token of every pair at a distance."""
    if grid is None:
        first = torch.arange(max(0, tokens - distance), device=device)
        return first, first + distance
    at = torch.arange(tokens, device=device).view(grid)
    first = torch.cat([at[:, :-distance].flatten(), at[:-distance].flatten()])
    second = torch.cat([at[:, distance:].flatten(), at[distance:].flatten()])
    return first, second


def _group_locality(labels: list[Tensor], grid: tuple[int, int] | None, distances: tuple[int, ...]) -> Locality:
    shares, pairs = [], []
    for distance in distances:
        first, second = _pairs_at(distance, len(labels[0]), grid, labels[0].device)
        both = [(each[first] >= 0) & (each[second] >= 0) for each in labels]
        same = [b & (each[first] == each[second]) for b, each in zip(both, labels, strict=True)]
        count = sum(int(b.sum()) for b in both)
        shares.append(_share(sum(int(s.sum()) for s in same), count))
        pairs.append(count)
    sizes = [each[each >= 0].bincount() for each in labels]
    together = sum(int((n * (n - 1)).sum()) for n in sizes)
    every = sum(int(n.sum()) * (int(n.sum()) - 1) for n in sizes)
    return Locality("groups", distances, tuple(shares), tuple(pairs), _share(together, every))


def _meeting_locality(one: Plan, grid: tuple[int, int] | None, distances: tuple[int, ...]) -> Locality:
    queries, keys, offset = one.num_queries, one.num_keys, int(one.offset[0])
    level = queries == keys and offset == 0
    expect(
        grid is None or level, "grid", "a plan of tokens that attend to each other", f"{queries} queries, {keys} keys"
    )
    wanted = [_queries_and_keys_at(distance, one, grid) for distance in distances]
    met_pairs = visible = 0
    met_at, pairs_at = [0] * len(distances), [0] * len(distances)
    for rows, met in bands(one):
        busy = met.any(-1)
        position = torch.arange(rows.start, rows.stop, device=one.device) + offset
        seen = (position + 1).clamp(0, keys) if one.causal else torch.full_like(position, keys)
        met_pairs, visible = met_pairs + int(met.sum()), visible + int(seen[busy].sum())
        for index, (row, key) in enumerate(wanted):
            here = (row >= rows.start) & (row < rows.stop)
            at, to = row[here] - rows.start, key[here]
            met_at[index] += int(met[at, to].sum())
            pairs_at[index] += int(busy[at].sum())
    shares = tuple(_share(m, n) for m, n in zip(met_at, pairs_at, strict=True))
    return Locality("meetings", distances, shares, tuple(pairs_at), _share(met_pairs, visible))


def _queries_and_keys_at(distance: int, one: Plan, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Every query, and the keys at a distance from its position that it may see."""
    queries, keys, offset = one.num_queries, one.num_keys, int(one.offset[0])
    begin = min(0, offset)  # queries and keys sit on one line, which either may begin and end
    first, second = _pairs_at(distance, max(keys, queries + offset) - begin, grid, one.device)
    row, key = (second, first) if one.causal else (torch.cat([second, first]), torch.cat([first, second]))
    row, key = row + begin - offset, key + begin
    inside = (row >= 0) & (row < queries) & (key >= 0) & (key < keys)
    return row[inside], key[inside]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def _share(some: float, every: int) -> float:
    return some / every if every else math.nan
