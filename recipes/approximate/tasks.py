"""The tasks that an approximation is tested on: each as its own recipe fine-tunes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from coterie.cli.inputs import UserError
from recipes.common.tuning import Settings, Tuning
from recipes.glue import run as glue
from recipes.glue.tasks import TASKS as GLUE
from recipes.imdb import run as imdb
from recipes.qa import run as qa


class Recipe(NamedTuple):
    """A task's own recipe: its settings, and what makes a tuning of (task, data, model, settings)."""

    default: Settings
    tuning: Callable[[str, str, str, Settings], Tuning]


TASKS: dict[str, Recipe] = {
    **dict.fromkeys(GLUE, Recipe(glue.DEFAULT, glue.tuning)),
    "imdb": Recipe(imdb.DEFAULT, imdb.tuning),
    "qa": Recipe(qa.DEFAULT, qa.tuning),
}


def tuning(task: str, data: str, model: str, **asked: Any) -> Tuning:
    """How a task's own recipe fine-tunes a model; what is None is as that recipe has it."""
    if task not in TASKS:
        raise UserError(f"--task must be one of {', '.join(TASKS)}, not {task!r}.")
    settings = TASKS[task].default._replace(**{key: value for key, value in asked.items() if value is not None})
    return TASKS[task].tuning(task, data, model, settings)
