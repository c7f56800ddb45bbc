"""Look at the attention of a trained generator: the clusters of its pixels, and the singular values of its maps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from coterie.analysis import (
    HeadSpectrum,
    Locality,
    Spectra,
    draw_grid,
    draw_locality,
    draw_spectra,
    head_spectra,
    save,
)
from coterie.cli.console import print_table, wrote
from coterie.cli.inputs import UserError
from coterie.files import expect_writable, write_json
from coterie.hosts import watch_dense
from coterie.observe import Seen
from recipes.biggan import source
from recipes.biggan.attention import DENSE, blocks
from recipes.biggan.sampling import draw_y, draw_z, generate
from recipes.common import clusters, command
from recipes.common import ranks as common
from recipes.common.results import Table
from recipes.common.scores import shown
from recipes.common.study import Result

_DRAWN = 4  # images whose clusters are drawn


def main(
    model: Annotated[Path, typer.Argument(help="A generator's folder: ours, BigGAN-PyTorch's, or BigGAN-deep's.")],
    out: Annotated[Path, typer.Option(help="A folder for pictures.")] = Path("out/recipes/biggan-memberships"),
    count: Annotated[int, typer.Option(min=1, help="How many images: mean and standard error.")] = 8,
    block: Annotated[str | None, typer.Option(help="Whose pixels; the block with the most by default.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    suffix: Annotated[str, typer.Option(help="What the names of BigGAN-PyTorch's files end in.")] = "",
    debug: command.Debug = False,
) -> None:
    """Look at the attention of a trained generator, run densely.

    SMYRF's supplement, Figure 7: the clusters of its pixels in one hashing round, 2 of them and 128, and how local they
    are. Figure 5: the singular values of its attention maps.
    """
    found = source.generator(model, DENSE, suffix)
    z, y = draw_z(found, count, None, seed), draw_y(found, count, seed)
    name = _block(found, z[:1], y[:1], block, model)
    expect_writable(out / "results.json")
    images: list[dict[int, Locality]] = []
    spectra: list[HeadSpectrum] = []
    rows: list[Result] = []
    for index in range(count):
        at = z[index : index + 1], y[index : index + 1]
        image, seen = generate(found, *at), watch(found, *at)[name]
        local = clusters.localities({name: seen}, index)
        if index < _DRAWN:
            save(drawn(image[0], seen, index), out / f"memberships-{index}.png")
        heads = [replace(each, sample=index) for each in head_spectra(seen.q, seen.k, module=name, **_scale(seen))]
        spectra += heads
        rows.append(
            {
                "without": _without(found, name, image, at),
                "ranks": common.ranks(heads),
                "locality": clusters.rows(local),
            }
        )
        images.append(local)
    mean = {f"{each} clusters": clusters.mean_of([local[each] for local in images]) for each in clusters.CLUSTERS}
    save(draw_locality(mean, title="pixels in one cluster of SMYRF, one round"), out / "locality.png")
    title = f"attention maps of {name}: {count} image{'s' * (count > 1)}"
    save(draw_spectra(Spectra("", tuple(spectra)), title=title), out / "spectra.png")
    tables = [
        _maps(rows, found.get_submodule(name).gamma, seen),
        clusters.table([row["locality"] for row in rows], seen.q.shape[2]),
    ]
    for table in tables:
        print_table(*table)
    stored = [{"title": title, "columns": columns, "rows": cells} for title, columns, cells in tables]
    write_json(out / "results.json", {"block": name, "tables": stored, "images": rows})
    for each in (*(f"memberships-{index}" for index in range(min(count, _DRAWN))), "locality", "spectra"):
        wrote(out / f"{each}.png")


def watch(model: Any, z: Tensor, y: Tensor) -> dict[str, Seen]:
    """What the attention blocks of a generator are called with while it makes an image densely, by name."""
    found: dict[str, Seen] = {}
    watch_dense(model, (z, y), found.__setitem__)
    return found


def drawn(image: Tensor, seen: Seen, seed: int) -> Figure:
    """An image (3, H, W) in [−1, 1], as fine as the block that is seen, beside the clusters of its pixels."""
    grid = clusters.grid_of(seen)
    small = F.adaptive_avg_pool2d(image, grid).movedim(0, -1)
    return draw_grid(clusters.memberships(seen, seed), grid, image=((small + 1) / 2).clamp(0, 1))


def _block(found: Any, z: Tensor, y: Tensor, asked: str | None, folder: Path) -> str:
    if not any(blocks(found)):
        raise UserError(f"the generator in {folder} has no attention block.")
    seen = watch(found, z, y)
    if asked is not None and asked not in seen:
        raise UserError(f"--block {asked}: expected one of {', '.join(seen)}.")
    return asked or max(seen, key=lambda name: seen[name].q.shape[2])


def _scale(seen: Seen) -> dict[str, Any]:
    return {"scale": seen.settings["scale"]}


def _without(found: Any, name: str, image: Tensor, at: tuple[Tensor, Tensor]) -> float:
    """How much the image changes without this block: ‖x̂ − x‖ / ‖x‖ of values from −1 to 1."""
    with _silent(found.get_submodule(name)):
        other = generate(found, *at)
    return float((other - image).double().norm() / image.double().norm().clamp(min=1e-300))


@contextmanager
def _silent(block: Any) -> Iterator[None]:
    """Inside, the block adds nothing to what it is given."""
    before = block.gamma.detach().clone()
    with torch.no_grad():
        block.gamma.zero_()
    try:
        yield
    finally:
        with torch.no_grad():
            block.gamma.copy_(before)


def _maps(rows: list[Result], gamma: Tensor, seen: Seen) -> Table:
    """The block, how much it does, and the singular values of its maps."""
    queries, keys = seen.q.shape[2], seen.k.shape[2]
    cells = [f"{gamma.item():+.3f}", shown([row["without"] for row in rows]), *common.cells([r["ranks"] for r in rows])]
    title = f"dense maps of {queries:,} queries and {keys:,} keys: {len(rows)} image{'s' * (len(rows) > 1)}"
    return title, ["γ", "image without it changes by, %", *common.COLUMNS], [cells]


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    command.run("biggan.memberships", main)
