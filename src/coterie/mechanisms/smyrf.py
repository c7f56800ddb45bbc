"""Smyrf: asymmetric hashing, sorted and cut into balanced groups."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from coterie import draws
from coterie.checks import expect, expect_choice, expect_int, expect_seed, expect_type
from coterie.mechanisms.base import Mechanism, register
from coterie.plan import Duplicates, Plan, Round
from coterie.planning import hashing, whole
from coterie.planning.orders import balanced_offsets, ceil_div
from coterie.planning.round_errors import Orders, RoundErrors, round_errors, rounds_needed
from coterie.planning.tokens import Tokens

MAX_ROUNDS = 16  # of "auto", unless told


@register("smyrf")
@dataclass(frozen=True)
class Smyrf(Mechanism):
    """SMYRF: queries and keys are hashed by one random projection a round, sorted apart, and cut into the same number
    of groups (supplement §13).

        F(q) = [q; 0; √(M_Q²+M_K²−‖q‖²)],  G(k) = [k; √(M_Q²+M_K²−‖k‖²); 0],  h(u) = u·a,  a ~ N(0, 1)

    so that ‖F(q)−G(k)‖² = 2(M_Q²+M_K²−q·k) depends on the inner product alone. The L = ⌈Nq / cluster_size⌉ groups of a
    round have equal sizes, to within one, on both sides; rounds are merged by their softmax mass (Eq. 15).
    O(H·N·log N + H·N²/L). Causality: `mask`.

    With `rounds="auto"` each head of each sample takes the fewest rounds, up to `max_rounds`, for which

        ‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F ≤ max_error

    on 64 of its queries (one from each of 64 equal stretches), whose exact attention is computed: fewer as training
    makes maps sparse (§16.1). It is also the relative error of the output that values of white noise would get. It is
    an estimate: it does not see masks of pairs, and it counts the queries that it looks at. A head that stays above
    the bound takes `max_rounds`, and a warning says so. A later round of the plan is empty for heads that took fewer;
    `rounds_taken(plan)` counts. With `duplicates="once"` the error goes to 0 as rounds are added; with "count" it need
    not, as pairs that meet more often weigh more. Not in a compiled graph, whose shapes cannot depend on data.
    Looking costs about as much as ten rounds at 4,096 tokens, so this holds a bound rather than saves time;
    `coterie.RoundsSchedule` looks only every so many steps.

    Args:
        rounds: hashing rounds H, or "auto".
        cluster_size: queries in a group; keys follow as Nk / L.
        transform: "smyrf", or an ablation: "none" (E2LSH), "l2-alsh", "xbox", "simple".
        hash: "projection", "e2lsh" (⌊(u·a+b)/r⌋, with r such that the hashes of a round span L buckets) or
            "cross-polytope" (the nearest of L random axes).
        duplicates: a pair met in several rounds counts each time ("count", the paper) or "once".
        seed: of the random draws.
        resample: draw new hashes at every call from PyTorch's generator; `coterie.nn` does so in training only.
        max_error: the bound of `rounds="auto"`, > 0; needed there, and None otherwise.
        max_rounds: the most that "auto" takes, 16 unless told; None otherwise. As many as there are groups cost as much
            as dense attention.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 200, 16).unbind(0)
        >>> coterie.attention(q, k, v, coterie.Smyrf(rounds=2, cluster_size=32)).shape
        torch.Size([1, 4, 200, 16])
    """

    size_field = "cluster_size"

    rounds: int | str = 4
    cluster_size: int = 64
    transform: str = "smyrf"
    hash: str = "projection"
    duplicates: Duplicates = "count"
    seed: int = 0
    resample: bool = False
    max_error: float | None = None
    max_rounds: int | None = None

    def __repr__(self) -> str:
        """The fields that apply: the last two go with rounds="auto" alone."""
        shown = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        return f"Smyrf({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def check(self) -> None:
        self._check_rounds()
        expect_int("cluster_size", self.cluster_size, at_least=1)
        expect_choice("transform", self.transform, hashing.TRANSFORMS)
        expect_choice("hash", self.hash, hashing.HASHES)
        expect_choice("duplicates", self.duplicates, ("count", "once"))
        expect_seed(self.seed)
        expect_type(isinstance(self.resample, bool), "resample", "a bool", type(self.resample).__name__)

    def _check_rounds(self) -> None:
        if not isinstance(self.rounds, str):
            expect_int("rounds", self.rounds, at_least=1)
            for name in ("max_error", "max_rounds"):
                value = getattr(self, name)
                expect(value is None, name, "None where the number of rounds is fixed (rounds='auto' adapts it)", value)
            return
        only_word = f"str {self.rounds!r} (the only word is 'auto')"
        expect_type(self.rounds == "auto", "rounds", "an int", only_word)
        error = self.max_error
        number = isinstance(error, int | float) and not isinstance(error, bool)
        expect_type(number, "max_error", "a number with rounds='auto', such as 0.5", type(error).__name__)
        expect(error is not None and 0 < error < math.inf, "max_error", "a finite number > 0", error)
        if self.max_rounds is not None:
            expect_int("max_rounds", self.max_rounds, at_least=1, at_most=2**14)

    def build(self, tokens: Tokens) -> Plan:
        if isinstance(self.rounds, int):
            if self.hash != "cross-polytope" and whole.possible(tokens.call):
                return self._whole(tokens, self.rounds)
            orders = self._orders(tokens, self.rounds)
            taken = None
        else:
            expect(
                not torch.compiler.is_compiling(),
                "rounds",
                "an int in a compiled graph, whose shapes cannot depend on data",
                "'auto'",
            )
            orders = self._orders(tokens, self.max_rounds or MAX_ROUNDS)
            taken = self._taken(tokens, orders)
        query_offsets, key_offsets = tokens.per_head(orders.query_offsets), tokens.per_head(orders.key_offsets)
        rounds = tuple(
            Round(
                query_order=orders.queries[:, :, r],
                # A head that needs no more rounds is not in the later ones.
                query_offsets=query_offsets if taken is None else query_offsets * (r < taken)[..., None],
                key_order=orders.keys[:, :, r],
                key_start=key_offsets[..., :-1],
                key_stop=key_offsets[..., 1:],
            )
            for r in range(orders.rounds if taken is None else max([1, *taken.flatten().tolist()]))
        )
        return tokens.plan(rounds, duplicates=self.duplicates)

    def _whole(self, tokens: Tokens, rounds: int) -> Plan:
        """The plan in one native call."""
        seed, capacity = self._seed(), self._capacity(tokens)
        queries, keys, query_offsets, key_offsets = whole.smyrf_groups(
            tokens.call,
            tokens.query_mask,
            tokens.key_mask,
            self.cluster_size,
            capacity,
            rounds,
            self.transform,
            self.hash,
            seed,
        )
        start, stop = key_offsets[..., :-1], key_offsets[..., 1:]
        each = zip(queries.unbind(2), keys.unbind(2), strict=True)
        return tokens.plan(
            tuple(Round(query_order, query_offsets, key_order, start, stop) for query_order, key_order in each),
            duplicates=self.duplicates,
            sound=True,
        )

    def _seed(self) -> int | Tensor:
        return draws.fresh_seed() if self.resample else self.seed

    def _capacity(self, tokens: Tokens) -> int:
        """The groups that there is room for."""
        return max(2, ceil_div(tokens.sizes.queries, self.cluster_size))  # 1 would be a graph of its own

    def round_errors(self, tokens: Tokens, rounds: int) -> RoundErrors:
        """What 1, 2, … `rounds` rounds would miss, estimated on sampled queries."""
        return self._errors(tokens, self._orders(tokens, rounds))

    def _errors(self, tokens: Tokens, orders: Orders) -> RoundErrors:
        return round_errors(tokens, orders, once=self.duplicates == "once", seed=self.seed)

    def _taken(self, tokens: Tokens, orders: Orders) -> Tensor:
        """The rounds that each head takes, (B, H)."""
        assert self.max_error is not None
        needed = rounds_needed(self._errors(tokens, orders).per_head(), self.max_error)
        if not bool(needed.reached.all()):
            warnings.warn(
                f"{self}: some heads stay above max_error={self.max_error} with {orders.rounds} rounds. They take all "
                "of these; more max_rounds, a larger cluster_size or a larger max_error would help.",
                stacklevel=2,
            )
        return needed.rounds

    def _orders(self, tokens: Tokens, rounds: int) -> Orders:
        """Queries and keys sorted by hash, and cut into groups."""
        num_queries, num_keys = tokens.query_mask.sum(-1), tokens.key_mask.sum(-1)
        # Never more groups than keys, or some queries would meet nobody.
        groups = torch.minimum((num_queries + self.cluster_size - 1) // self.cluster_size, num_keys).clamp(min=1)
        capacity = self._capacity(tokens)
        return Orders(
            *self._sorted(tokens, groups, capacity, rounds),
            balanced_offsets(num_queries, groups, capacity),
            balanced_offsets(num_keys, groups, capacity),
        )

    def _sorted(self, tokens: Tokens, groups: Tensor, capacity: int, rounds: int) -> tuple[Tensor, Tensor]:
        """Queries and keys by hash, (B, H, rounds, N) each."""
        seed = self._seed()
        seed = seed.to(tokens.device) if isinstance(seed, Tensor) else seed
        steps = tokens.steps
        if self.hash != "cross-polytope":
            return steps.smyrf_orders(tokens, groups, rounds, self.transform, self.hash, seed)
        # About as many buckets, two to an axis, as there are groups.
        columns, most = (groups + 1) // 2, (capacity + 1) // 2
        query_buckets, key_buckets = steps.buckets(tokens, columns, most, rounds, self.transform, seed)
        return (
            steps.order_by(query_buckets, tokens.query_mask[:, None, None]),
            steps.order_by(key_buckets, tokens.key_mask[:, None, None]),
        )


def rounds_taken(plan: Plan) -> Tensor:
    """How many rounds each head of a plan took part in, (B, H) int64.

    >>> import coterie, torch
    >>> q = torch.randn(1, 3, 200, 16)
    >>> rounds_taken(coterie.Smyrf(rounds=2).plan(q, q)).tolist()
    [[2, 2, 2]]
    >>> sure = coterie.Smyrf(rounds="auto", max_error=0.9, cluster_size=50)
    >>> rounds_taken(sure.plan(12 * q, 12 * q)).tolist()  # everybody looks at himself
    [[1, 1, 1]]
    """
    return torch.stack([each.query_offsets[..., -1] > 0 for each in plan.rounds]).sum(0)
