"""Sequences to be copied, drawn by seed. Their layout is ours: no text at hand has the paper's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SYMBOLS = 10  # numbered from 1
SEPARATOR, MASK = 0, SYMBOLS + 1
TOKENS = SYMBOLS + 2
HIDDEN = 0.2  # share of the symbols that are masked


class Examples(NamedTuple):
    """Sequences: what a model sees, what it is to say, and where that counts; all (B, N)."""

    seen: Tensor
    wanted: Tensor
    scored: Tensor


def masked_copy(count: int, length: int, draw: torch.Generator) -> Examples:
    """`0 w 0 w` with a fifth of all symbols masked, never both copies of one; the masked ones are to be said.

    >>> found = masked_copy(1, 12, torch.Generator().manual_seed(0))
    >>> found.wanted.tolist()
    [[0, 5, 10, 4, 1, 4, 0, 5, 10, 4, 1, 4]]
    >>> found.seen.tolist()
    [[0, 5, 11, 4, 11, 4, 0, 5, 10, 4, 1, 4]]
    """
    symbols = length // 2 - 1
    word = torch.randint(1, SYMBOLS + 1, (count, symbols), generator=draw)
    hidden = torch.rand(count, symbols, generator=draw).argsort(-1) < round(2 * HIDDEN * symbols)
    first = torch.rand(count, symbols, generator=draw) < 0.5  # which copy it is masked in
    stop = torch.full((count, 1), SEPARATOR)
    wanted = torch.cat([stop, word, stop, word], 1)
    nowhere = torch.zeros(count, 1, dtype=torch.bool)
    scored = torch.cat([nowhere, hidden & first, nowhere, hidden & ~first], 1)
    return Examples(wanted.masked_fill(scored, MASK), wanted, scored)


def causal_copy(count: int, length: int, draw: torch.Generator) -> Examples:
    """`w 0 w`, each symbol to be said before it is seen; those of the second copy count.

    >>> found = causal_copy(1, 6, torch.Generator().manual_seed(0))
    >>> found.seen.tolist(), found.wanted.tolist()
    ([[5, 10, 4, 0, 5, 10]], [[10, 4, 0, 5, 10, 4]])
    >>> found.scored.tolist()
    [[False, False, False, True, True, True]]
    """
    symbols = length // 2
    word = torch.randint(1, SYMBOLS + 1, (count, symbols), generator=draw)
    whole = torch.cat([word, torch.full((count, 1), SEPARATOR), word], 1)
    scored = (torch.arange(2 * symbols) >= symbols).expand(count, -1)
    return Examples(whole[:, :-1], whole[:, 1:], scored)


TASKS = {"masked": masked_copy, "causal": causal_copy}
SEEDS, STEPS = 2**10, 2**20  # at most: PyTorch's generator has 32 bits for both


def batch(task: str, count: int, length: int, seed: int, step: int, *, fresh: bool = False) -> Examples:
    """The batch of a training step, or a fresh one that no step ever sees."""
    draw = torch.Generator().manual_seed((seed * STEPS + step) * 2 + fresh)
    return TASKS[task](count, length, draw)
