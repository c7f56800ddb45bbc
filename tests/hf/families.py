"""Small random models of every family that Coterie promises to fit; a new family is one line at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY, LENGTH = 99, 61  # odd lengths, always
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
NARROW = WIDE | {"vocab_size": VOCABULARY, "num_key_value_heads": 2}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """One architecture: how to build it, what to feed it, and where its answers count."""

    name: str
    config: str
    model: str
    settings: dict[str, Any]
    inputs: Callable[[str], tuple[dict[str, Tensor], list[Tensor | None]]]
    sides: tuple[str, ...]  # padding that it takes
    causal: bool = False

    def build(self, **changes: Any) -> Any:
        """A model in eval mode, the same at every call."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(self.settings | changes))
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():  # attention that is peaked enough for mechanisms to differ
            for name, weight in model.named_parameters():
                if weight.ndim == 2 and any(
                    part in name for part in ("q_proj", "k_proj", "query", "key", "q_lin", "k_lin")
                ):
                    weight.mul_(8)
        return model

    def answers(self, model: Any, padding: str) -> list[Tensor]:
        """The outputs at real tokens."""
        inputs, real = self.inputs(padding)
        found = model(**inputs)
        outputs = [found[key] for key in ("last_hidden_state", "text_embeds", "image_embeds") if key in found]
        assert len(outputs) == len(real)
        return [x if mask is None else x[mask] for x, mask in zip(outputs, real, strict=True)]


def _tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def _mask(length: int, padding: str) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    if padding == "right":
        mask[1, length - 17 :] = 0
    elif padding == "left":
        mask[1, :17] = 0
    return mask


def text(padding: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    inputs = {"input_ids": _tokens(2, LENGTH)}
    if padding == "none":
        return inputs, [None]
    mask = _mask(LENGTH, padding)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    extra = {"position_ids": positions} if padding == "left" else {}
    return inputs | {"attention_mask": mask} | extra, [mask.bool()]


def image(padding: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}, [None]


def text_and_image(padding: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    ids = _tokens(2, LENGTH)
    ids[:, -20] = VOCABULARY - 1  # CLIP reads the text at its end token
    mask = {} if padding == "none" else {"attention_mask": _mask(LENGTH, padding)}
    return {"input_ids": ids} | mask | image(padding)[0], [None, None]


def speech(padding: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(2, 80, 2 * LENGTH, generator=generator)
    inputs = {"input_features": sound, "decoder_input_ids": _tokens(2, 37)}
    if padding == "none":
        return inputs, [None]
    mask = _mask(37, padding)
    return inputs | {"decoder_attention_mask": mask}, [mask.bool()]


def translation(padding: str) -> tuple[dict[str, Tensor], list[Tensor | None]]:
    inputs = {"input_ids": _tokens(2, LENGTH), "decoder_input_ids": _tokens(2, LENGTH, seed=1)}
    if padding == "none":
        return inputs, [None]
    mask, decoder_mask = _mask(LENGTH, padding), _mask(LENGTH, "right").flip(0)
    return inputs | {"attention_mask": mask, "decoder_attention_mask": decoder_mask}, [decoder_mask.bool()]


BERT = WIDE | {"vocab_size": VOCABULARY, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PATCHES = WIDE | {"image_size": 32, "patch_size": 4, "hidden_dropout_prob": 0.0}
BOTH, RIGHT, NONE = ("none", "right", "left"), ("none", "right"), ("none",)

FAMILIES = [
    Family("bert", "BertConfig", "BertModel", BERT, text, RIGHT),
    Family("roberta", "RobertaConfig", "RobertaModel", BERT | {"pad_token_id": 1}, text, RIGHT),
    Family("albert", "AlbertConfig", "AlbertModel", BERT | {"embedding_size": 16}, text, RIGHT),
    Family(
        "distilbert",
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2},
        text,
        RIGHT,
    ),
    Family("electra", "ElectraConfig", "ElectraModel", BERT | {"embedding_size": 16}, text, RIGHT),
    Family(
        "modernbert",
        "ModernBertConfig",
        "ModernBertModel",
        WIDE | {"vocab_size": VOCABULARY, "num_hidden_layers": 3, "local_attention": 16, "pad_token_id": 0},
        text,
        RIGHT,
    ),
    Family("vit", "ViTConfig", "ViTModel", PATCHES, image, NONE),
    Family("dinov2", "Dinov2Config", "Dinov2Model", WIDE | {"image_size": 32, "patch_size": 4}, image, NONE),
    Family(
        "clip",
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": WIDE | {"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1, "bos_token_id": 0},
            "vision_config": WIDE | {"image_size": 32, "patch_size": 4},
            "projection_dim": 16,
        },
        text_and_image,
        RIGHT,
    ),
    Family(
        "whisper",
        "WhisperConfig",
        "WhisperModel",
        ENCODER_DECODER | {"max_source_positions": LENGTH, "max_target_positions": 64},
        speech,
        RIGHT,
    ),
    Family("bart", "BartConfig", "BartModel", ENCODER_DECODER | {"max_position_embeddings": 64}, translation, RIGHT),
    Family(
        "t5",
        "T5Config",
        "T5Model",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        translation,
        RIGHT,
    ),
    Family(
        "gpt2",
        "GPT2Config",
        "GPT2Model",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
        text,
        BOTH,
        causal=True,
    ),
    Family("llama", "LlamaConfig", "LlamaModel", NARROW, text, BOTH, causal=True),
    Family("qwen2", "Qwen2Config", "Qwen2Model", NARROW, text, BOTH, causal=True),
    Family(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3TextModel",
        NARROW | {"head_dim": 8, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        text,
        BOTH,
        causal=True,
    ),
]
BY_NAME = {family.name: family for family in FAMILIES}
