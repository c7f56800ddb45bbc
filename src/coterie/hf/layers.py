"""What attention runs in a model, layer by layer."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from coterie.hf import choice
from coterie.hf.attend import NAME
from coterie.hf.sites import find, find_others
from coterie.hf.wrapped import model_inside


class Layer(NamedTuple):
    """One attention module of a model."""

    name: str
    number: int
    kind: str  # "self" or "cross"
    runs: str  # a mechanism, "dense", or the implementation that the model had


def describe(model: nn.Module) -> list[Layer]:
    """Print, layer by layer, what attention runs in a model; the same as a list."""
    model = model_inside(model)
    found = [Layer(site.name, site.number, site.kind, _runs(site.module)) for site in find(model)]
    if not found:
        print(f"{type(model).__name__} does not use Hugging Face's attention interface: Coterie cannot reach it.")
    width = max((len(layer.name) for layer in found), default=0)
    for layer in found:
        print(f"{layer.name:{width}}  {layer.kind:5} {layer.runs}")
    for name, _ in find_others(model) if found else []:
        print(f"{name}  attends by itself, untouched")
    return found


def _runs(module: Any) -> str:
    implementation = module.config._attn_implementation
    return choice.text(module) if implementation == NAME else str(implementation)
