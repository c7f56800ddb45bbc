"""Two builds of Coterie measured in one run: each in a process of its own, taking turns, medians over the turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

Figures = dict[str, float]


def turn(python: str, script: str, arguments: list[str]) -> Figures:
    """What `script --json` prints when another interpreter runs it, which need not have that file."""
    code = (
        f"import sys, runpy; sys.argv = {[script, '--json', *arguments]!r}; "
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} could not measure: {done.stderr.strip().splitlines()[-1]}")
    found: Figures = json.loads(done.stdout)
    return found


def medians(turns: list[Figures]) -> Figures:
    """Each figure's median over the turns."""
    return {name: statistics.median(each[name] for each in turns) for name in turns[0]}


def compared(python: str, script: str, arguments: list[str], turns: int) -> tuple[Figures, Figures]:
    """The figures of the other interpreter, and of this one."""
    theirs, ours = [], []
    for _ in range(turns):
        theirs.append(turn(python, script, arguments))
        ours.append(turn(sys.executable, script, arguments))
    return medians(theirs), medians(ours)
