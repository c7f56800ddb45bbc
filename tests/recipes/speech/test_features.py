"""The log-mel spectrogram against its formula, in loops and float64; SpecAugment."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from recipes.speech.augment import Masks, spec_augment
from recipes.speech.features import frames_of, log_mel, mel_filters, normalised


def slow_log_mel(samples, rate, mels):
    """Windows, sums over samples for each frequency, triangles in mel: each written out."""
    window, hop = round(0.025 * rate), round(0.010 * rate)
    size = 1
    while size < window:
        size *= 2
    samples = samples + [0.0] * (window - len(samples))

    def hertz(mel):
        return 700 * (10 ** (mel / 2595) - 1)

    highest = 2595 * math.log10(1 + rate / 1400)
    corners = [hertz(highest * i / (mels + 1)) for i in range(mels + 2)]
    found = []
    for start in range(0, len(samples) - window + 1, hop):
        power = []
        for f in range(size // 2 + 1):
            total = 0j
            for n in range(window):
                hann = 0.5 - 0.5 * math.cos(2 * math.pi * n / window)
                total += hann * samples[start + n] * cmath.exp(-2j * math.pi * f * n / size)
            power.append(abs(total) ** 2)
        row = []
        for m in range(mels):
            left, peak, right = corners[m : m + 3]
            weights = []
            for f in range(size // 2 + 1):
                at = f * rate / size
                rising, falling = (at - left) / (peak - left), (right - at) / (right - peak)
                weights.append(max(0.0, min(rising, falling)))
            row.append(math.log(max(1e-10, sum(w * p for w, p in zip(weights, power, strict=True)))))
        found.append(row)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize(
    ("count", "rate", "mels"), [(330, 4000, 7), (101, 4000, 8), (57, 4000, 5), (500, 3999, 6)], ids=str
)
def test_the_formula(count, rate, mels):
    torch.manual_seed(0)
    samples = torch.rand(count) - 0.5
    expected = slow_log_mel(samples.double().tolist(), rate, mels)
    found = log_mel(samples, rate, mels)
    assert len(found) == frames_of(count, rate)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_tone_is_loudest_in_its_channel():
    tone = torch.sin(2 * math.pi * 1000 * torch.arange(8000) / 8000)
    mel = 2595 * math.log10(1 + 1000 / 700) / (2595 * math.log10(1 + 4000 / 700)) * 41 - 1
    assert abs(int(log_mel(tone, 8000).mean(0).argmax()) - mel) < 1


@pytest.mark.parametrize(("rate", "size"), [(8000, 256), (16000, 512), (22050, 1024)])
def test_no_channel_is_deaf(rate, size):
    assert (mel_filters(rate, size, 40).sum(1) > 0).all()


def test_silence_is_finite_and_normalises_to_zero():
    silent = log_mel(torch.zeros(1000), 8000)
    assert silent.isfinite().all()
    assert normalised(silent).abs().max() == 0


def test_normalised():
    torch.manual_seed(0)
    found = normalised(5 + 3 * torch.randn(50, 4))
    torch.testing.assert_close(found.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.square().mean(0), torch.ones(4))


def test_masks_are_stretches_within_what_is_real():
    lengths = torch.tensor([100, 37, 1])
    masks = Masks(channels=0.5, frames=0.1, longest=6, times=1)
    widest = {"channels": 0, "frames": 0}
    for seed in range(60):
        torch.manual_seed(seed)
        kept = spec_augment(torch.ones(3, 100, 8), lengths, masks)
        for row, length in zip(kept, lengths.tolist(), strict=True):
            channels = (row[:length].amax(0) == 0).nonzero().flatten()
            frames = (row.amax(1) == 0).nonzero().flatten()
            hidden = torch.ones_like(row)
            hidden[:, channels] = 0
            hidden[frames] = 0
            if len(frames) < length and len(channels) < 8:
                assert torch.equal(hidden, row), "whole channels and whole frames"
            for where, most, room in ((channels, 4, 8), (frames, min(6, length // 10), length)):
                if len(where):
                    assert int(where[-1] - where[0]) + 1 == len(where) <= most
                    assert int(where[-1]) < room
            widest = {"channels": max(widest["channels"], len(channels)), "frames": max(widest["frames"], len(frames))}
    assert widest == {"channels": 4, "frames": 6}


def test_masks_depend_on_the_generator_alone():
    features, lengths = torch.ones(2, 50, 10), torch.tensor([50, 40])
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(spec_augment(features, lengths))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert features.min() == 1  # what came in stays
