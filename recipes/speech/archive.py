"""The files of a data set: in a folder, or in a zip file that lies in it."""

from __future__ import annotations

import zipfile
from pathlib import Path

from coterie.cli.inputs import UserError


class Files:
    """Files by name, with "/" between folders.

    Args:
        folder: where they are; a zip file of one of the names `archives` in it goes first.
    """

    def __init__(self, folder: Path, archives: tuple[str, ...]) -> None:
        self.where = next((folder / name for name in archives if (folder / name).is_file()), folder)
        self._zip: zipfile.ZipFile | None = None
        if self.where == folder:
            self.names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
            return
        try:
            self._zip = zipfile.ZipFile(self.where)
        except (zipfile.BadZipFile, OSError) as error:
            raise UserError(f"{self.where} is no zip file, or is damaged.") from error
        self.names = sorted(name for name in self._zip.namelist() if not name.endswith("/"))

    def shown(self, name: str) -> str:
        """What errors call a file."""
        return f"{self.where}/{name}"

    def read(self, name: str) -> bytes:
        """The content of a file."""
        try:
            return (self.where / name).read_bytes() if self._zip is None else self._zip.read(name)
        except OSError as error:
            raise UserError(f"{self.shown(name)} cannot be read: {error.strerror}.") from error
        except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
            raise UserError(f"{self.shown(name)} cannot be unpacked: the zip file is damaged.") from error

    def lines(self, name: str) -> list[str]:
        """The lines of a text that are not empty."""
        try:
            return [line for line in self.read(name).decode().splitlines() if line.strip()]
        except UnicodeDecodeError as error:
            raise UserError(f"{self.shown(name)} is not UTF-8 text.") from error
