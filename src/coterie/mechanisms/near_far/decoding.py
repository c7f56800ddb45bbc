"""Near–far decoding: a few new queries and a cache, whose finished chunks are met through near keys and means."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from coterie.compiled import kernels, last_contiguous, why_not
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
    room = finished.finish(k, v, step.real, step.finished(options.chunk))
    reach = max(options.near, options.search.looked_at(options.near, k.shape[2], causal=True))
    if q.device.type != "cpu" or k.dtype == torch.float64 or why_not():
        return _reference(finished, room, q, k, v, step, scale, reach, least)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32)
    picks = torch.empty(*q.shape[:3], options.near, dtype=torch.int32)
    kernels().decode(
        last_contiguous(q),
        last_contiguous(k),
        last_contiguous(v),
        step.real,
        step.rank,
        *room.native(),
        options.chunk,
        finished.per,
        options.sinks,
        options.near,
        reach,
        least,
        scale,
        torch.get_num_threads(),
        out,
        picks,
    )
    return out.to(v.dtype), picks


def _reference(
    finished: Finished, room: Room, q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, reach: int, least: int
) -> tuple[Tensor, Tensor]:
    """In plain PyTorch, query by query: the definition of what the kernel gives."""
    options, share = finished.options, q.shape[1] // k.shape[1]
    wide = torch.promote_types(k.dtype, torch.float32)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
    picks = torch.full((*q.shape[:3], options.near), -1, dtype=torch.int32, device=q.device)
    for b in range(q.shape[0]):
        for i, rank in enumerate(step.rank[b].tolist()):
            if rank < 0:
                continue
            begin = 0 if rank + 1 < least else max(0, rank // options.chunk - 1) * options.chunk
            query = q[b, :, i].to(wide).unflatten(0, (-1, share))
            near, left = _pick(finished, room, b, query, k[b].to(wide), step.real[b], scale, begin, reach)
            picks[b, :, i, : near.shape[-1]] = near.flatten(0, 1)
            met = torch.cat([step.real[b, : min(options.sinks, begin)], step.real[b, begin : rank + 1]]).long()
            keys, values = (x[b].to(wide) for x in (k, v))
            chosen = near.long()
            near_keys, near_values = (
                x.gather(1, chosen.flatten(1)[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, chosen.shape[1:])
                for x in (keys, values)
            )
            clusters = left.shape[-1]
            scores = torch.cat(
                [
                    query @ keys[:, met].mT * scale,
                    (query[:, :, None] @ near_keys.mT).squeeze(2) * scale,
                    query @ room.means_of_keys(b, clusters, k.shape[3]).to(wide).mT * scale + left.to(wide).log(),
                ],
                -1,
            )
            exact, picked, far = scores.softmax(-1).split([len(met), chosen.shape[-1], clusters], -1)
            answer = exact @ values[:, met] + (picked[:, :, None] @ near_values).squeeze(2)
            out[b, :, i] = (answer + far @ room.means_of_values(b, clusters, v.shape[3]).to(wide)).flatten(0, 1)
    return out.to(v.dtype), picks


def _pick(
    finished: Finished,
    room: Room,
    b: int,
    query: Tensor,
    keys: Tensor,
    real: Tensor,
    scale: float,
    begin: int,
    reach: int,
) -> tuple[Tensor, Tensor]:
    """The near keys (Hk, share, ≤ near) of queries (Hk, share, D), and how many keys each cluster has left."""
    options = finished.options
    far = max(0, begin - options.sinks)
    clusters = begin // options.chunk * finished.per if far else 0
    lead, dim = query.shape[:2], query.shape[-1]
    sizes = room.offsets[b, :, : clusters + 1].diff().long()
    if far == 0 or options.near == 0:
        return query.new_zeros(*lead, 0, dtype=torch.int32), sizes[:, None].expand(*lead, -1)
    cluster = torch.arange(clusters, device=query.device).expand_as(sizes)
    cluster = torch.stack([each.repeat_interleave(n) for each, n in zip(cluster, sizes, strict=True)])  # of each place
    order = room.order[b, :, :far] + cluster // finished.per * options.chunk  # ranks of keys
    likes = query @ room.means_of_keys(b, clusters, dim).to(query.dtype).mT * scale
    likes = torch.where(likes.isfinite(), likes, 0)
    scores = _coded(room, b, far, torch.where(query.isfinite(), query, 0) * scale)
    scores = scores + likes.gather(-1, cluster[:, None].expand_as(scores))
    scores = scores.clamp(*(sign * torch.finfo(torch.float32).max for sign in (-1, 1)))
    if far > reach:
        searched = _searched(likes, sizes, reach)
        scores = scores.masked_fill(~searched.gather(-1, cluster)[:, None], float("-inf"))
    by_rank = order.argsort(-1)[:, None].expand_as(scores)
    exact = query @ keys[:, real[options.sinks : begin].long()].mT * scale
    best = (
        scores.gather(-1, by_rank).sort(dim=-1, descending=True, stable=True).indices[..., : SHORTLIST * options.near]
    )
    searched_too = scores.gather(-1, by_rank.gather(-1, best)) > float("-inf")
    looked_at = torch.where(searched_too, exact.gather(-1, best), float("-inf"))
    shortlist = torch.full_like(exact, float("-inf")).scatter(-1, best, looked_at)
    best = shortlist.nan_to_num(torch.inf, torch.inf, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = by_rank.gather(-1, best[..., : options.near])
    near = real[order.long()][:, None].expand_as(scores).gather(-1, places)
    taken = cluster[:, None].expand_as(scores).gather(-1, places)
    left = sizes[:, None].expand(*lead, -1).clone()
    return near, left.scatter_add_(-1, taken, -torch.ones_like(taken))


def _coded(room: Room, b: int, far: int, query: Tensor) -> Tensor:
    """The products of queries in bytes with the residuals of keys, (Hk, share, far)."""
    top = query.to(torch.float32).abs().amax(-1, keepdim=True)
    whole = (query.to(torch.float32) / torch.where(top > 0, top, 1) * _BYTE).round().to(torch.float64)
    residuals, tops = room.residuals(b, far, query.shape[-1])
    return (whole @ residuals.mT * (top.clamp(1e-30, 1e28) / (15 * _BYTE)) * tops[:, None]).to(query.dtype)


def _searched(likes: Tensor, sizes: Tensor, reach: int) -> Tensor:
    """The clusters (Hk, C) that one of the heads that share them likes best, until they hold `reach` keys."""
    likes = likes.masked_fill(sizes[:, None] == 0, float("-inf"))
    likes = (likes - likes.amax(-1, keepdim=True)).amax(1)
    ranked = likes.sort(dim=-1, descending=True, stable=True).indices
    held = sizes.gather(-1, ranked)
    before = held.cumsum(-1) - held
    return torch.zeros_like(sizes, dtype=torch.bool).scatter(-1, ranked, before < reach) & (sizes > 0)
