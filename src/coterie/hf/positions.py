"""Models with a table of positions: where it ends, and how to stretch it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from coterie.checks import expect, expect_int

_Model = TypeVar("_Model", bound=nn.Module)
_TABLES = ("position_embeddings", "wpe", "position_embedding", "embed_positions")  # what models call it
_SIZES = ("max_position_embeddings", "n_positions", "max_target_positions")  # and what configs call its size


class Table(NamedTuple):
    """A learned table of positions."""

    owner: nn.Module
    name: str
    first: int  # rows before that of position 0

    @property
    def embedding(self) -> nn.Embedding:
        """The table itself."""
        found: nn.Embedding = getattr(self.owner, self.name)
        return found

    @property
    def limit(self) -> int:
        """How many tokens it has positions for."""
        return self.embedding.num_embeddings - self.first


def learned_positions(model: nn.Module) -> Table | None:
    """A text model's learned table of positions; None if it has none, as with RoPE or relative positions."""
    for owner in model.modules():
        for name in _TABLES:
            table = getattr(owner, name, None)
            words = any(hasattr(owner, each) for each in ("word_embeddings", "wte", "token_embedding", "embed_tokens"))
            if isinstance(table, nn.Embedding) and words and "Sinusoidal" not in type(table).__name__:
                # BART leaves some rows out; RoBERTa counts from its padding.
                first = getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1
                return Table(owner, name, first)
    return None


def extend_positions(model: _Model, length: int) -> _Model:
    """Stretch a learned table of positions to `length` tokens by linear interpolation; what is there keeps its order.

    The model sees positions that it was never trained with, in between those that it knows: short texts change too.
    Fine-tune it, or measure what it costs. Models with rotary positions (Llama, Qwen2, Gemma 3, ModernBERT) need no
    table: their own config scales them (`rope_scaling`).

    Args:
        model: with learned absolute positions, such as BERT, RoBERTa, ALBERT, DistilBERT, ELECTRA, GPT-2, BART.
        length: tokens to make room for; more than there is.

    Example:
        >>> import coterie.hf, torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        >>> model = coterie.hf.extend_positions(BertModel(config).eval(), 700)
        >>> model(torch.ones(1, 700, dtype=torch.long)).last_hidden_state.shape
        torch.Size([1, 700, 32])
    """
    expect_int("length", length, at_least=1)
    tables: list[Table] = []
    for part in model.modules():
        table = learned_positions(part)
        if table is not None and table.embedding not in [t.embedding for t in tables]:
            tables.append(table)
    expect(
        bool(tables),
        "model",
        "a learned table of positions (with rotary or relative positions there is nothing to stretch)",
        type(model).__name__,
    )
    for table in tables:
        limit, rows = table.limit, table.embedding.num_embeddings
        expect(length > limit, "length", f"more than the {limit} positions there are", length)
        _stretch(table, length)
        for config in {id(c): c for part in model.modules() if (c := getattr(part, "config", None))}.values():
            for name in _SIZES:
                if getattr(config, name, None) in (limit, rows):
                    setattr(config, name, length + getattr(config, name) - limit)
    return model


def _stretch(table: Table, length: int) -> None:
    old = table.embedding
    head, rows = old.weight.data[: table.first], old.weight.data[table.first :]
    stretched = F.interpolate(rows.T[None].float(), size=length, mode="linear", align_corners=True)[0].T
    weight = torch.cat([head, stretched.to(rows.dtype)])
    kind: Any = type(old)  # BART's own takes other arguments
    new = kind.__new__(kind)
    nn.Embedding.__init__(new, weight.shape[0], weight.shape[1], padding_idx=old.padding_idx, device=weight.device)
    new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in new.__dict__})
    new.weight = nn.Parameter(weight, requires_grad=old.weight.requires_grad)
    setattr(table.owner, table.name, new)
    for name, buffer in list(table.owner.named_buffers(recurse=False)):
        if buffer.ndim == 2 and buffer.shape == (1, old.num_embeddings):  # position_ids, token_type_ids
            grown = torch.arange(weight.shape[0], device=buffer.device)[None] if name == "position_ids" else None
            fresh = buffer.new_zeros(1, weight.shape[0]) if grown is None else grown.to(buffer.dtype)
            persistent = name not in table.owner._non_persistent_buffers_set
            table.owner.register_buffer(name, fresh, persistent=persistent)
