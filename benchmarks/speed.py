"""`make bench`: SDPA, both backends and public peers side by side, planning included: time, memory, two plots."""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coterie
from benchmarks import peers
from benchmarks.measure import peak_bytes, peaked_tensors
from benchmarks.promises import GROWTHS, IMPROVED, MEMORIES, NEAR_FAR, PROMISES, SMYRF, Attend, ours, step
from benchmarks.records import AGAINST_REFERENCE, AGAINST_SDPA, GROWTH, MEMORY, Figure, Record, columns, compare
from benchmarks.where import where
from coterie import Mechanism
from coterie.analysis import save
from coterie.files import expect_writable, write_json
from coterie.timing import interleaved

MECHANISMS: list[Mechanism] = [
    SMYRF,
    coterie.Smyrf(rounds=4, cluster_size=64),
    IMPROVED,
    NEAR_FAR,
    coterie.Clustered(clusters=100),
    coterie.Reformer(rounds=2, chunk_size=64),
    coterie.Routing(clusters=64, window=128),
    coterie.Local(window=128),
    coterie.Longformer(window=128, global_tokens=4),
    coterie.Strided(stride=64),
    coterie.Fixed(stride=128, summary=8),
]
CELLS = 4096 * 4096 * 16  # scores a head beyond which quadratic candidates are left out of a pass


def check() -> list[str]:
    """What is wrong: native against the reference, and Full against SDPA. Nothing is measured unless this is empty."""
    q, k, v = peaked_tensors(500)
    wrong = []
    for mechanism in [*MECHANISMS, coterie.Full(), coterie.TopK()]:
        plan = mechanism.plan(q, k, backend="native")
        results = []
        for backend in ("native", "reference"):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = coterie.grouped_attention(inputs[0], inputs[1], inputs[2], plan, backend=backend).out
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(*results, strict=True)):
            wrong.append(f"{mechanism}: native differs from the reference")
        if not torch.equal(plan.to_dense(), mechanism.plan(q, k, backend="reference").to_dense()):
            wrong.append(f"{mechanism}: the native plan differs from the reference's")
    if not torch.allclose(coterie.attention(q, k, v, "full"), F.scaled_dot_product_attention(q, k, v), atol=1e-5):
        wrong.append("full: differs from SDPA")
    return wrong


def promises(repeats: int) -> tuple[Table, list[Figure]]:
    """The ratios that the project promises, each measured beside SDPA; what falls short is marked."""
    figures = []
    machine = f"{coterie.backends()['native']}, {torch.get_num_threads()} threads"
    table = Table(title=f"8 heads × 64, float32, batch 1, planning included; native: {machine}")
    for column in ("case", "SDPA", "ours", "ratio", "want", ""):
        table.add_column(
            column, no_wrap=True, justify="right" if column in ("SDPA", "ours", "ratio", "want") else "left"
        )
    for promise in PROMISES:
        seconds = interleaved(promise.runs(promise.tensors()), promise.turns(repeats))
        ratio = seconds["sdpa"] / seconds["ours"]
        figures.append(Figure(promise.name, AGAINST_SDPA, ratio, seconds))
        times = _ms(seconds["sdpa"]), _ms(seconds["ours"])
        table.add_row(promise.name, *times, f"{ratio:.1f}×", f"{promise.want:g}×", _verdict(ratio >= promise.want))
    long = peaked_tensors(65_536)
    for mechanism, length, most in GROWTHS:
        runs = {"short": partial(step, ours(mechanism), *peaked_tensors(length))}
        runs["long"] = partial(step, ours(mechanism), *long)
        seconds = interleaved(runs, repeats)
        growth = seconds["long"] / seconds["short"]
        name = f"{mechanism}, time at 65,536 / time at {length:,}"
        figures.append(Figure(name, GROWTH, growth, seconds))
        table.add_row(name, "", "", f"{growth:.2f}", f"≤ {most:g}", _verdict(growth <= most))
    for mechanism, causal, most in MEMORIES:
        peak = _peak_alone(mechanism, causal)
        size = long[0].numel() * 4
        beyond = None if peak is None else (peak - size) / size
        name = f"{mechanism}, 65,536, {'causal, ' * causal}forward: peak memory beyond q, k, v, out"
        figures.append(Figure(name, MEMORY, beyond))
        cell = "–" if beyond is None else f"{beyond:.2f} × q"
        table.add_row(name, "", "", cell, f"≤ {most:g}", "" if beyond is None else _verdict(beyond <= most))
    return table, figures


def _peak_alone(mechanism: Mechanism, causal: bool) -> int | None:
    """In a process of its own: what earlier calls leave behind in the heap moves the peak by half the size of q."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(_peak_of_long, mechanism, causal).result()


def _peak_of_long(mechanism: Mechanism, causal: bool) -> int | None:
    return peak_bytes(partial(step, ours(mechanism, causal=causal), *peaked_tensors(65_536)))


def _verdict(kept: bool) -> str:
    return "" if kept else "falls short"


def backends(repeats: int, length: int = 8192) -> tuple[Table, list[Figure]]:
    """Native against reference, planning and execution apart."""
    figures = []
    table = Table(title=f"native against reference, {length:,} tokens, forward")
    for column in ("mechanism", "plan", "execute", "all native", "all reference", "ratio"):
        table.add_column(column, no_wrap=True, justify="left" if column == "mechanism" else "right")
    tensors = peaked_tensors(length)
    for mechanism in MECHANISMS:
        plan = mechanism.plan(*tensors[:2])
        runs: dict[str, Callable[[], object]] = {
            "plan": partial(mechanism.plan, *tensors[:2]),
            "execute": partial(coterie.grouped_attention, *tensors, plan),
            "native": partial(step, ours(mechanism), *tensors),
            "reference": partial(step, ours(mechanism, "reference"), *tensors),
        }
        s = interleaved(runs, repeats)
        ratio = s["reference"] / s["native"]
        ordered = {name: s[name] for name in ("plan", "execute", "reference", "native")}
        figures.append(Figure(f"{mechanism}, {length:,}, forward", AGAINST_REFERENCE, ratio, ordered))
        table.add_row(str(mechanism), *(_ms(s[x]) for x in ("plan", "execute", "native", "reference")), f"{ratio:.1f}×")
    return table, figures


def sweep(lengths: list[int], repeats: int, others: dict[str, Attend], console: Console) -> list[dict[str, Any]]:
    """Every candidate at every length: seconds and peak memory, forward and forward + backward."""
    rows = []
    for length in track(lengths, "lengths", console=console, transient=True):
        tensors = peaked_tensors(length)
        for backward in (False, True):
            dense = length * length * (3 if backward else 1) <= CELLS
            attends: dict[str, Attend] = {"sdpa": F.scaled_dot_product_attention} if dense else {}
            attends |= {str(mechanism): ours(mechanism) for mechanism in MECHANISMS}
            attends |= {"smyrf:rounds=2 (reference)": ours(SMYRF, "reference")} if length <= 8192 else {}
            attends |= others
            runs = {name: partial(step, attend, *tensors, backward=backward) for name, attend in attends.items()}
            for name in list(runs):
                try:
                    runs[name]()
                except (RuntimeError, AssertionError, ValueError) as error:  # a peer that does not take this length
                    console.print(f"{name} at {length:,}: {type(error).__name__}: {str(error)[:100]}")
                    del runs[name]
            seconds = interleaved(runs, repeats)
            for name, taken in seconds.items():
                peak = peak_bytes(runs[name])
                row = {"candidate": name, "length": length, "backward": backward, "seconds": taken, "peak_bytes": peak}
                rows.append(row)
    return rows


def constant_tokens(repeats: int, tokens: int = 65_536) -> list[dict[str, Any]]:
    """Figure 8 of the supplement: batch × length = 65K."""
    rows = []
    for length in (512, 1024, 2048, 4096, 8192):
        tensors = peaked_tensors(length, batch=tokens // length)
        attends = {"sdpa": F.scaled_dot_product_attention, "smyrf 2 × 64": ours(SMYRF)}
        seconds = interleaved({n: partial(step, a, *tensors) for n, a in attends.items()}, repeats)
        rows += [{"candidate": n, "length": length, "seconds": s} for n, s in seconds.items()]
    return rows


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Seconds against length, one line a candidate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name in dict.fromkeys(row["candidate"] for row in rows):
        mine = [row for row in rows if row["candidate"] == name]
        axes.plot([r["length"] for r in mine], [r["seconds"] for r in mine], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds", title=title)
    axes.set_xscale("log", base=2)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, path)
    plt.close(figure)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _options() -> tuple[argparse.Namespace, Record | None]:
    """The command line, and the run to compare with; what is wrong with either is said before anything is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    lengths = "512,1024,2048,4096,8192,16384,32768,65536"
    parser.add_argument("--lengths", default=lengths, help="comma-separated numbers of tokens")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs; the median counts")
    parser.add_argument("--where", action="store_true", help="only where the time of each promised call goes")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for bench.json and the plots")
    parser.add_argument("--promises", action="store_true", help="only the promised ratios")
    parser.add_argument("--append", type=Path, help="add what --promises measures to this file, a line a run")
    parser.add_argument("--columns", type=Path, help="only print a file of such runs, a column for each machine")
    parser.add_argument("--save", type=Path, help="write what --promises measures to this file, and stop there")
    parser.add_argument("--note", default="", help="a sentence for that file, such as what else the machine was doing")
    parser.add_argument("--against", type=Path, help="a file that --save wrote: compare with it, and stop there")
    options = parser.parse_args()
    if options.note and not (options.save or options.append):
        parser.error("--note: expected --save or --append beside it")
    try:
        before = Record.read(options.against) if options.against else None
        for path in (options.save, options.append):
            if path:
                expect_writable(path)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return options, before


def main() -> None:
    """Check, measure, print, write."""
    options, before = _options()
    console = Console()
    console = Console(width=max(console.width, 140))
    if options.columns:
        console.print(columns(Record.read_all(options.columns)))
        return
    if wrong := check():
        console.print("Not measured, because correctness is red:", *wrong, sep="\n  ")
        sys.exit(1)
    if options.where:
        console.print(*where(PROMISES, options.repeats), sep="\n")
        return
    promised, figures = promises(max(3, options.repeats))
    console.print(promised)
    if options.append:
        Record.here(figures, options.repeats, options.note).append(options.append)
        console.print(f"wrote {options.append}")
    if options.promises and not (options.save or before):
        return
    compared, more = backends(options.repeats)
    console.print(compared)
    now = Record.here([*figures, *more], options.repeats, options.note)
    if options.save:
        now.write(options.save)
        console.print(f"wrote {options.save}")
    if before:
        notes, table = compare(before, now)
        console.print(*notes, table, sep="\n")
    if options.save or before:
        return
    others, missing = peers.available()
    for name, reason in missing.items():
        console.print(f"{name}: not measured ({reason})")
    rows = sweep([int(part) for part in options.lengths.split(",")], options.repeats, others, console)
    for backward in (False, True):
        when = "forward + backward" if backward else "forward"
        mine = [row for row in rows if row["backward"] == backward]
        console.print(_table(f"ms, {when}", mine, "seconds", 1e3, ".1f"))
        console.print(_table(f"peak MB, {when}", mine, "peak_bytes", 1e-6, ".0f"))
    figure_8 = constant_tokens(options.repeats)
    settings = {
        "torch": torch.__version__,
        "coterie": coterie.__version__,
        "backends": coterie.backends(),
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
    }
    report = {"settings": settings, "sweep": rows, "constant_tokens": figure_8}
    write_json(options.out / "bench.json", report)
    plot(figure_8, "batch × length = 65,536, forward (cf. supplement, Figure 8)", options.out / "constant_tokens.png")
    forward = [row for row in rows if not row["backward"]]
    plot(forward, "batch 1, forward (cf. supplement, Figure 9)", options.out / "lengths.png")
    console.print(f"wrote {options.out}/bench.json, constant_tokens.png, lengths.png")


def _table(title: str, rows: list[dict[str, Any]], what: str, unit: float, form: str) -> Table:
    """A row for each candidate, a column for each length; "–" where it was not measured."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    table = Table(title=title)
    table.add_column("candidate", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for name in dict.fromkeys(row["candidate"] for row in rows):
        found = {row["length"]: row[what] for row in rows if row["candidate"] == name}
        cells = (found.get(length) for length in lengths)
        table.add_row(name, *("–" if cell is None else format(cell * unit, form) for cell in cells))
    return table


if __name__ == "__main__":
    main()
