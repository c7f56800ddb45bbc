"""Mechanisms of the user's own: files that register them, and options that name them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.inputs import UserError
from coterie.hosts import DENSE
from coterie.mechanisms import Mechanism, as_mechanism, list_mechanisms

Import = Annotated[
    list[Path] | None,
    typer.Option("--import", help="A Python file that registers a mechanism of yours; it is run. Several times too."),
]


def import_files(files: Iterable[Path] | None) -> None:
    """Run Python files that register mechanisms, so that strings and saved fits may name them.

    As with `python FILE`, a file may import others beside it; what is installed comes first.
    """
    for number, file in enumerate(files or ()):
        before = list_mechanisms()
        _run(file, f"coterie_import_{number}")
        if list_mechanisms() == before:
            raise UserError(f"--import: {file} registers no mechanism; docs/mechanisms.md shows how.")


def _run(file: Path, name: str) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise UserError(f"--import: {file} cannot be read: {error.strerror}.") from error
    spec = spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))  # whatever its suffix
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look
    sys.path.append(str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        words = next(iter(str(error).splitlines()), "no message")
        raise UserError(f"--import: {file} could not be run: {type(error).__name__}: {words}") from error
    finally:
        sys.path.pop()


def parse_candidates(texts: Iterable[str] | None) -> list[Mechanism] | None:
    """The mechanisms that an option names, each once; None if it was not given.

    At a comma, a part that reads field=value belongs to the mechanism before it; any other starts a new one. A text
    that starts with a brace is one mechanism in JSON.

    Example:
        >>> [str(each) for each in parse_candidates(["smyrf:rounds=2,cluster_size=32,near-far,local@512"])]
        ['smyrf:rounds=2,cluster_size=32', 'near-far', 'local@512']
    """
    if texts is None:
        return None
    found: dict[str, Mechanism] = {}
    for text in texts:
        for part in [text] if text.lstrip().startswith("{") else _split(text):
            mechanism = as_mechanism(part)
            found[str(mechanism)] = mechanism
    if not found:
        raise UserError("--candidates names no mechanism; 'coterie mechanisms' lists them.")
    return list(found.values())


def unknown_names(specs: Iterable[str]) -> list[str]:
    """The mechanisms in a saved fit that nobody has registered.

    Example:
        >>> unknown_names(["dense", "mine:size=3@512", "near-far:near=64"])
        ['mine']
    """
    names = {re.split("[:@]", spec)[0] for spec in specs if not spec.startswith("{")}
    return sorted(names - {DENSE, *list_mechanisms()})


def _split(text: str) -> list[str]:
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        field, equals, _ = part.partition("=")
        if equals and ":" not in field and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found
