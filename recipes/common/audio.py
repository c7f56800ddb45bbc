"""Recordings: WAV, FLAC and whatever else libsndfile reads, at one rate. What is wrong with a file is said in a
sentence that names it."""

from __future__ import annotations

import io
import math
from pathlib import Path

import torch
from torch import Tensor

from coterie.cli.inputs import UserError

_STREAMED = (0, 0xFFFFFFFF)  # lengths in headers of WAV files that were written before their end was known
_SLOWEST, _FASTEST = 1_000, 1_000_000  # Hz
_LOUDEST = 1e9  # there are floats on the scale of integers; of much larger ones the power is infinite


def read_audio(path: Path, rate: int) -> Tensor:
    """The samples of a file, (samples,) in float32 from −1 to 1: the mean of its channels, resampled to `rate` Hz."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    return decode_audio(data, rate, str(path))


def decode_audio(data: bytes, rate: int, name: str) -> Tensor:
    """The same of a file's content.

    Args:
        name: what errors call it.
    """
    import soundfile

    _check_whole(data, name)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            found, own, promised = file.read(dtype="float32", always_2d=True), file.samplerate, file.frames
    except (soundfile.SoundFileError, TypeError) as error:  # TypeError: raw samples, by an unknown header
        raise UserError(f"{name} is no audio file, or is damaged: expected WAV or FLAC.") from error
    if len(found) < promised:
        raise UserError(f"{name} is cut off: it has {len(found):,} of {promised:,} samples.")
    if not len(found):
        raise UserError(f"{name} holds no samples.")
    if not _SLOWEST <= own <= _FASTEST:
        raise UserError(f"{name} is damaged: its header says {own:,} samples a second.")
    samples = torch.from_numpy(found).mean(1)
    if not samples.isfinite().all():
        raise UserError(f"{name} holds samples that are not finite numbers.")
    if samples.abs().max() > _LOUDEST:
        raise UserError(f"{name} is damaged: it holds samples as large as {samples.abs().max():.0e}.")
    return resample(samples, own, rate)


def resample(samples: Tensor, own: int, rate: int) -> Tensor:
    """Samples at `own` Hz as samples at `rate` Hz, frequencies above half of either rate removed.

    >>> resample(torch.ones(800), 8000, 16000).shape
    torch.Size([1600])
    """
    if own == rate:
        return samples
    from scipy.signal import resample_poly

    common = math.gcd(own, rate)
    return torch.from_numpy(resample_poly(samples.numpy(), rate // common, own // common)).float()


def _check_whole(data: bytes, name: str) -> None:
    """libsndfile reads what is left of a WAV file without a word."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    promised = int.from_bytes(data[4:8], "little")
    if promised not in _STREAMED and promised + 8 > len(data):
        raise UserError(f"{name} is cut off: it has {len(data):,} of {promised + 8:,} bytes.")
