"""`python -m benchmarks.speed --where`: where the time of each promised call goes.

plan, execute   milliseconds of each alone, medians that take turns with SDPA and with a large matrix product
GFLOP/s         of execution: 2 · 2 · head dim for each pair of rows that meets; and as a share of SDPA's rate for its
                own pairs, and of the matrix product's, all of the same run
gathered        bytes of queries, keys, values and sums that groups read and write, and how many a second
waiting         share of the time of the threads in parallel parts that they had nothing to do
steps           of planning: each native op, and what PyTorch does between them, milliseconds by torch's profiler. While
                it looks, plans are made step by step, as in a compiled graph; otherwise one call makes most of them,
                with next to nothing between the steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import coterie
from benchmarks.promises import Promise, ours, sdpa, step
from coterie import Plan
from coterie.compiled import regions
from coterie.plan import Round
from coterie.timing import interleaved

_SIDE = 2048  # of the matrices whose product is the machine's best


class Work(NamedTuple):
    """What executing a plan takes."""

    pairs: int  # of rows that meet
    moved: int  # bytes

    @staticmethod
    def of(plan: Plan, dim: int) -> Work:
        """Of all heads: they are as large as the first one, or nearly."""
        pairs = sum(_pairs(plan, each) for each in plan.rounds)
        rows = sum(int(each.query_sizes[0, 0].sum()) for each in plan.rounds)
        keys = sum(int(each.key_sizes[0, 0].sum()) for each in plan.rounds)
        # A group reads its queries, its keys and its values, and reads and writes its sums.
        return Work(pairs * plan.heads, (3 * rows + 2 * keys) * dim * 4 * plan.heads)


def _pairs(plan: Plan, each: Round) -> int:
    """Of the first head's groups: those that a causal plan hides from each other do not count."""
    sizes, keys = each.query_sizes[0, 0].long(), each.key_sizes[0, 0].long()
    if not plan.causal:
        return int((sizes * keys).sum())
    total, order, rows = 0, each.key_order[0, 0], each.query_order[0, 0]
    offsets, starts = each.query_offsets[0, 0].tolist(), each.key_start[0, 0].tolist()
    for group, (count, first) in enumerate(zip(keys.tolist(), starts, strict=True)):
        mine, seen = rows[offsets[group] : offsets[group + 1]], order[first : first + count]
        hidden = (seen < plan.num_keys) & (seen > (mine + plan.offset[0])[:, None])
        total += mine.numel() * count - int(hidden.sum())
    return total


def steps(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Milliseconds of each native op and, as "PyTorch", of all others; medians."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        each: dict[str, float] = {}
        for event in profiled.key_averages():
            name = event.key.removeprefix("coterie::") if event.key.startswith("coterie::") else "PyTorch"
            each[name] = each.get(name, 0.0) + event.self_cpu_time_total / 1e3
        for name, taken in each.items():
            found.setdefault(name, []).append(taken)
    return {name: median(taken) for name, taken in found.items()}


def waiting(run: Callable[[], object], repeats: int) -> float:
    """The share of threads' time in parallel parts in which they wait; NaN with one thread."""
    before = regions()
    for _ in range(repeats):
        run()
    after = regions()
    held = after.seconds - before.seconds
    return (after.idle - before.idle) / held if held else float("nan")


def where(promises: list[Promise], repeats: int) -> Iterator[Table]:
    """For forward calls: rates, and the steps of planning. Yields two tables."""
    rates = Table(title=f"where the time goes, {torch.get_num_threads()} threads: medians of {repeats}")
    for column in (
        "case",
        "plan",
        "execute",
        "planning",
        "GFLOP/s",
        "of SDPA's",
        "of a matmul's",
        "gathered",
        "waiting",
    ):
        rates.add_column(column, justify="left" if column == "case" else "right", no_wrap=True)
    parts = Table(title="steps of planning, ms")
    parts.add_column("case", no_wrap=True)
    parts.add_column("steps")
    left, right = torch.randn(2, _SIDE, _SIDE).unbind(0)
    for promise in promises:
        if promise.backward:
            continue
        q, k, v = tensors = promise.tensors()
        make = partial(promise.mechanism.plan, q, k, is_causal=promise.causal)
        plan: Plan = make()
        runs: dict[str, Callable[[], object]] = {
            "sdpa": partial(step, sdpa(causal=promise.causal), *tensors),
            "plan": make,
            "execute": partial(coterie.grouped_attention, q, k, v, plan),
            "matmul": partial(torch.mm, left, right),
        }
        seconds = interleaved(runs, promise.turns(repeats))
        work, size = Work.of(plan, q.shape[-1]), 4 * q.shape[-1]
        dense = q.shape[0] * q.shape[1] * promise.length**2 // (2 if promise.causal else 1)
        rate = work.pairs * size / seconds["execute"]
        whole = seconds["plan"] + seconds["execute"]
        rates.add_row(
            f"{promise.mechanism}, {promise.length:,}{', causal' * promise.causal}",
            *(f"{seconds[name] * 1e3:.1f} ms" for name in ("plan", "execute")),
            f"{seconds['plan'] / whole:.0%}",
            f"{rate / 1e9:.0f}",
            f"{rate / (dense * size / seconds['sdpa']):.0%}",
            f"{rate / (2 * _SIDE**3 / seconds['matmul']):.0%}",
            f"{work.moved / 1e6:,.0f} MB, {work.moved / seconds['execute'] / 1e9:.1f} GB/s",
            f"{waiting(partial(ours(promise.mechanism, causal=promise.causal), *tensors), repeats):.0%}",
        )
        taken = sorted(steps(make, repeats).items(), key=lambda each: -each[1])
        parts.add_row(
            f"{promise.mechanism}, {promise.length:,}{', causal' * promise.causal}",
            ", ".join(f"{name} {ms:.1f}" for name, ms in taken if ms >= 0.05),
        )
    yield rates
    yield parts
