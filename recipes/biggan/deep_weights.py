"""Weights of `pytorch-pretrained-biggan` for our `DeepGenerator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.cli.inputs import UserError
from recipes.biggan.deep import DeepConfig, DeepGenerator
from recipes.common import weights
from recipes.common.reading import read_data
from recipes.common.weights import State

_NAMES = {"output_dim": "resolution", "channel_width": "ch", "z_dim": "dim_z", "num_classes": "classes"}
_NAMES |= {"attention_layer_position": "attention_before", "n_stats": "truncations", "layers": "layers", "eps": "eps"}


def load(folder: Path) -> DeepGenerator:
    """From the package's own folder: `pytorch_model.bin` and `config.json`."""
    file = folder / "pytorch_model.bin"
    found = read_data(folder / "config.json")
    return convert(weights.read_state(file), deep_config(found, folder / "config.json"), file)


def deep_config(found: dict[str, Any], file: Path) -> DeepConfig:
    """From the package's config."""
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise UserError(f"{file} is no config of pytorch-pretrained-biggan: there is no {missing[0]!r} in it.")
    return DeepConfig.from_dict({ours: found[theirs] for theirs, ours in _NAMES.items()})


def convert(state: State, config: DeepConfig, file: Path = Path("the state dict")) -> DeepGenerator:
    """A generator with the same outputs in eval mode. Spectral norms are divided out: W / (u · Wv)."""
    model = DeepGenerator(config)
    weights.fill(model, _three_colours(_renamed(_divided(state, file))), file)
    return model.eval()


def _divided(state: State, file: Path) -> State:
    found = {}
    for key, value in state.items():
        if key.endswith(("weight_u", "weight_v")):
            continue
        if key.endswith("weight_orig"):
            name = key.removesuffix("_orig")
            u, v = state.get(f"{name}_u"), state.get(f"{name}_v")
            if u is None or v is None:
                raise UserError(f"{file} has no {name}_u and {name}_v, which its spectral norm needs.")
            # In an embedding's or a layer's own precision; σ = u · Wv, as PyTorch computes it in eval mode.
            found[name] = value / (u @ (value.flatten(1) @ v))
        else:
            found[key] = value
    return found


def _renamed(state: State) -> State:
    """`generator.` in front, and the attention's names."""
    found = {}
    for key, value in state.items():
        name = key.removeprefix("generator.").replace("snconv1x1_o_conv", "o").replace("snconv1x1_", "")
        found[name] = value.reshape(()) if name.endswith("gamma") else value
    return found


def _three_colours(state: State) -> State:
    """The package computes ch channels at the end and keeps three."""
    last = ("conv_to_rgb.weight", "conv_to_rgb.bias")
    return {key: value[:3].clone() if key in last else value for key, value in state.items()}
