"""Near–far decoding: a few new queries and a cache, whose finished chunks are met through near keys and means."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, why_not
from coterie.mechanisms.near_far import merged, tree
from coterie.mechanisms.near_far.finished import Finished, Room

SHORTLIST = 2  # times as many keys as are wanted are looked at themselves
_BYTE = 127  # a query in bytes is so many at most


class Step(NamedTuple):
    """The tokens of one decoding step, the same for all layers.

    Attributes:
        real: (B, N) int32, the positions of real keys in order.
        rank: (B, Nq) int32, how many real keys come before the last one that a query sees; −1: it sees none.
    """

    real: Tensor
    rank: Tensor

    def finished(self, chunk: int) -> list[int]:
        """How many chunks each sample must have finished: all before the previous one."""
        last = self.rank.amax(1) if self.rank.shape[1] else self.rank.new_zeros(self.rank.shape[0])
        return [max(0, rank // chunk - 1) for rank in last.tolist()]


def decode(
    finished: Finished, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, *, least: int = 0
) -> tuple[Tensor, Tensor]:
    """The answers of a few queries at the end of a cache.

    A query whose last key is in chunk c meets the chunks c and c − 1 exactly, as far as it sees them, and the first
    `sinks` keys; of the chunks before, which are finished, it meets the `near` keys that it likes best, and the others
    through the means of their clusters, less those that were picked, in one softmax:

        out = [Σ_{j exact} e^{s_j} v_j + Σ_g n_g e^{scale·q·k̄_g} v̄_g] / [the same sums without v]

    What a query meets depends on its place alone, and not on the calls that the tokens came in. Of twice as many keys
    that it likes best by their codes, the product with the mean of their cluster and that of its bytes with a residual
    of 4 bits, it takes those with the best scores. Of more than `reach` finished keys (6,144, or 24·near) it looks at
    those clusters whose mean one of the query heads that share the key head likes best, until they hold so many.

    Args:
        finished: the clusters of this cache; those that are missing are made.
        q: (B, H, Nq, D).
        k, v: (B, Hk, N, D) all that is cached, the keys of these queries included.
        step: which of them are real, and what each query sees.
        scale: of the scores.
        least: queries that see fewer keys meet all of them exactly.

    Returns:
        out (B, H, Nq, Dv) and picks (B, H, Nq, near) int32, the positions of the near keys, −1 behind the last one.
    """
    options = finished.options
    room, blocks = finished.finish(k, v, step.real, step.finished(options.chunk))
    reach = max(options.near, options.search.looked_at(options.near, k.shape[2], causal=True))
    if q.device.type != "cpu" or k.dtype == torch.float64 or why_not():
        return _reference(finished, q, k, v, step, scale, reach, least)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    picks = torch.empty(*q.shape[:3], options.near, dtype=torch.int32)
    kernels().decode(
        last_contiguous(q),
        last_contiguous(k),
        last_contiguous(v),
        step.real,
        step.rank,
        *room.native(),
        *blocks,
        options.chunk,
        finished.per,
        options.sinks,
        options.near,
        reach,
        tree.WIDER,
        merged.SHOWN,
        least,
        scale,
        torch.get_num_threads(),
        out,
        picks,
    )
    return out.to(v.dtype), picks


def _reference(
    finished: Finished, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, reach: int, least: int
) -> tuple[Tensor, Tensor]:
    """In plain PyTorch, query by query: the definition of what the kernel gives."""
    chunk, sinks, share = finished.options.chunk, finished.options.sinks, q.shape[1] // k.shape[1]
    wide = torch.promote_types(k.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
    picks = torch.full((*q.shape[:3], finished.options.near), -1, dtype=torch.int32, device=q.device)
    for b, g, i in product(range(q.shape[0]), range(k.shape[1]), range(q.shape[2])):
        rank, heads = int(step.rank[b, i]), slice(g * share, (g + 1) * share)
        if rank < 0:
            continue
        begin = 0 if rank + 1 < least else max(0, rank // chunk - 1) * chunk
        query, keys, values = (x.to(wide) for x in (q[b, heads, i], k[b, g], v[b, g]))
        clusters = tree.Tree(finished, b, g, (k.shape[3], v.shape[3]), begin // chunk if begin > sinks else 0)
        nodes = clusters.seen()
        near, inside = _pick(clusters, query, keys, step.real[b], scale, reach)
        picks[b, heads, i, : near.shape[1]] = near.to(torch.int32)
        means = clusters.kept(nodes)
        left = means.sizes.expand(share, -1).clone().scatter_add_(1, inside, -torch.ones_like(inside))
        met = torch.cat([step.real[b, : min(sinks, begin)], step.real[b, begin : rank + 1]]).long()
        near_scores = (keys[near] @ query[..., None]).squeeze(2)
        far_scores = query @ means.keys.to(wide).mT * scale + left.to(wide).log()
        far_scores = torch.where(left > 0, far_scores, float("-inf"))
        scores = torch.cat([query @ keys[met].mT * scale, near_scores * scale, far_scores], 1)
        exact, picked, far = scores.softmax(1).split([len(met), near.shape[1], left.shape[1]], 1)
        far_values = torch.where(left[..., None] > 0, means.values.to(wide), 0)
        answer = exact @ values[met] + (picked[:, None] @ values[near]).squeeze(1)
        out[b, heads, i] = answer + (far[:, None] @ far_values).squeeze(1)
    return out.to(v.dtype), picks


def _pick(
    clusters: tree.Tree, query: Tensor, keys: Tensor, real: Tensor, scale: float, reach: int
) -> tuple[Tensor, Tensor]:
    """The near keys (share, ≤ near) of queries (share, D), and which of the clusters that they see those are in."""
    options, room = clusters.finished.options, clusters.finished.room
    assert room is not None
    if not options.near:
        return (torch.zeros(len(query), 0, dtype=torch.int64, device=query.device),) * 2
    nodes = clusters.search(query, scale, reach)
    sizes, own = clusters.kept(nodes).sizes, nodes.block * clusters.finished.per + nodes.which
    mine = torch.arange(len(sizes), device=query.device).repeat_interleave(sizes)  # of each key that is held
    first = room.offsets[clusters.b, clusters.g, own].long() - (sizes.cumsum(0) - sizes)
    places = torch.arange(len(mine), device=query.device) + first[mine]
    ranks = room.order[clusters.b, clusters.g, places].long() + nodes.block[mine] * options.chunk
    by_rank = ranks.argsort()
    mine, places, ranks = mine[by_rank], places[by_rank], ranks[by_rank]
    likes = clusters.likes(nodes, query, scale)
    likes = torch.where(likes.isfinite(), likes, 0)
    scores = (
        _coded(room, clusters.b, clusters.g, places, torch.where(query.isfinite(), query, 0) * scale) + likes[:, mine]
    )
    scores = scores.clamp(*(sign * torch.finfo(torch.float32).max for sign in (-1, 1)))
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : SHORTLIST * options.near].sort(1).values
    exact = (keys[real.long()[ranks[best]]] @ query[..., None]).squeeze(2) * scale
    exact = exact.nan_to_num(torch.inf, torch.inf, -torch.inf)
    best = best.gather(1, exact.sort(dim=1, descending=True, stable=True).indices[:, : options.near])
    return real.long()[ranks[best]], nodes.seen[mine[best]]


def _coded(room: Room, b: int, g: int, places: Tensor, query: Tensor) -> Tensor:
    """The products of queries (share, D) in bytes with the residuals of keys, (share, n)."""
    top = query.to(torch.float32).abs().amax(-1, keepdim=True)
    whole = (query.to(torch.float32) / torch.where(top > 0, top, 1) * _BYTE).round().to(torch.float64)
    residuals, tops = room.residuals(b, g, places, query.shape[-1])
    return (whole @ residuals.mT * (top.clamp(1e-30, 1e28) / (15 * _BYTE)) * tops).to(query.dtype)
