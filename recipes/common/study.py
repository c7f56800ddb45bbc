"""A study: many runs, each stored as soon as it is done, so that a study that was killed goes on where it was."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

import coterie
from coterie.cli.inputs import UserError
from coterie.files import expect_writable, plain, read_json, write_json
from recipes.common.processes import processes

Result = dict[str, Any]
_SETTINGS = "settings.json"
_DIGEST = "data digest"
_LOCKS: dict[Path, FileLock] = {}  # held until this process ends
_FULL = 2**20  # bytes: a disk with fewer is full


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
            settings: all that decides its figures, the recipe's name among them; versions are added.
            fresh: remove the study that is there; a folder that is none stays and is an error.
        """
        assert "recipe" in settings, "what tells a study from somebody else's folder"
        with processes().main_process_first():
            if processes().is_main_process:
                expect_writable(folder / _SETTINGS)
                with enough_room(folder):
                    _enter(folder, _stored({**settings, "versions": versions()}), fresh)
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
        processes().wait_for_everyone()  # nobody stores it before all have looked
        if done:
            result = _read(file)
        else:
            with enough_room(self.folder):
                work.mkdir(parents=True, exist_ok=True)
                result = _stored(make(work))
                processes().wait_for_everyone()  # nobody removes what others still read
                if processes().is_main_process:
                    write_json(file, result)
        if processes().is_main_process:
            shutil.rmtree(work, ignore_errors=True)  # there still if it was killed just after it was stored
        processes().wait_for_everyone()
        return result


def versions() -> dict[str, str]:
    """What computes the figures; a study does not go on with others."""
    return {module.__name__: module.__version__ for module in (coterie, torch, transformers)}


@contextmanager
def enough_room(folder: Path) -> Iterator[None]:
    """Whatever writers make of a full disk is said in one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or shutil.disk_usage(there).free < _FULL:
            raise UserError(f"{folder}: no space is left there. What is done is kept; make room and go on.") from error
        raise


def _enter(folder: Path, settings: Result, fresh: bool) -> None:
    """Write the settings into a new folder; refuse one that holds others, or that another command is at work in."""
    file = folder / _SETTINGS
    found = _settings(folder)
    if fresh and found is not None:
        _lock(folder)
        _remove(folder)
        found = None
    if fresh and folder.is_dir() and _others(folder):
        raise UserError(f"{folder} holds no study, so --fresh removes nothing there: give another --out.")
    if found is None:
        if folder.is_dir() and _others(folder):
            raise UserError(f"{folder} is not empty and holds no study: give another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder)
        write_json(file, settings)
        return
    _lock(folder)
    for key in _in_order((settings.keys() | found.keys()) - _free(settings)):
        if settings.get(key) != found.get(key):
            raise UserError(
                f"{folder} holds a study with another {key} ({found.get(key)!r} instead of {settings.get(key)!r}): "
                "give another --out, or --fresh to start anew there."
            )
    if found != settings:
        write_json(file, settings)


def _in_order(keys: set[str]) -> list[str]:
    """The digest last: it is another whenever a setting of the data is, and says less."""
    return sorted(keys, key=lambda key: (key == _DIGEST, key))


def _free(settings: Result) -> set[str]:
    """What may be another when a study goes on: runs of different seeds know nothing of each other, and data that are
    the same may lie elsewhere."""
    return {"seeds", "data"} if _DIGEST in settings else {"seeds"}


def _settings(folder: Path) -> Result | None:
    """Those of the study in a folder; None if it holds none. A file of that name may be somebody else's."""
    file = folder / _SETTINGS
    if not file.exists():
        return None
    try:
        found = read_json(file)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "recipe" not in found:
        raise UserError(f"{file} holds no settings of a study: give another --out.")
    return found


def _others(folder: Path) -> list[Path]:
    """What is in a folder, but for what a study that was killed at its very start may have left."""
    return [each for each in folder.iterdir() if each.name != ".lock" and not each.match(".coterie-*.tmp")]


def _lock(folder: Path) -> None:
    """Keep other commands out of a study for as long as this one runs."""
    lock = _LOCKS.setdefault(folder.resolve(), FileLock(folder / ".lock"))
    try:
        if not lock.is_locked:
            lock.acquire(timeout=0)
    except Timeout as error:
        raise UserError(f"another command is at work in {folder}: wait for it, or give another --out.") from error


def _remove(folder: Path) -> None:
    """All of a study, its settings last: if it is killed on the way, the folder still is one."""
    for each in folder.iterdir():
        if each.is_dir():
            shutil.rmtree(each)
        elif each.name not in (_SETTINGS, ".lock"):
            each.unlink()
    (folder / _SETTINGS).unlink()


def _read(file: Path) -> Result:
    try:
        found = read_json(file)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{file} holds no result of a run: remove it, and the run is made again.")
    return found


def _stored(found: Result) -> Result:
    """As it will be read again."""
    return dict(json.loads(json.dumps(plain(found))))
