"""Which queries are real tokens: what the attention before says of the one that runs now.

Cross-attention is told which keys are real, and not which queries: those are the tokens of the self-attention that ran
just before it in the same layer. So each attention leaves a note of its queries, which the next one may read: if it has
the same config and the same shape, and if the model has made no mask in between, as it does at the start of every pass.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn


class _Note(threading.local):
    """One for each thread, as each may run a model."""

    config: Any = None
    real: Tensor | None = None  # (B, Nq) bool


class _TracedNote:
    """A compiled graph cannot have one for each thread, and needs none: it runs as one piece."""

    config: Any = None
    real: Tensor | None = None


_eager, _traced = _Note(), _TracedNote()


def _note() -> Any:
    return _traced if torch.compiler.is_compiling() else _eager


def new_pass() -> None:
    """A model makes a mask: what was noted before is about other tokens."""
    note = _note()
    note.config = note.real = None


def leave(module: nn.Module, real: Tensor | None) -> None:
    """Note which queries of this module were real."""
    note = _note()
    note.config, note.real = module.config, real


def queries_before(module: nn.Module, shape: tuple[int, int]) -> Tensor | None:
    """Which queries were real in the attention before, if they are this module's queries too."""
    note = _note()
    fits = note.config is module.config and note.real is not None and tuple(note.real.shape) == shape
    found: Tensor | None = note.real if fits else None
    return found
