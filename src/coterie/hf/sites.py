"""Where attention sits in a model of transformers: the modules that Coterie can reach, and those that it cannot."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

# Families that the tests go through; docs/guide/hugging-face.md has them as a table.
TESTED = (
    *("BERT", "RoBERTa", "ALBERT", "DistilBERT", "ELECTRA", "ModernBERT", "ViT", "DINOv2", "CLIP", "Whisper", "BART"),
    *("T5", "GPT-2", "Llama", "Qwen2", "Gemma 3"),
)
_CROSS = re.compile(r"cross|enc(oder)?_?(dec)?_?attn|encdec", re.IGNORECASE)


class Site(NamedTuple):
    """An attention module that calls Hugging Face's interface."""

    name: str
    short: str  # its name in the bare model, so that models with and without a head agree
    number: int  # of its layer
    kind: str  # "self" or "cross"
    module: Any  # an nn.Module with a config


class Sites(NamedTuple):
    """A model and its sites."""

    model: PreTrainedModel
    each: list[Site]

    def configs(self) -> list[Any]:
        """The configs that the attention modules and the models around them look at, each once; the model's first."""
        found: dict[int, Any] = {id(self.model.config): self.model.config}
        for site in self.each:
            found.setdefault(id(site.module.config), site.module.config)
        return list(found.values())

    def some(self, kind: str, within: str) -> list[Site]:
        """Those of a kind ("all" is any) below a module's name ("" is the model's)."""
        return [
            site
            for site in self.each
            if kind in ("all", site.kind) and (not within or f"{site.short}.".startswith(f"{within}."))
        ]


def sites_of(model: PreTrainedModel) -> Sites:
    """What Coterie can reach in a model; refused if that is nothing."""
    found = Sites(model, list(find(model)))
    if not found.each:
        raise ValueError(
            f"{type(model).__name__} has attention of its own that ignores Hugging Face's attention interface: "
            f"Coterie cannot replace it; it can in {', '.join(TESTED)} and most others on that interface."
        )
    return found


def find(model: PreTrainedModel) -> Iterator[Site]:
    """The sites of a model, if there are any."""
    head = f"{model.base_model_prefix}." if model.base_model_prefix else ""
    for name, module in model.named_modules():
        if _calls_interface(type(module).forward):
            yield Site(name, name.removeprefix(head), _number(name), _kind(name, module), module)


def find_others(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Attention modules that attend by themselves, and the config that they go by."""
    found, configs = [], {"": model.config}
    for name, module in model.named_modules():
        config = getattr(module, "config", None) or configs.get(name.rpartition(".")[0], model.config)
        configs[name] = config
        if "attention" in type(module).__name__.lower() and _attends_itself(type(module).forward):
            found.append((name, config))
    return found


def _number(name: str) -> int:
    """The first number in a module's name: the layer it is in."""
    found = re.search(r"(?<=\.)\d+(?=\.|$)", f".{name}")
    return int(found[0]) if found else 0


def _kind(name: str, module: nn.Module) -> str:
    own = [*name.split(".")[-2:], type(module).__name__]
    return "cross" if any(_CROSS.search(part) for part in own) else "self"


@cache
def _attends_itself(forward: Any) -> bool:
    if forward.__module__.startswith("torch.") or _calls_interface(forward):
        return False
    try:
        source = inspect.getsource(forward)
    except OSError:  # written where there is no file
        return False
    return "softmax(" in source or "scaled_dot_product_attention(" in source


@cache
def _calls_interface(forward: Any) -> bool:
    """Whether a forward method looks its attention up."""
    if forward.__module__.startswith("torch."):
        return False
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(forward)
    except OSError:  # written where there is no file, in a shell for example
        return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(forward).__code__.co_names
