"""What a recogniser hears: the logarithm of a mel spectrogram."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

MELS = 40
_WINDOW, _HOP = 0.025, 0.010  # seconds
_FLOOR = 1e-10  # of a power, where there is silence


def log_mel(samples: Tensor, rate: int, mels: int = MELS) -> Tensor:
    """(samples,) → (frames, mels): log Σ_f filter_mf |Σ_n w_n x_(t·hop+n) e^(−2πi f n / F)|².

    Hann windows of 25 ms, 10 ms apart, all of them inside of the recording; one shorter than a window is filled up with
    zeros. F, the length of the transform, is the next power of 2.

    >>> log_mel(torch.zeros(8000), 8000).shape
    torch.Size([98, 40])
    """
    window, hop, size = window_sizes(rate)
    if len(samples) < window:
        samples = torch.nn.functional.pad(samples, (0, window - len(samples)))
    frames = samples.unfold(0, window, hop) * torch.hann_window(window)
    power = torch.fft.rfft(frames, size).abs().square()
    return (power @ mel_filters(rate, size, mels).T).clamp(min=_FLOOR).log()


def frame_at(sample: int, rate: int) -> int:
    """The first frame whose middle is not before a sample.

    >>> frame_at(100, 8000), frame_at(101, 8000)
    (0, 1)
    """
    window, hop, _ = window_sizes(rate)
    return max(0, math.ceil((sample - window / 2) / hop))


def window_sizes(rate: int) -> tuple[int, int, int]:
    """Samples of a window, samples between two windows, and the length of the transform.

    >>> window_sizes(8000), window_sizes(16000)
    ((200, 80, 256), (400, 160, 512))
    """
    window = round(_WINDOW * rate)
    return window, round(_HOP * rate), 2 ** math.ceil(math.log2(window))


def frames_of(samples: int, rate: int) -> int:
    """How many frames `log_mel` makes of so many samples.

    >>> frames_of(8000, 8000), frames_of(10, 8000)
    (98, 1)
    """
    window, hop, _ = window_sizes(rate)
    return 1 + max(0, samples - window) // hop


@cache
def mel_filters(rate: int, size: int, mels: int) -> Tensor:
    """(mels, size // 2 + 1): triangles whose corners are equally far apart in mel = 2595 · log₁₀(1 + f / 700), from 0
    Hz to half of the rate; each is 1 at its peak."""
    highest = 2595 * math.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, highest, mels + 2, dtype=torch.float64) / 2595) - 1)
    frequency = torch.arange(size // 2 + 1, dtype=torch.float64) * rate / size
    left, peak, right = (corners[i : i + mels, None] for i in range(3))
    rising, falling = (frequency - left) / (peak - left), (right - frequency) / (right - peak)
    return torch.minimum(rising, falling).clamp(min=0).float()


def normalised(features: Tensor) -> Tensor:
    """(frames, channels), each channel with mean 0 and variance 1 over the utterance.

    >>> normalised(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[-1., 0.],
            [ 1., 0.]])
    """
    centred = features - features.mean(0)
    return centred / centred.square().mean(0).sqrt().clamp(min=1e-5)
