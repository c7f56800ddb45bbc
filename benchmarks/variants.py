"""Kinds of calls that decide which code a Triton kernel has in it: what `python -m benchmarks.gpu` compiles.

Each is compiled for groups of 16, 32 and 64 queries, since that is how tiles are chosen: `auto` may take any of these
for any call, as its length and its mechanism will have it.

The first are calls as people make them. Those of `Everything` have what rounds may have, some of it together: each
kernel that `auto` can choose for a mechanism has a part of what one of these has, in a tile of the same size.
`tests/engine/test_variants.py` goes through all mechanisms, masks and settings to see that this is so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import coterie
from benchmarks.measure import peaked_tensors
from coterie import Mechanism
from coterie.call import Call
from coterie.engine.flat import Inputs
from coterie.plan import Means, Plan, Round
from coterie.planning.best_keys import best_keys_op
from coterie.planning.largest import largest_seen
from coterie.planning.lloyd import Listed, kmeans, padded

GROUPS = (16, 32, 64)  # queries of a group
_LENGTH = 256  # of the calls that are compiled: shapes choose the tiles, and groups are as large as in long ones


class Planner(Protocol):
    """What writes a plan: a mechanism, or `Everything`."""

    def plan(self, q: Tensor, k: Tensor, *, is_causal: bool, backend: str) -> Plan:
        """The plan of these queries and keys."""


class Everything(NamedTuple):
    """Groups of so many queries that meet all keys, and have what rounds may have."""

    size: int
    window: bool = True
    skip: bool = True
    counts: bool = False
    means: bool = False

    def plan(self, q: Tensor, k: Tensor, *, is_causal: bool, backend: str) -> Plan:
        """One plan for all heads, so that they can share tiles, if they skip and count nothing."""
        (batch, heads, queries), (key_heads, keys) = q.shape[:3], k.shape[1:3]
        rows, groups = keys + 8 * self.means, -(-queries // self.size)

        def of_heads(x: Tensor, count: int = heads) -> Tensor:
            return x.to(torch.int32).expand(batch, count, -1)

        nothing = torch.zeros(groups)
        each = Round(
            of_heads(torch.arange(queries)),
            of_heads((torch.arange(groups + 1) * self.size).clamp(max=queries)),
            of_heads(torch.arange(rows)),
            of_heads(nothing),
            of_heads(nothing + rows),
            skip=torch.zeros(batch, heads, queries, 2, dtype=torch.int32) if self.skip else None,
            window=(-64, 64) if self.window else None,
            counts=torch.ones(batch, heads, groups, rows, dtype=torch.int32) if self.counts else None,
        )
        start = of_heads(torch.arange(8), key_heads)
        means = Means(of_heads(torch.arange(keys), key_heads), start, start + 1, start) if self.means else None
        offset = torch.zeros(batch, dtype=torch.int32)
        return Plan(queries, keys, key_heads, (each,), offset, causal=is_causal, key_means=means)


class Variant(NamedTuple):
    """A kind of call; `mechanism` makes one with groups of about so many queries."""

    mechanism: Callable[[int], Planner]
    causal: bool = False
    heads: int = 2
    key_heads: int = 2
    queries: int = _LENGTH
    mask: tuple[int, ...] | None = None  # the shape of a float mask, which is differentiated
    padded: bool = False
    dropout: float = 0.0


def _smyrf(size: int) -> Mechanism:
    return coterie.Smyrf(rounds=1, cluster_size=size)


def _once(size: int) -> Mechanism:
    return coterie.Smyrf(rounds=2, cluster_size=size, duplicates="once")


def _near_far(size: int) -> Mechanism:
    return coterie.NearFar(near=32, query_clusters=_LENGTH // size)


def _causal_near_far(size: int) -> Mechanism:
    return coterie.NearFar(near=32, chunk=64, query_clusters=64 // size)


def _full(size: int) -> Mechanism:
    return coterie.Full()


_CAUSAL: dict[str, Any] = {"causal": True, "padded": True}
_POOLED: dict[str, Any] = {"heads": 4, "key_heads": 1, "queries": 16}
VARIANTS: dict[str, Variant] = {
    "smyrf": Variant(_smyrf),
    "smyrf, causal": Variant(_smyrf, causal=True),
    "smyrf, once": Variant(_once),
    "smyrf, padding and dropout": Variant(_smyrf, padded=True, dropout=0.1),
    "near-far": Variant(_near_far),
    "near-far, causal": Variant(_causal_near_far, causal=True),
    "near-far, causal, padding and dropout": Variant(_causal_near_far, causal=True, padded=True, dropout=0.1),
    "improved-clustered": Variant(lambda size: coterie.ImprovedClustered(clusters=_LENGTH // size, topk=32)),
    "local, causal": Variant(lambda size: coterie.Local(window=64), causal=True),
    "local, causal, four heads on one": Variant(
        lambda size: coterie.Local(window=64), causal=True, heads=4, key_heads=1, queries=16
    ),
    "full, a mask of pairs": Variant(_full, mask=(1, 1, _LENGTH, _LENGTH)),
    "full, a bias of keys": Variant(_full, mask=(1, 1, 1, _LENGTH)),
    "a window, causal, padding": Variant(lambda size: Everything(size, skip=False), **_CAUSAL),
    "skipped keys, causal, padding": Variant(lambda size: Everything(size, window=False), **_CAUSAL),
    "means, causal, padding": Variant(lambda size: Everything(size, window=False, skip=False, means=True), **_CAUSAL),
    "everything, four heads on one": Variant(
        lambda size: Everything(size, skip=False, means=True),
        **_CAUSAL,
        **_POOLED,
    ),
    "everything, dropout and a mask of queries": Variant(Everything, mask=(1, 2, _LENGTH, 1), dropout=0.1, **_CAUSAL),
    "means that count, dropout and a mask of queries": Variant(
        lambda size: Everything(size, window=False, skip=False, counts=True, means=True),
        mask=(1, 2, _LENGTH, 1),
        dropout=0.1,
        **_CAUSAL,
    ),
    "everything, dropout and a mask of queries, four heads on one": Variant(
        lambda size: Everything(size, skip=False, means=True), mask=(1, 4, 16, 1), dropout=0.1, **_CAUSAL, **_POOLED
    ),
    "everything, dropout and a mask of pairs": Variant(
        Everything, mask=(1, 1, _LENGTH, _LENGTH), dropout=0.1, **_CAUSAL
    ),
    "everything, dropout and a mask of keys": Variant(Everything, mask=(1, 2, 1, _LENGTH), dropout=0.1, **_CAUSAL),
    "once, causal, padding": Variant(_once, **_CAUSAL),
    "once, dropout and a mask of queries": Variant(_once, mask=(1, 2, _LENGTH, 1), dropout=0.1, **_CAUSAL),
    "once, dropout and a mask of pairs": Variant(_once, mask=(1, 1, _LENGTH, _LENGTH), dropout=0.1, **_CAUSAL),
    "once, dropout and a mask of keys": Variant(_once, mask=(1, 2, 1, _LENGTH), dropout=0.1, **_CAUSAL),
}


KMEANS, TOP_KEYS, NEAR_KEYS = "k-means", "top keys", "near keys"
PLANNING = (KMEANS, TOP_KEYS, NEAR_KEYS)
CALLS = (*VARIANTS, *PLANNING)


def launch(call: str, size: int, dim: int, dtype: torch.dtype) -> None:
    """Launch everything that a call would launch, with groups of `size` queries."""
    if call == KMEANS:
        _cluster(size, dim)
    elif call == TOP_KEYS:
        _pick()
    elif call == NEAR_KEYS:
        _search(dim)
    else:
        _attend(VARIANTS[call], size, dim, dtype)


def _cluster(size: int, dim: int) -> None:
    """k-means in parts of a sequence, and in all of it, with so many clusters; always in float32."""
    rows, _, _ = peaked_tensors(_LENGTH, 2, dim)
    order = torch.arange(_LENGTH, dtype=torch.int32).expand(1, 2, -1)
    for parts in (1, 4):
        edges = torch.arange(parts + 1, dtype=torch.int32)[None] * (_LENGTH // parts)
        listed = Listed(rows, order, edges[:, :-1], edges[:, 1:])
        centroids = torch.zeros(1, 2, parts, size, dim, dtype=torch.float64)
        kmeans(listed, listed, centroids, torch.full((1, parts), size), 1)


def _pick() -> None:
    """The largest scores of all keys; for any head dim."""
    largest_seen(torch.zeros(1, 2, 4, _LENGTH).double(), torch.ones(1, 1, _LENGTH, dtype=torch.bool), 32)


def _search(dim: int) -> None:
    """The best keys in the clusters that groups have chosen."""
    rows = torch.zeros(1, 2, 4, 16, max(32, padded(dim)), dtype=torch.int8)
    keys, scale = rows.new_zeros(1, 2, _LENGTH, rows.shape[-1]), torch.ones(1, 2, _LENGTH)
    order, sizes = torch.zeros(1, 2, _LENGTH, dtype=torch.int32), torch.zeros(1, 2, 4, 40, dtype=torch.int32)
    best_keys_op(rows, keys, scale, order, sizes, sizes, torch.ones(1, 2, 4, 16, 40, dtype=torch.bool), 32)


def _attend(variant: Variant, size: int, dim: int, dtype: torch.dtype) -> None:
    """Forward and backward."""
    from coterie.engine.kernels import gradients, launches

    q, k, _ = peaked_tensors(_LENGTH, variant.heads, dim)
    q, k = q[:, :, : variant.queries], k[:, : variant.key_heads]
    plan = variant.mechanism(size).plan(q, k, is_causal=variant.causal, backend="native")
    settings: dict[str, Any] = {"is_causal": variant.causal, "dropout_p": variant.dropout}
    if variant.mask is not None:
        settings["attn_mask"] = torch.zeros(variant.mask, dtype=dtype)
    if variant.padded:
        settings["key_mask"] = torch.ones(1, _LENGTH, dtype=torch.bool)
        settings["query_mask"] = torch.ones(1, variant.queries, dtype=torch.bool)
    q, k = q.to(dtype), k.to(dtype)
    call = Call.of(q, k, k.clone(), backend="native", **settings)
    if variant.dropout:
        call = replace(call, seed=torch.tensor(5 * 2**33 + 7))
    given = Inputs.of(call, plan)
    out, lse, alone = launches.forward(given)
    gradients.backward(given, out, lse, out, lse, alone, variant.mask is not None)
