"""SpecAugment (Park et al. 2019): stretches of channels and of time are hidden in training; times are not warped."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Masks(NamedTuple):
    """How much is hidden of an utterance.

    Attributes:
        channels: the widest mask, as a share of all channels.
        frames: the longest mask, as a share of the utterance's frames.
        longest: the longest mask in frames.
        times: how many masks of either kind.
    """

    channels: float = 0.2
    frames: float = 0.05
    longest: int = 20
    times: int = 2


MASKS = Masks()


def spec_augment(features: Tensor, lengths: Tensor, masks: Masks = MASKS) -> Tensor:
    """(B, frames, channels) with stretches set to 0, which is each channel's mean; drawn from PyTorch's generator.

    >>> _ = torch.manual_seed(0)
    >>> kept = spec_augment(torch.ones(2, 200, 10), torch.tensor([200, 100]))
    >>> bool(kept.mean() > 0.6), bool((kept == 0).any())
    (True, True)
    """
    channels = torch.full_like(lengths, features.shape[2])
    found = features
    for _ in range(masks.times):
        hidden = _stretch(channels, masks.channels * channels, features.shape[2])[:, None, :]
        longest = (masks.frames * lengths).clamp(max=masks.longest)
        found = found.masked_fill(hidden | _stretch(lengths, longest, features.shape[1])[:, :, None], 0.0)
    return found


def _stretch(sizes: Tensor, longest: Tensor, room: int) -> Tensor:
    """(B, room): a stretch of 0 … longest places, rounded down, somewhere in the first `sizes` of each row."""
    width = (torch.rand(len(sizes)) * (longest.cpu().floor() + 1)).floor()
    start = (torch.rand(len(sizes)) * (sizes.cpu() - width + 1)).floor()
    at = torch.arange(room)
    return ((at >= start[:, None]) & (at < (start + width)[:, None])).to(sizes.device)
