"""What is watched while a model runs: that its attention reaches Coterie, and that what it asks for can be given."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache

from coterie.hf import choice
from coterie.hf.attend import NAME
from coterie.hf.cache import Cache, check_owner, grow
from coterie.hf.positions import Table, learned_positions
from coterie.hf.sites import Sites


def watch(sites: Sites) -> list[Any]:
    """Hook these checks into a model; returns the handles that take them out again."""
    hooks = [sites.model.register_forward_pre_hook(_before_forward, with_kwargs=True)]
    table = learned_positions(sites.model)
    if table is not None:
        hooks.append(table.owner.register_forward_pre_hook(partial(_before_positions, table), with_kwargs=True))
    for site in sites.each:
        hooks.append(site.module.register_forward_pre_hook(_before_attention))
        hooks.append(site.module.register_forward_hook(_after_attention))
    return hooks


def _before_forward(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What can be told before anything is computed; and keys and values of earlier tokens get buffers."""
    if not torch.compiler.is_compiling():
        past = named.get("past_key_values")
        past = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
        if isinstance(past, Cache):
            check_owner(past, model)
        elif isinstance(past, DynamicCache):
            grow(past)
    if named.get("output_attentions") or getattr(model.config, "output_attentions", False):
        raise ValueError(
            "output_attentions: clustered attention never has the matrix of weights; "
            "load the model with attn_implementation='eager' to get it."
        )


def _before_positions(table: Table, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Tokens that there is no position for."""
    tokens = named.get("input_ids", inputs[0] if inputs else None)
    if isinstance(tokens, torch.Tensor) and tokens.ndim == 2 and tokens.shape[1] > table.limit:
        raise ValueError(
            f"this model has {table.limit} positions, and the input has {tokens.shape[1]} tokens; "
            f"coterie.hf.extend_positions(model, {tokens.shape[1]}) interpolates them (fine-tune after that)."
        )


def _before_attention(module: Any, inputs: Any) -> None:
    """Some wrappers call a model's `forward` itself, past what watches the whole of it; they all come by here."""
    now = module.config._attn_implementation
    if now != NAME:
        raise RuntimeError(
            f"set_attn_implementation({now!r}) was called after coterie.hf.use, which chose a mechanism for this "
            "model: call coterie.hf.undo(model) to take it out, or coterie.hf.use again."
        )


def _after_attention(module: nn.Module, inputs: Any, output: Any) -> None:
    """Check that the attention of a module has reached Coterie."""
    if not torch.compiler.is_compiling() and choice.calls(module) == 0:
        raise RuntimeError(
            f"{choice.name(module)} ran without calling attn_implementation='coterie': {type(module).__name__} has "
            "another way to attend with these settings, so nothing was replaced there."
        )
