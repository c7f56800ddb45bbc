"""Random draws as a pure function of (seed, layer, stream, index).

Philox4x32-10 (Salmon et al., 2011) in integer tensor arithmetic: the same numbers on every device and in every
backend, at any shape, with no generator whose state could differ between a forward pass and its recomputation.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """What a draw is for; two purposes never share a number."""

    PROJECTION = 1
    OFFSET = 2
    ROTATION = 3
    HYPERPLANE = 4
    STARTS = 5
    DROPOUT = 6
    SAMPLE = 7


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    # The product has 64 bits; int64 wraps around, and the shift's sign extension is masked off.
    product = x * a
    return (product >> 32) & _WORD, product & _WORD


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int | Tensor) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on four broadcastable int64 words; returns four words in [0, 2**32).

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [hex(word.item()) for word in philox((zero, zero, zero, zero), seed=0)]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*(word & _WORD for word in counter))
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _words(
    stream: Stream, shape: tuple[int, ...], seed: int | Tensor, layer: int, device: torch.device
) -> tuple[Tensor, ...]:
    """One Philox block for each index of a tensor of up to three dimensions.

    The index itself is the counter, so a smaller shape is a corner of a larger one: draws for the first heads,
    rounds or columns do not depend on how many there are.
    """
    axes = [torch.arange(size, dtype=torch.int64, device=device) for size in shape]
    grid = list(torch.meshgrid(*axes, indexing="ij"))
    while len(grid) < 3:
        grid.insert(0, torch.zeros((), dtype=torch.int64, device=device))
    last = torch.full((), (layer << 8) | int(stream), dtype=torch.int64, device=device)
    return philox((grid[0], grid[1], grid[2], last), seed)


def _unit(word: Tensor) -> Tensor:
    """A word as a float64 in the open interval (0, 1)."""
    return (word.to(torch.float64) + 0.5) / 2.0**32


def uniform(
    stream: Stream, shape: tuple[int, ...], *, seed: int | Tensor, layer: int = 0, device: torch.device
) -> Tensor:
    """Uniform draws in (0, 1), float64."""
    return _unit(_words(stream, shape, seed, layer, device)[0])


def normal(
    stream: Stream, shape: tuple[int, ...], *, seed: int | Tensor, layer: int = 0, device: torch.device
) -> Tensor:
    """Standard normal draws by Box–Muller, rounded to float32 so that every libm agrees; returned as float64."""
    first, second, *_ = _words(stream, shape, seed, layer, device)
    draw = torch.sqrt(-2.0 * torch.log(_unit(first))) * torch.cos(2.0 * torch.pi * _unit(second))
    return draw.to(torch.float32).to(torch.float64)


def fresh_seed() -> Tensor:
    """A seed from PyTorch's own generator: follows `torch.manual_seed` and activation checkpointing.

    On the host, whatever the default device is: kernels for GPUs take it as a number, which nobody waits for there.
    """
    return torch.randint(2**62, (), dtype=torch.int64, device="cpu")


def keep_pairs(heads: Tensor, rows: Tensor, keys: Tensor, *, dropout_p: float, seed: Tensor) -> Tensor:
    """Which (head, query, key) pairs dropout keeps: a function of the pair, so a pair met twice shares its fate."""
    last = torch.full((), int(Stream.DROPOUT), dtype=torch.int64, device=rows.device)
    word = philox((keys, rows, heads, last), seed.to(rows.device))[0]
    return word >= int(dropout_p * 2**32)
