"""`make mechanisms`: every mechanism on tensors of real size: error against dense attention, pairs met, time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coterie
from benchmarks.measure import peaked_tensors, relative_error
from coterie import Mechanism
from coterie.timing import interleaved

MECHANISMS: list[Mechanism] = [
    coterie.Smyrf(rounds=2, cluster_size=64),
    coterie.Smyrf(rounds=8, cluster_size=64),
    coterie.Clustered(clusters=100, space="euclidean"),
    coterie.ImprovedClustered(clusters=100, topk=128, space="euclidean"),
    coterie.NearFar(near=128),
    coterie.Reformer(rounds=4, chunk_size=64),
    coterie.Routing(clusters=64, window=256),
    coterie.Local(window=256),
    coterie.Longformer(window=256, global_tokens=4),
    coterie.Strided(stride=64),
    coterie.Fixed(stride=128, summary=8),
    coterie.TopK(k=128),
]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs; the median counts")
    options = parser.parse_args()
    q, k, v = peaked_tensors(options.length)
    exact = F.scaled_dot_product_attention(q, k, v).double()
    console = Console()
    console = Console(width=max(console.width, 124))  # a row is not worth folding
    table = Table(title=f"1 × 8 heads × {options.length:,} tokens × 64, float32, {torch.get_num_threads()} threads")
    table.add_column("mechanism", no_wrap=True)
    for column in ("pairs met", "relative error", "cosine", "plan", "execute", "time / SDPA"):
        table.add_column(column, justify="right", no_wrap=True)
    for mechanism in track([coterie.Full(), *MECHANISMS], "measuring", console=console, transient=True):
        plan = mechanism.plan(q, k)
        out = coterie.grouped_attention(q, k, v, plan).out.double()
        runs: dict[str, Callable[[], object]] = {
            "sdpa": partial(F.scaled_dot_product_attention, q, k, v),
            "plan": partial(mechanism.plan, q, k),
            "execute": partial(coterie.grouped_attention, q, k, v, plan),
        }
        seconds = interleaved(runs, options.repeats)
        share = float(plan.pairs_met().double().mean()) / options.length**2
        table.add_row(
            str(mechanism),
            f"{share:.1%}",
            f"{relative_error(out, exact):.2g}",
            f"{float(F.cosine_similarity(out, exact, dim=-1).mean()):.3f}",
            f"{seconds['plan'] * 1e3:.0f} ms",
            f"{seconds['execute'] * 1e3:.0f} ms",
            f"{(seconds['plan'] + seconds['execute']) / seconds['sdpa']:.2f}",
        )
    console.print(table)
    console.print(
        f"Engine: {coterie.backends()['native']}. Error: ‖out − dense‖ / ‖dense‖. The last column includes planning."
    )


if __name__ == "__main__":
    main()
