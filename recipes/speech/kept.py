"""Recognisers that a study trained, in its folder `models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.cli.inputs import UserError
from recipes.common import weights
from recipes.speech.corpus import Corpus
from recipes.speech.network import DENSE, Config, Recogniser, attend_by

_PARTS = {"config", "symbols", "unit", "mechanism", "weights"}


def keep(model: Recogniser, file: Path, corpus: Corpus, mechanism: str) -> None:
    """Store a recogniser with what it writes and what it was trained with."""
    found = {
        "config": model.config.to_dict(),
        "symbols": corpus.symbols,
        "unit": corpus.unit,
        "mechanism": mechanism,
        "weights": model.state_dict(),
    }
    weights.write(file, found)


def load(file: Path) -> tuple[Recogniser, dict[str, Any]]:
    """A recogniser, ready to hear with the mechanism that it was trained with; and what was stored beside it."""
    found = weights.read(file)
    if not isinstance(found, dict) or not found.keys() >= _PARTS:
        raise UserError(f"{file} holds no recogniser: expected one of a study's models.")
    model = Recogniser(Config(**found["config"]))
    weights.fill(model, found["weights"], file)
    attend_by(model, found["mechanism"] or DENSE).eval()
    return model, {name: found[name] for name in ("symbols", "unit", "mechanism")}
