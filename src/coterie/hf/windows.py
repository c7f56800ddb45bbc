"""Layers with a sliding window of their own: they keep it, whatever mechanism is chosen."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from coterie.hf.sites import Site, find
from coterie.hf.wrapped import model_inside


def own_windows(model: nn.Module) -> dict[str, int]:
    """The attention modules of a model that have a sliding window of their own, and how wide it is.

    The width is that of `coterie.Local`: a window that looks back alone holds so many tokens, the query's own included;
    one that looks both ways, as ModernBERT's, reaches half as far to either side. Names are those of
    `attention_modules`. An input that fits into the window is not cut by it: there the mechanism runs that was chosen.

    Example:
        >>> import coterie.hf
        >>> from transformers import ModernBertConfig, ModernBertModel
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = ModernBertModel(ModernBertConfig(vocab_size=99, pad_token_id=0, local_attention=128, **sizes))
        >>> coterie.hf.own_windows(model)
        {'layers.1.attn': 128, 'layers.2.attn': 128}
    """
    return {site.short: width for site in find(model_inside(model)) if (width := window_of(site))}


def window_of(site: Site) -> int:
    """How wide the window of an attention module is; 0 if it has none."""
    module = site.module
    if site.kind == "cross":
        return 0
    if hasattr(module, "sliding_window"):
        reach = module.sliding_window  # None where only some layers have one
    else:
        reach = getattr(module.config, "sliding_window", None) if _asks_its_config(type(module).forward) else None
    if not isinstance(reach, int):
        return 0
    return reach if getattr(module, "is_causal", True) else 2 * (reach - 1)  # it counts the query itself


@cache
def _asks_its_config(forward: Any) -> bool:
    """Whether a forward method takes a window from the config, as Mistral's does in every layer."""
    try:
        return "sliding_window" in inspect.getsource(forward)
    except OSError:  # written where there is no file
        return False
