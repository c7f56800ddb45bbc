"""How far a study is: its runs, what is under way, and the time that is left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from coterie.cli.console import err
from coterie.progress import in_notebook, lines, notebook_bars
from recipes.common.processes import processes

Tell = Callable[[str, int, int], None]  # what, done, total


class Bar(TrainerCallback):  # type: ignore[misc]
    """What is under way, and how far it is. The Trainer tells it of its steps."""

    def __init__(self, tell: Tell, runs: int) -> None:
        self.tell, self.runs, self.over, self.begun = tell, runs, 0, False
        self.what, self.steps, self.total = "", 0, 1
        tell("runs", 0, runs)

    def begin(self, what: str, total: int = 1) -> None:
        """Another run, or another part of it."""
        self.what, self.steps, self.total, self.begun = what, 0, total, True
        self.tell(what, 0, total)

    def tick(self, steps: int = 1) -> None:
        """So many steps of it are done."""
        self.steps += steps
        self.tell(self.what, self.steps, self.total)

    def done(self) -> None:
        """A run is done. One that was stored began nothing, and says nothing of the time that others take."""
        self.over, self.runs = (self.over + 1, self.runs) if self.begun else (self.over, self.runs - 1)
        self.begun = False
        self.tell("runs", self.over, self.runs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps, self.total = state.global_step, state.max_steps  # a run that goes on has steps behind it
        self.tell(self.what, self.steps, self.total)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.tick(state.global_step - self.steps)


@contextmanager
def bar(runs: int) -> Iterator[Bar]:
    """Over so many runs; only the first process of several draws."""
    with _drawn() as tell:
        yield Bar(tell, runs)


def _drawn() -> AbstractContextManager[Tell]:
    if in_notebook():
        return notebook_bars()
    if not processes().is_main_process:
        return nullcontext(lambda what, done, total: None)
    return _terminal() if err.is_terminal else nullcontext(plainly(partial(print, file=sys.stderr, flush=True)))


def plainly(write: Callable[[str], None], between: float = 60.0) -> Tell:
    """Into a file or a pipe: now and then a line about what is under way, and how many runs are over.

    >>> tell = plainly(print, between=0)
    >>> tell("runs", 2, 6)
    >>> tell("dense, seed 0", 10, 250)
    2 of 6 runs are done; dense, seed 0 10/250, 0 s
    """
    over = ""
    told = lines(lambda line: write(f"{over}; {line}"), between)

    def tell(what: str, done: int, total: int) -> None:
        nonlocal over
        if what == "runs":
            over = f"{done} of {total} runs are done"
        else:
            told(what, done, total)

    return tell


@contextmanager
def _terminal() -> Iterator[Tell]:
    """Two lines: the runs, and what is under way."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    # Runs take minutes, and the rate of the last half minute, as it is by default, would say nothing of them.
    day = 24 * 3600.0
    with Progress(*columns, *times, console=err, transient=True, speed_estimate_period=day) as progress:
        runs, steps = progress.add_task("runs"), progress.add_task("", visible=False)
        now = ""

        def tell(what: str, done: int, total: int) -> None:
            nonlocal now
            if what == "runs":
                progress.update(runs, completed=done, total=total)
                return
            if what != now:
                now = what
                progress.reset(steps, description=what, visible=True)
            progress.update(steps, completed=done, total=total)

        yield tell
