"""Convert a checkpoint: to safetensors with a config and a card, or to BigGAN-PyTorch's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import wrote
from coterie.cli.inputs import UserError
from coterie.files import expect_writable
from recipes.biggan import published, source
from recipes.biggan.deep import DeepGenerator
from recipes.biggan.pretrained import save_pretrained
from recipes.common import command


def main(
    model: Annotated[Path, typer.Argument(help="A folder: ours, BigGAN-PyTorch's, or pytorch-pretrained-biggan's.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    to: Annotated[str, typer.Option(help="'safetensors' or 'biggan-pytorch'.")] = "safetensors",
    suffix: Annotated[str, typer.Option(help="What the names of BigGAN-PyTorch's files end in.")] = "",
    debug: command.Debug = False,
) -> None:
    """Convert a checkpoint. Of BigGAN-PyTorch's the moving average is what becomes safetensors, if there is one."""
    if to not in ("safetensors", "biggan-pytorch"):
        raise UserError(f"--to must be 'safetensors' or 'biggan-pytorch', got {to!r}.")
    if out.exists():
        raise UserError(f"{out} is there already: give a new folder.")
    expect_writable(out / "model.safetensors")
    found = source.load(model, suffix)
    if to == "safetensors":
        save_pretrained(found.ema or found.g, out, discriminator=found.d, about={"converted from": model.name})
    elif isinstance(found.g, DeepGenerator):
        raise UserError(f"{model} is BigGAN-deep, which BigGAN-PyTorch's folders do not hold.")
    else:
        published.save(out, found)
    wrote(out)


if __name__ == "__main__":
    command.run("biggan.convert", main)
