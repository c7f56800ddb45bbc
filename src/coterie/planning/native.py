"""Planning steps in C++, as torch custom ops: the draws, the arithmetic and the sorting happen inside them.

`Steps` says what each one gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack, cast

import torch
from torch import Tensor

from coterie.checks import expect_keywords
from coterie.compiled import kernels, last_contiguous, mask_bytes, unwatched
from coterie.plan import Means
from coterie.planning import hashing
from coterie.planning.kmeans import Options
from coterie.planning.orders import Parts
from coterie.planning.steps import NearSearch, Seen

if TYPE_CHECKING:
    from coterie.planning.tokens import Tokens

_LIBRARY = torch.library.Library("coterie", "FRAGMENT")
_KINDS = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "list[Tensor]": "Tensor[]",
    "int": "SymInt",
    "bool": "bool",
}
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # what each op is, without the dispatcher
P = ParamSpec("P")
R = TypeVar("R", bound=Tensor | tuple[Tensor, ...])


def _op(*results: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare the op `coterie::NAME` by the function NAME_op that makes its results, still empty.

    That function is the op's schema and what tracing sees; the kernel NAME then fills its results. Arguments reach the
    kernel by name; `results` is what it calls the results.
    """

    def declare(empty: Callable[P, R]) -> Callable[P, R]:
        name = empty.__name__.removesuffix("_op")
        parameters = inspect.signature(empty).parameters.values()
        names = [each.name for each in parameters]
        readers = [(each.name, _reader(each)) for each in parameters if "Tensor" in each.annotation]

        @wraps(empty)
        def fill(*args: P.args, **kwargs: P.kwargs) -> R:
            found = empty(*args, **kwargs)
            given: dict[str, Any] = dict(zip(names, args, strict=True))
            for each, read in readers:
                given[each] = read(given[each])
            given |= zip(results, (found,) if isinstance(found, Tensor) else found, strict=True)
            getattr(kernels(), name)(**given, threads=torch.get_num_threads())
            return found

        # Without the autograd that `custom_op` adds: plans have no gradient, and it costs as much as a small kernel.
        inputs = ", ".join(f"{_KINDS[each.annotation]} {each.name}" for each in parameters)
        tensors = ", ".join(["Tensor"] * len(results))
        _LIBRARY.define(f"{name}({inputs}) -> ({tensors})")
        _LIBRARY.impl(name, fill, "CPU")
        torch.library.register_fake(f"coterie::{name}", empty, lib=_LIBRARY)
        op = getattr(torch.ops.coterie, name).default
        _FUNCTIONS[op] = fill
        return cast(Callable[P, R], op)

    return declare


def run(op: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The op of these arguments, of which the first is one of the call's own tensors, or made from one."""
    return _FUNCTIONS[op](*args, **kwargs) if unwatched(cast(Tensor, args[0])) else op(*args, **kwargs)


def _reader(parameter: inspect.Parameter) -> Callable[[Any], Any]:
    """What makes of a tensor, or a list of them, what the kernels read."""
    if parameter.annotation == "list[Tensor]":
        return lambda tensors: [last_contiguous(each) for each in tensors]
    if parameter.name in ("q", "k", "x"):  # rows may lie anywhere
        return last_contiguous
    if parameter.name.endswith("mask"):
        return mask_bytes
    if parameter.name == "seed":
        return int
    return lambda x: None if x is None else x.contiguous()


def _seed(seed: int | Tensor) -> Tensor:
    """A seed as a tensor, so that a fresh one and a fixed one are the same to a compiled graph."""
    return seed.to("cpu") if isinstance(seed, Tensor) else torch.full((), seed, dtype=torch.int64)


@_op("query_order", "key_order")
def smyrf_orders_op(
    q: Tensor,
    k: Tensor,
    query_mask: Tensor,
    key_mask: Tensor,
    groups: Tensor,
    seed: Tensor,
    rounds: int,
    transform: int,
    e2lsh: bool,
    layer: int,
) -> tuple[Tensor, Tensor]:
    lead = (q.shape[0], q.shape[1], rounds)
    return (
        q.new_empty((*lead, q.shape[2]), dtype=torch.int32),
        q.new_empty((*lead, k.shape[2]), dtype=torch.int32),
    )


def smyrf_orders(
    tokens: Tokens, groups: Tensor, rounds: int, transform: str, hash_name: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    return run(
        smyrf_orders_op,
        tokens.raw_q,
        tokens.raw_k,
        tokens.query_mask,
        tokens.key_mask,
        groups,
        _seed(seed),
        rounds,
        hashing.TRANSFORMS.index(transform),
        hash_name == "e2lsh",
        tokens.layer,
    )


@_op("buckets")
def cross_polytope_op(
    x: Tensor, mask: Tensor, columns: Tensor, seed: Tensor, heads: int, rounds: int, layer: int
) -> Tensor:
    return x.new_empty((x.shape[0], heads, rounds, x.shape[2]), dtype=torch.int64)


def buckets(
    tokens: Tokens, columns: Tensor, capacity: int, rounds: int, transform: str, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    if transform == "none":
        f, g = tokens.raw_q, tokens.raw_k
    else:  # an ablation: the transformed vectors are rounded to float32
        masks = tokens.query_mask[:, None], tokens.key_mask[:, None]
        f, g = (x.float() for x in hashing.transform(transform, tokens.q, tokens.k, *masks))
    heads, drawn = tokens.sizes.heads, _seed(seed)
    return (
        run(cross_polytope_op, f, tokens.query_mask, columns, drawn, heads, rounds, tokens.layer),
        run(cross_polytope_op, g, tokens.key_mask, columns, drawn, heads, rounds, tokens.layer),
    )


@_op("labels")
def hamming_kmeans_op(
    x: Tensor, mask: Tensor, seed: Tensor, clusters: int, iterations: int, bits: int, layer: int
) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=torch.int64)


def hamming_clusters(tokens: Tokens, clusters: int, iterations: int, bits: int, seed: int) -> Tensor:
    return run(
        hamming_kmeans_op, tokens.raw_q, tokens.query_mask, _seed(seed), clusters, iterations, bits, tokens.layer
    )


@_op("labels", "centroids")
def kmeans_op(
    x: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    counts: Tensor | None,
    given: Tensor | None,
    seed: Tensor,
    clusters: int,
    iterations: int,
    sample: int,
    unit: bool,
    per_head: bool,
    layer: int,
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape[:3], dtype=torch.int64),
        x.new_empty((*x.shape[:2], start.shape[1] * clusters, x.shape[3]), dtype=torch.float64),
    )


_KMEANS = tuple(Options.__annotations__)


def kmeans(
    x: Tensor, parts: Parts, clusters: int, iterations: int, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    expect_keywords("kmeans", options, _KMEANS)
    return run(
        kmeans_op,
        x,
        parts.order,
        parts.start,
        parts.stop,
        options.get("counts"),
        options.get("centroids"),
        _seed(options["seed"]),
        clusters,
        iterations,
        options.get("sample", 0),
        False,
        options.get("per_head", True),
        options["layer"],
    )


@_op("means")
def cluster_means_op(x: Tensor, mask: Tensor, labels: Tensor, clusters: int) -> Tensor:
    return x.new_empty((*x.shape[:2], clusters, x.shape[3]), dtype=torch.float64)


def cluster_means(tokens: Tokens, labels: Tensor, clusters: int, *, mask: Tensor | None = None) -> Tensor:
    return run(cluster_means_op, tokens.raw_q, tokens.query_mask if mask is None else mask, labels, clusters)


def routing_centroids(tokens: Tokens, clusters: int, iterations: int, seed: int) -> tuple[Tensor, Tensor]:
    keys = tokens.raw_k.repeat_interleave(tokens.sizes.heads // tokens.sizes.key_heads, 1)
    parts = Parts.whole(torch.cat([tokens.query_mask, tokens.key_mask], -1))
    both = torch.cat([tokens.raw_q, keys], 2)
    bounds = (parts.order, parts.start, parts.stop)
    unit, per_head = True, True
    labels, centroids = run(
        kmeans_op, both, *bounds, None, None, _seed(seed), clusters, iterations, 0, unit, per_head, tokens.layer
    )
    return centroids, labels[:, :, : tokens.sizes.queries]


@_op("top")
def top_keys_op(queries: Tensor, k: Tensor, mask: Tensor, limits: Tensor | None, count: int, unit: bool) -> Tensor:
    return queries.new_empty((*queries.shape[:3], count), dtype=torch.int64)


def top_keys(tokens: Tokens, queries: Tensor, count: int, *, unit: bool = False, causal: bool = False) -> Tensor:
    limits = tokens.query_positions.long() + 1 if causal else None
    return run(top_keys_op, queries, tokens.raw_k, tokens.key_mask, limits, count, unit)


@_op("halved")
def halve_op(x: Tensor, order: Tensor, start: Tensor, stop: Tensor, leaves: Tensor, together: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], order.shape[-1]), dtype=torch.int32)


def halve(x: Tensor, parts: Parts, leaves: Tensor, room: int, together: Tensor) -> Tensor:
    return run(halve_op, x, parts.order, parts.start, parts.stop, leaves, together)


@_op("picks", "left")
def near_keys_op(
    queries: Tensor,
    k: Tensor,
    clusters: list[Tensor],
    visible: Tensor,
    seen: Tensor,
    used: Tensor,
    together: Tensor,
    near: int,
    reach: int,
    wide: bool,
    room: int,
) -> tuple[Tensor, Tensor]:
    lead = queries.shape[:3]
    return (
        queries.new_empty((*lead[:2], lead[2] * near), dtype=torch.int32),
        queries.new_empty((*lead, room), dtype=torch.int32 if wide else torch.int16),
    )


def near_keys(
    tokens: Tokens, queries: Tensor, clusters: Means, seen: Seen, search: NearSearch
) -> tuple[Tensor, Tensor]:
    members = [clusters.order, clusters.start, clusters.stop]
    visible, count = seen.clusters.to(torch.int32), seen.shown.to(torch.int32)
    return run(
        near_keys_op, queries, tokens.raw_k, members, visible, count, seen.groups, seen.together, *search, seen.room
    )


@_op("order")
def order_by_op(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.int32)


def order_by(scores: Tensor, mask: Tensor) -> Tensor:
    return run(order_by_op, scores.to(torch.float32), mask.expand(scores.shape))


@_op("order", "offsets")
def group_by_op(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return (
        labels.new_empty(labels.shape, dtype=torch.int32),
        labels.new_empty((*labels.shape[:-1], groups + 1), dtype=torch.int32),
    )


def group_by(labels: Tensor, mask: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return run(group_by_op, labels.long(), mask.expand(labels.shape), groups)
