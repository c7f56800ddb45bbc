"""The Triton kernels: timed on a GPU, or, where there is none, compiled ahead of time.

    python -m benchmarks.gpu                  # with a GPU: against PyTorch's own attention; without: the table below
    python -m benchmarks.gpu --ahead          # without running anything: registers, spills, shared memory, instructions
    python -m benchmarks.gpu --ahead --write docs/gpu.md

Compiled ahead of time, each kernel is told by what it needs: registers, bytes that did not fit into them (spilled),
shared memory, how many blocks of it fit into a multiprocessor, and how many instructions of tensor cores its listing
has. The time is an estimate: what must be read and multiplied, by the data sheet, whichever takes longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import coterie
from benchmarks.measure import peaked_tensors
from coterie import Mechanism
from coterie.call import Call
from coterie.plan import Plan

DIMS = (32, 64, 96, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LENGTHS = (1024, 4096, 16_384, 65_536)


class Variant(NamedTuple):
    """A kind of call, which decides the code that a kernel has in it."""

    mechanism: Mechanism
    causal: bool = False
    heads: int = 2
    key_heads: int = 2
    settings: tuple[tuple[str, Any], ...] = ()


VARIANTS: dict[str, Variant] = {
    "smyrf, groups of 64": Variant(coterie.Smyrf(rounds=1, cluster_size=64)),
    "smyrf, groups of 32, causal": Variant(coterie.Smyrf(rounds=1, cluster_size=32), causal=True),
    "smyrf, groups of 16, once": Variant(coterie.Smyrf(rounds=2, cluster_size=16, duplicates="once")),
    "near-far": Variant(coterie.NearFar(near=32)),
    "near-far, causal": Variant(coterie.NearFar(near=32, chunk=64), causal=True),
    "improved-clustered": Variant(coterie.ImprovedClustered(clusters=8, topk=32)),
    "local, causal": Variant(coterie.Local(window=64), causal=True),
    "full, a mask of pairs": Variant(coterie.Full(), settings=(("attn_mask", "pairs"),)),
    "smyrf, padding and dropout": Variant(
        coterie.Smyrf(rounds=1, cluster_size=64), settings=(("key_mask", "all"), ("dropout_p", 0.1))
    ),
}
_LENGTH = 256  # of the calls that are compiled: shapes choose the tiles, and groups are as large as in long ones
_BEGIN, _END = "<!-- python -m benchmarks.gpu --ahead --write docs/gpu.md -->", "<!-- end -->"


def _call(variant: Variant, dim: int, dtype: torch.dtype) -> tuple[Call, Plan]:
    q, k, _ = peaked_tensors(_LENGTH, variant.heads, dim)
    k = k[:, : variant.key_heads]
    masks: dict[str, Any] = {
        "pairs": torch.zeros(_LENGTH, _LENGTH, dtype=torch.float32),
        "all": torch.ones(1, _LENGTH, dtype=torch.bool),
    }
    settings = {name: masks[value] if isinstance(value, str) else value for name, value in variant.settings}
    plan = variant.mechanism.plan(q, k, is_causal=variant.causal, backend="native")
    q, k = q.to(dtype), k.to(dtype)
    call = Call.of(q, k, k.clone(), is_causal=variant.causal, backend="native", **settings)
    return call, plan


def compile_variant(variant: Variant, dim: int, dtype: torch.dtype) -> None:
    """Launch everything that a forward and a backward pass would launch."""
    from dataclasses import replace

    from coterie.engine.flat import Inputs
    from coterie.engine.kernels import gradients, launches

    call, plan = _call(variant, dim, dtype)
    if call.dropout_p:
        call = replace(call, seed=torch.tensor(5 * 2**33 + 7))
    given = Inputs.of(call, plan)
    out, lse, alone = launches.forward(given)
    gradients.backward(given, out, lse, out, lse, alone, False)


class Line(NamedTuple):
    """One kernel of one variant."""

    gpu: str
    variant: str
    dim: int
    dtype: str
    kernel: str
    tile: str
    warps: int
    registers: int
    spilled: int
    shared: int
    blocks: int
    mma: int
    wgmma: int


def ahead(
    variants: Iterable[str],
    dims: Iterable[int],
    dtypes: Iterable[str],
    gpus: Iterable[str],
    *,
    small: bool = False,
    tell: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Every kernel of the variants, compiled; the `small` ones, which only move and add rows, if they are asked for."""
    from benchmarks.ahead import GPUS, compiling

    lines = []
    for gpu in (each for each in GPUS if each.name in gpus):
        for dtype in dtypes:
            for dim in dims:
                for name in variants:
                    with compiling(gpu, small=small) as found:
                        compile_variant(VARIANTS[name], dim, DTYPES[dtype])
                    for each in found:
                        tile = " × ".join(str(each.constants[x]) for x in ("ROWS", "KEYS") if x in each.constants)
                        needs = (each.warps, each.registers, each.spilled, each.shared, each.blocks(gpu))
                        line = Line(gpu.name, name, dim, dtype, each.kernel, tile, *needs, each.mma, each.wgmma)
                        tell(line)
                        lines.append(line)
    return lines


def table(lines: Iterable[Line]) -> str:
    """As Markdown."""
    head = ("GPU", "call", "dim", "dtype", "kernel", "tile", "warps", "registers", "spilled", "shared KB")
    rows = [(*head, "blocks", "mma", "wgmma"), ("---",) * (len(head) + 3)]
    rows += [tuple(str(x) for x in (*line[:9], f"{line.shared / 1024:.0f}", *line[10:])) for line in lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def summary(lines: Iterable[Line]) -> str:
    """The worst of all calls, for each GPU, head dim and kernel, as Markdown."""
    found: dict[tuple[str, int, str, str], list[Line]] = {}
    for line in lines:
        found.setdefault((line.gpu, line.dim, line.dtype, line.kernel), []).append(line)
    rows: list[tuple[str, ...]] = [
        (
            "GPU",
            "head dim",
            "dtype",
            "kernel",
            "variants",
            "registers",
            "spilled",
            "shared KB",
            "blocks",
            "mma",
            "wgmma",
        )
    ]
    rows.append(("---",) * len(rows[0]))
    for key, each in found.items():
        most = [
            max(getattr(line, name) for line in each) for name in ("registers", "spilled", "shared", "mma", "wgmma")
        ]
        fewest = [min(getattr(line, name) for line in each) for name in ("blocks", "registers", "shared")]
        registers, shared = f"{fewest[1]}–{most[0]}", f"{fewest[2] / 1024:.0f}–{most[2] / 1024:.0f}"
        cells = (*key, len(each), registers, most[1], shared, fewest[0], most[3], most[4])
        rows.append(tuple(str(x) for x in cells))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


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
    from benchmarks.ahead import GPUS

    q, k, _ = peaked_tensors(length, heads, dim)
    rows: list[tuple[str, ...]] = [("call", "GFLOP", "GB", *(f"{gpu.name}, ms (estimate)" for gpu in GPUS))]
    rows.append(("---",) * len(rows[0]))
    for name, mechanism, causal in (
        ("smyrf:rounds=4,cluster_size=64", coterie.Smyrf(rounds=4, cluster_size=64), False),
        ("near-far:near=64", coterie.NearFar(near=64), False),
        ("near-far:near=64, causal", coterie.NearFar(near=64), True),
    ):
        work = Work.of(mechanism.plan(q, k, is_causal=causal), dim, 64)
        times = (max(work.bytes / gpu.bandwidth, work.flops / gpu.flops) * 1e3 for gpu in GPUS)
        rows.append((name, f"{work.flops / 1e9:.1f}", f"{work.bytes / 1e9:.2f}", *(f"{t:.2f}" for t in times)))
    dense = 4.0 * dim * length**2 * heads
    times = (dense / gpu.flops * 1e3 for gpu in GPUS)
    rows.append(("dense", f"{dense / 1e9:.1f}", f"{8 * length * dim * heads / 1e9:.2f}", *(f"{t:.2f}" for t in times)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _milliseconds(name: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    """Of forward, and of forward and backward."""
    import triton.testing

    grad = torch.randn_like(q)

    def attend() -> Tensor:
        if name == "SDPA":
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return coterie.attention(q, k, v, name, backend="triton")

    def learn() -> None:
        torch.autograd.grad(attend(), (q, k, v), grad)

    with torch.no_grad():
        forward = float(triton.testing.do_bench(attend))
    return forward, float(triton.testing.do_bench(learn))


def timed(heads: int = 8, dim: int = 64) -> str:
    """On this GPU: milliseconds of forward and of forward and backward, planning included, beside SDPA's."""
    import triton

    rows: list[tuple[str, ...]] = [("length", "call", "forward ms", "× SDPA", "with backward ms", "× SDPA")]
    rows.append(("---",) * len(rows[0]))
    for length in LENGTHS:
        q, k, v = (x.to("cuda", torch.bfloat16).requires_grad_() for x in peaked_tensors(length, heads, dim))
        dense = _milliseconds("SDPA", q, k, v)
        for name in ("SDPA", "smyrf:rounds=4,cluster_size=64", "near-far:near=64"):
            times = dense if name == "SDPA" else _milliseconds(name, q, k, v)
            cells = (
                f"{x:{digits}f}" for t, d in zip(times, dense, strict=True) for x, digits in ((t, ".3"), (d / t, ".2"))
            )
            rows.append((f"{length:,}", name, *cells))
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    return title + "\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write(path: Path, text: str) -> None:
    """Put the text between the two marks of a page."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    path.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", action="store_true", help="compile ahead of time, also where there is a GPU")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--gpus", nargs="+", choices=["A100", "H100"], default=["A100", "H100"])
    parser.add_argument("--small", action="store_true", help="also the kernels that only move and add rows")
    parser.add_argument("--json", type=Path, help="write the lines of the table here, and no estimate")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    options = parser.parse_args()
    if torch.cuda.is_available() and not options.ahead:
        print(timed())
        return
    lines = ahead(
        options.variants,
        options.dims,
        options.dtypes,
        options.gpus,
        small=options.small,
        tell=lambda line: print(*line, sep="  ", file=sys.stderr, flush=True),
    )
    if options.json:
        options.json.write_text(json.dumps([line._asdict() for line in lines], indent=1))
        return
    text = f"{summary(lines)}\n\n{estimate()}"
    print(table(lines), text, sep="\n\n")
    if options.write:
        write(options.write, text)


if __name__ == "__main__":
    main()
