"""A study: many runs, each stored as soon as it is done, so that a study that was killed goes on where it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState

from coterie.cli.inputs import UserError
from coterie.files import expect_writable, plain, read_json, write_json

Result = dict[str, Any]
_FREE = "seeds"  # may be another when a study goes on: runs of different seeds know nothing of each other


@dataclass(frozen=True)
class Study:
    """A folder with `settings.json`, a file in `runs` for each run that is done, and `work` for those under way.

    Under `accelerate launch` every process makes every run, and the first one writes.
    """

    folder: Path

    @staticmethod
    def open(folder: Path, settings: Result, *, fresh: bool = False) -> Study:
        """The study in this folder: a new one, or one of the same settings that goes on, perhaps with more seeds.

        Args:
            fresh: remove the study that is there; a folder that is none stays and is an error.
        """
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                if fresh:
                    _remove(folder)
                _enter(folder, _stored(settings))
        return Study(folder)

    def part(self, name: str) -> Study:
        """A folder in it for runs whose names may be those of others."""
        return Study(self.folder / name)

    def run(self, name: str, make: Callable[[Path], Result]) -> Result:
        """The result of a run: as it was stored, or made in a folder of its own and stored.

        Args:
            name: of its files.
            make: what makes it, in a folder that is kept if it is killed and removed once it is done.
        """
        file, work = self.folder / "runs" / f"{name}.json", self.folder / "work" / name
        done = file.exists()
        PartialState().wait_for_everyone()  # nobody stores it before all have looked
        if done:
            return dict(read_json(file))
        work.mkdir(parents=True, exist_ok=True)
        result = _stored(make(work))
        if PartialState().is_main_process:
            write_json(file, result)
            shutil.rmtree(work)
        PartialState().wait_for_everyone()
        return result


def _enter(folder: Path, settings: Result) -> None:
    """Write the settings into a new folder; refuse one that holds others."""
    file = folder / "settings.json"
    expect_writable(file)
    if not file.exists():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no study: give another --out.")
        write_json(file, settings)
        return
    found = read_json(file)
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no settings of a study: give another --out.")
    for key in (settings.keys() | found.keys()) - {_FREE}:
        if settings.get(key) != found.get(key):
            raise UserError(
                f"{folder} holds a study with another {key} ({found.get(key)!r} instead of {settings.get(key)!r}): "
                "give another --out, or --fresh to start anew there."
            )
    if found != settings:
        write_json(file, settings)


def _remove(folder: Path) -> None:
    if not folder.exists():
        return
    if not (folder / "settings.json").exists():
        raise UserError(f"{folder} holds no study, so --fresh removes nothing there: give another --out.")
    shutil.rmtree(folder)


def _stored(found: Result) -> Result:
    """As it will be read again."""
    return dict(json.loads(json.dumps(plain(found))))
