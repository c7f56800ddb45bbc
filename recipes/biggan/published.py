"""Checkpoints of BigGAN-PyTorch, which are also SMYRF's: a folder with G.pth, D.pth, their optimisers, and more.

Our networks have the same keys, shapes and order of parameters. Nothing is converted; sizes are read off the shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from coterie.checks import expect
from coterie.cli.inputs import UserError
from recipes.biggan.config import BOTTOM, WIDTHS, Config
from recipes.biggan.discriminator import Discriminator
from recipes.biggan.generator import Generator
from recipes.common import weights
from recipes.common.weights import State


class Checkpoint(NamedTuple):
    """What such a folder holds."""

    g: Generator
    d: Discriminator | None = None
    ema: Generator | None = None
    g_optim: dict[str, Any] | None = None
    d_optim: dict[str, Any] | None = None
    state: dict[str, Any] = {}  # noqa: RUF012 – iterations, scores and settings, as they were stored


def load(folder: Path, suffix: str = "") -> Checkpoint:
    """Read a folder; all but G.pth may be missing.

    Args:
        suffix: what the files' names end in, such as "best0".
    """
    end = f"_{suffix}" if suffix else ""

    def file(name: str) -> Path:
        return folder / f"{name}{end}.pth"

    g_state = weights.read_state(file("G"))
    d_state = weights.read_state(file("D")) if file("D").exists() else None
    config = config_of(g_state, d_state, file("G"))
    g = Generator(config)
    weights.fill(g, g_state, file("G"))
    d = ema = None
    if d_state is not None:
        d = Discriminator(config)
        weights.fill(d, d_state, file("D"))
    if file("G_ema").exists():
        ema = Generator(config)
        weights.fill(ema, weights.read_state(file("G_ema")), file("G_ema"))
    g_optim, d_optim = (
        _optimiser(file(name), network) if network is not None and file(name).exists() else None
        for name, network in (("G_optim", g), ("D_optim", d))
    )
    state = weights.read(file("state_dict")) if file("state_dict").exists() else {}
    return Checkpoint(g, d, ema, g_optim, d_optim, state if isinstance(state, dict) else {})


def save(folder: Path, checkpoint: Checkpoint, suffix: str = "") -> None:
    """Write such a folder, each file whole or not at all."""
    end = f"_{suffix}" if suffix else ""
    found = {
        "G": checkpoint.g.state_dict(),
        "D": None if checkpoint.d is None else checkpoint.d.state_dict(),
        "G_ema": None if checkpoint.ema is None else checkpoint.ema.state_dict(),
        "G_optim": checkpoint.g_optim,
        "D_optim": checkpoint.d_optim,
        "state_dict": checkpoint.state,
    }
    for name, content in found.items():
        if content is not None:
            weights.write(folder / f"{name}{end}.pth", content)


def config_of(g: State, d: State | None, file: Path) -> Config:
    """The sizes of a generator and its discriminator, from the shapes of their weights."""
    try:
        last, first, linear = (
            g[f"{name}.weight"].shape for name in ("output_layer.2", "blocks.0.0.bn1.gain", "linear")
        )
    except KeyError as error:
        raise UserError(f"{file} is not a generator of BigGAN-PyTorch: there is no {error.args[0]!r} in it.") from error
    shared = g["shared.weight"].shape if "shared.weight" in g else None
    try:
        width, gain, chunk = last[1], first, linear[1]
        blocks = 1 + max(int(key.split(".")[1]) for key in g if key.startswith("blocks."))
        resolution = BOTTOM * 2**blocks
        expect(resolution in WIDTHS, "blocks", f"those of {', '.join(map(str, WIDTHS))}²", f"{blocks} of them")
        ch = width // WIDTHS[resolution][-1]
        hierarchical = shared is not None and gain[1] > shared[1]
        attention = tuple(BOTTOM * 2 ** (i + 1) for i in _attention(g))
        plain = Config(resolution, ch, attention=())
        return Config(
            resolution=resolution,
            ch=ch,
            dim_z=chunk * (blocks + 1) if hierarchical else chunk,
            classes=gain[0] if shared is None else shared[0],
            attention=attention,
            d_attention=tuple(plain.down_resolutions[i] for i in _attention(d or {})),
            shared_dim=0 if shared is None else shared[1],
            hierarchical=hierarchical,
        )
    except (ValueError, IndexError) as error:
        raise UserError(f"{file} is not a generator of BigGAN-PyTorch that is known here: {error}.") from error


def _attention(state: State) -> list[int]:
    """The blocks with attention behind them."""
    return sorted(int(key.split(".")[1]) for key in state if key.startswith("blocks.") and key.endswith(".1.gamma"))


def _optimiser(file: Path, network: nn.Module) -> dict[str, Any]:
    """An optimiser's state; its rows are the network's parameters in their order."""
    found = weights.read(file)
    try:
        # Rows go by number, or, in files from before PyTorch 1.5, by where parameters once lay in memory.
        rows = [found["state"].get(row) for group in found["param_groups"] for row in group["params"]]
        shapes = [None if row is None else tuple(row["exp_avg"].shape) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} holds no state of an optimiser.") from error
    parameters = list(network.named_parameters())
    if len(rows) != len(parameters):
        raise UserError(f"{file} is of a network with {len(rows)} parameters, expected {len(parameters)}.")
    for (name, parameter), shape in zip(parameters, shapes, strict=True):
        if shape not in (None, tuple(parameter.shape)):
            raise UserError(f"{file}: what belongs to {name} has the shape {shape}, expected {tuple(parameter.shape)}.")
    return found
