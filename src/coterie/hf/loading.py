"""Load a model with the mechanisms that were stored for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from coterie.checks import expect
from coterie.files import read_json
from coterie.hf.model import apply
from coterie.hf.stored import DECODE, modules_in
from coterie.hf.trust import code_of
from coterie.hf.wrapped import model_inside

_WHERE = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token")  # what files are read


def load(model: nn.Module | str | Path, stored: str | Path | None = None, **settings: Any) -> Any:
    """A model with the mechanisms that were stored for it.

    Args:
        model: a folder or hub name that `save_pretrained` wrote after `use`; or the model that was loaded from it, in a
            wrapper too: `load(SentenceTransformer(path))`.
        stored: a JSON file with a choice for this model; without one, the choice is that in the model's config.
        settings: for `from_pretrained`. A model with code of its own is refused unless `trust_remote_code=True` is
            among them: nothing is asked, and nothing of it is run.
    """
    if not isinstance(model, nn.Module):
        model = _load(model, **settings)
    else:
        expect(not settings, "settings", "none for a model that is loaded already", ", ".join(settings))
    assert isinstance(model, nn.Module)
    if stored is not None:
        choices = read_json(Path(stored))
    else:
        choices = getattr(model_inside(model).config, "coterie", None)
        expect(choices is not None, "model", "a config with a stored choice: call coterie.hf.use and save it", "none")
    return apply(model, modules_in(choices), modules_in(choices, DECODE))


def _load(path: str | Path, *, trust_remote_code: bool = False, **settings: Any) -> PreTrainedModel:
    where = {key: settings[key] for key in _WHERE if settings.get(key) is not None}
    code = "" if trust_remote_code else code_of(path, **where)
    expect(not code, "model", "no code of its own unless trust_remote_code=True", f"{path} with {code}")
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
    known = config.architectures or []
    expect(bool(known), "model", "a config that names its architecture", path)
    kind = getattr(transformers, str(known[0]), None)
    if trust_remote_code:  # the Auto class that its own code is for
        own = getattr(config, "auto_map", None) or {}
        asked = (name for name, code in own.items() if str(code).rpartition(".")[2] == known[0])
        kind = getattr(transformers, next(asked, ""), kind)
    fits = isinstance(kind, type) and (issubclass(kind, PreTrainedModel) or kind.__name__.startswith("AutoModel"))
    expect(fits, "model", "an architecture of transformers", known[0])
    assert kind is not None
    model = kind.from_pretrained(path, trust_remote_code=trust_remote_code, **settings)
    assert isinstance(model, PreTrainedModel)
    return model
