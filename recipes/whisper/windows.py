"""Recordings cut into windows that a model takes."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 320  # samples that are as loud as each other: 20 ms, a token of Whisper's encoder
_LATEST = 1 / 6  # of a window: where a cut may be


def cut(samples: Tensor, size: int) -> list[Tensor]:
    """Pieces of at most `size` samples, in their order; nothing is lost and nothing is heard twice.

    A recording that is longer than a window is cut where the last sixth of the window is most quiet, so that words
    stay whole as far as they can.

    >>> [len(piece) for piece in cut(torch.cat([torch.ones(2000), torch.zeros(320), torch.ones(2000)]), 2560)]
    [2240, 2080]
    """
    pieces = []
    while len(samples) > size:
        at = _quietest(samples[:size])
        pieces.append(samples[:at])
        samples = samples[at:]
    return [*pieces, samples]


def _quietest(window: Tensor) -> int:
    """The middle of the most quiet block of its last sixth; its end if it is shorter than a block."""
    blocks = len(window) // _BLOCK
    first = min(blocks - 1, blocks - max(1, round(blocks * _LATEST)))
    if first < 0:
        return len(window)
    energy = window[: blocks * _BLOCK].view(blocks, _BLOCK)[first:].square().mean(-1)
    return (first + int(torch.argmin(energy))) * _BLOCK + _BLOCK // 2
