"""What attention runs in a model, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from coterie.hf import choice
from coterie.hf.attend import NAME
from coterie.hf.sites import Site, find, find_others
from coterie.hf.windows import window_of
from coterie.hf.wrapped import model_inside
from coterie.tables import Table, output, paragraph


class Layer(NamedTuple):
    """One attention module of a model."""

    name: str
    number: int
    kind: str  # "self" or "cross"
    runs: str  # a mechanism, "dense", its own window, or the implementation that the model had; and what decodes


class Layers(list[Layer]):
    """The attention modules of a model. Printed, or shown by a notebook, it is a table.

    Attributes:
        notes: what is to be said besides: of attention that Coterie does not reach.
    """

    def __init__(self, layers: Iterable[Layer], notes: Iterable[str] = ()) -> None:
        super().__init__(layers)
        self.notes = list(notes)

    def __repr__(self) -> str:
        return "\n".join([*([self._table().text()] if self else []), *self.notes])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return output(*([self._table().html()] if self else []), *map(paragraph, self.notes))

    def _table(self) -> Table:
        return Table((), [[layer.name, layer.kind, layer.runs] for layer in self], words=(0, 1, 2))


def describe(model: nn.Module) -> Layers:
    """What attention runs in a model, layer by layer: a list that prints itself as a table.

    Example:
        >>> import coterie.hf
        >>> from transformers import LlamaConfig, LlamaModel
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = LlamaModel(LlamaConfig(vocab_size=99, **sizes))
        >>> coterie.hf.describe(coterie.hf.use(model, "near-far", layers=[1]))
        layers.0.self_attn  self  dense
        layers.1.self_attn  self  near-far
    """
    model = model_inside(model)
    found = [Layer(site.name, site.number, site.kind, _runs(site)) for site in find(model)]
    if not found:
        return Layers(
            [], [f"{type(model).__name__} does not use Hugging Face's attention interface: Coterie cannot reach it."]
        )
    return Layers(found, [f"{name} attends by itself, untouched" for name, _ in find_others(model)])


def _runs(site: Site) -> str:
    implementation, width = str(site.module.config._attn_implementation), window_of(site)
    window = f"its own window ({width})"
    if implementation == NAME:
        decode = choice.decode_text(site.module)
        over_cache = "" if decode == choice.DENSE else f", new tokens {decode}"
        return window if width else choice.text(site.module) + over_cache
    return f"{implementation}, {window}" if width else implementation
