"""Independent oracles: the papers' formulas, with loops, in float64, on single heads.

Nothing here imports from coterie. Shapes: q (Nq, D), k (Nk, D), v (Nk, Dv).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax_over(
    q: Tensor, k: Tensor, v: Tensor, scale: float, weights: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax where pair (i, j) counts weights[i, j] times; (out, lse), 0 and −inf for rows that meet nobody."""
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    lse = torch.full((q.shape[0],), -math.inf, dtype=torch.float64)
    for i in range(q.shape[0]):
        keys = [j for j in range(k.shape[0]) if weights[i, j] > 0]
        if bias is not None:
            keys = [j for j in keys if bias[i, j] > -math.inf]
        if not keys:
            continue
        scores = []
        for j in keys:
            s = scale * float(q[i] @ k[j]) + math.log(float(weights[i, j]))
            scores.append(s + (float(bias[i, j]) if bias is not None else 0.0))
        top = max(scores)
        total = sum(math.exp(s - top) for s in scores)
        for s, j in zip(scores, keys, strict=True):
            out[i] += math.exp(s - top) / total * v[j]
        lse[i] = top + math.log(total)
    return out, lse


def merge_rounds(q: Tensor, k: Tensor, v: Tensor, scale: float, rounds: list[list[list[int]]]) -> Tensor:
    """Eq. 15 of the supplement: each round's attention, weighted by its share of the softmax mass.

    rounds[h][i]: the keys K^h_q that query i meets in round h.
    """
    out = torch.zeros(q.shape[0], v.shape[1], dtype=torch.float64)
    for i in range(q.shape[0]):
        masses, outputs = [], []
        for groups in rounds:
            mass = sum(math.exp(scale * float(q[i] @ k[j])) for j in groups[i])
            output = torch.zeros(v.shape[1], dtype=torch.float64)
            for j in groups[i]:
                output += math.exp(scale * float(q[i] @ k[j])) / mass * v[j]
            masses.append(mass)
            outputs.append(output)
        for mass, output in zip(masses, outputs, strict=True):
            out[i] += mass / sum(masses) * output
    return out


def naive_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None = None) -> Tensor:
    """Dense attention in the dtype of its inputs, (…, N, D): the yardstick of low-precision error."""
    scores = (q @ k.mT) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v


def clustered(q: Tensor, k: Tensor, v: Tensor, scale: float, labels: list[int]) -> Tensor:
    """Members share softmax(scale·q_c·Kᵀ)·V of their mean query; differentiable."""
    rows = []
    for i in range(q.shape[0]):
        members = [j for j in range(q.shape[0]) if labels[j] == labels[i]]
        centroid = torch.stack([q[j] for j in members]).mean(0)
        rows.append((scale * (k @ centroid)).softmax(0) @ v)
    return torch.stack(rows)


def improved_clustered(q: Tensor, k: Tensor, v: Tensor, scale: float, labels: list[int], topk: int) -> Tensor:
    """m · softmax over T of the member's own scores · V_T + Σ_{j∉T} A_c[j]·v_j; differentiable, m included."""
    rows = []
    for i in range(q.shape[0]):
        members = [j for j in range(q.shape[0]) if labels[j] == labels[i]]
        centroid = torch.stack([q[j] for j in members]).mean(0)
        weights = (scale * (k @ centroid)).softmax(0)
        best = sorted(range(k.shape[0]), key=lambda j: (-float((k @ centroid)[j].detach()), j))[:topk]
        rest = [j for j in range(k.shape[0]) if j not in best]
        mass = weights[best].sum()
        own = (scale * (k[best] @ q[i])).softmax(0) @ v[best]
        far = (weights[rest, None] * v[rest]).sum(0)
        rows.append(mass * own + far)
    return torch.stack(rows)


def window_met(i: int, j: int, offset: int, window: int, causal: bool) -> bool:
    """Whether Local's window lets query i meet key j."""
    distance = i + offset - j
    return 0 <= distance < window if causal else abs(distance) <= window // 2


def strided_met(i: int, j: int, stride: int, causal: bool, pattern: int) -> bool:
    """Whether pattern 1 or 2 of strided attention lets a query at position i meet the key at j (Child et al., §4.2)."""
    met = abs(i - j) <= stride if pattern == 1 else (i - j) % stride == 0
    return met and (j <= i or not causal)


def fixed_met(i: int, j: int, stride: int, summary: int, causal: bool, pattern: int) -> bool:
    """The same of fixed attention; i and j count real keys."""
    met = i // stride == j // stride if pattern == 1 else j % stride >= stride - summary
    return met and (j <= i or not causal)


def hamming_lloyd(bits: list[list[int]], starts: list[int], iterations: int) -> list[int]:
    """Lloyd's algorithm on ±1 vectors: nearest centroid (ties to the first), then the bit majority (ties to +1)."""
    centroids = [list(bits[s]) for s in starts]

    def assign() -> list[int]:
        labels = []
        for b in bits:
            distances = [sum(x != y for x, y in zip(b, c, strict=True)) for c in centroids]
            labels.append(distances.index(min(distances)))
        return labels

    for _ in range(iterations):
        labels = assign()
        for c in range(len(centroids)):
            members = [b for b, label in zip(bits, labels, strict=True) if label == c]
            if members:
                centroids[c] = [1 if sum(column) >= 0 else -1 for column in zip(*members, strict=True)]
    return assign()


def euclidean_lloyd(points: Tensor, starts: list[int], iterations: int) -> list[int]:
    """Lloyd's algorithm on points (N, D)."""
    centroids = [points[s].clone() for s in starts]

    def assign() -> list[int]:
        return [min(range(len(centroids)), key=lambda c: (float(((p - centroids[c]) ** 2).sum()), c)) for p in points]

    for _ in range(iterations):
        labels = assign()
        for c in range(len(centroids)):
            members = [p for p, label in zip(points, labels, strict=True) if label == c]
            if members:
                centroids[c] = torch.stack(members).mean(0)
    return assign()


def in_bytes(x: Tensor, most: int) -> tuple[list[int], float]:
    """Whole numbers round(most·x / max|x|), computed in float32, and max|x|."""
    x = x.detach().to(torch.float32)
    top = x.abs().max()
    return [round(float(each / top * most)) for each in x], float(top)


def byte_product(q: Tensor, k: Tensor) -> float:
    """What keys are ranked by for one query: the whole numbers' product, times the key's largest number, in float32."""
    (left, _), (right, top) = in_bytes(q, 63), in_bytes(k, 127)
    whole = sum(a * b for a, b in zip(left, right, strict=True))
    return float(torch.tensor(float(whole), dtype=torch.float32) * top)


def near_far(
    q: Tensor, k: Tensor, v: Tensor, scale: float, groups: list[int], clusters: list[int], near: int
) -> Tensor:
    """A group's mean query picks `near` keys; the members meet those, and the rest of each cluster as its mean, which
    counts for as many keys as were not picked."""
    out = []
    means = {c: [j for j, x in enumerate(clusters) if x == c] for c in set(clusters)}
    for i in range(q.shape[0]):
        members = [m for m, x in enumerate(groups) if x == groups[i]]
        mean = torch.stack([q[m].detach() for m in members]).mean(0)
        products = [byte_product(scale * mean, key) for key in k]
        liked = sorted(range(k.shape[0]), key=lambda j: (-products[j], j))[:near]
        scores, values = [scale * (q[i] @ k[j]) for j in liked], [v[j] for j in liked]
        for keys in means.values():
            left = len([j for j in keys if j not in liked])
            if left:
                mean_key, mean_value = (torch.stack([x[j] for j in keys]).mean(0) for x in (k, v))
                scores.append(scale * (q[i] @ mean_key) + math.log(left))
                values.append(mean_value)
        out.append(torch.softmax(torch.stack(scores), 0) @ torch.stack(values))
    return torch.stack(out)
