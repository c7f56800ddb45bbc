"""Whole models: put a mechanism into their layers, and take it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from coterie.checks import expect, expect_choice, expect_int
from coterie.hf import choice, stored
from coterie.hf.sites import Site, Sites, sites_of
from coterie.hf.takeover import give_back, is_taken, take_over
from coterie.hf.wrapped import model_inside
from coterie.mechanisms import Mechanism

_Model = TypeVar("_Model", bound=nn.Module)  # a PreTrainedModel, or a wrapper around one, such as PEFT's


def use(
    model: _Model,
    mechanism: Mechanism | str | dict[str, Any] | Mapping[int, Any] | None,
    layers: Iterable[int] | None = None,
    *,
    kind: str = "all",
    within: str = "",
) -> _Model:
    """Let the attention of a trained model run through a mechanism; weights, masks and cache stay.

    Call it again to give some layers another mechanism; layers that were never chosen run dense. A layer with a sliding
    window keeps it, exactly and at the window's cost. Up to `FEW_QUERIES` queries (decoding) are answered densely.
    Padding changes nothing: a sample of a padded batch gets what it would get alone. The choice is stored in the
    model's config, so `save_pretrained` keeps it.

    Args:
        model: any model on Hugging Face's attention interface, or one wrapped by PEFT, sentence-transformers and the
            like; others are refused.
        mechanism: a mechanism or its string; None or "dense" for dense attention; or a dict from layer to these.
        layers: which layers; all by default.
        kind: "self", "cross" or "all" attention.
        within: only modules below this name, for example "decoder" or "vision_model".

    Returns:
        The model.

    Example:
        >>> import coterie, coterie.hf, torch
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        >>> model = coterie.hf.use(BertModel(config).eval(), "near-far:near=16")
        >>> model(torch.arange(60)[None]).last_hidden_state.shape
        torch.Size([1, 60, 32])
        >>> coterie.hf.describe(model)
        encoder.layer.0.attention.self  self  near-far:near=16
        encoder.layer.1.attention.self  self  near-far:near=16
    """
    inner = model_inside(model)
    expect_choice("kind", kind, ("all", "self", "cross"))
    sites = sites_of(inner)
    some = sites.some(kind, within)
    expect(bool(some), "within, kind", f"some of {', '.join(s.name for s in sites.each)}", f"{within!r}, {kind!r}")
    chosen = _wanted(mechanism, layers, some)
    _put(sites, [(site, chosen[site.number]) for site in some if site.number in chosen])
    return model


def apply(model: _Model, modules: Mapping[str, str]) -> _Model:
    """Put a mechanism's string, or "dense", into each attention module; names are those of the bare model."""
    sites = sites_of(model_inside(model))
    missing = sorted(set(modules) ^ {site.short for site in sites.each})
    expect(not missing, "stored choice", "the attention modules of this model", f"a difference in {missing}")
    _put(sites, [(site, choice.parse(modules[site.short])) for site in sites.each])
    return model


def undo(model: _Model) -> _Model:
    """Take Coterie out: the model runs the attention that it had before `use`, or that was chosen since."""
    inner = model_inside(model)
    expect(is_taken(inner), "model", "a model that coterie.hf.use was called on", type(model).__name__)
    sites = sites_of(inner)
    give_back(sites)
    stored.erase(sites)
    return model


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that Coterie can reach, by their names in the bare model."""
    return {site.short: site.module for site in sites_of(model_inside(model)).each}


def _put(sites: Sites, chosen: Iterable[tuple[Site, Mechanism | None]]) -> None:
    take_over(sites)
    for site, mechanism in chosen:
        choice.put(site, mechanism)
    stored.write(sites, {site.name: choice.text(site.module) for site in sites.each})


def _wanted(mechanism: Any, layers: Iterable[int] | None, sites: list[Site]) -> dict[int, Mechanism | None]:
    """The mechanism of each layer that is chosen."""
    there = sorted({site.number for site in sites})
    if isinstance(mechanism, Mapping) and "mechanism" not in mechanism:
        expect(layers is None, "layers", "None with a dict from layer to mechanism", layers)
        by_layer = dict(mechanism)
    else:
        by_layer = dict.fromkeys(there if layers is None else layers, mechanism)
    for layer in by_layer:
        expect_int("layers", layer, at_least=0)
        expect(layer in there, "layers", f"layers among {there}", layer)
    return {layer: choice.parse(spec) for layer, spec in by_layer.items()}
