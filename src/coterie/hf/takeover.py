"""Point a model's attention at Coterie, and back."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from coterie.checks import expect
from coterie.hf import choice
from coterie.hf.attend import NAME
from coterie.hf.hooks import watch
from coterie.hf.sites import Sites, find_others, sites_of
from coterie.hf.wrapped import model_inside

_KEY = "_coterie_taken"


class _Taken(NamedTuple):
    """What giving back needs."""

    before: list[tuple[Any, str]]  # configs, and the implementation that each had
    hooks: list[Any]


def take_over(sites: Sites) -> None:
    """Point every attention module at Coterie, dense until a mechanism is chosen, and watch the first calls."""
    if not is_taken(sites.model):
        _check_free(sites)
        _own_configs(sites.model)
        usual = "sdpa" if sites.model._supports_sdpa else "eager"
        before = [
            (config, usual if config._attn_implementation in (NAME, None) else config._attn_implementation)
            for config in sites.configs()
        ]
        for site in sites.each:
            choice.put(site, None)
        sites.model.__dict__[_KEY] = _Taken(before, watch(sites))
    for config in sites.configs():
        config._attn_implementation = NAME


def give_back(sites: Sites) -> None:
    """Leave nothing of `take_over`; an implementation that was set since stays."""
    taken: _Taken = sites.model.__dict__.pop(_KEY)
    for hook in taken.hooks:
        hook.remove()
    for config, before in taken.before:
        if config._attn_implementation == NAME:
            config._attn_implementation = before
    for site in sites.each:
        choice.take(site.module)


def is_taken(model: PreTrainedModel) -> bool:
    """Whether Coterie has this model's attention."""
    return _KEY in model.__dict__


def _check_free(sites: Sites) -> None:
    """A part of a model and the whole of it are not both taken, nor a model that attends in two ways."""
    model = sites.model
    taken = [site.name for site in sites.each if choice.name(site.module) is not None]
    expect(
        not taken,
        "model",
        "one that coterie.hf.use was not called on by way of a part of it, or of a model around it: undo it there",
        f"{type(model).__name__} with {', '.join(taken[:3])} taken",
    )
    _check_whole(sites)


def check_reach(model: nn.Module) -> None:
    """Refuse a model whose attention Coterie cannot replace, before anything else is asked of it."""
    _check_whole(sites_of(model_inside(model)))


def _check_whole(sites: Sites) -> None:
    configs, model = sites.configs(), sites.model
    mixed = sorted(name for name, config in find_others(model) if any(config is each for each in configs))
    expect(
        not mixed,
        "model",
        "attention that is all on Hugging Face's interface, as the others would misread its masks",
        f"{type(model).__name__} with attention of its own in {', '.join(mixed[:3])}",
    )


def _own_configs(model: PreTrainedModel) -> None:
    """Give a model configs of its own, as another may share them and has not been asked."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copies[id(config)] if id(config) in copies else copy.deepcopy(config, copies)
