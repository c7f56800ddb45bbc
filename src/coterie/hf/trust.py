"""Code that comes with a model: nobody runs it by accident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

_KERNELS = ("attn_implementation", "experts_implementation")  # also with an underscore before


def code_of(source: str | Path, *, gguf_file: str | None = None, **where: Any) -> str:
    """The code that a model's folder or hub repository asks for, such as "modeling_x.py, named by config.json"; "" if
    it asks for none.

    Its JSON files are read and nothing is run. What counts is what they ask for, whether transformers would run it or
    knows such a model itself: an `auto_map` at any depth, or a kernel from the hub. Code that no JSON file names is
    never run.

    Args:
        source: the folder, or a name on the hub.
        gguf_file: a file whose own settings, which know no code, take the place of config.json.
        where: `revision`, `subfolder`, `cache_dir`, `token`, `local_files_only`, as for `from_pretrained`.
    """
    configs: dict[str, Any] = {"tokenizer_config.json": get_tokenizer_config(source, **where)}
    if gguf_file is None:
        configs["config.json"], _ = PreTrainedConfig.get_config_dict(source, **where)
    found = [f"{file}, named by {name}" for name, config in configs.items() for file in _asked(config)]
    return "; ".join(dict.fromkeys(found))


def _asked(config: Any) -> Iterator[str]:
    left = [config]
    while left:
        part = left.pop()
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        for key, value in part.items() if isinstance(part, dict) else ():
            if key == "auto_map" and value:
                classes = [each for each in _strings(value) if each]
                yield from (_file(each) for each in classes)
                if not classes:
                    yield f"auto_map {value!r}"
            elif key.lstrip("_") in _KERNELS:
                yield from (f"the kernel {each}" for each in _strings(value) if "/" in each)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside; a tokenizer's entry is a pair, the others are dicts."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _file(reference: str) -> str:
    """`modeling_x.Model` is in modeling_x.py; `owner/name--modeling_x.Model` in that of another repository."""
    elsewhere, _, own = reference.rpartition("--")
    file = f"{own.rpartition('.')[0] or own}.py"
    return f"{file} of {elsewhere}" if elsewhere else file
