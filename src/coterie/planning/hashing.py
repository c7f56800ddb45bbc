"""Asymmetric transforms and locality-sensitive hashes (supplement §13).

A transform F of queries and G of keys turns large inner products into small distances; a hash then puts near vectors
near each other. All functions take (…, N, D) tensors and the (…, N) masks of real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRANSFORMS = ("smyrf", "none", "l2-alsh", "xbox", "simple")
HASHES = ("projection", "e2lsh", "cross-polytope")

_ALSH_M = 3
_ALSH_U = 0.83  # m and U as Shrivastava & Li (2014) recommend; U scales the longest key


def _squared_norms(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


def _longest(squared: Tensor, mask: Tensor) -> Tensor:
    """The largest squared norm of the real tokens, (…, 1, 1)."""
    masked = squared.masked_fill(~mask[..., None], 0)
    return masked.amax(-2, keepdim=True) if squared.shape[-2] else squared.new_zeros(*squared.shape[:-2], 1, 1)


def _missing_norm(total: Tensor, squared: Tensor) -> Tensor:
    return (total - squared).clamp(min=0).sqrt()


def transform(name: str, q: Tensor, k: Tensor, query_mask: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """F(q) and G(k).

    With M_Q, M_K the largest norms:
      "smyrf":   F = [q; 0; √(M_Q²+M_K²−‖q‖²)], G = [k; √(M_Q²+M_K²−‖k‖²); 0], ‖F−G‖² = 2(M_Q²+M_K²−q·k)   (Eq. 12)
      "none":    F = q, G = k                                                       plain E2LSH
      "l2-alsh": F = [q; ½; …; ½], G = [Uk; ‖Uk‖²; …; ‖Uk‖^(2^m)]                    [32], U = 0.83/M_K, m = 3
      "xbox":    F = [q; 0], G = [k; √(M_K²−‖k‖²)]                                   [33]
      "simple":  F = M_K/‖q‖·[q; 0], G as "xbox"                                     [34]
    Only the first makes the distance a function of q·k alone.

    >>> q, k = torch.randn(2, 7, 4, dtype=torch.float64).unbind(0)
    >>> real = torch.ones(7, dtype=torch.bool)
    >>> f, g = transform("smyrf", q, k, real, real)
    >>> bound = q.norm(dim=-1).max() ** 2 + k.norm(dim=-1).max() ** 2
    >>> torch.allclose(torch.cdist(f, g) ** 2, 2 * (bound - q @ k.T))
    True
    """
    if name == "none":
        return q, k
    squared_q, squared_k = _squared_norms(q), _squared_norms(k)
    longest_k = _longest(squared_k, key_mask)
    zero_q, zero_k = torch.zeros_like(squared_q), torch.zeros_like(squared_k)
    if name == "smyrf":
        bound = _longest(squared_q, query_mask) + longest_k
        f = torch.cat([q, zero_q, _missing_norm(bound, squared_q)], -1)
        return f, torch.cat([k, _missing_norm(bound, squared_k), zero_k], -1)
    if name == "l2-alsh":
        shrunk = _ALSH_U / longest_k.sqrt().clamp(min=torch.finfo(k.dtype).tiny) * k
        powers = [_squared_norms(shrunk)]
        while len(powers) < _ALSH_M:
            powers.append(powers[-1] ** 2)
        return torch.cat([q] + [torch.full_like(squared_q, 0.5)] * _ALSH_M, -1), torch.cat([shrunk, *powers], -1)
    g = torch.cat([k, _missing_norm(longest_k, squared_k)], -1)
    if name == "xbox":
        return torch.cat([q, zero_q], -1), g
    if name == "simple":
        factor = longest_k.sqrt() / squared_q.sqrt().clamp(min=torch.finfo(q.dtype).tiny)
        return torch.cat([factor * q, zero_q], -1), g
    raise ValueError(f"transform: expected one of {', '.join(map(repr, TRANSFORMS))}, got {name!r}")


def unit(x: Tensor) -> Tensor:
    """Rows scaled to length 1; a zero row stays."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


def project(x: Tensor, directions: Tensor) -> Tensor:
    """h(u) = u·a for each round's direction a: (B, H, N, D) and (H, R, D) give (B, H, R, N)."""
    return torch.einsum("bhnd,hrd->bhrn", x, directions)


def cross_polytope(x: Tensor, rotations: Tensor, columns: Tensor) -> Tensor:
    """The nearest of the ± axes after a random rotation: (B, H, N, D) and (H, D, C) give (B, H, N) buckets.

    `columns` (B,): how many of the C rotated axes a sample uses, so that it has 2 · columns buckets whatever the
    batch is padded to.
    """
    rotated = torch.einsum("bhnd,hdc->bhnc", x, rotations).to(torch.float32)
    size = rotations.shape[-1]
    used = torch.arange(size, device=x.device) < columns[:, None]
    both = torch.stack([rotated, -rotated], -1).nan_to_num(nan=0.0)
    both = both.masked_fill(~used[:, None, None, :, None], float("-inf"))
    return both.flatten(-2).argmax(-1)
