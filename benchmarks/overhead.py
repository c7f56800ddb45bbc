"""What a call costs when there is almost nothing to compute: microseconds at 64 tokens.

    python -m benchmarks.overhead
    python -m benchmarks.overhead --against ../older/.venv/bin/python    # another build of Coterie, in the same run

Times are CPU time of one thread, the median of many calls, so that they hold on a machine that is busy. With another
interpreter, the two take turns in processes of their own, and each figure is the median over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import coterie

CALLS: dict[str, tuple[str, bool]] = {
    "full": ("full", False),
    "local, causal": ("local", True),
    "smyrf": ("smyrf:rounds=2,cluster_size=16", False),
    "improved-clustered": ("improved-clustered:clusters=8,topk=8", False),
    "near-far": ("near-far:near=8", False),
    "near-far, causal": ("near-far:near=8,chunk=16", True),
}


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """Median CPU time of a call."""
    for _ in range(20):
        run()
    taken = []
    for _ in range(repeats):
        start = time.thread_time_ns()
        run()
        taken.append(time.thread_time_ns() - start)
    return statistics.median(taken) / 1000


def measure(repeats: int) -> dict[str, float]:
    """Each call, what planning it takes alone, and what is left if its plan is given."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 8, 64, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, (spec, causal) in CALLS.items():
            mechanism = coterie.as_mechanism(spec)
            plan = mechanism.plan(q, k, is_causal=causal)
            found |= {
                f"{name} | attention": microseconds(
                    partial(coterie.attention, q, k, v, mechanism, is_causal=causal), repeats
                ),
                f"{name} | plan": microseconds(partial(mechanism.plan, q, k, is_causal=causal), repeats),
                f"{name} | grouped_attention": microseconds(partial(coterie.grouped_attention, q, k, v, plan), repeats),
            }
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installation of Coterie")
    parser.add_argument("--repeats", type=int, default=200, help="calls in a turn")
    parser.add_argument("--turns", type=int, default=5, help="of each interpreter, with --against")
    parser.add_argument("--json", action="store_true", help="print the figures of one turn")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.repeats)))
        return
    if options.against is None:
        print("| mechanism | call | µs |\n|---|---|---:|")
        for name, taken in measure(options.repeats).items():
            print(f"| {name} | {taken:,.0f} |")
        return
    from benchmarks.builds import compared  # an older build that runs this file has no such module

    before, after = compared(options.against, __file__, ["--repeats", str(options.repeats)], options.turns)
    print("| mechanism | call | there, µs | here, µs | here / there |\n|---|---|---:|---:|---:|")
    for name, taken in after.items():
        print(f"| {name} | {before[name]:,.0f} | {taken:,.0f} | {taken / before[name]:.2f} |")


if __name__ == "__main__":
    main()
