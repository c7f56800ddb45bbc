"""A SentenceTransformer that takes documents of a given length."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import logging

from coterie.cli.inputs import UserError, check_code, find_model, loading, position_limit
from coterie.hf import extend_positions, undo, use
from coterie.hf.positions import learned_positions
from coterie.hf.wrapped import model_inside
from recipes.embed import late_chunking


def load(name: str, length: int | None = None) -> Any:
    """A folder, a hub name or "demo", in float32; a table of positions that is too short for `length` is interpolated.

    A folder of a plain transformers model gets a mean over tokens, as sentence-transformers does.
    """
    from sentence_transformers import SentenceTransformer

    logging.disable_progress_bar()
    source, where = find_model(name)
    if "gguf_file" in where:
        raise UserError(f"{name} is a GGUF file, which sentence-transformers does not read.")
    with loading(name):
        check_code(name, source, where, trust=False)
        model = SentenceTransformer(str(source), trust_remote_code=False, model_kwargs={"dtype": torch.float32})
    try:
        late_chunking.check(model)
    except ValueError as error:
        raise UserError(f"{name} cannot be chunked late: {error}.") from error
    if length is not None:
        limit = positions(model)
        if limit is not None and length > limit:
            extend_positions(model, length)
        model.max_seq_length = length
    return model.eval()


def check(name: str, model: Any, mechanisms: list[str], longest: int) -> None:
    """Refuse what this model cannot do, before anything is written."""
    for mechanism in mechanisms:
        use(model, mechanism)
    undo(model)
    limit = positions(model)
    if limit is not None and longest > limit and learned_positions(model_inside(model)) is None:
        raise UserError(
            f"{name} has {limit:,} positions and no table of them to interpolate: ask for shorter --lengths."
        )


def positions(model: Any) -> int | None:
    """How many tokens it has positions for."""
    return position_limit(model_inside(model))
