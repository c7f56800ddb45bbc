"""What a plan means, written down a second time: loops over pairs, then dense softmax in float64.

Nothing here imports from coterie. A plan is read attribute by attribute, as its documentation describes it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention(
    plan: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    pair_mask: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the real queries in float64; differentiable in q, k, v and a float mask."""
    q, k, v = (x.double() for x in (q, k, v))
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    queries, keys = q.shape[2], k.shape[2]
    q, q_at = _behind(q, plan.query_means, 1)
    k, k_at = _behind(k, plan.key_means, shared)
    v, _ = _behind(v, plan.key_means, shared)
    log_weights = torch.full((q.shape[0], heads, q.shape[2], k.shape[2]), -math.inf, dtype=torch.float64)
    for b in range(q.shape[0]):
        offset = int(plan.offset[b])
        for h in range(heads):
            query_at = [i + offset for i in range(queries)] + (q_at[b][h] if q_at else [])
            key_at = list(range(keys)) + (k_at[b][h] if k_at else [])
            allowed = _allowed(pair_mask, key_mask, query_mask, b, h, queries, keys)
            log_weights[b, h] = _log_weights(plan, b, h, q.shape[2], k.shape[2], query_at, key_at, allowed)
    scores = scale * (q @ k.mT) + log_weights
    if pair_mask is not None and pair_mask.is_floating_point():
        # A mask of keys alone reaches virtual queries too; there it has one row for all.
        finite = torch.where(pair_mask == -math.inf, 0, pair_mask.double())
        rows, columns = q.shape[2] - queries, k.shape[2] - keys
        finite = finite.expand(q.shape[0], heads, *finite.shape[2:])
        if finite.shape[2] > 1 or rows == 0:
            finite = finite.expand(-1, -1, queries, -1)
        if finite.shape[3] > 1 or columns == 0:
            finite = finite.expand(-1, -1, -1, keys)
        scores = scores + finite
    met = (scores > -math.inf).any(-1)
    top = torch.where(met, scores.detach().amax(-1) if k.shape[2] else 0.0, 0.0)
    weights = torch.exp(scores - top[..., None])
    total = torch.where(met, weights.sum(-1), 1.0)
    out = (weights / total[..., None]) @ v
    lse = torch.where(met, top + total.log(), -math.inf)
    merged, size = _merged(plan, out, lse, queries)
    if query_mask is None:
        return merged, size
    real = query_mask[:, None]  # padding says nothing, and borrows nothing
    return torch.where(real[..., None], merged, 0), torch.where(real, size, -math.inf)


def _behind(x: Tensor, means: Any, shared: int) -> tuple[Tensor, list[list[list[int]]] | None]:
    """x with the means of its segments behind it, and where those sit."""
    if means is None:
        return x, None
    members = torch.zeros(*x.shape[:2], means.start.shape[-1], x.shape[2], dtype=torch.float64)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            order = means.order[b, h // shared].tolist()
            bounds = zip(means.start[b, h // shared].tolist(), means.stop[b, h // shared].tolist(), strict=True)
            for s, (start, stop) in enumerate(bounds):
                for row in order[start:stop]:
                    members[b, h, s, row] += 1 / (stop - start)
    places = None
    if means.positions is not None:
        places = [[means.positions[b, h // shared].tolist() for h in range(x.shape[1])] for b in range(x.shape[0])]
    else:
        places = [[[0] * means.start.shape[-1]] * x.shape[1]] * x.shape[0]
    return torch.cat([x, members @ x], 2), places


def _allowed(
    pair_mask: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    b: int,
    h: int,
    queries: int,
    keys: int,
) -> Any:
    """Whether the masks let a pair of rows meet; a virtual row has no entry of its own."""
    table = None
    if pair_mask is not None:
        one = pair_mask[b % pair_mask.shape[0], h % pair_mask.shape[1]]
        table = (one if one.dtype == torch.bool else one != -math.inf).tolist()
    real_key = None if key_mask is None else key_mask[b].tolist()
    real_query = None if query_mask is None else query_mask[b].tolist()

    def allowed(i: int, j: int) -> bool:
        if real_key is not None and j < keys and not real_key[j]:
            return False
        if real_query is not None and i < queries and not real_query[i]:
            return False
        return table is None or table[i if len(table) > 1 else 0][j if len(table[0]) > 1 else 0]

    return allowed


def _log_weights(
    plan: Any, b: int, h: int, rows: int, key_rows: int, query_at: list[int], key_at: list[int], allowed: Any
) -> Tensor:
    """The log of the sum of count·exp(bias) over the slots in which a pair meets, divided by their number if once."""
    slots: dict[tuple[int, int], list[float]] = {}
    for part in plan.rounds:
        order, offsets = part.query_order[b, h].tolist(), part.query_offsets[b, h].tolist()
        key_order = part.key_order[b, h].tolist()
        starts, stops = part.key_start[b, h].tolist(), part.key_stop[b, h].tolist()
        bias = None if part.bias is None else part.bias[b, h].tolist()
        skip = None if part.skip is None else part.skip[b, h].tolist()
        counts = None if part.counts is None else part.counts[b, h].tolist()
        for g, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            for slot in range(offsets[g], offsets[g + 1]):
                i = order[slot]
                for place in range(start, stop):
                    j = key_order[place]
                    if skip is not None and j in skip[slot]:
                        continue
                    ahead = query_at[i] - key_at[j]
                    if plan.causal and ahead < 0:
                        continue
                    if part.window is not None and not part.window[0] <= ahead <= part.window[1]:
                        continue
                    extra = 0.0 if bias is None else bias[place]
                    stands_for = 1 if counts is None else counts[g][place - start]
                    if extra == -math.inf or stands_for == 0 or not allowed(i, j):
                        continue
                    extra += math.log(stands_for)
                    slots.setdefault((i, j), []).append(extra)
    lonely = set(range(plan.num_queries)) - {i for i, _ in slots}
    if plan.self_keys is not None:
        for i, j in enumerate(plan.self_keys[b].tolist()):
            if i in lonely and j >= 0 and allowed(i, j):
                slots[i, j] = [0.0]
    table = [[-math.inf] * key_rows for _ in range(rows)]
    for (i, j), found in slots.items():
        count = len(found) if plan.duplicates == "once" else 1
        table[i][j] = math.log(sum(math.exp(x) for x in found) / count)
    return torch.tensor(table, dtype=torch.float64).view(rows, key_rows)


def _merged(plan: Any, out: Tensor, lse: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Each query's own answer and the one that it borrows, weighted by their softmax masses."""
    own_out, own_size = out[:, :, :queries], lse[:, :, :queries]
    if plan.answer is None:
        return own_out, own_size
    batch, head, _ = torch.meshgrid(*(torch.arange(n) for n in own_size.shape), indexing="ij")
    if plan.mass is not None:
        stands = (plan.mass >= 0) & (own_size > -math.inf)
        own_size = torch.where(stands, lse[batch, head, plan.mass.long()], own_size)
    # Row −1 is the last one, which does no harm where nothing is borrowed.
    other_out = out[batch, head, plan.answer.long()]
    other_size = torch.where(plan.answer >= 0, lse[batch, head, plan.answer.long()], -math.inf)
    sizes = torch.stack([own_size, other_size], -1)
    heard = (sizes > -math.inf).any(-1)
    sizes = torch.where(heard[..., None], sizes, 0)
    share = torch.where(heard[..., None], torch.softmax(sizes, -1), 0)
    merged = share[..., :1] * own_out + share[..., 1:] * other_out
    return merged, torch.where(heard, torch.logsumexp(sizes, -1), -math.inf)
