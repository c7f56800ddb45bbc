"""The choice as a model's config keeps it: {"modules": {name: mechanism}, "by_layer": {index: mechanism} or None}.

Under "decode" it may hold the same again, for new tokens over a cache.
"""

from __future__ import annotations

from typing import Any

from coterie.checks import expect
from coterie.hf.sites import Site, Sites

DECODE = "decode"


def write(sites: Sites, chosen: dict[str, str], decode: dict[str, str]) -> None:
    """Write what was chosen, by the sites' names: all of it at the top, each part with the modules that it is for.

    `decode` is what was chosen for new tokens, empty if all are dense.
    """
    top, *parts = sites.configs()
    top.coterie = _form(sites.each, chosen, decode)
    for config in parts:
        config.coterie = _form([site for site in sites.each if site.module.config is config], chosen, decode)


def erase(sites: Sites) -> None:
    """As if nothing had been written."""
    for config in sites.configs():
        config.__dict__.pop("coterie", None)


def modules_in(stored: Any, part: str = "") -> dict[str, Any]:
    """The mechanism of each module, in what a config or a JSON file holds: anybody may have written that.

    With `part` "decode", those for new tokens; none if nothing is said of them.
    """
    if part and isinstance(stored, dict):
        stored = stored.get(part, {"modules": {}})
    modules = stored.get("modules") if isinstance(stored, dict) else None
    expect(isinstance(modules, dict), "stored choice", '{"modules": {name: mechanism}}', ascii(stored)[:100])
    assert isinstance(modules, dict)
    return modules


def spec_for(module: Any, default: Any, part: str = "") -> Any:
    """What a module's config says of a module that knows no more than its layer; the default if it says nothing."""
    stored: Any = getattr(module.config, "coterie", None)
    if stored is not None and part:
        modules_in(stored)  # anybody may have written it
        stored = stored.get(part)
    if stored is None:
        return default
    specs = list(modules_in(stored).values())
    if specs and all(spec == specs[0] for spec in specs):
        return specs[0]
    by_layer = stored.get("by_layer")
    layer = getattr(module, "layer_idx", None)
    if by_layer is None or layer is None:
        raise ValueError(
            f"the stored choice differs between the layers of this model, and {type(module).__name__} does not know "
            "which one it is: load the model with coterie.hf.load(path)."
        )
    known = isinstance(by_layer, dict) and str(layer) in by_layer
    expect(known, "stored choice", f"a mechanism for layer {layer}", ascii(by_layer)[:100])
    return by_layer[str(layer)]


def _form(sites: list[Site], chosen: dict[str, str], decode: dict[str, str]) -> dict[str, Any]:
    form = {"modules": {site.short: chosen[site.name] for site in sites}, "by_layer": _by_layer(sites, chosen)}
    return form | ({DECODE: _form(sites, decode, {})} if decode else {})


def _by_layer(sites: list[Site], chosen: dict[str, str]) -> dict[str, str] | None:
    """The mechanism of each layer index, if the index says it all."""
    found: dict[str, str] = {}
    for site in sites:
        layer, spec = getattr(site.module, "layer_idx", None), chosen[site.name]
        if layer is None or found.setdefault(str(layer), spec) != spec:
            return None
    return found
