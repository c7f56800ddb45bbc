"""Which mechanism runs in an attention module: set by `use`, or restored from the model's config."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coterie.checks import expect
from coterie.mechanisms import Mechanism, NearFar, as_mechanism

DENSE = "dense"
_MECHANISM, _INDEX, _CALLS, _KIND = "_coterie_mechanism", "_coterie_index", "_coterie_calls", "_coterie_kind"


def parse(spec: Any) -> Mechanism | None:
    """A mechanism, its string or its JSON form as a mechanism; None and "dense" are dense attention."""
    return None if spec is None or spec == DENSE else as_mechanism(spec)


def stored_modules(stored: Any) -> dict[str, Any]:
    """The mechanism of each module, in what a config or a JSON file holds: anybody may have written that."""
    modules = stored.get("modules") if isinstance(stored, dict) else None
    expect(isinstance(modules, dict), "stored choice", '{"modules": {name: mechanism}}', ascii(stored)[:100])
    assert isinstance(modules, dict)
    return modules


def put(module: nn.Module, mechanism: Mechanism | None, index: int, kind: str = "") -> None:
    """Let this mechanism run in this module; its kind is "self", "cross" or unknown."""
    module.__dict__.update({_MECHANISM: mechanism, _INDEX: index, _KIND: kind})
    module.__dict__.setdefault(_CALLS, 0)


def take(module: nn.Module) -> None:
    """Forget what was put."""
    for name in (_MECHANISM, _INDEX, _CALLS, _KIND):
        module.__dict__.pop(name, None)


def is_put(module: nn.Module) -> bool:
    """Whether `put` was called."""
    return _MECHANISM in module.__dict__


def of(module: nn.Module) -> Mechanism | None:
    """What runs in this module; restored from its config at the first call, near-far if nothing is stored there."""
    if not is_put(module):
        put(module, _stored(module), index(module))
    mechanism: Mechanism | None = module.__dict__[_MECHANISM]
    return mechanism


def index(module: nn.Module) -> int:
    """The module's layer."""
    return int(module.__dict__.get(_INDEX, draws(module)))


def crosses(module: nn.Module) -> bool:
    """Whether keys come from elsewhere, of a module that does not hide the future.

    Where nobody has said, decoders tell: their own attention does hide it.
    """
    kind = module.__dict__.get(_KIND, "")
    if kind:
        return bool(kind == "cross")
    return bool(getattr(module, "is_decoder", False)) or "cross" in type(module).__name__.lower()


def draws(module: nn.Module) -> int:
    """The layer for the random draws: what the module itself knows, so that a model draws the same however loaded."""
    return int(getattr(module, "layer_idx", None) or 0)


def count(module: nn.Module) -> None:
    """Attention has reached Coterie in this module."""
    if not torch.compiler.is_compiling():
        module.__dict__[_CALLS] = calls(module) + 1


def calls(module: nn.Module) -> int:
    """How often that was."""
    return int(module.__dict__.get(_CALLS, 0))


def _stored(module: Any) -> Mechanism | None:
    stored: dict[str, Any] | None = getattr(module.config, "coterie", None)
    if stored is None:
        return NearFar()
    specs = list(stored_modules(stored).values())
    if specs and all(spec == specs[0] for spec in specs):
        return parse(specs[0])
    by_layer = stored.get("by_layer")
    layer = getattr(module, "layer_idx", None)
    if by_layer is None or layer is None:
        raise ValueError(
            f"the stored choice differs between the layers of this model, and {type(module).__name__} does not know "
            "which one it is: load the model with coterie.hf.load(path)."
        )
    known = isinstance(by_layer, dict) and str(layer) in by_layer
    expect(known, "stored choice", f"a mechanism for layer {layer}", ascii(by_layer)[:100])
    return parse(by_layer[str(layer)])
