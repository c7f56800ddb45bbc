"""A recording as a speech model takes it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.cli.inputs import Loaded, UserError, find_model, loading


class Heard(NamedTuple):
    """What a speech model is called with, and the share of its tokens that is sound: what follows is padding."""

    batch: dict[str, Any]
    sound: float


def hear(loaded: Loaded, file: Path, *, trust: bool = False) -> Heard:
    """The first window of a WAV file, such as Whisper's 30 seconds."""
    from transformers import AutoFeatureExtractor

    source, settings = find_model(loaded.name)
    with loading(loaded.name):
        extractor = AutoFeatureExtractor.from_pretrained(source, **settings, trust_remote_code=trust)
    rate = getattr(extractor, "sampling_rate", None)
    if rate is None:
        raise UserError(f"{loaded.name} is no speech model: --audio is for those that listen.")
    samples = _samples(file, rate)
    found = dict(extractor(samples, sampling_rate=rate, return_tensors="pt"))
    if loaded.model.config.is_encoder_decoder:
        start = loaded.model.config.decoder_start_token_id
        found["decoder_input_ids"] = torch.full((1, 1), start)
    window = getattr(extractor, "n_samples", len(samples))  # others than Whisper's are not padded
    return Heard(found, min(1.0, len(samples) / window))


def _samples(file: Path, rate: int) -> Any:
    """The samples of a WAV file from −1 to 1, the mean of its channels, at a rate in Hz."""
    import numpy as np
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    try:
        own, samples = wavfile.read(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{file} is no WAV file, or is damaged.") from error
    if not len(samples):
        raise UserError(f"{file} holds no samples.")
    if samples.dtype == np.uint8:
        samples = samples.astype(np.float32) / 128 - 1
    elif samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / -float(np.iinfo(samples.dtype).min)
    mono = samples.astype(np.float32).reshape(len(samples), -1).mean(1)
    if not np.isfinite(mono).all():
        raise UserError(f"{file} holds samples that are not finite numbers.")
    common = math.gcd(own, rate)
    return mono if own == rate else resample_poly(mono, rate // common, own // common).astype(np.float32)
