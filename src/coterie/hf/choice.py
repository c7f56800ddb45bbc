"""Which mechanism runs in an attention module: set by `use`, or restored from the model's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from coterie.hf import decoding, stored
from coterie.hf.sites import Site
from coterie.mechanisms import Mechanism, NearFar, as_mechanism

DENSE = "dense"
_KEY = "_coterie"


@dataclass
class _State:
    """All that Coterie knows of one attention module."""

    mechanism: Mechanism | None  # None is dense
    index: int  # of its layer
    kind: str = ""  # "self", "cross" or unknown
    name: str | None = None  # in the model that was taken over, if one was
    calls: int = 0  # of attention that have reached Coterie
    decode: Mechanism | None = None  # what answers new tokens over a cache; None is dense


def parse(spec: Any) -> Mechanism | None:
    """A mechanism, its string or its JSON form as a mechanism; None and "dense" are dense attention."""
    return None if spec is None or spec == DENSE else as_mechanism(spec)


def _state(module: nn.Module) -> _State | None:
    return module.__dict__.get(_KEY)


def put(site: Site, mechanism: Mechanism | None, decode: Mechanism | None = None) -> None:
    """Let this mechanism run in the module of a site, and another one over its cache."""
    state = _State(mechanism, site.number, site.kind, site.name, calls(site.module), decode)
    site.module.__dict__[_KEY] = state


def take(module: nn.Module) -> None:
    """Forget what was put."""
    module.__dict__.pop(_KEY, None)


def of(module: nn.Module) -> Mechanism | None:
    """What runs in this module; restored from its config at the first call, near-far if nothing is stored there."""
    state = _state(module)
    if state is None:
        decode = decoding.form(parse(stored.spec_for(module, None, stored.DECODE)))
        state = _State(parse(stored.spec_for(module, NearFar())), draws(module), decode=decode)
        module.__dict__[_KEY] = state
    return state.mechanism


def decode_of(module: nn.Module) -> Mechanism | None:
    """What answers new tokens over a cache in this module."""
    of(module)
    state = _state(module)
    assert state is not None
    return state.decode


def text(module: nn.Module) -> str:
    """What runs, as a string."""
    return _text(of(module))


def decode_text(module: nn.Module) -> str:
    """What answers new tokens over a cache, as a string."""
    return _text(decode_of(module))


def _text(mechanism: Mechanism | None) -> str:
    return DENSE if mechanism is None else str(mechanism)


def index(module: nn.Module) -> int:
    """The module's layer."""
    state = _state(module)
    return draws(module) if state is None else state.index


def name(module: nn.Module) -> str | None:
    """The module's name in the model that was taken over, None if none was."""
    state = _state(module)
    return None if state is None else state.name


def crosses(module: nn.Module) -> bool:
    """Whether keys come from elsewhere, of a module that does not hide the future.

    Where nobody has said, decoders tell: their own attention does hide it.
    """
    state = _state(module)
    if state is not None and state.kind:
        return state.kind == "cross"
    return bool(getattr(module, "is_decoder", False)) or "cross" in type(module).__name__.lower()


def draws(module: nn.Module) -> int:
    """The layer for the random draws: what the module itself knows, so that a model draws the same however loaded."""
    return int(getattr(module, "layer_idx", None) or 0)


def count(module: nn.Module) -> None:
    """Attention has reached Coterie in this module."""
    state = _state(module)
    if state is not None and not torch.compiler.is_compiling():
        state.calls += 1


def calls(module: nn.Module) -> int:
    """How often that was."""
    state = _state(module)
    return 0 if state is None else state.calls
