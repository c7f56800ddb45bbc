"""Coterie inside Hugging Face models: `import coterie.hf` registers `attn_implementation="coterie"`.

model = AutoModel.from_pretrained(path, attn_implementation="coterie")
coterie.hf.use(model, coterie.NearFar(near=64))
"""

from coterie.hf import version

version.check()  # before anything that an older one does not have

from coterie.hf.cache import Cache  # noqa: E402
from coterie.hf.layers import Layer, describe  # noqa: E402
from coterie.hf.loading import load  # noqa: E402
from coterie.hf.model import apply, attention_modules, undo, use  # noqa: E402
from coterie.hf.positions import extend_positions  # noqa: E402
from coterie.hf.windows import own_windows  # noqa: E402
from coterie.mechanisms.by_sample import FEW_QUERIES  # noqa: E402

__all__ = [
    "FEW_QUERIES",
    "Cache",
    "Layer",
    "apply",
    "attention_modules",
    "describe",
    "extend_positions",
    "load",
    "own_windows",
    "undo",
    "use",
]
