"""A Whisper with random weights as openai-whisper stores it, its tokens, and clips with transcripts."""

from __future__ import annotations

import base64
import math
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MELS, TOKENS, WIDTH, HEADS, TEXTS = 80, 100, 16, 2, 32  # 100 tokens of the encoder: windows of 2 seconds
TEXT_TOKENS = 256 + 3  # bytes, and a few words
VOCABULARY = TEXT_TOKENS + 2 + 99 + 5 + 1 + 1501


def sinusoids(length: int, channels: int) -> Tensor:
    """The encoder's positions, with loops: sin and cos of t / 10000^(i / (channels/2 − 1))."""
    half = channels // 2
    rows = []
    for t in range(length):
        angles = [t * math.exp(-math.log(10000) / (half - 1) * i) for i in range(half)]
        rows.append([*map(math.sin, angles), *map(math.cos, angles)])
    return torch.tensor(rows)


def state(seed: int = 0) -> dict[str, Tensor]:
    """Random weights by openai-whisper's names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    found = {
        "encoder.conv1.weight": draw(WIDTH, MELS, 3),
        "encoder.conv1.bias": draw(WIDTH),
        "encoder.conv2.weight": draw(WIDTH, WIDTH, 3),
        "encoder.conv2.bias": draw(WIDTH),
        "encoder.positional_embedding": sinusoids(TOKENS, WIDTH),
        "decoder.token_embedding.weight": 4 * draw(VOCABULARY, WIDTH),
        "decoder.positional_embedding": draw(TEXTS, WIDTH),
    }

    def norm(name: str) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + 0.1 * draw(WIDTH), 0.1 * draw(WIDTH)

    def attention(name: str) -> None:
        for part in ("query", "key", "value", "out"):
            found[f"{name}.{part}.weight"] = 2 * draw(WIDTH, WIDTH)
            if part != "key":
                found[f"{name}.{part}.bias"] = draw(WIDTH)
        norm(f"{name}_ln")

    for side, layers in (("encoder", 2), ("decoder", 1)):
        for layer in range(layers):
            block = f"{side}.blocks.{layer}"
            attention(f"{block}.attn")
            if side == "decoder":
                attention(f"{block}.cross_attn")
            found[f"{block}.mlp.0.weight"], found[f"{block}.mlp.0.bias"] = draw(4 * WIDTH, WIDTH), draw(4 * WIDTH)
            found[f"{block}.mlp.2.weight"], found[f"{block}.mlp.2.bias"] = draw(WIDTH, 4 * WIDTH), draw(WIDTH)
            norm(f"{block}.mlp_ln")
    norm("encoder.ln_post")
    norm("decoder.ln")
    return found


DIMS = {
    "n_mels": MELS,
    "n_vocab": VOCABULARY,
    "n_audio_ctx": TOKENS,
    "n_audio_state": WIDTH,
    "n_audio_head": HEADS,
    "n_audio_layer": 2,
    "n_text_ctx": TEXTS,
    "n_text_state": WIDTH,
    "n_text_head": HEADS,
    "n_text_layer": 1,
}


def write_model(file: Path, **changed: object) -> Path:
    """A .pt; `changed` takes the place of dims, or of the weights as `weights`."""
    weights = changed.pop("weights", None) or {name: each.half() for name, each in state().items()}
    torch.save({"dims": {**DIMS, **changed}, "model_state_dict": weights}, file)
    return file


def write_tokens(file: Path) -> Path:
    """Bytes and three words, each with its number."""
    texts = [*(bytes([i]) for i in range(256)), b" one", b" two", b" three"]
    file.write_text("".join(f"{base64.b64encode(text).decode()} {i}\n" for i, text in enumerate(texts)))
    return file


def write_wav(file: Path, seconds: float, pitch: float = 300.0, rate: int = 16_000) -> Path:
    """A tone that comes and goes."""
    t = np.arange(round(seconds * rate)) / rate
    samples = 0.3 * np.sin(2 * np.pi * pitch * t) * (np.sin(2 * np.pi * 3 * t) > 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(rate)
        stream.writeframes((samples * 32767).astype("<i2").tobytes())
    return file


def write_clips(folder: Path) -> Path:
    """Four clips with transcripts in CMU Sphinx's manner; the third is longer than a window."""
    for number, seconds in enumerate((0.7, 1.3, 3.1, 0.9)):
        write_wav(folder / f"c{number}.wav", seconds, 200 + 90 * number)
    lines = ["red green blue", "green", "blue blue red green", "red"]  # numbers in a row would be one word
    text = "".join(f"<s> {line} </s> (c{number})\n" for number, line in enumerate(lines))
    (folder / "some.transcription").write_text(text)
    return folder


def write_folder(where: Path) -> Path:
    """The same model as transformers stores it, with a tokenizer of single bytes and three words."""
    from recipes.whisper import weights
    from transformers import WhisperFeatureExtractor, WhisperTokenizerFast

    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}  # GPT-2 writes other bytes as letters from Ā on
    others = iter(range(256, 512))
    texts = [*(chr(i) if i in printed else chr(next(others)) for i in range(256)), "Ġone", "Ġtwo", "Ġthree"]
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"]
    tokenizer = WhisperTokenizerFast(vocab={token: i for i, token in enumerate([*texts, *special])}, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.save_pretrained(where)
    WhisperFeatureExtractor(feature_size=MELS, chunk_length=TOKENS // 50).save_pretrained(where)
    weights.load(write_model(where / "tiny.pt")).save_pretrained(where)
    return where
