"""What attention at full resolution costs: memory of the block, and time and memory of a whole step.

    python -m recipes.biggan.costs                    # the block at 64², 128², 256²
    python -m recipes.biggan.costs --whole            # and a step of D and G at 128² and 256²

Each measurement is a process of its own, in which nothing else was allocated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.measure import peak_bytes

from coterie import as_mechanism
from coterie.cli.console import err, out, print_table
from coterie.cli.inputs import UserError
from coterie.files import write_json
from recipes.biggan.attention import DENSE, WRITTEN_OUT, SelfAttention, attend_by
from recipes.biggan.config import Config
from recipes.biggan.discriminator import Discriminator
from recipes.biggan.generator import Generator
from recipes.biggan.images import Images
from recipes.biggan.spectral import SpectralConv2d
from recipes.biggan.training import Settings, Training
from recipes.common import command

_ROOT = Path(__file__).parents[2]
_KEPT = 3  # maps of a written-out attention that are in memory at once, at its peak: scores, softmax, and a gradient
_SPARE = 0.8  # of the memory that is free


def map_bytes(resolution: int, batch: int) -> int:
    """Of an attention map in float32: N queries and N / 4 keys."""
    return 4 * batch * resolution**2 * (resolution**2 // 4)


def default(resolution: int) -> str:
    """The paper's: 4 rounds of 8 clusters, which is half of the pairs."""
    return f"smyrf:rounds=4,cluster_size={resolution**2 // 8}"


def block_once(resolution: int, channels: int, batch: int, mechanism: str) -> Any:
    """What runs the block forward and backward."""
    torch.manual_seed(0)
    block = attend_by(SelfAttention(channels, SpectralConv2d), mechanism)
    torch.nn.init.ones_(block.gamma)
    x = torch.randn(batch, channels, resolution, resolution, requires_grad=True)

    def run() -> None:
        x.grad = None
        block.zero_grad()
        block(x).square().mean().backward()

    return run


def step_once(resolution: int, ch: int, batch: int, mechanism: str, bf16: bool, recompute: bool) -> Any:
    """What takes one whole step: one of D, one of G."""
    config = Config(resolution=resolution, ch=ch, attention=(resolution,))
    pixels = torch.randint(256, (batch, 3, resolution, resolution), dtype=torch.uint8)
    images = Images(pixels, torch.zeros(batch, dtype=torch.long), ["noise"])
    settings = Settings(1, batch, d_steps=1, mechanism=mechanism, bf16=bf16, recompute=recompute)
    return Training(config, settings, images, 0).advance


def measure(what: str, resolution: int, size: int, batch: int, mechanism: str, bf16: bool, recompute: bool) -> Any:
    """Here and now: how far memory rises, and seconds of the quickest of two runs."""
    if what == "block":
        run = block_once(resolution, size, batch, mechanism)
    else:
        run = step_once(resolution, size, batch, mechanism, bf16, recompute)
    seconds: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)

    return {"peak_bytes": peak_bytes(timed), "seconds": min(seconds)}


def in_process(*arguments: Any) -> dict[str, Any] | None:
    """The same in a process of its own; None if the system ended it, which is how memory runs out."""
    told = json.dumps([torch.get_num_threads(), *arguments])
    done = subprocess.run(
        [sys.executable, "-m", "recipes.biggan.costs_worker", told], cwd=_ROOT, capture_output=True, text=True
    )
    if done.returncode < 0 or "not enough memory" in done.stderr or "can't allocate memory" in done.stderr:
        return None
    if done.returncode:
        raise UserError(f"a measurement failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def free_bytes() -> int:
    """Memory that is free; plenty where the kernel does not tell."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return 1 << 60
    line = next(line for line in file.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def row(what: str, resolution: int, size: int, batch: int, mechanism: str, bf16: bool, recompute: bool) -> Any:
    """One measurement, or what it would need at least if that is more than there is."""
    asked = {"what": what, "resolution": resolution, "size": size, "batch": batch, "mechanism": mechanism}
    least = _KEPT * map_bytes(resolution, batch) if mechanism == WRITTEN_OUT else 0
    if least > _SPARE * free_bytes():
        return {**asked, "needs": least}
    err.print(f"{what}, {resolution}², {mechanism}", highlight=False)
    found = in_process(what, resolution, size, batch, mechanism, bf16, recompute)
    return {**asked, "needs": least} if found is None else {**asked, **found}


def parameters(resolution: int, ch: int) -> int:
    """Of both networks."""
    config = Config(resolution=resolution, ch=ch, attention=(resolution,))
    with torch.device("meta"):
        return sum(p.numel() for network in (Generator(config), Discriminator(config)) for p in network.parameters())


def main(
    resolution: Annotated[list[int] | None, typer.Option(min=8, help="64, 128 and 256 by default.")] = None,
    mechanism: Annotated[list[str] | None, typer.Option(help="The paper's 4 rounds of 8 clusters by default.")] = None,
    channels: Annotated[int, typer.Option(min=8, help="Of the block; the paper's last has 96.")] = 96,
    ch: Annotated[int, typer.Option(min=8, help="Width of the networks in --whole; the paper has 96.")] = 32,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    whole: Annotated[bool, typer.Option("--whole", help="Also a whole step of D and G, at 128² and 256².")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Whole steps under autocast to bfloat16.")] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Whole steps with activation checkpointing.")] = False,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Dense attention beside it, both ways.")] = True,
    file: Annotated[Path, typer.Option("--out", help="A JSON file.")] = Path("out/recipes/biggan-costs.json"),
    debug: command.Debug = False,
) -> None:
    """Measure memory and time of dense and clustered attention, forward and backward, each in a process of its own.

    "dense" is PyTorch's attention, which keeps no map; "written-out" is dense attention as BigGAN writes it, whose maps
    are what the paper compares its memory with.
    """
    asked = resolution or [64, 128, 256]
    steps = [size for size in resolution or [128, 256] if size >= 32] if whole else []
    before = [WRITTEN_OUT, DENSE] if dense else []
    for spec in mechanism or []:
        try:
            as_mechanism(spec)
        except (ValueError, TypeError) as error:
            raise UserError(f"--mechanism {spec}: {error}") from error
    rows = [
        row("block", size, channels, batch, name, bf16, recompute)
        for size in asked
        for name in [*before, *(mechanism or [default(size)])]
    ]
    two = max(2, batch)  # batch norms
    rows += [
        row("step", size, ch, two, name, bf16, recompute)
        for size in steps
        for name in [*before, *(mechanism or [default(size)])]
    ]
    for what, title in (
        ("block", f"attention block, {channels} channels, batch {batch}"),
        ("step", f"whole step of D and G, ch {ch}, batch {two}"),
    ):
        mine = [_cells(each, rows) for each in rows if each["what"] == what]
        if mine:
            columns = ["resolution", "queries", "mechanism", "seconds", "memory", "of written-out"]
            print_table(f"{title}: forward and backward", columns, mine, words=(0, 2))
    if steps:
        counts = ", ".join(f"{size}²: {parameters(size, ch) / 1e6:.1f} M parameters" for size in steps)
        out.print(counts, highlight=False)
    write_json(file, {"rows": rows, "threads": torch.get_num_threads(), "bf16": bf16, "recompute": recompute})


def _cells(found: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    like = ("what", "resolution", "size", "batch")
    base = next((r for r in rows if r["mechanism"] == WRITTEN_OUT and all(r[key] == found[key] for key in like)), None)
    of = None if base is None else base.get("peak_bytes") or base.get("needs")
    mine = found.get("peak_bytes")
    memory = _size(mine) if mine else f"needs > {_size(found['needs'])}" if found.get("needs") else "not enough memory"
    share = f"{mine / of:.0%}" if mine and of else ""
    seconds = f"{found['seconds']:.2f}" if "seconds" in found else "–"
    resolution = found["resolution"]
    return [f"{resolution}²", f"{resolution**2:,}", found["mechanism"], seconds, memory, share]


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GB" if count >= 2**30 else f"{count / 2**20:.0f} MB"


if __name__ == "__main__":
    command.run("biggan.costs", main)
