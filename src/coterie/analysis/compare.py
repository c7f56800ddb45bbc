"""The ablation table: mechanisms side by side on the same tensors, at an equal number of keys met."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from coterie.analysis.errors import AttentionErrors, Estimate, errors_of
from coterie.call import Call, Planning
from coterie.checks import check_flag, expect, expect_int, expect_keywords
from coterie.functional import MechanismLike
from coterie.mechanisms import ImprovedClustered, Mechanism, NearFar, Smyrf, as_mechanism, list_mechanisms
from coterie.mechanisms.base import plan_call
from coterie.tables import Table, output, paragraph

# What the papers compare with, by what it is called there.
ABLATION: dict[str, str] = {
    "SMYRF": "smyrf",
    "E2LSH": "smyrf:transform=none,hash=e2lsh",
    "cross-polytope": "smyrf:transform=none,hash=cross-polytope",
    "Reformer": "reformer",
    "L2-ALSH (Shrivastava & Li)": "smyrf:transform=l2-alsh",
    "Xbox (Bachrach et al.)": "smyrf:transform=xbox",
    "Simple-ALSH (Neyshabur & Srebro)": "smyrf:transform=simple",
    "improved clustered": "improved-clustered:space=euclidean",
    "near–far": "near-far",
    "top-k, the oracle": "topk",
}
_MEASURES = ("relative_frobenius", "output", "mass", "total_variation")


class ComparisonRow(NamedTuple):
    """One mechanism: what it was called, what it became, and what it changed."""

    name: str
    mechanism: str
    errors: AttentionErrors

    @property
    def keys_met(self) -> float:
        """Scores that the engine computes for a query, on average."""
        return float(self.errors.keys_met.mean())

    def estimates(self) -> dict[str, Estimate]:
        """The means over heads and samples of every measure."""
        return {name: self.errors.mean(name) for name in ("frobenius", *_MEASURES)}


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found; `print` it, or take its `rows`."""

    rows: tuple[ComparisonRow, ...]
    keys: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON: of each measure the value and the two ends of its interval."""
        rows = [
            {
                "name": row.name,
                "mechanism": row.mechanism,
                "keys_met": row.keys_met,
                **{name: [float(x) for x in found] for name, found in row.estimates().items()},
            }
            for row in self.rows
        ]
        return {"keys": self.keys, "confidence": self.rows[0].errors.confidence, "rows": rows}

    def __str__(self) -> str:
        return f"{self._table().text()}\n{self._legend()}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return output(self._table().html(), paragraph(self._legend()))

    def _table(self) -> Table:
        rows = []
        for row in self.rows:
            found = row.estimates()
            rows.append((row.name, row.mechanism, f"{row.keys_met:,.1f}", *(_written(found[m]) for m in _MEASURES)))
        titles = ("", "mechanism", "keys met", "weights", "output", "mass captured", "misplaced")
        return Table(titles, rows, words=(0, 1))

    def _legend(self) -> str:
        first = self.rows[0].errors
        looked, real = int((first.rows >= 0).sum()), int(first.population.sum())
        sampled = f"{looked:,} of {real:,} queries, ± half of a {first.confidence:.0%} interval"
        return (
            "weights: ‖σ(P̂) − σ(P)‖_F / ‖σ(P)‖_F; output: the same of the answers; mass captured: dense attention's on "
            f"the keys that are met; misplaced: total variation. {'All queries' if looked == real else sampled}; means "
            "over heads."
        )


def _written(found: Estimate) -> str:
    half = float(found.high - found.value)
    return f"{float(found.value):.3f}" + (f" ± {half:.3f}" if half else "")


def compare(
    mechanisms: Sequence[MechanismLike] | dict[str, MechanismLike] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    keys: int | None = None,
    rows: int | None = None,
    seed: int = 0,
    confidence: float = 0.95,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
    layer: int = 0,
    backend: str = "auto",
) -> Comparison:
    """Mechanisms side by side on the same queries.

    Args:
        mechanisms: a list, or a dict of names; None is `ABLATION`: what SMYRF and clustered attention are compared
            with in the papers, near–far and the oracle. With `is_causal`, `ABLATION` goes without improved clustered
            attention, which refuses it; in a list of yours it is an error.
        q, k, v: as in `attention`.
        keys: size each mechanism so that a query meets about so many keys (see `sized`); None takes them as they are.
        rows, seed, confidence: queries to look at and their intervals, as in `attention_errors`; all use the same ones.
        key_mask, query_mask, is_causal, causal_offset, scale, layer, backend: as in `attention`.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.compare import compare
        >>> q, k, v = torch.randn(3, 1, 2, 256, 16).unbind(0)
        >>> found = compare(["smyrf:rounds=2", "topk"], q, k, v, keys=32)
        >>> [(row.mechanism, row.keys_met) for row in found.rows]
        [('smyrf:rounds=2,cluster_size=16', 32.0), ('topk', 32.0)]
        >>> print(found)
                         mechanism                       keys met  weights  output  mass captured  misplaced
        smyrf:rounds=2   smyrf:rounds=2,cluster_size=16      32.0 ...
        topk             topk                                32.0 ...
    """
    check_flag("is_causal", is_causal)
    if mechanisms is None:
        chosen: dict[str, Mechanism] = {name: as_mechanism(spec) for name, spec in ABLATION.items()}
        if is_causal:
            chosen = {name: each for name, each in chosen.items() if each.causality != "none"}
    elif isinstance(mechanisms, dict):
        chosen = {str(name): as_mechanism(each) for name, each in mechanisms.items()}
    else:
        chosen = {str(each): each for each in map(as_mechanism, mechanisms)}
        expect(len(chosen) == len(mechanisms), "mechanisms", "each one once", ", ".join(map(str, mechanisms)))
    expect(len(chosen) > 0, "mechanisms", "at least one", "none")
    masks: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask, "is_causal": is_causal}
    call = Call.of(q, k, v, **masks, causal_offset=causal_offset, scale=scale, layer=layer, backend=backend, runs=False)
    found = []
    for name, mechanism in chosen.items():
        each = mechanism if keys is None else _sized(mechanism, keys, call)
        found.append(ComparisonRow(name, str(each), errors_of(call, each, rows, seed, confidence)))
    return Comparison(tuple(found), keys)


# --- equal keys -------------------------------------------------------------------------------------------------------


def sized(mechanism: MechanismLike, keys: int, q: Tensor, k: Tensor, **planning: Any) -> Mechanism:
    """A mechanism whose queries meet about `keys` keys on these tensors: the nearest that one number of it allows.

    That number is the mechanism's `size_field`: `cluster_size` (Smyrf, at its number of rounds), `chunk_size`
    (Reformer), `window`, `clusters` (Clustered), `topk` (ImprovedClustered), `near` (NearFar), `k` (TopK), or what a
    mechanism of yours names; plans are made and counted to find it. What stands for far keys takes at most a third:
    improved clustered attention gets at most so many clusters that their means cost keys / 3 scores a query, and
    near–far at most keys / 3 key clusters, or chunks of keys / 3 if causal.

    Args:
        mechanism: one with a `size_field`; others cannot be sized.
        keys: scores for a query that are wanted, on average; fewer than there are keys.
        q, k: what to plan for.
        planning: `key_mask`, `is_causal` and so on, as in `Mechanism.plan`.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.compare import sized
        >>> q, k = torch.randn(2, 1, 2, 512, 16).unbind(0)
        >>> str(sized("topk", 96, q, k)), str(sized("smyrf:rounds=2", 96, q, k))
        ('topk:k=96', 'smyrf:rounds=2,cluster_size=51')
    """
    expect_keywords("sized", planning, Planning.__annotations__)
    return _sized(as_mechanism(mechanism), keys, Call.of(q, k, **planning, runs=False))


def _sized(mechanism: Mechanism, keys: int, call: Call) -> Mechanism:
    sizes, field = call.sizes, mechanism.size_field
    expect_int("keys", keys, at_least=1, at_most=max(1, sizes.keys))
    if field is None:
        known = ", ".join(name for name, kind in list_mechanisms().items() if kind.size_field is not None)
        raise ValueError(f"mechanism: expected one of {known} to size for {keys} keys, got {str(mechanism)!r}")
    names = [each.name for each in fields(mechanism)]  # type: ignore[arg-type]
    expect(field in names, f"{mechanism.name}.size_field", "a field of " + ", ".join(names), repr(field))
    fixed = not isinstance(mechanism, Smyrf) or isinstance(mechanism.rounds, int)
    expect(fixed, "mechanism", "a fixed number of rounds to size", str(mechanism))
    frugal = with_small_far_field(mechanism, max(1, keys // 3), call)
    queries = int(call.real_queries.sum())

    def with_size(size: int) -> Mechanism:
        return replace(frugal, **{field: size})  # type: ignore[type-var]

    @cache
    def met(size: int) -> float:
        plan = plan_call(with_size(size), call)
        return float(plan.pairs_met().sum()) / max(1, queries * sizes.heads)

    enough = _first_beyond(met, keys, max(1, sizes.queries, sizes.keys))
    return with_size(min((size for size in (enough - 1, enough) if size >= 1), key=lambda size: abs(met(size) - keys)))


def _first_beyond(met: Callable[[int], float], keys: int, limit: int) -> int:
    """The smallest size up to a limit that meets at least `keys` keys, or the limit; large sizes are tried last."""
    low, high = 1, min(keys, limit)
    while high < limit and met(high) < keys:
        low, high = high + 1, min(2 * high, limit)
    while low < high:
        middle = (low + high) // 2
        if met(middle) >= keys:
            high = middle
        else:
            low = middle + 1
    return low


@singledispatch
def with_small_far_field(mechanism: Mechanism, most: int, call: Call) -> Mechanism:
    """A mechanism of which at most so many scores a query go to what stands for far keys; most have nothing such."""
    return mechanism


@with_small_far_field.register
def _(mechanism: ImprovedClustered, most: int, call: Call) -> Mechanism:
    sizes = call.sizes
    return replace(mechanism, clusters=max(1, min(mechanism.clusters, most * sizes.queries // max(1, sizes.keys))))


@with_small_far_field.register
def _(mechanism: NearFar, most: int, call: Call) -> Mechanism:
    if call.causal:
        return replace(mechanism, chunk=min(mechanism.chunk, most))
    auto = math.ceil(math.sqrt(2 * call.sizes.keys))
    wanted = auto if isinstance(mechanism.key_clusters, str) else mechanism.key_clusters
    return mechanism if wanted <= most else replace(mechanism, key_clusters=most)


__all__ = ["ABLATION", "Comparison", "ComparisonRow", "compare", "sized"]
