"""The Triton kernels: timed on a GPU, or, where there is none, compiled ahead of time.

    python -m benchmarks.gpu                  # with a GPU: promised calls beside flash attention; without: as --ahead
    python -m benchmarks.gpu --ahead          # without running anything: registers, spills, shared memory, instructions
    python -m benchmarks.gpu --ahead --write docs/gpu.md
    python -m benchmarks.gpu --ahead --gpus B200 MI300X
    python -m benchmarks.gpu --ahead --dtypes float16 --json half.json     # the long table in parts …
    python -m benchmarks.gpu --ahead --read half.json … --write docs/gpu.md  # … and together

Compiled ahead of time, each kernel is told by what it needs: registers, bytes that did not fit into them (spilled),
shared memory, how many blocks of it fit into a multiprocessor, and how many instructions of tensor cores its listing
has. The time is an estimate: what must be read and multiplied, by the data sheet, whichever takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

import coterie
from benchmarks.measure import peaked_tensors
from benchmarks.variants import CALLS, GROUPS, PLANNING, launch
from coterie.plan import Plan

DIMS = (32, 64, 96, 128)
GPUS = ("A100", "H100")  # what is promised; B200 and MI300X can be asked for
# "tf32" is float32 where `torch.set_float32_matmul_precision("high")` allows less exact products.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}


_BEGIN, _END = "<!-- python -m benchmarks.gpu --ahead --write docs/gpu.md -->", "<!-- end -->"


class Line(NamedTuple):
    """One kernel of one kind of call."""

    gpu: str
    dtype: str
    dim: int
    call: str
    group: int  # queries of a group
    kernel: str
    tile: str
    warps: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    tensor: int
    key: str  # the same for one and the same kernel, whatever calls take it

    @property
    def broken(self) -> bool:
        """Whether it breaks what is promised."""
        return self.spilled > 0 or self.blocks < 2 or (self.tensor == 0 and self.uses_tensor_cores)

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether it should: numbers of 16 bits, or those that may be rounded, in kernels of attention; and bytes."""
        return self.kernel == "best_keys" or (self.dtype != "float32" and self.call not in PLANNING)


class Task(NamedTuple):
    """What one process compiles in one go."""

    gpu: str
    dtype: str
    dim: int
    call: str
    groups: tuple[int, ...]
    small: bool

    def lines(self) -> list[Line]:
        """Every kernel, once."""
        from benchmarks.ahead import GPUS, compiling

        gpu = GPUS[self.gpu]
        torch.set_float32_matmul_precision("high" if self.dtype == "tf32" else "highest")
        found: list[Line] = []
        with compiling(gpu, small=self.small) as kernels:
            for group in self.groups:
                launch(self.call, group, self.dim, DTYPES[self.dtype])
                for each in kernels[len(found) :]:
                    tile = " × ".join(str(each.constants[x]) for x in ("ROWS", "KEYS") if x in each.constants)
                    needs = (each.warps, each.registers, each.spilled, each.shared, each.blocks(gpu), each.tensor)
                    found.append(Line(*self[:4], group, each.kernel, tile, *needs, key=each.key))
        return found


def ahead(tasks: Iterable[Task], jobs: int) -> Iterator[Line]:
    """Every kernel of the tasks, compiled by so many processes."""
    if jobs == 1:
        yield from itertools.chain.from_iterable(task.lines() for task in tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines in pool.map(Task.lines, tasks):
            yield from lines


def markdown(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """A table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table(lines: Iterable[Line]) -> str:
    """Every kernel, as Markdown."""
    head = ("GPU", "dtype", "dim", "call", "group", "kernel", "tile", "warps", "registers", "spilled", "shared KB")
    rows = ((*line[:10], f"{line.shared / 1024:.0f}", line.blocks, line.tensor) for line in lines)
    return markdown((*head, "blocks", "tensor cores"), rows)


def summary(lines: Iterable[Line]) -> str:
    """The least and the most of all different kernels for each GPU, dtype and head dim, as Markdown."""
    kernels: dict[tuple[str, str, int], dict[str, Line]] = {}
    for line in lines:
        kernels.setdefault((line.gpu, line.dtype, line.dim), {})[line.key] = line
    found = {kind: each.values() for kind, each in kernels.items()}

    def span(values: Iterable[int]) -> str:
        values = sorted(values)
        return f"{values[0]}" if values[0] == values[-1] else f"{values[0]}–{values[-1]}"

    rows = (
        (
            *key,
            len(each),
            span(line.registers for line in each),
            max(line.spilled for line in each),
            span(round(line.shared / 1024) for line in each),
            span(line.blocks for line in each),
            span(line.tensor for line in each),
        )
        for key, each in found.items()
    )
    head = ("GPU", "dtype", "head dim", "kernels", "registers", "spilled", "shared KB", "blocks", "tensor cores")
    return markdown(head, rows)


class Work(NamedTuple):
    """What one forward pass must do at least."""

    flops: float
    bytes: float

    @staticmethod
    def of(plan: Plan, dim: int, rows: int) -> Work:
        """In bfloat16: keys and values are read once for each tile of queries, sums in float32 once a round."""
        flops = 4.0 * dim * float(plan.pairs_met().double().sum())
        moved = 0.0
        for each in plan.rounds:
            tiles = (each.query_sizes + rows - 1) // rows
            moved += float((tiles * each.key_sizes).double().sum()) * 2 * dim * 2
            moved += float(each.query_sizes.double().sum()) * (2 * dim + 2 * 4 * dim)
        return Work(flops, moved)


def estimate(length: int = 16_384, heads: int = 8, dim: int = 64) -> str:
    """Bytes, multiplications and the time that a data sheet allows them, for calls of real size."""
    from benchmarks.ahead import GPUS as ALL

    q, k, _ = peaked_tensors(length, heads, dim)
    gpus = [ALL[name] for name in GPUS]
    rows: list[tuple[str, ...]] = []
    for name, mechanism, causal in (
        ("smyrf:rounds=4,cluster_size=64", coterie.Smyrf(rounds=4, cluster_size=64), False),
        ("near-far:near=64", coterie.NearFar(near=64), False),
        ("near-far:near=64, causal", coterie.NearFar(near=64), True),
    ):
        work = Work.of(mechanism.plan(q, k, is_causal=causal), dim, 64)
        times = (max(work.bytes / gpu.bandwidth, work.flops / gpu.flops) * 1e3 for gpu in gpus)
        rows.append((name, f"{work.flops / 1e9:.1f}", f"{work.bytes / 1e9:.2f}", *(f"{t:.2f}" for t in times)))
    dense = 4.0 * dim * length**2 * heads
    times = (dense / gpu.flops * 1e3 for gpu in gpus)
    rows.append(("dense", f"{dense / 1e9:.1f}", f"{8 * length * dim * heads / 1e9:.2f}", *(f"{t:.2f}" for t in times)))
    return markdown(("call", "GFLOP", "GB", *(f"{gpu.name}, ms (estimate)" for gpu in gpus)), rows)


def timed() -> str:
    """On this GPU: the promised calls beside PyTorch's flash attention; an error where the kernels are wrong."""
    from benchmarks.on_gpu import HEAD, Place, rows, title, wrong

    place = Place()
    if mistakes := wrong(place):
        sys.exit("\n  ".join(["Not measured, because correctness is red:", *mistakes]))
    return f"{title()}\n\n{markdown(HEAD, rows(place))}"


def write(path: Path, text: str) -> None:
    """Put the text between the two marks of a page."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    path.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")


def compiled(options: argparse.Namespace) -> list[Line]:
    """The lines of what was asked for. What Triton has compiled before is in its cache, so this can be stopped."""
    kinds = itertools.product(options.gpus, options.dtypes, options.dims, options.calls)
    lines: list[Line] = []
    for line in ahead([Task(*kind, tuple(options.groups), options.small) for kind in kinds], options.jobs):
        print("BROKEN" if line.broken else "", *line[:-1], sep="  ", file=sys.stderr, flush=True)
        lines.append(line)
        if options.json:
            options.json.write_text(json.dumps([each._asdict() for each in lines], indent=1))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", action="store_true", help="compile ahead of time, also where there is a GPU")
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS))
    parser.add_argument("--groups", nargs="+", type=int, default=list(GROUPS), help="queries of a group")
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--gpus", nargs="+", choices=["A100", "H100", "B200", "MI300X"], default=list(GPUS))
    parser.add_argument("--small", action="store_true", help="also the kernels that only move and add rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile at a time")
    parser.add_argument("--json", type=Path, help="write the lines of the table here, and no estimate")
    parser.add_argument("--read", type=Path, nargs="+", help="take lines that were written before, and compile nothing")
    parser.add_argument("--write", type=Path, help="put the summary into this page")
    options = parser.parse_args()
    if torch.cuda.is_available() and not options.ahead:
        print(timed())
        return
    if options.read:
        lines = [Line(**each) for path in options.read for each in json.loads(path.read_text())]
    else:
        lines = compiled(options)
    if options.json:
        return
    text = f"{summary(lines)}\n\n{estimate()}"
    print(table(lines), text, sep="\n\n")
    if options.write:
        write(options.write, text)
    if broken := sum(line.broken for line in lines):
        sys.exit(f"{broken} kernels spill, fit less than twice, or use no tensor core")


if __name__ == "__main__":
    main()
