"""Whole models: put a mechanism into their layers, and take it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn

from coterie.checks import expect, expect_choice, expect_int
from coterie.hf import choice, decoding, stored
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
    decode: Mechanism | str | dict[str, Any] | Mapping[int, Any] | None = None,
) -> _Model:
    """Let the attention of a trained model run through a mechanism; weights, masks and cache stay.

    Call it again to give some layers another mechanism; layers that were never chosen run dense. A layer with a sliding
    window keeps it, exactly and at the window's cost. Up to `FEW_QUERIES` queries (decoding) are answered densely, or
    by `decode`, which looks up what it needs in the cache: keys and values of earlier tokens then lie in the buffers of
    `coterie.hf.Cache`, in whatever cache a model makes for itself too.
    Padding changes nothing: a sample of a padded batch gets what it would get alone. The choice is stored in the
    model's config, so `save_pretrained` keeps it.

    Args:
        model: any model on Hugging Face's attention interface, or one wrapped by PEFT, sentence-transformers and the
            like; others are refused.
        mechanism: a mechanism or its string; None or "dense" for dense attention; or a dict from layer to these.
        layers: which layers; all by default.
        kind: "self", "cross" or "all" attention.
        within: only modules below this name, for example "decoder" or "vision_model".
        decode: what answers new tokens over a cache, as `mechanism`: dense, or "near-far", in the self-attention of
            these layers that hides the future and has no window of its own.

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
    over_cache = {number: decoding.form(each) for number, each in _wanted(decode, layers, some).items()}
    here = [site for site in some if site.number in chosen]
    _check_decoding(inner, here, over_cache)
    _put(sites, [(site, chosen[site.number], over_cache.get(site.number)) for site in here])
    return model


def apply(model: _Model, modules: Mapping[str, str], decode: Mapping[str, str] | None = None) -> _Model:
    """Put a mechanism's string, or "dense", into each attention module; names are those of the bare model.

    `decode`: the same for new tokens over a cache, where they are not dense.
    """
    sites, decode = sites_of(model_inside(model)), decode or {}
    here = {site.short for site in sites.each}
    missing = sorted(set(modules) ^ here | set(decode) - set(modules))
    another = f"those of another model, such as {missing[0]}" if missing else ""
    expect(not missing, "stored choice", f"the {len(here)} attention modules of {type(model).__name__}", another)
    over_cache = {name: decoding.form(choice.parse(spec)) for name, spec in decode.items()}
    _put(sites, [(site, choice.parse(modules[site.short]), over_cache.get(site.short)) for site in sites.each])
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


def _put(sites: Sites, chosen: Iterable[tuple[Site, Mechanism | None, Mechanism | None]]) -> None:
    take_over(sites)
    for site, mechanism, decode in chosen:
        choice.put(site, mechanism, decode if decoding.fits(site) else None)
    over_cache = {site.name: choice.decode_text(site.module) for site in sites.each}
    some = any(text != choice.DENSE for text in over_cache.values())
    stored.write(sites, {site.name: choice.text(site.module) for site in sites.each}, over_cache if some else {})


def _check_decoding(model: nn.Module, sites: list[Site], decode: Mapping[int, Mechanism | None]) -> None:
    """A mechanism that decodes nowhere was not meant."""
    wanted = [number for number, each in decode.items() if each is not None]
    fits = any(decoding.fits(site) for site in sites if site.number in wanted)
    what = f"layers of {type(model).__name__} with causal self-attention and no window of their own"
    expect(not wanted or fits, "decode", what, f"layers {wanted}")


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
