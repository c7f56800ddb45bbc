"""Progress of what takes a while: bars on a terminal, now and then a line in a file or a pipe, and in a notebook one
output that is drawn again in its place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from coterie.checks import expect, expect_type
from coterie.tables import as_html, output

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]
ESTIMATE = "about how many seconds"  # told once, as a total: how long everything will take
_BETWEEN = 0.2  # seconds between two drawings in a notebook
_LINES = 10.0  # seconds between two lines where nothing can be drawn again


def telling(progress: Progress | bool | None) -> AbstractContextManager[Progress]:
    """What a user's `progress=` stands for: a function (what, done, total). True draws bars, False and None nothing.

    Example:
        >>> from coterie.progress import telling
        >>> with telling(print) as tell:
        ...     tell("batches", 1, 3)
        batches 1 3
        >>> telling("yes")
        Traceback (most recent call last):
        TypeError: progress: expected True, False or a function (what, done, total), got str
    """
    if progress is None or progress is False:
        return nullcontext(_nothing)
    if progress is True:
        return notebook_bars() if in_notebook() else terminal_bars()
    wanted = "True, False or a function (what, done, total)"
    expect_type(callable(progress), "progress", wanted, type(progress).__name__)
    return nullcontext(progress)


def _nothing(what: str, done: int, total: int) -> None:
    return


def in_notebook() -> bool:
    """Whether a kernel runs this code, so that outputs can hold HTML and be replaced."""
    shell = sys.modules.get("IPython")
    return shell is not None and getattr(shell.get_ipython(), "kernel", None) is not None


# --- on a terminal ----------------------------------------------------------------------------------------------------


def terminal_bars(console: Console | None = None) -> AbstractContextManager[Progress]:
    """A bar for each what, on stderr or a console of rich; they vanish when all is done. In a file or a pipe, lines."""
    expect(_has_rich(), "progress", "rich to draw bars with (pip install rich), or a function", "no rich")
    from rich.console import Console

    there = console or Console(stderr=True)
    return _rich_bars(there) if there.is_terminal else nullcontext(lines(partial(print, file=there.file, flush=True)))


def _has_rich() -> bool:
    return find_spec("rich") is not None


def lines(write: Callable[[str], None], between: float = _LINES) -> Progress:
    """A line about what is under way, and no more than one in so many seconds; what is over before that writes none.

    Example:
        >>> from coterie.progress import lines
        >>> tell = lines(print, between=0)
        >>> tell("batches", 1, 3)
        batches 1/3, 0 s
    """
    steps = Drawn()
    last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if what == ESTIMATE:
            write(estimate(total))
            return
        now = time.monotonic()
        steps.tell(what, done, total, now)
        if now - last >= between:
            write(steps.line(what))
            last = now

    return tell


def estimate(seconds: int) -> str:
    """How long everything will take, in words.

    >>> estimate(40), estimate(130)
    ('about 40 s in all', 'about 2 min in all')
    """
    return f"about {seconds} s in all" if seconds < 100 else f"about {round(seconds / 60)} min in all"


@contextmanager
def _rich_bars(console: Console) -> Iterator[Progress]:
    from rich import progress

    words = progress.TextColumn("{task.description:14}", markup=False)
    count = progress.TextColumn("{task.completed}/{task.total}")
    columns = (words, progress.BarColumn(), count, progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console, transient=True) as drawn:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what == ESTIMATE:
                console.print(estimate(total))
                return
            if what not in tasks:
                tasks[what] = drawn.add_task(what, total=total)
            drawn.update(tasks[what], completed=done, total=total)

        yield tell


# --- in a notebook ----------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """How far one thing is."""

    done: int
    total: int
    start: float
    now: float

    @property
    def seconds(self) -> float:
        """Since it was first heard of."""
        return self.now - self.start


@dataclass
class Drawn:
    """Steps as an output of a notebook: a line for each, with a bar where HTML is shown.

    Example:
        >>> from coterie.progress import Drawn
        >>> found = Drawn()
        >>> found.tell("batches", 1, 3, now=0.0)
        >>> found.tell("batches", 2, 3, now=4.0)
        >>> found
        batches 2/3, 4 s
        >>> '<progress value="2" max="3">' in found._repr_html_()
        True
    """

    steps: dict[str, Step] = field(default_factory=dict)

    def tell(self, what: str, done: int, total: int, now: float) -> None:
        """Take down how far something is; `now` is in seconds."""
        first = self.steps.get(what)
        self.steps[what] = Step(done, total, now if first is None else first.start, now)

    def line(self, what: str) -> str:
        """How far something is, in words."""
        step = self.steps[what]
        if what == ESTIMATE:
            return estimate(step.total)
        return f"{what} {step.done:,}/{step.total:,}, {step.seconds:.0f} s"

    def __repr__(self) -> str:
        return "\n".join(map(self.line, self.steps))

    def _repr_html_(self) -> str:
        return output(
            *(
                f"<div>{_bar(step) if what != ESTIMATE else ''}{as_html(self.line(what))}</div>"
                for what, step in self.steps.items()
            )
        )


def _bar(step: Step) -> str:
    return f'<progress value="{step.done}" max="{step.total}"></progress> '


@contextmanager
def notebook_bars() -> Iterator[Progress]:
    """Bars in one output, which stays when all is done. It needs no widgets, and a stored notebook holds it once."""
    from IPython.display import display

    drawn, last = Drawn(), 0.0
    handle: Any = None

    def show() -> None:
        nonlocal handle, last
        if handle is None:
            handle = display(drawn, display_id=True)
        else:
            handle.update(drawn)
        last = time.monotonic()

    def tell(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        drawn.tell(what, done, total, now)
        if handle is None or now - last >= _BETWEEN:
            show()

    try:
        yield tell
    finally:
        if drawn.steps:
            show()  # the last state, whatever it is
