"""Whole models: put a mechanism into their layers, take it out, say what runs, load it again."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from coterie.checks import expect, expect_choice, expect_int
from coterie.files import read_json
from coterie.hf import choice
from coterie.hf.attend import NAME
from coterie.hf.positions import Table, learned_positions
from coterie.hf.trust import code_of
from coterie.hf.wrapped import model_inside
from coterie.mechanisms import Mechanism

_Model = TypeVar("_Model", bound=nn.Module)  # a PreTrainedModel, or a wrapper around one, such as PEFT's
_STATE = "_coterie_state"
_NAME = "_coterie_name"
_WHERE = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token")  # what files are read
_CROSS = re.compile(r"cross|enc(oder)?_?(dec)?_?attn|encdec", re.IGNORECASE)


class Layer(NamedTuple):
    """One attention module of a model."""

    name: str
    number: int
    kind: str  # "self" or "cross"
    runs: str  # a mechanism, "dense", or the implementation that the model had


class _Site(NamedTuple):
    name: str
    number: int
    kind: str
    module: Any  # an nn.Module with a config


class _State(NamedTuple):
    """What `undo` needs."""

    before: list[tuple[Any, str]]  # configs, and the implementation that each had
    hooks: list[Any]


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
        >>> [layer.runs for layer in coterie.hf.describe(model)]
        encoder.layer.0.attention.self  self  near-far:near=16
        encoder.layer.1.attention.self  self  near-far:near=16
        ['near-far:near=16', 'near-far:near=16']
    """
    inner = model_inside(model)
    expect_choice("kind", kind, ("all", "self", "cross"))
    sites = _sites(inner)
    some = [s for s in sites if kind in ("all", s.kind) and _below(_short(inner, s.name), within)]
    expect(bool(some), "within, kind", f"some of {', '.join(s.name for s in sites)}", f"{within!r}, {kind!r}")
    chosen = _wanted(mechanism, layers, some)
    _take_over(inner, sites)
    for site in some:
        if site.number in chosen:
            choice.put(site.module, chosen[site.number], site.number, site.kind)
    _store(inner, sites)
    return model


def undo(model: _Model) -> _Model:
    """Put the attention back that the model had before `use`, or that `set_attn_implementation` has chosen since."""
    inner = model_inside(model)
    state: _State | None = inner.__dict__.pop(_STATE, None)
    expect(state is not None, "model", "a model that coterie.hf.use was called on", type(model).__name__)
    assert state is not None
    for hook in state.hooks:
        hook.remove()
    for config, before in state.before:
        if config._attn_implementation == NAME:
            config._attn_implementation = before
    sites = _sites(inner)
    for site in sites:
        choice.take(site.module)
        site.module.__dict__.pop(_NAME, None)
    for config in _configs(inner, sites):
        config.__dict__.pop("coterie", None)
    return model


def describe(model: nn.Module) -> list[Layer]:
    """Print, layer by layer, what attention runs in a model; the same as a list."""
    model = model_inside(model)
    found = [Layer(name, number, kind, _runs(module)) for name, number, kind, module in _sites(model, refuse=False)]
    if not found:
        print(f"{type(model).__name__} does not use Hugging Face's attention interface: Coterie cannot reach it.")
    width = max((len(layer.name) for layer in found), default=0)
    for layer in found:
        print(f"{layer.name:{width}}  {layer.kind:5} {layer.runs}")
    for name, _ in _others(model) if found else []:
        print(f"{name}  attends by itself, untouched")
    return found


def load(model: nn.Module | str | Path, stored: str | Path | None = None, **settings: Any) -> Any:
    """A model with the mechanisms that were stored for it.

    Args:
        model: a folder or hub name that `save_pretrained` wrote after `use`; or a model, with `stored`.
        stored: a JSON file with a choice for this model.
        settings: for `from_pretrained`. A model with code of its own is refused unless `trust_remote_code=True` is
            among them: nothing is asked, and nothing of it is run.
    """
    if isinstance(model, nn.Module):
        expect(stored is not None, "stored", "a JSON file, for a model that is loaded already", "None")
    else:
        model = _load(model, **settings)
    assert isinstance(model, nn.Module)
    if stored is not None:
        choices = read_json(Path(stored))
    else:
        choices = getattr(model_inside(model).config, "coterie", None)
        expect(choices is not None, "model", "a config with a stored choice: call coterie.hf.use and save it", "none")
    return apply(model, choice.stored_modules(choices))


def _load(path: str | Path, *, trust_remote_code: bool = False, **settings: Any) -> PreTrainedModel:
    where = {key: settings[key] for key in _WHERE if settings.get(key) is not None}
    code = "" if trust_remote_code else code_of(path, **where)
    expect(not code, "model", "no code of its own unless trust_remote_code=True", f"{path} with {code}")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
    known = config.architectures or []
    expect(bool(known), "model", "a config that names its architecture", path)
    kind = getattr(transformers, str(known[0]), None)
    if trust_remote_code:  # the Auto class that its own code is for
        own = getattr(config, "auto_map", None) or {}
        asked = (name for name, code in own.items() if str(code).rpartition(".")[2] == known[0])
        kind = getattr(transformers, next(asked, ""), kind)
    fits = isinstance(kind, type) and (issubclass(kind, PreTrainedModel) or kind.__name__.startswith("AutoModel"))
    expect(fits, "model", "an architecture of transformers", known[0])
    assert kind is not None
    model = kind.from_pretrained(path, trust_remote_code=trust_remote_code, **settings)
    assert isinstance(model, PreTrainedModel)
    return model


def apply(model: _Model, modules: Mapping[str, str]) -> _Model:
    """Put a mechanism's string, or "dense", into each attention module; names are those of the bare model."""
    inner = model_inside(model)
    sites = _sites(inner)
    names = {_short(inner, s.name): s for s in sites}
    missing = sorted(set(modules) ^ set(names))
    expect(not missing, "stored choice", "the attention modules of this model", f"a difference in {missing}")
    _take_over(inner, sites)
    for name, site in names.items():
        choice.put(site.module, choice.parse(modules[name]), site.number, site.kind)
    _store(inner, sites)
    return model


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that Coterie can reach, by their names in the bare model."""
    inner = model_inside(model)
    return {_short(inner, site.name): site.module for site in _sites(inner)}


# --- which modules ----------------------------------------------------------------------------------------------------


def _sites(model: PreTrainedModel, *, refuse: bool = True) -> list[_Site]:
    """The attention modules that call Hugging Face's interface."""
    found = [
        _Site(name, _number(name), _kind(name, module), module)
        for name, module in model.named_modules()
        if _calls_interface(type(module).forward)
    ]
    if not found and refuse:
        raise ValueError(
            f"{type(model).__name__} has attention of its own that ignores Hugging Face's attention interface: "
            "Coterie cannot replace it."
        )
    return found


def _kind(name: str, module: nn.Module) -> str:
    own = [*name.split(".")[-2:], type(module).__name__]
    return "cross" if any(_CROSS.search(part) for part in own) else "self"


def _others(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Attention modules that attend by themselves, and the config that they go by."""
    found, configs = [], {"": model.config}
    for name, module in model.named_modules():
        config = getattr(module, "config", None) or configs.get(name.rpartition(".")[0], model.config)
        configs[name] = config
        if "attention" in type(module).__name__.lower() and _attends_itself(type(module).forward):
            found.append((name, config))
    return found


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


def _number(name: str) -> int:
    """The first number in a module's name: the layer it is in."""
    found = re.search(r"(?<=\.)\d+(?=\.|$)", f".{name}")
    return int(found[0]) if found else 0


def _below(name: str, within: str) -> bool:
    return not within or f"{name}.".startswith(f"{within}.")


def _wanted(mechanism: Any, layers: Iterable[int] | None, sites: list[_Site]) -> dict[int, Mechanism | None]:
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


# --- taking over ------------------------------------------------------------------------------------------------------


def _take_over(model: PreTrainedModel, sites: list[_Site]) -> None:
    """Point every attention module at Coterie, dense until a mechanism is chosen, and watch the first calls."""
    if _STATE not in model.__dict__:
        taken = [site.name for site in sites if _NAME in site.module.__dict__]
        expect(
            not taken,
            "model",
            "one that coterie.hf.use was not called on by way of a part of it, or of a model around it: undo it there",
            f"{type(model).__name__} with {', '.join(taken[:3])} taken",
        )
        configs = _configs(model, sites)
        mixed = sorted(name for name, config in _others(model) if any(config is each for each in configs))
        expect(
            not mixed,
            "model",
            "attention that is all on Hugging Face's interface, as the others would misread its masks",
            f"{type(model).__name__} with attention of its own in {', '.join(mixed[:3])}",
        )
        _own_configs(model)
        usual = "sdpa" if model._supports_sdpa else "eager"
        before = [
            (c, usual if c._attn_implementation in (NAME, None) else c._attn_implementation)
            for c in _configs(model, sites)
        ]
        hooks = [model.register_forward_pre_hook(_before_forward, with_kwargs=True)]
        table = learned_positions(model)
        if table is not None:
            hooks.append(table.owner.register_forward_pre_hook(partial(_before_positions, table), with_kwargs=True))
        for site in sites:
            choice.put(site.module, None, site.number, site.kind)
            site.module.__dict__[_NAME] = site.name
            hooks.append(site.module.register_forward_pre_hook(_before_attention))
            hooks.append(site.module.register_forward_hook(_after_attention))
        model.__dict__[_STATE] = _State(before, hooks)
    for config in _configs(model, sites):
        config._attn_implementation = NAME


def _own_configs(model: PreTrainedModel) -> None:
    """Give a model configs of its own, as another may share them and has not been asked."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            module.config = copies[id(config)] if id(config) in copies else copy.deepcopy(config, copies)


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
            f"{module.__dict__[_NAME]} ran without calling attn_implementation='coterie': {type(module).__name__} has "
            "another way to attend with these settings, so nothing was replaced there."
        )


def _before_forward(model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """What can be told before anything is computed."""
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


def _configs(model: PreTrainedModel, sites: list[_Site]) -> list[Any]:
    """The configs that the attention modules and the models around them look at, each once."""
    found: dict[int, Any] = {id(model.config): model.config}
    for site in sites:
        found.setdefault(id(site.module.config), site.module.config)
    return list(found.values())


def _store(model: PreTrainedModel, sites: list[_Site]) -> None:
    """Write the choice into the configs: all of it at the top, each part with the modules that it is for."""
    specs = {_short(model, site.name): _chosen(site.module) for site in sites}
    model.config.coterie = {"modules": specs, "by_layer": _by_layer(sites)}
    for config in _configs(model, sites)[1:]:
        own = [site for site in sites if site.module.config is config]
        config.coterie = {
            "modules": {_short(model, s.name): _chosen(s.module) for s in own},
            "by_layer": _by_layer(own),
        }


def _by_layer(sites: list[_Site]) -> dict[str, str] | None:
    """The mechanism of each layer index, if the index says it all."""
    found: dict[str, str] = {}
    for site in sites:
        if getattr(site.module, "layer_idx", None) is None:
            return None
        if found.setdefault(str(site.module.layer_idx), _chosen(site.module)) != _chosen(site.module):
            return None
    return found


def _short(model: PreTrainedModel, name: str) -> str:
    """A module's name in the bare model, so that models with and without a head agree."""
    return name.removeprefix(f"{model.base_model_prefix}.") if model.base_model_prefix else name


def _runs(module: Any) -> str:
    implementation = module.config._attn_implementation
    if implementation != NAME:
        return str(implementation)
    return _chosen(module)


def _chosen(module: Any) -> str:
    mechanism = choice.of(module)
    return choice.DENSE if mechanism is None else str(mechanism)
