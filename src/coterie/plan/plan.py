"""A plan: who meets whom, written down as tensors."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.checks import expect, expect_int, expect_type, is_int
from coterie.plan.tiles import count_pairs, fold_means, pairs_met
from coterie.tables import facts, output, paragraph

Duplicates = Literal["count", "once"]
_SETTINGS = ("num_queries", "num_keys", "key_heads", "causal", "once")


def _check_index(
    name: str, index: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...] = (torch.int32,)
) -> None:
    """A tensor of this shape, the last size of which may be None for any, and of one of these dtypes."""
    expect_type(isinstance(index, Tensor), name, "a tensor", type(index).__name__)
    got, last = index.shape, shape[-1]
    if len(got) != len(shape) or got[:-1] != shape[:-1] or (last is not None and got[-1] != last):
        expect(False, name, "shape {}", tuple(got), _Shape(shape))
    if index.dtype not in dtypes:
        expect_type(False, name, f"dtype {' or '.join(map(str, dtypes))}", index.dtype)


class _Shape(tuple[int | None, ...]):
    """A shape that is written with "any" for a size that does not matter."""

    def __str__(self) -> str:
        return "(" + ", ".join("any" if size is None else str(size) for size in self) + ")"


def _check_range(name: str, index: Tensor, used: Tensor, limit: int) -> None:
    wrong = used & ((index < 0) | (index >= limit))
    if wrong.any():
        raise ValueError(f"{name}: expected indices in [0, {limit}), got {int(index[wrong][0])}")


def _check_segments(name: str, start: Tensor, stop: Tensor, capacity: int) -> None:
    wrong = ~((start >= 0) & (start <= stop) & (stop <= capacity))
    if wrong.any():
        got = f"start {int(start[wrong][0])}, stop {int(stop[wrong][0])}"
        raise ValueError(f"{name}: expected 0 ≤ start ≤ stop ≤ {capacity}, got {got}")


def _covered(start: Tensor, stop: Tensor, capacity: int) -> Tensor:
    """Which slots of an order tensor lie in some [start, stop)."""
    edges = torch.zeros(*start.shape[:-1], capacity + 1, dtype=torch.int64, device=start.device)
    edges.scatter_add_(-1, start.long(), torch.ones_like(start, dtype=torch.int64))
    edges.scatter_add_(-1, stop.long(), -torch.ones_like(stop, dtype=torch.int64))
    return edges.cumsum(-1)[..., :capacity] > 0


@dataclass(frozen=True, eq=False)
class Round:
    """One round of groups, disjoint in queries.

    In every head, group g holds the query rows `query_order[query_offsets[g] : query_offsets[g + 1]]`; each of them
    meets the key rows `key_order[key_start[g] : key_stop[g]]`. The key ranges of two groups may overlap, so a shared or
    sliding range costs no copy. Slots that no range covers are unused: shapes depend on input shapes alone, never on
    data.

    Attributes:
        query_order: (B, H, Mq) int32; a row ≥ num_queries is a virtual one (a mean of queries).
        query_offsets: (B, H, G + 1) int32, not decreasing, from 0.
        key_order: (B, H, Mk) int32; a row ≥ num_keys is a virtual one (a mean of keys and values).
        key_start, key_stop: (B, H, G) int32.
        bias: (B, H, Mk) float32, added to the scores of that slot of `key_order`.
        skip: (B, H, Mq, E) int32, ascending: keys that the query in that slot does not meet in this round; −1 is none.
        window: (low, high): a pair meets only if low ≤ query position − key position ≤ high.
        counts: (B, H, G, W) int16 or int32: how many keys the w-th key of group g's range stands for. The log of it is
            added to the scores, beside any bias; a count of 0 hides the key from that group. W is at least the longest
            range. So groups that share a range may still weigh its keys differently.
    """

    query_order: Tensor
    query_offsets: Tensor
    key_order: Tensor
    key_start: Tensor
    key_stop: Tensor
    bias: Tensor | None = None
    skip: Tensor | None = None
    window: tuple[int, int] | None = None
    counts: Tensor | None = None

    def __repr__(self) -> str:
        """In short: its tensors are long."""
        shapes = ", ".join(f"{name}={tuple(getattr(self, name).shape)}" for name in ("query_order", "key_order"))
        return f"Round(groups={self.groups}, {shapes}, window={self.window})"

    @property
    def groups(self) -> int:
        """How many groups there is room for; some may be empty."""
        return self.key_start.shape[-1]

    @property
    def query_sizes(self) -> Tensor:
        """Queries in each group, (B, H, G)."""
        return self.query_offsets[..., 1:] - self.query_offsets[..., :-1]

    @property
    def key_sizes(self) -> Tensor:
        """Keys that each group meets, (B, H, G)."""
        return self.key_stop - self.key_start

    def _check_shapes(self, name: str, lead: tuple[int, int]) -> None:
        expect_type(isinstance(self.key_start, Tensor), f"{name}.key_start", "a tensor", type(self.key_start).__name__)
        groups = self.key_start.shape[-1] if self.key_start.ndim else 0
        _check_index(f"{name}.query_order", self.query_order, (*lead, None))
        _check_index(f"{name}.query_offsets", self.query_offsets, (*lead, groups + 1))
        _check_index(f"{name}.key_order", self.key_order, (*lead, None))
        _check_index(f"{name}.key_start", self.key_start, (*lead, groups))
        _check_index(f"{name}.key_stop", self.key_stop, (*lead, groups))
        if self.bias is not None:
            shape, got = tuple(self.key_order.shape), tuple(self.bias.shape)
            expect(got == shape, f"{name}.bias", "shape {}", got, shape)
            expect_type(self.bias.dtype == torch.float32, f"{name}.bias", "dtype torch.float32", self.bias.dtype)
        if self.skip is not None:
            _check_index(f"{name}.skip", self.skip, (*lead, self.query_order.shape[-1], None))
        if self.window is not None:
            whole = len(self.window) == 2 and all(is_int(bound) for bound in self.window)
            expect_type(whole, f"{name}.window", "two ints", self.window)
            expect(self.window[0] <= self.window[1], f"{name}.window", "low ≤ high", self.window)
            fits = self.window[0] >= -(2**63) and self.window[1] < 2**63
            expect(fits, f"{name}.window", "ints of 64 bits", self.window)
        if self.counts is not None:
            _check_index(f"{name}.counts", self.counts, (*lead, groups, None), (torch.int16, torch.int32))

    def _check_values(self, name: str, rows: int, keys: int) -> None:
        offsets, slots = self.query_offsets, self.query_order.shape[-1]
        expect(bool((offsets[..., 0] == 0).all()), f"{name}.query_offsets", "a first offset of 0", "another")
        _check_segments(f"{name}.query_offsets", offsets[..., :-1], offsets[..., 1:], slots)
        _check_segments(f"{name}.key_start, key_stop", self.key_start, self.key_stop, self.key_order.shape[-1])
        used = torch.arange(slots, device=offsets.device) < offsets[..., -1:]
        _check_range(f"{name}.query_order", self.query_order, used, rows)
        covered = _covered(self.key_start, self.key_stop, self.key_order.shape[-1])
        _check_range(f"{name}.key_order", self.key_order, covered, keys)
        # Unused slots all count for a row that does not exist.
        seen = torch.zeros(*offsets.shape[:2], rows + 1, dtype=torch.int32, device=offsets.device)
        seen.scatter_add_(-1, torch.where(used, self.query_order, rows).long(), used.int())
        most = int(seen.max()) if seen.numel() else 0
        expect(most <= 1, f"{name}.query_order", "each query at most once in a round", f"one {most} times")
        if self.bias is not None:
            expect(not bool(self.bias.isnan().any()), f"{name}.bias", "numbers", "NaN")
        if self.skip is not None:
            ascending = bool((self.skip[..., 1:] >= self.skip[..., :-1]).all())
            expect(ascending, f"{name}.skip", "ascending key rows", "an unsorted list")
            _check_range(f"{name}.skip", self.skip, self.skip != -1, keys)
        if self.counts is not None:
            width, longest = self.counts.shape[-1], int(self.key_sizes.max()) if self.key_sizes.numel() else 0
            expect(width >= longest, f"{name}.counts", f"room for {longest} keys, the longest range", width)
            used = torch.arange(width, device=offsets.device) < self.key_sizes[..., None]
            expect(not bool((used & (self.counts < 0)).any()), f"{name}.counts", "no number below 0", "one")


@dataclass(frozen=True, eq=False)
class Means:
    """Virtual rows: row s is the mean of the rows `order[..., start[..., s] : stop[..., s]]`.

    Formed differentiably just before execution. Segments may overlap or coincide; an empty one is the zero vector.

    Attributes:
        order: (B, heads, M) int32; query heads for means of queries, key heads for means of keys and values.
        start, stop: (B, heads, S) int32.
        positions: (B, heads, S) int32: where the mean sits for causality and windows; needed in a causal plan.
    """

    order: Tensor
    start: Tensor
    stop: Tensor
    positions: Tensor | None = None

    def __repr__(self) -> str:
        """In short: its tensors are long."""
        return f"Means(rows={self.rows}, order={tuple(self.order.shape)})"

    @property
    def rows(self) -> int:
        """How many virtual rows there are."""
        return self.start.shape[-1]

    def _check_shapes(self, name: str, lead: tuple[int, int]) -> None:
        expect_type(isinstance(self.start, Tensor), f"{name}.start", "a tensor", type(self.start).__name__)
        rows = self.start.shape[-1] if self.start.ndim else 0
        _check_index(f"{name}.order", self.order, (*lead, None))
        _check_index(f"{name}.start", self.start, (*lead, rows))
        _check_index(f"{name}.stop", self.stop, (*lead, rows))
        if self.positions is not None:
            _check_index(f"{name}.positions", self.positions, (*lead, rows))

    def _check_values(self, name: str, members: int) -> None:
        _check_segments(f"{name}.start, stop", self.start, self.stop, self.order.shape[-1])
        covered = _covered(self.start, self.stop, self.order.shape[-1])
        _check_range(f"{name}.order", self.order, covered, members)

    def includes(self, mask: Tensor) -> bool:
        """Whether any segment holds a row where the (B, members) mask is True."""
        covered = _covered(self.start, self.stop, self.order.shape[-1])
        rows = torch.where(covered, self.order, 0).long()
        at_slot = mask[:, None, :].expand(*rows.shape[:2], -1).gather(-1, rows) if mask.shape[-1] else covered
        return bool((at_slot & covered).any())


@dataclass(frozen=True, eq=False)
class Plan:
    """Who meets whom: what a mechanism writes and the engine executes.

    Attributes:
        num_queries, num_keys: the lengths that the plan is for.
        key_heads: heads of k and v; query head h reads key head h // (heads // key_heads).
        rounds: a pair met in two rounds counts twice unless `duplicates` is "once".
        offset: (B,) int32; query i sits at key position i + offset.
        duplicates: "count" (the papers' merge, Eq. 15 of the supplement) or "once" (softmax over the union).
        causal: a pair meets only if the key's position is ≤ the query's.
        self_keys: (B, Nq) int32: the key that a query attends to if it meets nobody else; −1 is none.
        query_means, key_means: virtual rows, numbered behind the real ones.
        answer: (B, H, Nq) int32: the virtual query row whose answer is merged into this query's; −1 is none.
        mass: (B, H, Nq) int32: the virtual query row whose softmax mass stands for this query's own in that merge.

    Example:
        >>> import coterie, torch
        >>> q = k = torch.randn(1, 2, 100, 16)
        >>> plan = coterie.Smyrf(rounds=2, cluster_size=25).plan(q, k)
        >>> plan.to_dense().sum(-1).unique().tolist()   # each query meets 25 keys, twice
        [50]
    """

    num_queries: int
    num_keys: int
    key_heads: int
    rounds: tuple[Round, ...]
    offset: Tensor
    duplicates: Duplicates = "count"
    causal: bool = False
    self_keys: Tensor | None = None
    query_means: Means | None = None
    key_means: Means | None = None
    answer: Tensor | None = None
    mass: Tensor | None = None

    @classmethod
    def _unchecked(cls, **settings: Any) -> Plan:
        """A plan that is known to be sound: one call of the compiled module has written all of it."""
        plan = object.__new__(cls)
        plan.__dict__.update(settings)  # what is not given has a default, which the class has
        return plan

    def __post_init__(self) -> None:
        expect_type(isinstance(self.rounds, tuple), "rounds", "a tuple of Rounds", type(self.rounds).__name__)
        expect(len(self.rounds) > 0, "rounds", "at least one round", "none")
        lead = self.rounds[0].query_order
        expect_type(isinstance(lead, Tensor), "rounds[0].query_order", "a tensor", type(lead).__name__)
        expect(lead.ndim == 3, "rounds[0].query_order", "3 dimensions (B, H, Mq)", lead.ndim)
        for name in ("num_queries", "num_keys", "key_heads"):
            expect_int(name, getattr(self, name), at_least=0)
        expect_type(isinstance(self.causal, bool), "causal", "a bool", type(self.causal).__name__)
        expect(self.duplicates in ("count", "once"), "duplicates", "'count' or 'once'", repr(self.duplicates))
        fits = self.key_heads > 0 and self.heads % self.key_heads == 0
        expect(fits, "key_heads", "a divisor of the {} query heads", self.key_heads, self.heads)
        for index, each in enumerate(self.rounds):
            each._check_shapes(f"rounds[{index}]", (self.batch, self.heads))
        _check_index("offset", self.offset, (self.batch,))
        if self.self_keys is not None:
            _check_index("self_keys", self.self_keys, (self.batch, self.num_queries))
        windowed = any(each.window is not None for each in self.rounds)
        for name, means, heads in (
            ("query_means", self.query_means, self.heads),
            ("key_means", self.key_means, self.key_heads),
        ):
            if means is not None:
                means._check_shapes(name, (self.batch, heads))
                placed = means.positions is not None or not (self.causal or windowed)
                expect(placed, f"{name}.positions", "positions in a causal or windowed plan", "none")
        for name, rows in (("answer", self.answer), ("mass", self.mass)):
            if rows is not None:
                _check_index(name, rows, (self.batch, self.heads, self.num_queries))
                expect(self.query_means is not None, name, "query_means to point to", "none")
        expect(self.mass is None or self.answer is not None, "mass", "an answer to be merged with", "none")
        here, tensors = self.offset.device, self._tensors()
        if any(x.device != here for x in tensors):
            devices = sorted({str(x.device) for x in tensors})
            expect(False, "plan", "all tensors on one device", devices)

    def _tensors(self) -> list[Tensor]:
        found = [self.offset, self.self_keys, self.answer, self.mass]
        for r in self.rounds:
            found += [r.query_order, r.query_offsets, r.key_order, r.key_start, r.key_stop, r.bias, r.skip, r.counts]
        for means in (self.query_means, self.key_means):
            found += [] if means is None else [means.order, means.start, means.stop, means.positions]
        return [x for x in found if x is not None]

    @property
    def batch(self) -> int:
        """Batch size."""
        return self.rounds[0].query_order.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.rounds[0].query_order.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.offset.device

    @property
    def query_rows(self) -> int:
        """Real and virtual query rows."""
        return self.num_queries + (self.query_means.rows if self.query_means else 0)

    @property
    def key_rows(self) -> int:
        """Real and virtual key rows."""
        return self.num_keys + (self.key_means.rows if self.key_means else 0)

    def validate(self) -> Plan:
        """Check every index and offset; return the plan, or raise ValueError naming what is wrong.

        Shapes, dtypes and devices are checked when a plan is made; this looks at the values.
        """
        for index, each in enumerate(self.rounds):
            each._check_values(f"rounds[{index}]", self.query_rows, self.key_rows)
        if self.query_means is not None:
            self.query_means._check_values("query_means", self.num_queries)
        if self.key_means is not None:
            self.key_means._check_values("key_means", self.num_keys)
        if self.self_keys is not None:
            _check_range("self_keys", self.self_keys, self.self_keys != -1, self.num_keys)
            position = torch.arange(self.num_queries, device=self.device) + self.offset[:, None]
            later = self.causal and bool(((self.self_keys != -1) & (self.self_keys > position)).any())
            expect(not later, "self_keys", "no key after its query in a causal plan", "a later one")
        for name, rows in (("answer", self.answer), ("mass", self.mass)):
            if rows is not None:
                virtual = rows - self.num_queries
                _check_range(f"{name} - num_queries", virtual, rows != -1, self.query_rows - self.num_queries)
        return self

    def to_dict(self) -> dict[str, Tensor]:
        """The plan as a flat dict of tensors, for `torch.save` or a look inside.

        The way back is `Plan.from_dict(torch.load(file, weights_only=True)).validate()`.
        """
        found: dict[str, Tensor] = {}

        def collect(prefix: str, part: Any) -> None:
            for f in fields(part):
                value, name = getattr(part, f.name), prefix + f.name
                if isinstance(value, Tensor):
                    found[name] = value
                elif isinstance(value, Means):
                    collect(name + ".", value)
                elif f.name == "rounds":
                    for index, each in enumerate(value):
                        collect(f"rounds.{index}.", each)
                elif f.name == "duplicates":
                    found["once"] = torch.tensor(value == "once")
                elif value is not None:  # a length, a flag or a window
                    found[name] = torch.tensor(value)

        collect("", self)
        return found

    @staticmethod
    def from_dict(tensors: dict[str, Tensor]) -> Plan:
        """The plan that `to_dict` wrote down."""
        top: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for name, tensor in tensors.items():
            prefix, _, leaf = name.rpartition(".")
            if prefix:
                parts.setdefault(prefix, {})[leaf] = tuple(tensor.tolist()) if leaf == "window" else tensor
            elif leaf in ("num_queries", "num_keys", "key_heads"):
                top[leaf] = int(tensor)
            elif leaf == "causal":
                top[leaf] = bool(tensor)
            elif leaf == "once":
                top["duplicates"] = "once" if bool(tensor) else "count"
            else:
                top[leaf] = tensor
        rounds = [f"rounds.{index}" for index in range(sum(p.startswith("rounds.") for p in parts))]
        for prefix, part in parts.items():
            kind = Means if prefix in ("query_means", "key_means") else Round
            expect(kind is Means or prefix in rounds, "tensors", f"rounds numbered from 0: {rounds}", prefix)
            _check_fields(prefix + ".", kind, part)
        top["rounds"] = tuple(Round(**parts[p]) for p in rounds)
        top.update({name: Means(**parts[name]) for name in ("query_means", "key_means") if name in parts})
        _check_fields("", Plan, top)
        return Plan(**top)

    def to(self, device: torch.device | str) -> Plan:
        """The same plan on another device."""
        return Plan.from_dict({name: x if _is_setting(name) else x.to(device) for name, x in self.to_dict().items()})

    def to_dense(self) -> Tensor:
        """How often each pair meets, (B, H, Nq, Nk) int32: directly, through a mean that stands for either side, or
        because a query that meets nobody else falls back on itself. Quadratic in memory: for tests and pictures."""
        return fold_means(self, count_pairs(self))

    def pairs_met(self) -> Tensor:
        """How many scores the engine computes for each head, (B, H) int64, virtual rows included; O(N) memory."""
        return pairs_met(self)

    def describe(self) -> str:
        """A few lines on the plan's shape and cost.

        >>> import coterie, torch
        >>> q = k = torch.zeros(1, 2, 100, 16)
        >>> print(coterie.Smyrf(rounds=2, cluster_size=25).plan(q, k).describe())
        plan: batch 1, 2 heads on 2, 100 queries, 100 keys, duplicates="count"
          round 0: 4 groups of 25 queries, 25 keys
          round 1: 4 groups of 25 queries, 25 keys
          scores: 5,000 a head, 50.0 % of all pairs
        """
        return "\n".join([self._title(), *(f"  {name}: {said}" for name, said in self._facts())])

    def __repr__(self) -> str:
        """In one line: its tensors are long, and `describe` says more."""
        numbers = ("num_queries", "num_keys", "batch", "heads", "key_heads")
        counted = ", ".join(f"{name}={getattr(self, name)}" for name in numbers)
        return f"Plan({counted}, rounds={len(self.rounds)}, duplicates={self.duplicates!r}, causal={self.causal})"

    def _repr_html_(self) -> str:
        """What a notebook shows: what `describe` says."""
        return output(paragraph(self._title()), facts(self._facts()).html())

    def _title(self) -> str:
        causal = ", causal" if self.causal else ""
        return (
            f"plan: batch {self.batch}, {self.heads} heads on {self.key_heads}, {self.num_queries:,} queries, "
            f'{self.num_keys:,} keys, duplicates="{self.duplicates}"{causal}'
        )

    def _facts(self) -> list[tuple[str, str]]:
        """Its virtual rows, its rounds and its cost, each by name."""
        found = []
        for name, means in (("queries", self.query_means), ("keys", self.key_means)):
            if means is not None:
                sizes = means.stop - means.start
                found.append(("virtual rows", f"{_spread(sizes)} means of {name}"))
        for index, each in enumerate(self.rounds):
            busy = (each.query_sizes > 0) & (each.key_sizes > 0)
            heads = max(1, self.batch * self.heads)
            count = int(busy.sum()) / heads
            window = f", window {each.window}" if each.window is not None else ""
            counts = ", counted" if each.counts is not None else ""
            said = f"{count:,.4g} groups of {_spread(each.query_sizes[busy])} queries, "
            found.append((f"round {index}", f"{said}{_spread(each.key_sizes[busy])} keys{window}{counts}"))
        scores = float(self.pairs_met().double().mean()) if self.batch * self.heads else 0.0
        share = scores / max(1, self.num_queries * self.num_keys)
        found.append(("scores", f"{scores:,.0f} a head, {share:.1%} of all pairs".replace("%", " %")))
        return found


def _check_fields(prefix: str, kind: type[Plan | Round | Means], part: dict[str, Any]) -> None:
    """The entries of a dict must be the fields of a dataclass, and none that it needs may be missing."""
    known = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}
    missing, unknown = sorted(needed - set(part)), sorted(set(part) - known)
    expect(not missing, "tensors", f"all of {', '.join(prefix + n for n in sorted(needed))}", f"no {missing}")
    expect(not unknown, "tensors", f"fields of {kind.__name__}", [prefix + n for n in unknown])


def _is_setting(name: str) -> bool:
    """Whether an entry of `to_dict` is a number of the plan, which stays on the CPU, rather than an index."""
    return name in _SETTINGS or name.endswith(".window")


def _spread(sizes: Tensor) -> str:
    if sizes.numel() == 0:
        return "0"
    low, high = int(sizes.min()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
