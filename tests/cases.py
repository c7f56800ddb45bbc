"""Mechanisms and tensors that many tests run over: one list, a new mechanism is one line."""

from __future__ import annotations

import torch
from torch import Tensor

import coterie

MECHANISMS = {
    "smyrf": coterie.Smyrf(rounds=3, cluster_size=16),
    "smyrf-once": coterie.Smyrf(rounds=3, cluster_size=16, duplicates="once"),
    "smyrf-none-e2lsh": coterie.Smyrf(rounds=2, cluster_size=16, transform="none", hash="e2lsh"),
    "smyrf-l2-alsh": coterie.Smyrf(rounds=2, cluster_size=16, transform="l2-alsh"),
    "smyrf-xbox-polytope": coterie.Smyrf(rounds=2, cluster_size=16, transform="xbox", hash="cross-polytope"),
    "smyrf-simple": coterie.Smyrf(rounds=2, cluster_size=16, transform="simple"),
    "clustered": coterie.Clustered(clusters=7, iterations=3),
    "clustered-euclidean": coterie.Clustered(clusters=7, iterations=3, space="euclidean"),
    "improved": coterie.ImprovedClustered(clusters=7, topk=9, iterations=3),
    "improved-euclidean": coterie.ImprovedClustered(clusters=7, topk=9, iterations=3, space="euclidean"),
    "reformer": coterie.Reformer(rounds=2, chunk_size=16),
    "reformer-strict": coterie.Reformer(rounds=2, chunk_size=16, strict=True),
    "routing": coterie.Routing(clusters=5, window=20, iterations=3),
    "local": coterie.Local(window=15),
    "longformer": coterie.Longformer(window=15, global_tokens=2),
    "topk": coterie.TopK(k=9),
    "full": coterie.Full(),
}
CAUSAL = {name: m for name, m in MECHANISMS.items() if m.causality != "none"}
STRICT = {name: MECHANISMS[name] for name in ("reformer-strict", "local", "longformer", "topk", "full")}
MEANS = {name: m for name, m in MECHANISMS.items() if m.causality == "none"}


def tensors(
    batch=2, heads=2, queries=63, keys=None, dim=8, value_dim=None, key_heads=None, dtype=torch.float64, seed=0
):
    """Random q, k, v, with keys that resemble queries so that grouping has something to find."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q = draw(batch, heads, queries, dim)
    k = draw(batch, key_heads, keys, dim)
    v = draw(batch, key_heads, keys, value_dim or dim)
    return q, k, v


def padding(batch: int, length: int, lengths: list[int], side: str = "right") -> Tensor:
    """(batch, length) masks with `lengths` real tokens on the other side of the padding, or scattered."""
    mask = torch.zeros(batch, length, dtype=torch.bool)
    for b, real in enumerate(lengths):
        if side == "right":
            mask[b, :real] = True
        elif side == "left":
            mask[b, length - real :] = True
        else:
            chosen = torch.randperm(length, generator=torch.Generator().manual_seed(b))[:real]
            mask[b, chosen] = True
    return mask
