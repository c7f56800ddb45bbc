"""`make bench`: time against SDPA at growing lengths, forward and forward + backward, planning included."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import coterie
from benchmarks.measure import interleaved, peaked_tensors
from coterie import Mechanism

MECHANISMS: list[Mechanism] = [
    coterie.Smyrf(rounds=2, cluster_size=64),
    coterie.ImprovedClustered(clusters=100, topk=32),
    coterie.Reformer(rounds=2, chunk_size=64),
    coterie.Local(window=128),
]


def step(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> None:
    """One forward pass, and its gradients if asked for."""
    inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]
    out = attend(*inputs)
    if backward:
        torch.autograd.grad(out.sum(), inputs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192", help="comma-separated numbers of tokens")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median counts")
    options = parser.parse_args()
    lengths = [int(part) for part in options.lengths.split(",")]
    console = Console()
    table = Table(title=f"SDPA's time / ours, 1 × 8 heads × 64, float32, {torch.get_num_threads()} threads, reference")
    table.add_column("mechanism")
    table.add_column("pass")
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    cells: dict[tuple[str, str], list[str]] = {}
    for length in track(lengths, "measuring", console=console, transient=True):
        tensors = peaked_tensors(length)
        for name, backward in (("forward", False), ("both", True)):
            attends: dict[str, Callable[..., Tensor]] = {"sdpa": F.scaled_dot_product_attention}
            for mechanism in MECHANISMS:
                attends[str(mechanism)] = partial(coterie.attention, mechanism=mechanism)
            runs = {key: partial(step, attend, *tensors, backward=backward) for key, attend in attends.items()}
            seconds = interleaved(runs, options.repeats)
            for key in attends:
                cell = f"{seconds[key] * 1e3:.0f} ms" if key == "sdpa" else f"{seconds['sdpa'] / seconds[key]:.2f}×"
                cells.setdefault((key, name), []).append(cell)
    for (key, name), row in cells.items():
        table.add_row(key, name, *row)
    console.print(table)


if __name__ == "__main__":
    main()
