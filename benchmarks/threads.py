"""One thread against as many as there are cores, where cores are shared: `python -m benchmarks.threads`.

alone           nobody else is there
one core        all threads are pinned to the first core, as where two virtual CPUs are one
a neighbour     another process computes all the time on the first core
two processes   both measure the same at the same time

Each figure is the time with all threads over that with one; the two take turns, medians. "SDPA" is the same for dense
attention: what a machine does to threads it does to both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing.queues import Queue

import torch
from rich.console import Console
from rich.table import Table

import coterie
from benchmarks.promises import IMPROVED, NEAR_FAR, SMYRF, Promise, ours, sdpa, step
from coterie.timing import interleaved

CASES = [
    Promise(SMYRF, 8192, 0),
    Promise(IMPROVED, 4096, 0),
    Promise(NEAR_FAR, 8192, 0),
    Promise(coterie.NearFar(near=128), 8192, 0, causal=True),
]
SETTINGS = ("alone", "one core", "a neighbour", "two processes")


def measure(setting: str, threads: int, repeats: int, found: Queue[dict[str, dict[str, float]]]) -> None:
    """Put the seconds of each case into the queue."""
    if setting == "one core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = {}
    for case in CASES:
        tensors = case.tensors()
        calls = {"ours": ours(case.mechanism, causal=case.causal), "SDPA": sdpa(causal=case.causal)}
        runs = {
            f"{name}, {count}": partial(_with, count, partial(step, call, *tensors))
            for name, call in calls.items()
            for count in (1, threads)
        }
        result[case.name] = interleaved(runs, repeats)
    found.put(result)


def _with(threads: int, run: Callable[[], None]) -> None:
    torch.set_num_threads(threads)
    run()


def _neighbour() -> None:
    """Keep the first core busy until it is ended."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    left, right = torch.randn(2, 256, 256).unbind(0)
    while True:
        left @ right


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="compared with one")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs; the median counts")
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's threads
    table = Table(title=f"time with {options.threads} threads / time with 1; native: {coterie.backends()['native']}")
    for column in ("setting", "case", "ours, 1", f"ours, {options.threads}", "ratio", "SDPA's ratio"):
        table.add_column(column, justify="left" if column in ("setting", "case") else "right", no_wrap=True)
    for setting in SETTINGS:
        found: Queue[dict[str, dict[str, float]]] = spawn.Queue()
        neighbour = spawn.Process(target=_neighbour, daemon=True)
        if setting == "a neighbour":
            neighbour.start()
        count = 2 if setting == "two processes" else 1
        arguments = (setting, options.threads, options.repeats, found)
        workers = [spawn.Process(target=measure, args=arguments, daemon=True) for _ in range(count)]
        for worker in workers:
            worker.start()
        results = [found.get() for _ in workers]
        for worker in workers:
            worker.join()
        if setting == "a neighbour":
            neighbour.terminate()
        for result in results:
            for case, seconds in result.items():
                one, many = (seconds[f"ours, {each}"] for each in (1, options.threads))
                dense = seconds[f"SDPA, {options.threads}"] / seconds["SDPA, 1"]
                times = f"{one * 1e3:.1f} ms", f"{many * 1e3:.1f} ms"
                table.add_row(setting, case, *times, f"{many / one:.2f}", f"{dense:.2f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
