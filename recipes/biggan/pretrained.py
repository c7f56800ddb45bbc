"""Generators in files of their own: `model.safetensors`, `config.json`, and a model card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import coterie
from coterie.cli.inputs import UserError
from coterie.files import write_json
from recipes.biggan.attention import attend_by, blocks
from recipes.biggan.config import Config
from recipes.biggan.deep import DeepConfig, DeepGenerator
from recipes.biggan.discriminator import Discriminator
from recipes.biggan.generator import Generator
from recipes.common import weights
from recipes.common.reading import read_data

_KINDS: dict[str, Any] = {"biggan": (Generator, Config), "biggan-deep": (DeepGenerator, DeepConfig)}
_WEIGHTS, _OTHER = "model.safetensors", "discriminator.safetensors"


def save_pretrained(
    generator: Generator | DeepGenerator,
    folder: Path,
    *,
    discriminator: Discriminator | None = None,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a folder, whole or not at all; one that is there is replaced.

    Args:
        about: how it was made, for the card.
    """
    kind = next(name for name, (made, _) in _KINDS.items() if type(generator) is made)
    used = [str(block.mechanism) for block in blocks(generator)]
    part, old = folder.with_name(f"{folder.name}.part"), folder.with_name(f"{folder.name}.old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _store(generator, part / _WEIGHTS)
        if discriminator is not None:
            _store(discriminator, part / _OTHER)
        found = {"architecture": kind, "mechanism": used[0] if used else "dense", **generator.config.to_dict()}
        write_json(part / "config.json", found)
        (part / "README.md").write_text(card(generator, found, about or {}), encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def from_pretrained(folder: Path, mechanism: str | None = None) -> Any:
    """The generator of a folder, in eval mode.

    Args:
        mechanism: what its attention runs, or "dense"; what it was stored with by default. The weights are the same.
    """
    found = _config(folder)
    kind, config = found.pop("architecture"), found.pop("mechanism", "dense")
    made, settings = _KINDS[kind]
    try:
        model = made(settings.from_dict(found))
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{folder / 'config.json'} does not fit {kind}: {error}.") from error
    _fill(model, folder / _WEIGHTS)
    return attend_by(model, mechanism or config).eval()


def discriminator_of(folder: Path) -> Discriminator | None:
    """The discriminator beside it, if there is one."""
    found = _config(folder)
    if found.pop("architecture") != "biggan" or not (folder / _OTHER).exists():
        return None
    chosen = found.pop("mechanism", "dense")
    model: Discriminator = attend_by(Discriminator(Config.from_dict(found)), chosen)
    _fill(model, folder / _OTHER)
    return model


def is_here(folder: Path) -> bool:
    """Whether a folder holds one of ours."""
    return (folder / _WEIGHTS).exists()


def card(generator: nn.Module, config: dict[str, Any], about: dict[str, Any]) -> str:
    """The model card."""
    size = sum(p.numel() for p in generator.parameters())
    lines = [
        "---",
        "license: other",
        "library_name: coterie",
        "tags: [image-generation, gan, biggan, smyrf]",
        "---",
        "",
        f"# {config['architecture']}, {config['resolution']}²",
        "",
        f"A generator of images with {size:,} parameters. Its self-attention was trained with `{config['mechanism']}`, "
        "which has no parameters: the same weights run densely or with any other mechanism.",
        "",
        "```python",
        "from pathlib import Path",
        "from recipes.biggan.pretrained import from_pretrained",
        "generator = from_pretrained(Path('this folder'))                     # or mechanism='dense'",
        f"images = generator(torch.randn(4, {config['dim_z']}))                # in [-1, 1]",
        "```",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in {**config, **about}.items()),
        f"| coterie | {coterie.__version__} |",
        "",
        "It draws what it was trained on: put the licence of those pictures above.",
        "",
    ]
    return "\n".join(lines)


def _store(model: nn.Module, file: Path) -> None:
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, file, metadata={"format": "pt"})


def _fill(model: nn.Module, file: Path) -> None:
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as weights: {error}.") from error
    weights.fill(model, state, file)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    found = read_data(file)
    if not isinstance(found, dict) or found.get("architecture") not in _KINDS:
        raise UserError(f"{file} is no config of one of our generators: expected architecture {' or '.join(_KINDS)}.")
    return dict(found)
