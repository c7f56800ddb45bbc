"""Data sets from the hub."""

from __future__ import annotations

from typing import Any

from coterie.cli import hub
from coterie.cli.inputs import UserError


def from_hub(name: str, configuration: str | None = None) -> Any:
    """A data set by its hub name (owner/name): a dict of splits."""
    from datasets import load_dataset

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"there are no data at '{name}': expected a folder, or a hub name (owner/name).")
    if not hub.reachable():
        hub.look_on_the_disk_alone()
    try:
        return load_dataset(name, configuration)
    except MemoryError:
        raise
    except Exception as error:  # no network, no such name, files that are broken
        words = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"the data set {name} could not be had from the hub: {words}") from error
