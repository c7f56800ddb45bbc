"""One random plan, run by the engine and by the oracle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import coterie
from coterie import Plan
from coterie.plan import Means, Round
from tests.fuzz import oracle

INT32 = (-(2**31), 2**31 - 1)
# Errors are |found − want| / (1 + |want|): of an output or gradient in this dtype. Sums are made in float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class MismatchError(AssertionError):
    """The engine and the oracle disagree."""


@dataclass
class Case:
    """What one call of the engine gets."""

    plan: Plan
    tensors: tuple[Tensor, Tensor, Tensor]
    hidden: tuple[Tensor | None, Tensor | None]  # (B, 1, N, 1): rows of queries and keys that nobody may read
    mask: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    scale: float
    gradients: bool


def draw(seed: int) -> Case:
    """The case of this seed."""
    rng = random.Random(seed)
    values = torch.Generator().manual_seed(seed)
    maybe = lambda share: rng.random() < share  # noqa: E731
    large = maybe(0.003)  # over the edges of the kernels' blocks
    batch, key_heads, shared = (1, 1, 1) if large else (rng.randint(1, 2), rng.randint(1, 2), rng.choice((1, 1, 2)))
    queries, keys = (rng.randint(1, 150), rng.randint(1, 300)) if large else (rng.randint(0, 6), rng.randint(0, 6))
    heads, dim, value_dim = key_heads * shared, rng.choice((1, 3, 5, 8, 16, 17, 32)), rng.choice((1, 2, 16, 19, 80))
    dtype = rng.choices(list(TOLERANCE), (1, 23, 4, 4))[0]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=values)

    causal, windowed = maybe(0.4), maybe(0.4)
    placed = causal or windowed
    offset = [rng.choice((keys - queries, 0, rng.randint(-7, 7), *INT32)) for _ in range(batch)]
    query_means = _means(rng, batch, heads, queries, placed) if maybe(0.3) else None
    key_means = _means(rng, batch, key_heads, keys, placed) if maybe(0.3) else None
    rows = queries + (query_means.rows if query_means else 0)
    key_rows = keys + (key_means.rows if key_means else 0)
    rounds = tuple(
        _round(rng, batch, heads, rows, key_rows, windowed and (r == 0 or maybe(0.5)), randn, large)
        for r in range(rng.randint(1, 3))
    )
    self_keys = None
    if maybe(0.4):
        last = [[min(keys - 1, i + o if causal else keys) for i in range(queries)] for o in offset]
        self_keys = _int32([[rng.randint(-1, max(-1, top)) for top in row] for row in last], (batch, queries))
    answer = mass = None
    if query_means is not None and maybe(0.7):
        answer, mass = (_borrowed(rng, batch, heads, queries, query_means.rows) for _ in range(2))
        mass = mass if maybe(0.5) else None
    plan = Plan(
        num_queries=queries,
        num_keys=keys,
        key_heads=key_heads,
        rounds=rounds,
        offset=_int32(offset, (batch,)),
        duplicates=rng.choice(("count", "once")),
        causal=causal,
        self_keys=self_keys,
        query_means=query_means,
        key_means=key_means,
        answer=answer,
        mass=mass,
    )
    key_mask = _token_mask(rng, batch, keys, key_means) if maybe(0.3) else None
    query_mask = _token_mask(rng, batch, queries, query_means) if maybe(0.3) else None
    mask = None
    if maybe(0.4):
        sizes = (batch, heads, 1 if query_means else queries, 1 if key_means else keys)
        shape = [size if maybe(0.6) else 1 for size in sizes]
        if key_means is None and keys > 0:
            shape[3] = keys
        hide = torch.rand(*shape, generator=values) < 0.3
        if key_means is not None and shape[1:3] == [1, 1]:
            hide[:] = False  # it would be a mask of keys, and hide the members of means
        mask = ~hide if maybe(0.5) else torch.where(hide, -math.inf, randn(*shape)).to(dtype)
    q, k, v = (
        _laid_out(rng, randn(batch, h, n, d).to(dtype))
        for h, n, d in ((heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, value_dim))
    )
    hidden_queries, hidden_keys = (None if x is None else ~x[:, None, :, None] for x in (query_mask, key_mask))
    scale = rng.choice((1 / math.sqrt(dim), 1.0, 0.5, -0.7, 0.0))
    hidden = (hidden_queries, hidden_keys)
    return Case(plan, (q, k, v), hidden, mask, key_mask, query_mask, scale, gradients=maybe(0.15))


def _int32(values: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).view(shape)


def _bounds(rng: random.Random, count: int, size: int) -> tuple[list[int], list[int]]:
    pairs = [sorted((rng.randint(0, size), rng.randint(0, size))) for _ in range(count)]
    return [low for low, _ in pairs], [high for _, high in pairs]


def _means(rng: random.Random, batch: int, heads: int, members: int, placed: bool) -> Means:
    count, slots = rng.randint(0, 3), rng.randint(0, 5) if members else 0
    order: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    positions: list[int] = []
    for _ in range(batch * heads):
        low, high = _bounds(rng, count, slots)
        order += [rng.randrange(members) for _ in range(slots)]
        starts += low
        stops += high
        positions += [rng.choice((rng.randint(-3, members + 3), *INT32)) for _ in range(count)]
    shape = (batch, heads, count)
    return Means(
        _int32(order, (batch, heads, slots)),
        _int32(starts, shape),
        _int32(stops, shape),
        _int32(positions, shape) if placed or rng.random() < 0.3 else None,
    )


def _window(rng: random.Random) -> tuple[int, int]:
    low, high = sorted(rng.choice((rng.randint(-4, 4), 0, -(2**63), 2**63 - 1, 2**62, -(2**31), 2**31)) for _ in "ab")
    return low, high


def _round(
    rng: random.Random, batch: int, heads: int, rows: int, key_rows: int, windowed: bool, randn: Any, large: bool
) -> Round:
    groups, spare = rng.randint(1 if large else 0, 3), rng.randint(0, 2)
    used = [rows if large else rng.randint(0, rows) if groups else 0 for _ in range(batch * heads)]
    slots, key_slots = max(used) + spare, key_rows if large else rng.randint(0, 7) if key_rows else 0
    skips = rng.randint(0, 3) if rng.random() < 0.3 else None
    query_order: list[int] = []
    offsets: list[int] = []
    key_order: list[int] = []
    starts: list[int] = []
    stops: list[int] = []
    skip: list[list[int]] = []
    shared = rng.random() < 0.3  # one range for several groups
    for count in used:
        query_order += rng.sample(range(rows), count) + [rng.choice((-1, *INT32)) for _ in range(slots - count)]
        offsets += [0, *sorted(rng.randint(0, count) for _ in range(groups - 1)), count] if groups else [0]
        low, high = _bounds(rng, groups, key_slots)
        if shared:
            like = [rng.randrange(2) * g for g in range(groups)]
            low, high = [low[g] for g in like], [high[g] for g in like]
        starts += low
        stops += high
        covered = {slot for a, b in zip(low, high, strict=True) for slot in range(a, b)}
        key_order += [rng.randrange(key_rows) if s in covered else rng.choice((-1, *INT32)) for s in range(key_slots)]
        if skips is not None:
            skip += [sorted(rng.randrange(-1, key_rows) for _ in range(skips)) for _ in range(slots)]
    lead = (batch, heads)
    bias = None
    if rng.random() < 0.5:
        bias = 2 * randn(*lead, key_slots)
        bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))) < 0.25] = -math.inf
    return Round(
        _int32(query_order, (*lead, slots)),
        _int32(offsets, (*lead, groups + 1)),
        _int32(key_order, (*lead, key_slots)),
        _int32(starts, (*lead, groups)),
        _int32(stops, (*lead, groups)),
        bias=bias,
        skip=None if skips is None else _int32(skip, (*lead, slots, skips)),
        window=_window(rng) if windowed else None,
        counts=_counts(rng, lead, starts, stops) if rng.random() < 0.4 else None,
    )


def _counts(rng: random.Random, lead: tuple[int, int], starts: list[int], stops: list[int]) -> Tensor:
    sizes = [stop - start for start, stop in zip(starts, stops, strict=True)]
    width = max(sizes, default=0) + rng.randint(0, 2)
    kind = rng.choice((torch.int16, torch.int32))
    most = torch.iinfo(kind).max
    rows = [
        [rng.choice((0, 1, 2, 3, 1023, 1024, most)) if w < size else rng.choice((-1, -most)) for w in range(width)]
        for size in sizes
    ]
    return torch.tensor(rows, dtype=kind).view(*lead, len(sizes) // max(1, lead[0] * lead[1]), width)


def _borrowed(rng: random.Random, batch: int, heads: int, queries: int, means: int) -> Tensor:
    rows = [-1] + [queries + s for s in range(means)]
    return _int32([rng.choice(rows) for _ in range(batch * heads * queries)], (batch, heads, queries))


def _token_mask(rng: random.Random, batch: int, length: int, means: Means | None) -> Tensor:
    """A mask that hides no member of a mean: a plan with one that does is refused, by another test."""
    real = [[rng.random() < 0.7 for _ in range(length)] for _ in range(batch)]
    mask = torch.tensor(real, dtype=torch.bool).view(batch, length)
    if means is not None:
        for b in range(batch):
            mask[b, means.order[b].flatten().long()] = True
    return mask


def _laid_out(rng: random.Random, x: Tensor) -> Tensor:
    """The same numbers in another order in memory."""
    way = rng.randrange(4)
    if way == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == 2:
        return x.mT.contiguous().mT
    return x


@dataclass
class Errors:
    """The largest so far, as shares of what is tolerated."""

    out: float = 0.0
    lse: float = 0.0
    gradient: float = 0.0

    def worse(self, other: Errors) -> Errors:
        """The larger of each."""
        return Errors(max(self.out, other.out), max(self.lse, other.lse), max(self.gradient, other.gradient))


def check(case: Case, backend: str) -> Errors:
    """Run both; raise MismatchError where they are farther apart than is tolerated."""
    dtype = case.tensors[0].dtype
    ours = _leaves(case, poisoned=True)
    q, k, v, *mask = ours
    attended = coterie.grouped_attention(
        q,
        k,
        v,
        case.plan,
        attn_mask=mask[0] if mask else case.mask,
        key_mask=case.key_mask,
        query_mask=case.query_mask,
        scale=case.scale,
        backend=backend,
    )
    theirs = _leaves(case, poisoned=False)
    q, k, v, *mask = theirs
    pair_mask = mask[0] if mask else case.mask
    want = oracle.attention(case.plan, q, k, v, case.scale, pair_mask, case.key_mask, case.query_mask)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    errors = Errors(
        _error("out", attended.out, want[0], TOLERANCE[dtype]),
        _error("lse", attended.lse, want[1], TOLERANCE[accumulated]),
    )
    if case.gradients and attended.out.numel():
        found = _gradients(attended, ours)
        for name, a, b in zip("qkvm", found, _gradients(want, theirs, dtype), strict=False):
            errors.gradient = max(errors.gradient, _error(f"gradient of {name}", a, b, 3 * TOLERANCE[dtype]))
    return errors


def _leaves(case: Case, poisoned: bool) -> list[Tensor]:
    """q, k, v and a float mask, to be differentiated; rows that no mask lets anyone read hold NaN, or 0."""
    wild = math.nan if poisoned else 0.0
    sides = (case.hidden[0], case.hidden[1], case.hidden[1])
    found = [x if hide is None else x.masked_fill(hide, wild) for x, hide in zip(case.tensors, sides, strict=True)]
    if case.mask is not None and case.mask.is_floating_point() and case.gradients:
        found.append(case.mask.clone())
    return [x.detach().requires_grad_(case.gradients) for x in found]


def _error(name: str, found: Tensor, want: Tensor, tolerance: float) -> float:
    if found.shape != want.shape:
        raise MismatchError(f"{name}: shape {tuple(found.shape)}, expected {tuple(want.shape)}")
    if not found.numel():
        return 0.0
    found, want = found.detach().double(), want.detach().double()
    apart = torch.where(found == want, 0.0, (found - want).abs() / (1 + want.abs()))
    worst = float(apart.nan_to_num(nan=math.inf).max()) / tolerance
    if not worst <= 1:
        raise MismatchError(f"{name}: {worst:.3g} times the tolerance of {tolerance:g}\nfound {found}\nexpected {want}")
    return worst


def _gradients(results: Any, leaves: list[Tensor], dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    out, lse = results
    weight, lse_weight = (torch.linspace(-1, 1, x.numel()).view(x.shape) for x in (out, lse))
    weight = weight.to(dtype or out.dtype).to(out.dtype)
    loss = (out * weight).sum() + (torch.where(lse.isfinite(), lse, 0) * lse_weight).sum()
    return torch.autograd.grad(loss, leaves, materialize_grads=True)
