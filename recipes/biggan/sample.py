"""Draw images from a trained generator: a sheet, and a sheet of images between others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from coterie.cli.console import wrote
from coterie.cli.inputs import UserError
from recipes.biggan import sheets, source
from recipes.biggan.deep import DeepGenerator
from recipes.biggan.sampling import between, draw_y, draw_z, generate
from recipes.common import command


def main(
    model: Annotated[Path, typer.Argument(help="A generator's folder: ours, BigGAN-PyTorch's, or BigGAN-deep's.")],
    out: Annotated[Path, typer.Option(help="Where the sheets go.")] = Path("out/recipes/biggan-samples"),
    mechanism: Annotated[str | None, typer.Option(help="What its attention runs; its own by default.")] = None,
    count: Annotated[int, typer.Option(min=1)] = 64,
    columns: Annotated[int, typer.Option(min=2)] = 8,
    truncation: Annotated[
        float | None, typer.Option(min=1e-3, help="Draw z beyond ± this anew: less variety, better images.")
    ] = None,
    label: Annotated[int | None, typer.Option("--class", min=0, help="Only images of this class.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    suffix: Annotated[str, typer.Option(help="What the names of BigGAN-PyTorch's files end in.")] = "",
    debug: command.Debug = False,
) -> None:
    """Draw images from a trained generator: `samples.png`, and `between.png`, whose rows lead from one to another."""
    if mechanism is not None:
        mechanism = command.checked([mechanism])[-1]
    found = source.generator(model, mechanism, suffix)
    if label is not None and label >= found.config.classes:
        raise UserError(f"--class {label}: this generator knows the classes 0 … {found.config.classes - 1}.")
    if isinstance(found, DeepGenerator) and truncation is not None and truncation > 1:
        raise UserError(f"--truncation {truncation}: BigGAN-deep takes at most 1.")
    z, y = draw_z(found, count, truncation, seed), draw_y(found, count, seed, label)
    sheets.write(out / "samples.png", generate(found, z, y, truncation=truncation, batch=16), columns)
    rows = min(columns, 6)
    ends = draw_z(found, 2 * rows, truncation, seed + 1)
    same = draw_y(found, rows, seed + 1, label).repeat_interleave(columns)
    path = generate(found, between(ends, columns), same, truncation=truncation, batch=16)
    sheets.write(out / "between.png", path, columns)
    for name in ("samples.png", "between.png"):
        wrote(out / name)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    command.run("biggan.sample", main)
