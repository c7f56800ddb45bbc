"""Swap mechanisms into a pre-trained image generator: what becomes of its images, its maps and their clusters."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer

from coterie.analysis import draw_grid, draw_locality, draw_spectra, save
from coterie.cli.console import wrote
from coterie.cli.inputs import UserError, parse_numbers
from coterie.files import write_whole
from coterie.mechanisms import Mechanism
from coterie.observe import Seen
from recipes.common import clusters, command
from recipes.common.digest import of_file
from recipes.common.models import out_folder
from recipes.common.progress import Bar, bar
from recipes.common.results import finish
from recipes.common.study import Result, Study
from recipes.terrain import maps, tables
from recipes.terrain.attending import COMMON, Way, by_tokens, choose, generate, pairs, watch, ways
from recipes.terrain.images import given, relative_error, shape_error
from recipes.terrain.network import Generator
from recipes.terrain.pictures import coloured, sheet
from recipes.terrain.weights import load

MECHANISMS = ["smyrf", "near-far", "improved-clustered", "topk"]
QUICK: list[list[str]] = [[]]
_COLUMNS = 4  # images on a sheet


class Plan(NamedTuple):
    """What is done with every image.

    Attributes:
        choices: the mechanism of each block, for each way.
        probe: the way whose error in each head is set beside its singular values.
        block: whose clusters are drawn.
    """

    model: Generator
    ways: list[Way]
    choices: list[dict[str, Mechanism]]
    probe: Way
    block: str


def main(
    weights: Annotated[
        Path | None, typer.Option(help="An ONNX file; that of the package adaptive-terrain-diffusion by default.")
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="Any mechanism's string; several make one table. NAME=… is for one block, or those below."),
    ] = None,
    parts: Annotated[str, typer.Option(help="One in so many of the pairs is to meet; separated by commas.")] = "2,4,8",
    tokens: Annotated[int, typer.Option(min=0, help="Blocks over fewer tokens stay dense.")] = 0,
    block: Annotated[str | None, typer.Option(help="Whose clusters to draw; the last over the most tokens.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many images: mean and standard error.")] = 8,
    quick: command.Quick = False,
    out: command.Out = None,
    fresh: command.Fresh = False,
    debug: command.Debug = False,
) -> None:
    """Swap mechanisms into a pre-trained image generator, without training: how far its images are from the dense ones
    at 1/2, 1/4 and 1/8 of the pairs; the singular values of its attention maps; the clusters of its pixels."""
    wanted = parse_numbers("--parts", parts, least=2)  # of all pairs one in one is dense attention
    if quick:
        seeds, wanted = min(seeds, 2), wanted[len(wanted) // 2 :][:1]
    model = load(weights)
    seen = watch(model, given(0, model.layout.size))
    chosen = [Way(COMMON), *ways(mechanism or MECHANISMS, wanted, list(seen))]
    if len(chosen) == 1:
        raise UserError("--mechanism: expected one besides dense attention, which all are compared with.")
    choices = [_choose(way, seen, tokens) for way in chosen]
    plan = Plan(model, chosen, choices, Way(chosen[1].mechanism, wanted[len(wanted) // 2]), _block(block, seen))
    settings = {
        "recipe": "terrain",
        "weights": None if weights is None else str(weights),
        "weights digest": None if weights is None else of_file(weights),
        "mechanisms": [str(way) for way in chosen],
        "tokens": tokens,
        "block": plan.block,
        "seeds": seeds,
    }
    study = Study.open(out_folder(out, "terrain", quick), settings, fresh=fresh)
    with bar(seeds) as shown:
        found = []
        for seed in range(seeds):
            found.append(study.run(f"image-{seed}", partial(_image, plan, seed, study.folder, shown)))
            shown.done()
    local = clusters.table([image["locality"] for image in found], next(iter(by_tokens(seen))))
    blocks = f"{max(map(len, plan.choices))} of {len(seen)} attention blocks"
    finish(
        study.folder,
        [tables.errors(found, chosen, blocks), tables.ranks(found, plan.probe), local],
        {"images": found},
        partial(tables.draw, found=found, ways=chosen),
        tables.words(found, chosen),
    )
    _sheets(study.folder, ["dense", *map(tables.label, chosen)], found)


def _block(name: str | None, seen: dict[str, Seen]) -> str:
    if name is not None and name not in seen:
        raise UserError(f"--block {name}: expected one of {', '.join(seen)}.")
    return name or list(next(iter(by_tokens(seen).values())))[-1]


def _choose(way: Way, seen: dict[str, Seen], least: int) -> dict[str, Mechanism]:
    found = choose(way, seen, least)
    if not found:
        there = ", ".join(f"{tokens:,}" for tokens in by_tokens(seen))
        raise UserError(f"--tokens {least}: no block of {way} attends over so many; there are blocks over {there}.")
    return found


def _image(plan: Plan, seed: int, folder: Path, shown: Bar, _: Path) -> Result:
    """One image in every way, and the maps of the dense generator."""
    at = given(seed, plan.model.layout.size)
    shown.begin(f"image {seed}", len(plan.ways) + 3)
    dense = generate(plan.model, at, {}).image
    seen = watch(plan.model, at)
    shown.tick()
    images, rows = [dense], []
    for choice in plan.choices:
        made = generate(plan.model, at, choice, seed)
        images.append(made.image)
        replaced = {name: each for name, each in seen.items() if name in choice}
        rows.append(
            {
                "sized": str(next(iter(choice.values()))),
                "blocks": len(choice),
                "share": (made.met + pairs(seen) - pairs(replaced)) / pairs(seen),
                "relative": relative_error(made.image, dense),
                "shape": shape_error(made.image, dense),
            }
        )
        shown.tick()
    spectrum, ranks = _spectra(plan, seen, seed, folder)
    shown.tick()
    near = _locality(plan, seen, dense, seed, folder)
    held = io.BytesIO()
    np.save(held, torch.cat(images)[:, 0].numpy())
    write_whole(_kept(folder, seed), held.getvalue())
    return {"difficulty": float(at.difficulty), "ways": rows, "heads": spectrum, "ranks": ranks, "locality": near}


def _spectra(plan: Plan, seen: dict[str, Seen], seed: int, folder: Path) -> tuple[list[Result], list[Result]]:
    """A row for each head, and one for each number of tokens; the first image's are drawn (Figure 5)."""
    errors = maps.errors_of(seen, choose(plan.probe, seen))
    found = maps.spectra_of(seen, plan.probe, errors)
    if seed == 0:
        save(draw_spectra(found, title="attention maps of the terrain generator"), folder / "spectra.png")
    return found.table(), maps.ranks(found, seen, errors)


def _locality(plan: Plan, seen: dict[str, Seen], dense: torch.Tensor, seed: int, folder: Path) -> list[Result]:
    """How local SMYRF's clusters are over the most tokens; the first image's are drawn (Figure 7)."""
    largest = next(iter(by_tokens(seen).values()))
    found = clusters.localities(largest, seed)
    if seed == 0:
        named = {f"{count} clusters": each for count, each in found.items()}
        save(draw_locality(named, title="pixels in one cluster of SMYRF, one round"), folder / "locality.png")
        drawn, grid = seen[plan.block], clusters.grid_of(seen[plan.block])
        for head in range(drawn.q.shape[1]):
            panels = clusters.memberships(drawn, seed, head)
            figure = draw_grid(panels, grid, image=coloured(dense[0, 0], grid[0]))
            save(figure, folder / f"memberships-head-{head}.png")
    return clusters.rows(found)


def _kept(folder: Path, seed: int) -> Path:
    return folder / "images" / f"{seed}.npy"


def _sheets(folder: Path, names: list[str], found: list[Result]) -> None:
    """The first images, and how they differ from the dense ones."""
    some = found[:_COLUMNS]
    images = torch.stack([torch.from_numpy(np.load(_kept(folder, seed))) for seed in range(len(some))], 1)
    errors = [[image["ways"][row]["relative"] for image in some] for row in range(len(names) - 1)]
    for name, differences in (("images.png", False), ("differences.png", True)):
        save(sheet(names, images, errors, differences=differences), folder / name)
        wrote(folder / name)
    for name in ("spectra.png", "locality.png"):
        wrote(folder / name)
    for file in sorted(folder.glob("memberships-head-*.png")):
        wrote(file)
