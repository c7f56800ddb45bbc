"""How many hashing rounds a bound on the error needs (supplement §16.1), estimated on sampled queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from coterie import draws
from coterie.draws import Stream

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

ROWS = 64  # queries of a sample that are looked at
_BUDGET = 1 << 22  # exact weights in memory at a time
_FLOOR = -300.0  # scores that are lower than the best by more count as this: their squares are still numbers


class Orders(NamedTuple):
    """Queries and keys sorted by the hash of each round, (B, H, R, N), and where the groups of a round begin and end,
    (B, G + 1)."""

    queries: Tensor
    keys: Tensor
    query_offsets: Tensor
    key_offsets: Tensor

    @property
    def rounds(self) -> int:
        """R."""
        return self.queries.shape[2]


class RoundErrors(NamedTuple):
    """How far the attention map is from the dense one after 1, 2, … R rounds.

        missed = Σ_i ‖σ(P̂)_i − σ(P)_i‖²,   total = Σ_i ‖σ(P)_i‖²   over the sampled queries i

    Attributes:
        missed: (R, B, H) float64.
        total: (B, H) float64.

    >>> errors = RoundErrors(torch.tensor([[[4.0, 1.0]], [[1.0, 0.0]]]), torch.tensor([[4.0, 1.0]]))
    >>> errors.per_head()[:, 0].tolist(), errors.pooled().tolist()
    ([[1.0, 1.0], [0.5, 0.0]], [1.0, 0.447...])
    """

    missed: Tensor
    total: Tensor

    def per_head(self) -> Tensor:
        """‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F of each head, (R, B, H); 0 where there is nothing to attend to."""
        return _relative(self.missed, self.total)

    def pooled(self) -> Tensor:
        """The same norms over all heads and samples together, (R,)."""
        return _relative(self.missed.sum((1, 2)), self.total.sum())


def _relative(missed: Tensor, total: Tensor) -> Tensor:
    return torch.where(total > 0, missed / torch.where(total > 0, total, 1), 0).sqrt()


class Needed(NamedTuple):
    """Rounds that are needed, and whether they are enough."""

    rounds: Tensor
    reached: Tensor


def rounds_needed(errors: Tensor, max_error: float) -> Needed:
    """The first number of rounds whose error (R, …) is within the bound; all R if none is.

    >>> rounds_needed(torch.tensor([[0.9, 0.9], [0.2, 0.8], [0.3, 0.7]]), max_error=0.5)
    Needed(rounds=tensor([2, 3]), reached=tensor([ True, False]))
    """
    beyond = (errors > max_error).long().cumprod(0).sum(0)
    return Needed((beyond + 1).clamp(max=errors.shape[0]), beyond < errors.shape[0])


def sample_queries(tokens: Tokens, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """One real query from each of `count` equal stretches of a sample: rows (B, count), and which of these are used.

    They depend on the seed, the layer and the sample's own length alone; a sample that has fewer queries gives all.
    """
    order, real = tokens.real_queries
    stretches = real.clamp(max=count)
    within = draws.uniform(Stream.SAMPLE, (count,), seed=seed, layer=tokens.layer, device=tokens.device)
    step = torch.arange(count, device=tokens.device)
    used = step < stretches[:, None]
    begin, end = ((step + edge) * real[:, None] // stretches.clamp(min=1)[:, None] for edge in (0, 1))
    place = begin + (within * (end - begin)).floor().long()  # stretches have no query in common
    return order.gather(-1, torch.where(used, place, 0)).long(), used


def round_errors(tokens: Tokens, orders: Orders, *, once: bool, seed: int, rows: int = ROWS) -> RoundErrors:
    """The error of the first 1, 2, … R of these rounds, on sampled queries of each sample and head.

    Row i of σ(P̂) has the weights c_ij·e^{s_ij} / Σ_j c_ij·e^{s_ij}, where c_ij counts the rounds in which i meets j
    (`once`: at most 1); a causal query that meets only the future attends to itself. O(rows·(N·D + R·N/G)) a head.
    """
    sizes = tokens.sizes
    missed = torch.zeros(orders.rounds, sizes.batch, sizes.heads, dtype=torch.float64, device=tokens.device)
    total = torch.zeros(sizes.batch, sizes.heads, dtype=torch.float64, device=tokens.device)
    if sizes.batch * sizes.queries * sizes.keys == 0:
        return RoundErrors(missed, total)
    sampled, used = sample_queries(tokens, rows, seed)
    keys = _finite(tokens.raw_k, tokens.key_mask)
    slot_of_query = torch.empty_like(orders.queries, dtype=torch.int64)
    slots = torch.arange(sizes.queries, device=tokens.device).expand_as(orders.queries)
    slot_of_query.scatter_(-1, orders.queries.long(), slots)
    for part in torch.arange(rows, device=tokens.device).split(
        max(1, _BUDGET // (sizes.batch * sizes.heads * sizes.keys))
    ):
        exact = _Exact.of(tokens, keys, sampled[:, part], used[:, part])
        met = _Met(exact)
        total += met.exact_squares.sum(-1)
        for r in range(orders.rounds):
            rank = slot_of_query[:, :, r].gather(-1, exact.per_head(exact.rows))
            met.add(*_group_keys(orders, r, rank), once)
            missed[r] += met.errors().sum(-1)
    return RoundErrors(missed, total)


def _finite(x: Tensor, mask: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~mask[:, None, :, None], 0)
    return torch.where(wide.isfinite(), wide, 0)


class _Exact(NamedTuple):
    """e^{s_ij} of some queries, relative to their best key; 0 where a key is hidden."""

    rows: Tensor  # (B, S)
    powers: Tensor  # (B, H, S, Nk) float64
    sums: Tensor  # (B, H, S)
    own: Tensor | None  # (B, S, 1): the key that a causal query is level with

    @staticmethod
    def of(tokens: Tokens, keys: Tensor, rows: Tensor, used: Tensor) -> _Exact:
        sizes, dim = tokens.sizes, keys.shape[-1]
        index = rows[:, None, :, None].expand(-1, sizes.heads, -1, dim)
        queries = _finite(tokens.raw_q.gather(2, index), used)
        together = queries.unflatten(1, (sizes.key_heads, -1)).flatten(2, 3)  # heads that share their keys
        scores = (tokens.scale * together @ keys.mT).double().view(*queries.shape[:3], sizes.keys)
        seen = tokens.key_mask[:, None, :] & used[..., None]
        own = None
        if tokens.causal:
            own = tokens.query_positions.gather(-1, rows)[..., None]
            seen = seen & (torch.arange(sizes.keys, device=rows.device) <= own)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        best = scores.amax(-1, keepdim=True)
        scores -= torch.where(best.isfinite(), best, 0)
        powers = torch.where(scores == float("-inf"), 0, scores.clamp(min=_FLOOR).exp())
        return _Exact(rows, powers, powers.sum(-1), own)

    def per_head(self, index: Tensor) -> Tensor:
        """(B, S, …) for every head."""
        return index[:, None].expand(-1, self.powers.shape[1], *index.shape[1:])

    def squares(self) -> Tensor:
        """‖σ(P)_i‖², (B, H, S)."""
        return self.powers.square().sum(-1) / self.sums.square().clamp(min=1)  # the best key alone has e⁰ = 1

    def own_weight(self) -> Tensor | None:
        """e^{s_ii} of a causal query's own key, (B, H, S); 0 if it has none that it may see."""
        if self.own is None:
            return None
        keys = self.powers.shape[-1]
        inside = (self.own >= 0) & (self.own < keys)
        at_own = self.powers.gather(-1, self.per_head(self.own.clamp(0, keys - 1)))
        return torch.where(self.per_head(inside), at_own, 0).squeeze(-1)


def _group_keys(orders: Orders, r: int, rank: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that queries of these ranks (B, H, S) meet in round r: (B, H, S, C), and which of these are used."""
    batch, heads, rows = rank.shape
    group = torch.searchsorted(orders.query_offsets.long().contiguous(), rank.flatten(1).contiguous(), right=True) - 1
    group = group.clamp(max=orders.key_offsets.shape[-1] - 2)  # padding belongs to no group, and counts for nothing
    start, stop = (x.long().gather(-1, group).view_as(rank) for x in _edges(orders.key_offsets))
    widest = int((stop - start).max())
    slots = start[..., None] + torch.arange(widest, device=rank.device)
    used = slots < stop[..., None]
    listed = orders.keys[:, :, r].long().gather(-1, torch.where(used, slots, 0).view(batch, heads, -1))
    return listed.view(batch, heads, rows, widest), used


def _edges(offsets: Tensor) -> Iterator[Tensor]:
    yield offsets[..., :-1]
    yield offsets[..., 1:]


class _Met:
    """Sums over the keys that queries have met so far: Z = Σ c·e, Σ (c·e)² and Σ c·e²."""

    def __init__(self, exact: _Exact) -> None:
        self._powers, self._sums = exact.powers, exact.sums
        self.exact_squares, self._own = exact.squares(), exact.own_weight()
        self._counts = torch.zeros_like(exact.powers, dtype=torch.int16)
        self._z, self._squares, self._cross = (torch.zeros_like(exact.sums) for _ in range(3))

    def add(self, keys: Tensor, used: Tensor, once: bool) -> None:
        """Meet these keys (B, H, S, C), each at most once."""
        power = torch.where(used, self._powers.gather(-1, keys), 0)
        count = self._counts.gather(-1, keys)
        if once:
            power = torch.where(count > 0, 0, power)
            count = torch.zeros_like(count)
        self._z += power.sum(-1)
        self._squares += ((2 * count + 1) * power.square()).sum(-1)
        self._cross += power.square().sum(-1)
        self._counts.scatter_add_(-1, keys, used.to(torch.int16))

    def errors(self) -> Tensor:
        """‖σ(P̂)_i − σ(P)_i‖² = Σ ŵ² − 2·Σ ŵ·w + Σ w², (B, H, S)."""
        z, squares, cross = self._z, self._squares, self._cross
        if self._own is not None:  # met nobody but the future
            alone = z == 0
            z = torch.where(alone, self._own, z)
            squares, cross = (torch.where(alone, self._own.square(), x) for x in (squares, cross))
        safe, sums = (torch.where(x > 0, x, 1) for x in (z, self._sums))
        return (squares / safe.square() - 2 * cross / (safe * sums) + self.exact_squares).clamp(min=0)
