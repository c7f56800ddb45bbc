"""Weights as openai-whisper stores them, in transformers' Whisper."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from coterie.cli.inputs import UserError
from recipes.common.layout import expect_same

_DIMS = (
    "n_mels",
    "n_vocab",
    "n_audio_ctx",
    "n_audio_state",
    "n_audio_head",
    "n_audio_layer",
    "n_text_ctx",
    "n_text_state",
    "n_text_head",
    "n_text_layer",
)
# Parts of a weight's name there and here, in the order in which they are replaced.
_NAMES = (
    ("blocks.", "layers."),
    ("cross_attn_ln.", "encoder_attn_layer_norm."),
    ("attn_ln.", "self_attn_layer_norm."),
    ("mlp_ln.", "final_layer_norm."),
    ("cross_attn.", "encoder_attn."),
    (".attn.", ".self_attn."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    ("attn.out.", "attn.out_proj."),
    ("mlp.0.", "fc1."),
    ("mlp.2.", "fc2."),
    ("ln_post.", "layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    ("token_embedding.", "embed_tokens."),
)
_WHOLE = {"positional_embedding": "embed_positions.weight"}  # the last part of a name


def load(file: Path) -> Any:
    """The model of a file; nothing in it but tensors and numbers is read."""
    stored = _read(file)
    dims, weights = _dims(stored, file), _weights(stored, file)
    model = WhisperForConditionalGeneration(_config(dims))
    found = {f"model.{renamed(name)}": each for name, each in weights.items() if name != "alignment_heads"}
    if "model.decoder.embed_tokens.weight" in found:  # tied
        found["proj_out.weight"] = found["model.decoder.embed_tokens.weight"]
    expect_same(found, model.state_dict(), file)
    model.load_state_dict({name: each.float() for name, each in found.items()})
    return model.eval().requires_grad_(False)


def renamed(name: str) -> str:
    """What transformers calls a weight.

    >>> renamed("decoder.blocks.0.cross_attn_ln.bias"), renamed("encoder.positional_embedding")
    ('decoder.layers.0.encoder_attn_layer_norm.bias', 'encoder.embed_positions.weight')
    """
    part, _, last = name.rpartition(".")
    if last in _WHOLE:
        return f"{part}.{_WHOLE[last]}"
    for theirs, ours in _NAMES:
        name = name.replace(theirs, ours)
    return name


def _read(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{file} is no pickle of tensors alone, and nothing else in it is run.") from error
    except (RuntimeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} holds no weights of torch, or not all of them.") from error


def _dims(stored: Any, file: Path) -> dict[str, int]:
    found = stored.get("dims") if isinstance(stored, dict) else None
    if not isinstance(found, dict) or not isinstance(stored.get("model_state_dict"), dict):
        raise UserError(f"{file} is no Whisper of openai-whisper: expected 'dims' and 'model_state_dict' in it.")
    for name in _DIMS:
        if not isinstance(found.get(name), int) or found[name] < 1:
            raise UserError(f"{file}: its dims say {name} = {found.get(name)!r}, expected a number.")
    for part in ("audio", "text"):
        if found[f"n_{part}_state"] % found[f"n_{part}_head"]:
            raise UserError(f"{file}: n_{part}_state is no multiple of n_{part}_head.")
    if found["n_audio_state"] != found["n_text_state"]:
        raise UserError(f"{file}: n_audio_state and n_text_state differ, which Whisper's do not.")
    return found


def _weights(stored: Any, file: Path) -> dict[str, Tensor]:
    found = stored["model_state_dict"]
    for name, each in found.items():
        if not isinstance(each, Tensor):
            raise UserError(f"{file}: {name} is no tensor.")
    return dict(found)


def _config(dims: dict[str, int]) -> WhisperConfig:
    return WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_layers=dims["n_text_layer"],
        decoder_attention_heads=dims["n_text_head"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        # transformers looks these up in tables of that size; what is said begins and ends as `tokens.py` tells
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
