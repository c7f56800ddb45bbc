"""A model with a head for a task, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

import coterie
from coterie.cli.inputs import UserError, check_code, find_model, loading, position_limit
from coterie.hf import extend_positions


def load(name: str, kind: Any, positions: int | None = None, *, trust: bool = False, **settings: Any) -> Any:
    """A model of this Auto class from a folder, a hub name or "demo", in float32.

    Args:
        kind: such as `AutoModelForSequenceClassification`; what its head needs goes into `settings`.
        positions: how many it must have; a table of learned positions is interpolated if it is too short.
    """
    logging.disable_progress_bar()
    source, where = find_model(name)
    with loading(name):
        check_code(name, source, where, trust=trust)
        model = kind.from_pretrained(source, dtype=torch.float32, **where, **settings)
    limit = position_limit(model)
    if positions is not None and limit is not None and positions > limit:
        extend_positions(model, positions)
    return model


def expect_positions(model: Any, name: str, length: int) -> None:
    """A model must have so many positions."""
    limit = position_limit(model)
    if limit is not None and length > limit:
        raise UserError(f"{name} has {limit} positions, so that --length {length} is too long for it.")


def load_tokenizer(name: str, *, trust: bool = False) -> Any:
    """The tokenizer of the same model."""
    source, where = find_model(name)
    with loading(name):
        check_code(name, source, where, trust=trust)
        return AutoTokenizer.from_pretrained(source, **where)


def attend_by(model: Any, mechanism: str) -> Any:
    """Let a model run a mechanism, or "dense": PyTorch's own attention, as it does without Coterie."""
    coterie.hf.use(model, mechanism)
    return model


def slug(mechanism: str) -> str:
    """A mechanism's string as a part of a file's name.

    >>> slug("smyrf:rounds=2,cluster_size=32")
    'smyrf-rounds-2-cluster_size-32'
    """
    return "".join(c if c.isalnum() or c == "_" else "-" for c in mechanism)


def out_folder(out: Path | None, recipe: str, quick: bool) -> Path:
    """Where a study goes if nothing else is said."""
    return out or Path("out") / "recipes" / f"{recipe}{'-quick' * quick}"
