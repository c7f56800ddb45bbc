"""Files of weights: read without running what is in them, and refused in a sentence if they do not fit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coterie.cli.inputs import UserError

State = dict[str, Tensor]


def read(file: Path) -> Any:
    """What `torch.save` wrote: tensors and plain values, and the ReLU that BigGAN-PyTorch keeps among its settings."""
    try:
        with torch.serialization.safe_globals([nn.ReLU]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"there is no {file}.") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{file} is damaged, or holds more than tensors and plain values: it is not read.") from error
    except Exception as error:  # PyTorch's reader of files from before 1.6 stumbles over damage in many ways
        words = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(f"{file} cannot be read as weights: {words}") from error


def read_state(file: Path) -> State:
    """A state dict; the `module.` that data parallelism puts before its keys is dropped."""
    found = read(file)
    named = isinstance(found, Mapping) and found and all(isinstance(key, str) for key in found)
    if not named or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{file} holds no state dict: expected names with tensors.")
    return {key.removeprefix("module."): value for key, value in found.items()}


def write(file: Path, found: Any) -> None:
    """By `torch.save`, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as stream:
            torch.save(found, stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def fill(model: nn.Module, state: State, file: Path) -> None:
    """Give a model its weights. Other keys or other shapes are an error that names the first, and change nothing."""
    mine = model.state_dict()
    for key, value in mine.items():
        if key not in state:
            raise UserError(f"{file} has no {key}, which this architecture needs.")
        if state[key].shape != value.shape:
            raise UserError(f"{file}: {key} has the shape {tuple(state[key].shape)}, expected {tuple(value.shape)}.")
        if value.is_floating_point() and not state[key].is_floating_point():
            raise UserError(f"{file}: {key} holds {str(state[key].dtype).removeprefix('torch.')}, expected floats.")
    for key in state:
        if key not in mine:
            raise UserError(f"{file} has {key}, which this architecture does not know.")
    model.load_state_dict(state)
