"""Random calls of the compiled module, most of them malformed: each must be refused by an exception, or work.

A call starts out well-formed; then some of its arguments are bent: other shapes, dtypes, strides, values, numbers. What
is looked for is a crash, a hang, or an error that is not the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie import compiled

REFUSALS = (ValueError, TypeError, RuntimeError, MemoryError, BufferError, OverflowError)
NUMBERS = (-(2**63), -(2**31), -7, -1, 0, 1, 2, 3, 5, 17, 2**25, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)

Arguments = dict[str, Any]


class UnexpectedError(AssertionError):
    """An op failed in a way that names no argument."""


def draw(seed: int) -> tuple[str, Arguments]:
    """An op and its arguments."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(list(CALLS))
    arguments = CALLS[name](rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        arguments = _bend(rng, arguments)
    return name, arguments


def check(seed: int) -> bool:
    """Make the call of this seed; whether it was accepted."""
    name, arguments = draw(seed)
    try:
        _make(name, arguments)
    except REFUSALS:
        return False
    except Exception as error:
        raise UnexpectedError(f"{name}: {type(error).__name__}: {error}") from error
    return True


def _make(name: str, arguments: Arguments) -> None:
    module = compiled.kernels()
    if name not in ("forward", "backward"):
        getattr(module, name)(**arguments)
        return
    settings = {key: value for key, value in arguments.items() if key in _SETTINGS}
    results = {key: value for key, value in arguments.items() if key in _RESULTS}
    tensors = {key: value for key, value in arguments.items() if key not in _SETTINGS | _RESULTS}
    getattr(module, name)(module.Tensors(**tensors), module.Settings(**settings), **results)


# --- well-formed calls -----------------------------------------------------------------------------------------------


_SETTINGS = frozenset(("causal", "once", "scale", "dropout_p", "seed", "threads"))
_RESULTS = frozenset(("out", "lse", "alone", "grad_out", "grad_lse", "grad_q", "grad_k", "grad_v", "grad_mask"))


def _sizes(rng: random.Random) -> tuple[int, int, int, int, int, int]:
    key_heads = rng.randint(1, 2)
    long = 300 if rng.random() < 0.05 else 9
    return rng.randint(0, 2), key_heads * rng.randint(1, 2), key_heads, rng.randint(0, long), rng.randint(0, long), 8


def _floats(rng: random.Random, *shape: int) -> Tensor:
    x = torch.randn(shape)
    if rng.random() < 0.2 and x.numel():
        x.view(-1)[:: rng.randint(1, 5)] = rng.choice((float("nan"), float("inf"), -float("inf"), 1e38, 1e-42))
    return x.to(rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)))


def _bytes(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.8).to(torch.uint8)


def _ints(high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(0, max(1, high), shape, dtype=dtype)


def _segments(rng: random.Random, batch: int, heads: int, members: int, positions: bool) -> list[Tensor]:
    slots, count = (rng.randint(0, 6) if members else 0), rng.randint(0, 3)
    bounds = torch.randint(0, slots + 1, (2, batch, heads, count)).sort(0).values.to(torch.int32)
    found = [_ints(members, batch, heads, slots), bounds[0], bounds[1]]
    return [*found, _ints(9, batch, heads, count)] if positions else found


def _attention(rng: random.Random) -> tuple[Arguments, int]:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    few = [True, False, False]
    causal = rng.choice(few)
    windowed = [rng.choice(few) for _ in range(rng.randint(0, 2))]
    placed = causal or any(windowed)
    query_means = _segments(rng, batch, heads, queries, placed) if rng.choice(few) else []
    key_means = _segments(rng, batch, key_heads, keys, placed) if rng.choice(few) else []
    rows = queries + (query_means[1].shape[-1] if query_means else 0)
    key_rows = keys + (key_means[1].shape[-1] if key_means else 0)
    rounds, biases, skips, counts, layout = [], [], [], [], []
    for window in windowed:
        groups = rng.randint(1, 3)
        order = torch.stack([torch.randperm(rows, dtype=torch.int32) for _ in range(batch * heads)] or [_ints(1, rows)])
        order = order[: batch * heads].view(batch, heads, rows)
        cuts = torch.randint(0, rows + 1, (batch, heads, groups + 1)).sort(-1).values.to(torch.int32)
        cuts[..., 0] = 0
        slots = rng.randint(0, 9) if key_rows else 0
        bounds = torch.randint(0, slots + 1, (2, batch, heads, groups)).sort(0).values.to(torch.int32)
        rounds += [order, cuts, _ints(key_rows, batch, heads, slots), bounds[0], bounds[1]]
        bias, skip, counted = (rng.choice(few) for _ in range(3))
        biases += [torch.randn(batch, heads, slots)] if bias else []
        skips += [_ints(key_rows, batch, heads, rows, 3).sort(-1).values] if skip else []
        kind = rng.choice((torch.int16, torch.int32))
        counts += [_ints(4, batch, heads, groups, slots, dtype=kind)] if counted else []
        layout += [int(bias), int(skip), int(counted), int(window), *sorted(rng.choices(NUMBERS, k=2))]
    mask = None
    if rng.choice(few):
        shape = [batch, heads, 1 if query_means else queries, 1 if key_means else keys]
        shape = [size if rng.random() < 0.6 else 1 for size in shape]
        mask = _bytes(*shape) if rng.choice(few) else torch.randn(shape)
    arguments = {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        "v": _floats(rng, batch, key_heads, keys, 5),
        "rounds": rounds,
        "biases": biases,
        "skips": skips,
        "counts": counts,
        "layout": layout,
        "offset": _ints(5, batch),
        "self_keys": _ints(keys, batch, queries) if keys and rng.choice(few) else None,
        "query_means": query_means,
        "key_means": key_means,
        "mask": mask,
        "key_mask": _bytes(batch, keys) if rng.choice(few) else None,
        "query_mask": _bytes(batch, queries) if rng.choice(few) else None,
        "causal": causal,
        "once": rng.choice(few),
        "scale": 0.5,
        "dropout_p": rng.choice((0.0, 0.0, 0.5, 1.0)),
        "seed": rng.choice(NUMBERS),
        "threads": rng.randint(1, 3),
        "out": torch.empty(batch, heads, rows, 5),
        "lse": torch.empty(batch, heads, rows),
    }
    arguments["alone"] = None if arguments["self_keys"] is None else _bytes(batch, heads, queries)
    return arguments, rows


def _forward(rng: random.Random) -> Arguments:
    return _attention(rng)[0]


def _backward(rng: random.Random) -> Arguments:
    given, rows = _attention(rng)
    batch, heads = given["q"].shape[:2]
    mask = given["mask"]
    given |= {name: torch.randn(given[name].shape) for name in ("out", "lse")}
    given |= {f"grad_{name}": torch.empty(given[name].shape) for name in "qkv"}
    given |= {"grad_out": _floats(rng, batch, heads, rows, 5), "grad_lse": torch.randn(batch, heads, rows)}
    wanted = mask is not None and mask.is_floating_point() and rng.random() < 0.5
    return given | {"grad_mask": torch.zeros(mask.shape) if wanted else None}


def _drawing(rng: random.Random) -> Arguments:
    return {"seed": rng.choice(NUMBERS), "layer": rng.choice(NUMBERS), "threads": rng.randint(1, 3)}


def _order_by(rng: random.Random) -> Arguments:
    shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 2))] + [rng.randint(0, 50)]
    scores = _floats(rng, *shape).float()
    return {"scores": scores, "mask": _bytes(*shape), "order": _ints(1, *shape), "threads": rng.randint(1, 3)}


def _group_by(rng: random.Random) -> Arguments:
    shape, groups = [rng.randint(0, 3), rng.randint(0, 20)], rng.randint(1, 5)
    return {
        "labels": _ints(groups, *shape, dtype=torch.int64),
        "mask": _bytes(*shape),
        "groups": groups,
        "order": _ints(1, *shape),
        "offsets": _ints(1, shape[0], groups + 1),
        "threads": rng.randint(1, 3),
    }


def _smyrf_orders(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    rounds = rng.randint(0, 3)
    return {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        "query_mask": _bytes(batch, queries),
        "key_mask": _bytes(batch, keys),
        "groups": _ints(4, batch, dtype=torch.int64),
        "rounds": rounds,
        "transform": rng.randint(0, 4),
        "e2lsh": rng.random() < 0.3,
        "query_order": _ints(1, batch, heads, rounds, queries),
        "key_order": _ints(1, batch, heads, rounds, keys),
        **_drawing(rng),
    }


def _smyrf_groups(rng: random.Random) -> Arguments:
    given = _smyrf_orders(rng)
    del given["groups"]
    room = given["q"].shape[:2] + (rng.randint(1, 5),)
    return given | {
        "cluster_size": rng.randint(1, 9),
        "query_offsets": _ints(1, *room),
        "key_offsets": _ints(1, *room),
    }


def _masks(batch: int, queries: int, keys: int) -> dict[str, Tensor]:
    return {"query_mask": _bytes(batch, queries) > 0, "key_mask": _bytes(batch, keys), "offset": _ints(9, batch) - 4}


def _neighbours(rng: random.Random) -> Arguments:
    batch, _, _, queries, keys, _ = _sizes(rng)
    blocks = rng.randint(0, 4)
    return {
        **_masks(batch, queries, keys),
        "block": rng.randint(1, 5),
        "back": rng.randint(-3, 9),
        "ahead": rng.randint(-3, 9),
        "query_order": _ints(1, batch, queries),
        "query_offsets": _ints(1, batch, blocks + 1),
        "key_order": _ints(1, batch, keys),
        "key_start": _ints(1, batch, blocks),
        "key_stop": _ints(1, batch, blocks),
    }


def _self_keys(rng: random.Random) -> Arguments:
    batch, _, _, queries, keys, _ = _sizes(rng)
    return {**_masks(batch, queries, keys), "selves": _ints(1, batch, queries)}


def _near_far(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    chunk, room, near, wide = rng.choice((0, 0, 1, 2, 5)), rng.randint(1, 5), rng.randint(0, 4), rng.random() < 0.5
    parts = -(-queries // chunk) + 1 if chunk else rng.randint(1, 3)
    counts = [[rng.randint(0, 3), rng.randint(0, 2), rng.randint(0, 4), rng.randint(1, 4)] for _ in range(3)]
    levels = [[1, max(1, keys), *counts[0]], [2, keys // 2 + 1, *counts[1]]][: rng.randint(1, 2)] if chunk else []
    levels = levels or [[1, 1, *counts[0]]]
    sinks, clusters = rng.randint(0, 3), sum(each[1] * each[5] for each in levels)
    width = sum(min(each[1], 33) * each[5] for each in levels) + (min(sinks, keys) if chunk else 0)
    groups = parts * room
    lists = [_ints(1, batch, key_heads, clusters) for _ in range(3 if chunk else 2)]
    chunks = [_ints(1, batch, queries), _ints(1, batch, parts + 1), _ints(1, batch, keys)]
    return {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        **_masks(batch, queries, keys),
        "chunk": chunk,
        "groups": counts[2],
        "parts": parts,
        "room": room,
        "in_part": rng.randint(1, 4),
        "levels": [number for each in levels for number in each],
        "iterations": rng.randint(0, 2),
        "key_iterations": rng.randint(0, 2),
        "sample": rng.randint(0, 3),
        "looked_at": rng.randint(0, 9),
        "party": rng.randint(1, 4),
        "near": near,
        "reach": max(1, near) + rng.randint(0, 9),
        "wide": wide,
        "sinks": sinks,
        "scale": rng.random(),
        "order": _ints(1, batch, heads, queries),
        "offsets": _ints(1, batch, heads, groups + 1),
        "bounds": _ints(1, 4, batch, heads, groups),
        "rows": _ints(1, batch, parts, width),
        "picks": _ints(1, batch, heads, groups * near),
        "left": _ints(1, batch, heads, groups, width, dtype=torch.int32 if wide else torch.int16),
        "clusters": [_ints(1, batch, key_heads, len(levels) * keys), *lists],
        "chunks": [*chunks, _ints(1, batch, parts), _ints(1, batch, parts)] if chunk else [],
        **_drawing(rng),
    }


def _clustered(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    clusters, top = rng.randint(1, 9), rng.randint(0, min(3, keys))
    lead, means = (batch, heads), clusters * (2 if top else 1)
    far = [(*lead, clusters), (*lead, 2), (batch, keys), (batch, 1), (batch, 1), (*lead, queries)]
    far += [(*lead, means), (*lead, means), (*lead, queries)]
    near = [(*lead, queries), (*lead, clusters, top), (*lead, queries + clusters), (*lead, clusters + 1)]
    near += [(*lead, clusters * top), (*lead, clusters), (*lead, clusters)]
    masks = _masks(batch, queries, keys)
    del masks["offset"]
    return {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        **masks,
        "clusters": clusters,
        "iterations": rng.randint(0, 3),
        "bits": rng.choice((0, 1, 63, 70)),
        "top": top,
        "scale": rng.random(),
        "far": [_ints(1, *shape) for shape in far],
        "near": [_ints(1, *shape) for shape in near] if top else [],
        **_drawing(rng),
    }


def _borrow_answers(rng: random.Random) -> Arguments:
    batch, heads, _, queries, means, dim = _sizes(rng)
    rows, lead = queries + means, (batch, heads, queries)
    return {
        "out": torch.randn(batch, heads, rows, dim),
        "lse": torch.randn(batch, heads, rows),
        "answer": _ints(rows + 1, *lead) - 1,
        "mass": _ints(rows + 1, *lead) - 1 if rng.random() < 0.5 else None,
        "threads": rng.randint(1, 3),
        "merged": torch.empty(*lead, dim),
        "masses": torch.empty(lead),
    }


def _parts(rng: random.Random, batch: int, rows: int) -> dict[str, Tensor]:
    cuts = torch.randint(0, rows + 1, (batch, rng.randint(0, 3) + 1)).sort(-1).values.to(torch.int32)
    order = torch.stack([torch.randperm(rows, dtype=torch.int32) for _ in range(batch)] or [_ints(1, rows)])[:batch]
    return {"order": order.contiguous(), "start": cuts[:, :-1].contiguous(), "stop": cuts[:, 1:].contiguous()}


def _kmeans(rng: random.Random) -> Arguments:
    batch, heads, _, rows, _, dim = _sizes(rng)
    bounds, clusters = _parts(rng, batch, rows), rng.randint(1, 20)
    parts = bounds["start"].shape[1]
    centroids = (batch, heads, parts * clusters, dim)
    return {
        "x": _floats(rng, batch, heads, rows, dim),
        **bounds,
        "counts": _ints(clusters + 2, batch, parts, dtype=torch.int64) if rng.random() < 0.5 else None,
        "given": _floats(rng, *centroids).double() if rng.random() < 0.3 else None,
        "clusters": clusters,
        "iterations": rng.randint(0, 3),
        "sample": rng.randint(0, 3),
        "unit": rng.random() < 0.5,
        "per_head": rng.random() < 0.5,
        "labels": _ints(1, batch, heads, rows, dtype=torch.int64),
        "centroids": torch.empty(centroids, dtype=torch.float64),
        **_drawing(rng),
    }


def _hamming_kmeans(rng: random.Random) -> Arguments:
    batch, heads, _, rows, _, dim = _sizes(rng)
    return {
        **_rows(rng, batch, heads, rows, dim),
        "clusters": rng.randint(1, 40),
        "iterations": rng.randint(0, 3),
        "bits": rng.choice((1, 63, 64, 65, 130)),
        "labels": _ints(1, batch, heads, rows, dtype=torch.int64),
        **_drawing(rng),
    }


def _cluster_means(rng: random.Random) -> Arguments:
    batch, heads, _, rows, _, dim = _sizes(rng)
    clusters = rng.randint(1, 5)
    return {
        **_rows(rng, batch, heads, rows, dim),
        "labels": _ints(clusters, batch, heads, rows, dtype=torch.int64),
        "clusters": clusters,
        "threads": rng.randint(1, 3),
        "means": torch.empty(batch, heads, clusters, dim, dtype=torch.float64),
    }


def _rows(rng: random.Random, batch: int, heads: int, rows: int, dim: int) -> Arguments:
    return {"x": _floats(rng, batch, heads, rows, dim), "mask": _bytes(batch, rows)}


def _queries_and_keys(
    rng: random.Random, queries: tuple[int, ...], keys: tuple[int, ...], dtype: torch.dtype
) -> Arguments:
    return {"queries": _floats(rng, *queries).to(dtype), "k": _floats(rng, *keys)}


def _top_keys(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    count = rng.randint(0, 12)
    limits = torch.tensor([rng.choice(NUMBERS) for _ in range(batch * queries)], dtype=torch.int64)
    return {
        **_queries_and_keys(rng, (batch, heads, queries, dim), (batch, key_heads, keys, dim), torch.float64),
        "mask": _bytes(batch, keys),
        "limits": limits.view(batch, queries) if rng.random() < 0.5 else None,
        "count": count,
        "unit": rng.random() < 0.5,
        "threads": rng.randint(1, 3),
        "top": _ints(1, batch, heads, queries, count, dtype=torch.int64),
    }


def _near_keys(rng: random.Random) -> Arguments:
    batch, heads, key_heads, _, keys, dim = _sizes(rng)
    slots, count = (rng.randint(0, 40) if keys else 0), rng.randint(0, 5)
    edges = torch.randint(0, slots + 1, (batch, key_heads, count + 1), dtype=torch.int32).sort(-1).values
    clusters = [_ints(keys, batch, key_heads, slots), edges[..., :-1].clone(), edges[..., 1:].clone()]
    chunks, share, width, near = rng.randint(0, 3), rng.randint(0, 12), rng.randint(0, count), rng.randint(0, 5)
    groups = chunks * share
    wide, room = rng.random() < 0.5, width + rng.randint(0, 2)
    return {
        **_queries_and_keys(rng, (batch, heads, groups, dim), (batch, key_heads, keys, dim), torch.float32),
        "clusters": clusters,
        "visible": torch.rand(batch, chunks, count).argsort(-1)[..., :width].sort(-1).values.to(torch.int32),
        "seen": _ints(width + 1, batch, chunks),
        "used": _ints(share + 1, batch, chunks, dtype=torch.int64),
        "together": _ints(4, batch, chunks, dtype=torch.int64) + 1,
        "near": near,
        "reach": max(1, near) + rng.randint(0, 9),
        "wide": wide,
        "room": room,
        "threads": rng.randint(1, 3),
        "picks": _ints(1, batch, heads, groups * near),
        "left": _ints(1, batch, heads, groups, room, dtype=torch.int32 if wide else torch.int16),
    }


def _halve(rng: random.Random) -> Arguments:
    batch, heads, _, rows, _, dim = _sizes(rng)
    parts = _parts(rng, batch, rows)
    return {
        "x": _floats(rng, batch, heads, rows, dim),
        **parts,
        "leaves": _ints(9, batch, parts["start"].shape[1], dtype=torch.int64),
        "together": _ints(4, batch, dtype=torch.int64) + 1,
        "threads": rng.randint(1, 3),
        "halved": _ints(1, batch, heads, rows),
    }


def _cross_polytope(rng: random.Random) -> Arguments:
    batch, heads, key_heads, rows, _, dim = _sizes(rng)
    rounds = rng.randint(0, 2)
    return {
        **_rows(rng, batch, key_heads, rows, dim),
        "columns": _ints(20, batch, dtype=torch.int64),
        "heads": heads,
        "rounds": rounds,
        "buckets": _ints(1, batch, heads, rounds, rows, dtype=torch.int64),
        **_drawing(rng),
    }


def _room(batch: int, heads: int, chunks: int, chunk: int, per: int, dim: int, sinks: int) -> Arguments:
    """Finished chunks, all keys of each in its first cluster."""
    places, clusters, wide = -(-chunks * chunk // 16) * 16, chunks * per, -(-dim // 16) * 16
    ends = [max(0, (c // per + 1) * chunk - sinks) for c in range(clusters)]
    return {
        "codes": _ints(256, batch, heads, places // 16, wide // 8, 16, 4).to(torch.uint8),
        "tops": _ints(2**15, batch, heads, places).to(torch.uint16),
        "order": _ints(chunk, batch, heads, places).to(torch.uint8 if chunk < 3 else torch.int32),
        "offsets": torch.tensor([0, *ends], dtype=torch.int32).expand(batch, heads, -1).contiguous(),
        "mean_keys": _ints(2**15, batch, heads, clusters, wide).to(torch.int16),
        "mean_values": _ints(2**15, batch, heads, clusters, wide).to(torch.int16),
        "key_steps": torch.rand(batch, heads, clusters),
        "value_steps": torch.rand(batch, heads, clusters),
    }


def _blocks(batch: int, heads: int, chunks: int, per: int, dim: int) -> Arguments:
    """Blocks of chunks that are far away."""
    blocks, wide = chunks // 4 + chunks // 16 + chunks // 64, -(-dim // 16) * 16
    return {
        "labels": _ints(per, batch, heads, blocks, 4 * per),
        "block_sizes": _ints(9, batch, heads, blocks * per),
        "block_keys": _ints(2**15, batch, heads, blocks * per, wide).to(torch.int16),
        "block_values": _ints(2**15, batch, heads, blocks * per, wide).to(torch.int16),
        "block_key_steps": torch.rand(batch, heads, blocks * per),
        "block_value_steps": torch.rand(batch, heads, blocks * per),
    }


def _decode(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    chunk, per, sinks, near = rng.randint(1, 4), rng.randint(1, 2), rng.randint(0, 2), rng.randint(0, 5)
    rank = _ints(keys + 1, batch, queries) - 1
    return {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        "v": _floats(rng, batch, key_heads, keys, dim),
        "real": torch.arange(keys, dtype=torch.int32).expand(batch, -1).contiguous(),
        "rank": rank,
        **_room(batch, key_heads, keys // chunk, chunk, per, dim, sinks),
        **_blocks(batch, key_heads, keys // chunk, per, dim),
        "chunk": chunk,
        "per": per,
        "sinks": sinks,
        "near": near,
        "reach": max(1, near) + rng.randint(0, 9),
        "wider": rng.randint(1, 4),
        "shown": rng.randint(1, 3),
        "least": rng.randint(0, 9),
        "scale": rng.random(),
        "threads": rng.randint(1, 3),
        "out": torch.zeros(batch, heads, queries, dim),
        "picks": _ints(1, batch, heads, queries, near) if rng.random() < 0.5 else None,
    }


def _decode_all(rng: random.Random) -> Arguments:
    batch, heads, key_heads, queries, keys, dim = _sizes(rng)
    return {
        "q": _floats(rng, batch, heads, queries, dim),
        "k": _floats(rng, batch, key_heads, keys, dim),
        "v": _floats(rng, batch, key_heads, keys, dim),
        "real": _ints(2, batch, keys).to(torch.uint8) if rng.random() < 0.5 else None,
        "seen": _ints(keys + 1, batch, queries),
        "scale": rng.random(),
        "threads": rng.randint(1, 3),
        "out": torch.zeros(batch, heads, queries, dim),
    }


def _finish(rng: random.Random) -> Arguments:
    batch, _, heads, _, keys, dim = _sizes(rng)
    clusters = rng.randint(1, 3)
    return {
        "k": _floats(rng, batch, heads, keys, dim),
        "v": _floats(rng, batch, heads, keys, dim),
        "labels": _ints(clusters, batch, heads, keys, dtype=torch.int64),
        "samples": torch.arange(batch),
        "first_place": rng.randint(0, 2),
        "first_rank": rng.randint(0, 2),
        "first_cluster": rng.randint(0, 2),
        "clusters": clusters,
        "chunk": rng.randint(1, 5),
        "threads": rng.randint(1, 3),
        **_room(batch, heads, 5, keys // 3 + 1, 1, dim, 0),
    }


CALLS: dict[str, Callable[[random.Random], Arguments]] = {
    "forward": _forward,
    "backward": _backward,
    "order_by": _order_by,
    "group_by": _group_by,
    "smyrf_orders": _smyrf_orders,
    "smyrf_groups": _smyrf_groups,
    "neighbours": _neighbours,
    "self_keys": _self_keys,
    "near_far": _near_far,
    "clustered": _clustered,
    "borrow_answers": _borrow_answers,
    "kmeans": _kmeans,
    "halve": _halve,
    "hamming_kmeans": _hamming_kmeans,
    "cluster_means": _cluster_means,
    "top_keys": _top_keys,
    "near_keys": _near_keys,
    "cross_polytope": _cross_polytope,
    "decode": _decode,
    "decode_all": _decode_all,
    "finish": _finish,
}


# --- bent ones -------------------------------------------------------------------------------------------------------


def _bend(rng: random.Random, arguments: Arguments) -> Arguments:
    name = rng.choice(list(arguments))
    value = arguments[name]
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        bent: Any = [*value[:at], _bent(rng, value[at]), *value[at + 1 :]]
    elif isinstance(value, list):
        bent = rng.choice((value[:-1], value + value[:1], []))
    else:
        bent = _bent(rng, value)
    return arguments | {name: bent}


def _bent(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        # Thousands of threads, or memory for millions of clusters, are refused; hundreds would only be slow.
        return rng.choice(NUMBERS)
    if isinstance(value, float):
        return rng.choice((float("nan"), float("inf"), -1.0, 0.0, 1.0, 2.0, 1e300))
    if value is None:
        shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 4))]
        return torch.zeros(shape, dtype=rng.choice(DTYPES))
    if max(value.shape, default=0) > 1 << 20:  # bent already: one number, seen many times
        return value
    return rng.choice(BENDS)(rng, value)


def _other_shape(rng: random.Random, x: Tensor) -> Tensor:
    shape = list(x.shape)
    if shape and rng.random() < 0.7:
        at = rng.randrange(len(shape))
        shape[at] = max(0, shape[at] + rng.choice((-2, -1, 1, 2)))
    elif rng.random() < 0.5:
        shape.insert(rng.randint(0, len(shape)), rng.randint(0, 2))
    else:
        rng.shuffle(shape)
    return _ints(3, *shape).to(x.dtype)


def _other_strides(rng: random.Random, x: Tensor) -> Tensor:
    """The same shape over other memory: transposed, every other element, or all of it one element."""
    way = rng.randrange(3)
    if way == 0 and x.ndim >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if way == 1 and x.ndim:
        return torch.stack([x, x], -1).flatten(-2)[..., ::2]
    return torch.zeros((), dtype=x.dtype).expand(x.shape)


def _other_values(rng: random.Random, x: Tensor) -> Tensor:
    if not x.numel():
        return x
    if x.dtype in (torch.bool, torch.uint8):
        return torch.full_like(x, rng.randrange(2))
    if x.is_floating_point():
        return torch.full_like(x, rng.choice((float("nan"), float("inf"), -float("inf"), 6e4, -1e-40)))
    x, info = x.clone().contiguous(), torch.iinfo(x.dtype)
    x.view(-1)[rng.randrange(x.numel())] = max(info.min, min(info.max, rng.choice(NUMBERS)))
    return x


def _cut(rng: random.Random, x: Tensor) -> Tensor:
    if not x.ndim:
        return x[None]
    axis = rng.randrange(x.ndim)
    return x.narrow(axis, 0, rng.randint(0, x.shape[axis]))


BENDS: tuple[Callable[[random.Random, Tensor], Any], ...] = (
    _other_shape,
    _other_shape,
    _other_strides,
    _other_values,
    _other_values,
    _cut,
    lambda rng, x: x.to(rng.choice(DTYPES)),
    lambda rng, x: None,
    lambda rng, x: x.expand(2**33, *x.shape),
)
