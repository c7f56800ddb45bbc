"""Small language models with random weights, and texts for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def writer(kind: str = "llama") -> Any:
    """Llama; or Qwen2, two of whose query heads share a key head."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def texts(count: int = 6, length: int = 203, rows: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 61, (rows, length), generator=generator)} for _ in range(count)]
