"""One bar for a whole study, with the time that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import PartialState
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from coterie.cli.console import err


class Bar(TrainerCallback):  # type: ignore[misc]
    """What is under way, and how far it is. The Trainer tells it of its steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress = progress
        self.runs = progress.add_task("runs", total=total)
        self.steps = progress.add_task("", total=None, visible=False)

    def begin(self, what: str, total: int | None = None) -> None:
        """Another run, or another part of it."""
        self.progress.reset(self.steps, description=what, total=total, visible=True)

    def tick(self, steps: int = 1) -> None:
        """So many steps of it are done."""
        self.progress.advance(self.steps, steps)

    def done(self) -> None:
        """A run is done."""
        self.progress.advance(self.runs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.update(self.steps, total=state.max_steps, completed=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.progress.update(self.steps, completed=state.global_step)


@contextmanager
def bar(total: int) -> Iterator[Bar]:
    """A bar over so many runs; only the first process of several draws one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = PartialState().is_main_process
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not shown) as progress:
        yield Bar(progress, total)
