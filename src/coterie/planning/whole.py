"""What several native steps give, and the torch code between them, in one call of the compiled module.

For calls that nobody traces, transforms or profiles: compiled graphs and profiles are made of the single steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from coterie.call import Call
from coterie.compiled import kernels, last_contiguous, mask_bytes, unwatched
from coterie.planning import hashing


def possible(call: Call) -> bool:
    """Whether the call may be planned in this way."""
    return call.backend == "native" and unwatched(call.q, call.k)


def smyrf_groups(
    call: Call,
    query_mask: Tensor,
    key_mask: Tensor,
    cluster_size: int,
    capacity: int,
    rounds: int,
    transform: str,
    hash_name: str,
    seed: int | Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys by hash, (B, H, rounds, N), and where each of their groups begins, (B, H, capacity + 1)."""
    batch, heads, _, queries, keys = call.sizes
    found = _ints(batch, heads, rounds, queries), _ints(batch, heads, rounds, keys)
    offsets = _ints(batch, heads, capacity + 1), _ints(batch, heads, capacity + 1)
    kernels().smyrf_groups(
        last_contiguous(call.q),
        last_contiguous(call.k),
        mask_bytes(query_mask),
        mask_bytes(key_mask),
        cluster_size,
        rounds,
        hashing.TRANSFORMS.index(transform),
        hash_name == "e2lsh",
        int(seed),
        call.layer,
        torch.get_num_threads(),
        *found,
        *offsets,
    )
    return *found, *offsets


class Neighbours(NamedTuple):
    """Blocks of queries and the keys around them."""

    query_order: Tensor  # (B, Nq)
    query_offsets: Tensor  # (B, blocks + 1)
    key_order: Tensor  # (B, Nk)
    key_start: Tensor  # (B, blocks)
    key_stop: Tensor


def neighbours(
    query_mask: Tensor, key_mask: Tensor, offset: Tensor, blocks: int, size: int, back: int, ahead: int
) -> Neighbours:
    """Blocks of `size` queries, each with the keys from `back` before its first to `ahead` behind its last query."""
    batch, queries = query_mask.shape
    found = Neighbours(
        _ints(batch, queries),
        _ints(batch, blocks + 1),
        _ints(batch, key_mask.shape[1]),
        _ints(batch, blocks),
        _ints(batch, blocks),
    )
    masks = mask_bytes(query_mask), mask_bytes(key_mask)
    kernels().neighbours(*masks, offset.contiguous(), size, back, ahead, *found)
    return found


def self_keys(query_mask: Tensor, key_mask: Tensor, offset: Tensor) -> Tensor:
    """As `Plan.self_keys`: the key that a query is level with."""
    found = _ints(*query_mask.shape)
    kernels().self_keys(mask_bytes(query_mask), mask_bytes(key_mask), offset.contiguous(), found)
    return found


class ClusteredTensors(NamedTuple):
    """What the plan of clustered attention is made of, with C clusters; the mean queries meet all keys."""

    far_order: Tensor  # (B, H, C)
    far_offsets: Tensor  # (B, H, 2)
    keys: Tensor  # (B, Nk)
    key_start: Tensor  # (B, 1)
    key_stop: Tensor
    members: Tensor  # (B, H, Nq)
    start: Tensor  # (B, H, C), or twice as many
    stop: Tensor
    answer: Tensor  # (B, H, Nq)


class TopTensors(NamedTuple):
    """What is there besides if members meet the top keys of their cluster themselves."""

    mass: Tensor  # (B, H, Nq)
    skip: Tensor  # (B, H, C, top)
    order: Tensor  # (B, H, Nq + C)
    offsets: Tensor  # (B, H, C + 1)
    keys: Tensor  # (B, H, C · top)
    start: Tensor  # (B, H, C)
    stop: Tensor


def clustered(
    call: Call,
    query_mask: Tensor,
    key_mask: Tensor,
    *,
    clusters: int,
    iterations: int,
    bits: int,
    top: int,
    seed: int,
) -> tuple[ClusteredTensors, TopTensors | None]:
    """`bits` 0: Euclidean clusters; `top` 0: nobody meets top keys."""
    batch, heads, _, queries, keys = call.sizes
    means = clusters * (2 if top else 1)
    far = ClusteredTensors(
        _ints(batch, heads, clusters),
        _ints(batch, heads, 2),
        _ints(batch, keys),
        _ints(batch, 1),
        _ints(batch, 1),
        _ints(batch, heads, queries),
        _ints(batch, heads, means),
        _ints(batch, heads, means),
        _ints(batch, heads, queries),
    )
    near = None
    if top:
        near = TopTensors(
            _ints(batch, heads, queries),
            _ints(batch, heads, clusters, top),
            _ints(batch, heads, queries + clusters),
            _ints(batch, heads, clusters + 1),
            _ints(batch, heads, clusters * top),
            _ints(batch, heads, clusters),
            _ints(batch, heads, clusters),
        )
    kernels().clustered(
        last_contiguous(call.q),
        last_contiguous(call.k),
        mask_bytes(query_mask),
        mask_bytes(key_mask),
        clusters,
        iterations,
        bits,
        top,
        call.scale,
        seed,
        call.layer,
        torch.get_num_threads(),
        list(far),
        [] if near is None else list(near),
    )
    return far, near


class NearFarTensors(NamedTuple):
    """What the plan of near–far attention is made of, G groups in P parts, S clusters of keys."""

    order: Tensor  # (B, H, Nq)
    offsets: Tensor  # (B, H, G + 1)
    bounds: Tensor  # (4, B, H, G): where the far rows of each start and stop, and the near ones
    rows: Tensor  # (B, P, width): the far rows of a part
    picks: Tensor  # (B, H, G · near)
    left: Tensor  # (B, H, G, width)
    clusters: tuple[Tensor, ...]  # order (B, Hk, M), start, stop and if causal positions, (B, Hk, S)
    chunks: tuple[Tensor, ...]  # if causal: order (B, Nq), offsets (B, P + 1), keys (B, Nk), start and stop (B, P)


def near_far(
    call: Call,
    query_mask: Tensor,
    key_mask: Tensor,
    *,
    chunk: int,
    parts: int,
    room: int,
    near: int,
    wide: bool,
    width: int,
    levels: list[int],
    **more: Any,
) -> NearFarTensors:
    """The arguments are those of native/module.cpp."""
    batch, heads, key_heads, queries, keys = call.sizes
    groups, count = parts * room, len(levels) // 6
    clusters = sum(levels[6 * level + 1] * levels[6 * level + 5] for level in range(count))
    of_clusters = [_ints(batch, key_heads, clusters) for _ in range(3 if chunk else 2)]
    of_chunks = (
        (
            _ints(batch, queries),
            _ints(batch, parts + 1),
            _ints(batch, keys),
            _ints(batch, parts),
            _ints(batch, parts),
        )
        if chunk
        else ()
    )
    found = NearFarTensors(
        _ints(batch, heads, queries),
        _ints(batch, heads, groups + 1),
        _ints(4, batch, heads, groups),
        _ints(batch, parts, width),
        _ints(batch, heads, groups * near),
        torch.empty(batch, heads, groups, width, dtype=torch.int32 if wide else torch.int16),
        (_ints(batch, key_heads, count * keys), *of_clusters),
        of_chunks,
    )
    kernels().near_far(
        q=last_contiguous(call.q),
        k=last_contiguous(call.k),
        query_mask=mask_bytes(query_mask),
        key_mask=mask_bytes(key_mask),
        offset=call.offset.contiguous(),
        chunk=chunk,
        parts=parts,
        room=room,
        near=near,
        wide=wide,
        levels=levels,
        scale=call.scale,
        layer=call.layer,
        threads=torch.get_num_threads(),
        **more,
        **found._asdict(),
    )
    return found


def _ints(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="cpu")
