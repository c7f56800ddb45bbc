"""The figures of a run as a file, one for each release in benchmarks/history/, and a later run beside it."""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from rich.table import Table

import coterie
from coterie.files import read_json, write_json
from coterie.machine import cpu

FORMAT = "coterie speed, 1"
AGAINST_SDPA = "times as fast as SDPA"
AGAINST_REFERENCE = "times as fast as the reference"
GROWTH = "time of the longer / of the shorter"
MEMORY = "memory / that of q"
# Seconds mean something only where all of these are the same; ratios against SDPA survive another machine.
SAME_MACHINE = ("cpu", "instruction_set", "threads")


class Figure(NamedTuple):
    """One measured ratio."""

    case: str
    unit: str
    value: float | None  # None where it could not be measured
    seconds: Mapping[str, float] = MappingProxyType({})  # medians that it comes from; the last is ours


class Record(NamedTuple):
    """A run: where, of what, and what came out."""

    machine: dict[str, Any]
    coterie: str
    commit: str
    date: str
    repeats: int
    note: str
    figures: list[Figure]

    @classmethod
    def here(cls, figures: list[Figure], repeats: int, note: str = "") -> Record:
        """The record of a run that has just been made on this machine."""
        today = datetime.now(UTC).date().isoformat()
        return cls(machine(), coterie.__version__, commit(), today, repeats, note, figures)

    def write(self, path: Path) -> None:
        """As JSON."""
        write_json(path, self._as_json())

    def append(self, path: Path) -> None:
        """As one more line of a file of runs."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._as_json(), ensure_ascii=False) + "\n")

    def _as_json(self) -> dict[str, Any]:
        figures = [{**figure._asdict(), "seconds": dict(figure.seconds)} for figure in self.figures]
        return {"format": FORMAT, **self._asdict(), "figures": figures}

    @classmethod
    def read(cls, path: Path) -> Record:
        """What `write` wrote; OSError or ValueError if the file is none of that kind."""
        return cls._of(read_json(path), path)

    @classmethod
    def read_all(cls, path: Path) -> list[Record]:
        """What `append` wrote, a record a line; OSError or ValueError if the file is none of that kind."""
        return [cls._of(json.loads(line), path) for line in path.read_text(encoding="utf-8").splitlines()]

    @classmethod
    def _of(cls, found: Any, path: Path) -> Record:
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f"{path}: expected a file that `python -m benchmarks.speed --save` wrote ({FORMAT!r})")
        try:
            record = cls(**found)
            return record._replace(machine=dict(record.machine), figures=[_figure(each) for each in record.figures])
        except (TypeError, ValueError) as error:  # a field too many or too few, or of another type
            raise ValueError(f"{path}: expected the fields of {FORMAT!r}, got {error}") from error


def _figure(found: Any) -> Figure:
    """A figure as JSON has it."""
    figure = Figure(**found)
    seconds = dict(figure.seconds)
    numbers = [*seconds.values(), 0 if figure.value is None else figure.value]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError(f"{figure.case} without numbers")
    return figure._replace(seconds=seconds)


def machine() -> dict[str, Any]:
    """What times depend on."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "instruction_set": coterie.backends()["native"].removeprefix("available (").removesuffix(")"),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit(root: Path = Path(__file__).parent.parent) -> str:
    """The commit that is checked out, from the last line of git's log of HEAD; "unknown" outside a clone."""
    git = root / ".git"
    if git.is_file():  # a worktree
        git = root / git.read_text().partition(":")[2].strip()
    log = git / "logs" / "HEAD"
    return log.read_text().splitlines()[-1].split()[1][:12] if log.exists() else "unknown"


def compare(before: Record, now: Record) -> tuple[list[str], Table]:
    """What differs between the machines, in words, and both runs side by side.

    On another machine only ratios against SDPA are comparable, so that nothing else is shown.
    """
    names = {name for name in SAME_MACHINE if before.machine.get(name) != now.machine.get(name)}
    notes = [f"{name}: {before.machine.get(name)} then, {now.machine.get(name)} now" for name in sorted(names)]
    if names:
        notes.append("Another machine: seconds cannot be compared, and neither can ratios except those against SDPA.")
    if before.machine.get("torch") != now.machine["torch"]:
        notes.append(f"torch {before.machine.get('torch')} then, {now.machine['torch']} now: SDPA may have changed.")
    notes += [f"Note of {before.coterie}: {before.note}"] if before.note else []
    table = Table(title=f"{before.coterie} ({before.commit}, {before.date}) and {now.coterie} ({now.commit})")
    table.add_column("case")  # may be folded, figures may not
    columns = ("unit", "then", "now", "now / then") + (() if names else ("ms then", "ms now"))
    for column in columns:
        table.add_column(column, no_wrap=True, justify="left" if column == "unit" else "right")
    for case, unit, then, later in _pairs(before.figures, now.figures):
        if names and unit != AGAINST_SDPA:
            continue
        old, new = (figure.value if figure else None for figure in (then, later))
        cells = [_number(old), _number(new), _number(None if new is None or not old else new / old)]
        if not names:
            cells += [_milliseconds(figure) for figure in (then, later)]
        table.add_row(case, unit, *cells)
    return notes, table


def columns(records: list[Record]) -> Table:
    """A column for each machine, instruction set and number of threads: the median of its runs, and their range."""
    machines: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for each in records:
        machines[tuple(each.machine.get(name) for name in SAME_MACHINE)].append(each)
    table = Table(title="every machine seen")
    table.add_column("case")
    for (name, instruction_set, threads), runs in machines.items():
        count = f"{len(runs)} run" + "s" * (len(runs) > 1)
        table.add_column(f"{name}, {instruction_set}, {threads} threads ({count})", justify="right")
    for case, unit in dict.fromkeys((figure.case, figure.unit) for each in records for figure in each.figures):
        table.add_row(case, *(_range(runs, case, unit) for runs in machines.values()))
    return table


def _range(runs: list[Record], case: str, unit: str) -> str:
    found = [x.value for run in runs for x in run.figures if (x.case, x.unit) == (case, unit) and x.value is not None]
    if not found:
        return "–"
    middle = f"{median(found):.1f}" if unit == AGAINST_SDPA else f"{median(found):.2f}"
    return middle if len(found) == 1 else f"{middle} ({min(found):.1f}–{max(found):.1f})"


def _pairs(before: list[Figure], now: list[Figure]) -> Iterator[tuple[str, str, Figure | None, Figure | None]]:
    """Each case of either run, with its figure in both."""
    first, second = ({(figure.case, figure.unit): figure for figure in figures} for figures in (before, now))
    for case, unit in dict.fromkeys([*first, *second]):
        yield case, unit, first.get((case, unit)), second.get((case, unit))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _milliseconds(figure: Figure | None) -> str:
    """Ours."""
    return f"{list(figure.seconds.values())[-1] * 1e3:.1f}" if figure and figure.seconds else "–"
