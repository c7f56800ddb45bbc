"""A model with a head for a task, and its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

import coterie
from coterie.cli.inputs import UserError, check_code, find_model, loading, position_limit
from coterie.files import read_json, write_json
from coterie.hf import extend_positions
from recipes.common.processes import processes
from recipes.common.trying import trying

FINE_TUNED = "fine_tuned.json"  # beside the weights of a model that a recipe made


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
        try:
            model = kind.from_pretrained(source, dtype=torch.float32, **where, **settings)
        except RuntimeError as error:
            if "mismatched_sizes" not in str(error):
                raise
            raise UserError(f"{name} has a head for another task: give the model that it was made from.") from error
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


def try_out(model: Any, tokenizer: Any, name: str, length: int, mechanisms: list[str]) -> None:
    """Run two short texts with each mechanism: what a model or its tokenizer refuses is to be known before training."""
    if tokenizer.pad_token is None:
        raise UserError(f"the tokenizer of {name} has no token for padding, which batches of texts need.")
    some = ["word " * 40, "word " * 20]
    texts = tokenizer(some, padding=True, truncation=True, max_length=min(length, 40), return_tensors="pt")
    for mechanism in mechanisms:
        with trying(mechanism, f"in {name}"):
            attend_by(model, mechanism).eval()(**texts)


def has_head(name: str, head: str) -> bool:
    """Whether a model was stored with a head, such as "ForQuestionAnswering"."""
    source, where = find_model(name)
    with loading(name):
        check_code(name, source, where, trust=False)
        config = AutoConfig.from_pretrained(source, **where)
    return any(str(kind).endswith(head) for kind in config.architectures or ())


def keep(model: Any, tokenizer: Any, folder: Path, about: dict[str, Any]) -> None:
    """Store a model as transformers does, in full or not at all, without Coterie in its config.

    Args:
        about: how it was made, for a file `fine_tuned.json` beside the weights.
    """
    coterie.hf.undo(attend_by(model, "dense"))
    if processes().is_main_process:
        part = folder.with_name(f"{folder.name}.part")
        for old in (part, folder):  # of a run that was killed before it was stored
            shutil.rmtree(old, ignore_errors=True)
        try:
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
            write_json(part / FINE_TUNED, about)
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    processes().wait_for_everyone()


def kept_about(name: str) -> dict[str, Any]:
    """What `keep` wrote of a model; nothing if it is not one of ours."""
    file = Path(name) / FINE_TUNED
    found = read_json(file) if file.exists() else {}
    if not isinstance(found, dict):
        raise UserError(f"{file} does not say how a model was fine-tuned: expected a JSON object.")
    return found


def slug(mechanism: str) -> str:
    """A mechanism's string as a part of a file's name.

    >>> slug("smyrf:rounds=2,cluster_size=32")
    'smyrf-rounds-2-cluster_size-32'
    """
    return "".join(c if c.isalnum() or c == "_" else "-" for c in mechanism)


def out_folder(out: Path | None, recipe: str, quick: bool) -> Path:
    """Where a study goes if nothing else is said."""
    return out or Path("out") / "recipes" / f"{recipe}{'-quick' * quick}"
