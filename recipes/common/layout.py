"""Whether weights that were read are those of a network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from coterie.cli.inputs import UserError


def expect_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    """Both must have the same names and shapes, and those of the file must be floats."""
    for name in [*wanted, *found]:
        if name not in found or name not in wanted:
            has = "no weight" if name not in found else "a weight too many,"
            raise UserError(f"{file} is laid out in another way: it has {has} {name}.")
        if found[name].shape != wanted[name].shape or not found[name].is_floating_point():
            shape, kind = tuple(found[name].shape), str(found[name].dtype).removeprefix("torch.")
            raise UserError(f"{file}: {name} has shape {shape} of {kind}, expected {tuple(wanted[name].shape)} floats.")
