"""What is measured at one length: every attention on the same sections and documents."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import coterie
from coterie.files import write_whole
from coterie.timing import interleaved
from recipes.common.models import slug
from recipes.common.progress import Bar
from recipes.common.scores import spearman
from recipes.common.study import Result
from recipes.embed.late_chunking import JOINT, pool, read
from recipes.embed.retrieval import judge, relevance
from recipes.embed.sections import Section
from recipes.embed.stsb import Pairs

DENSE, FITTED = "dense", "fitted"
_BATCH = 16

Ways = Mapping[str, str | dict[str, str]]  # a mechanism, or one for each attention module, by what it is called


class Clock(NamedTuple):
    """How documents are timed."""

    repeats: int
    tokens: int  # in all documents together, which make up one batch


class Material(NamedTuple):
    """What is embedded at one length."""

    sections: list[Section]
    documents: list[range]  # of sections
    pairs: Pairs | None

    @property
    def queries(self) -> list[str]:
        """Headings, each once."""
        return list({section.heading.casefold(): section.heading for section in self.sections}.values())

    def texts(self, document: range) -> list[str]:
        """The sections of a document."""
        return [self.sections[i].text for i in document]


class Embedded(NamedTuple):
    """Embeddings of length 1, a row each."""

    queries: Tensor
    alone: Tensor  # sections, each by itself
    late: Tensor  # sections in their documents
    documents: Tensor
    likeness: Tensor  # of STS-B's pairs: cosines


def put(model: Any, way: str | dict[str, str]) -> None:
    """Let a model run a mechanism, or what was fitted for each of its modules."""
    if isinstance(way, str):
        coterie.hf.use(model, way)
    else:
        coterie.hf.apply(model, way)


def embed(model: Any, material: Material, tick: Callable[[], None]) -> Embedded:
    """Embed everything with the model as it is."""

    def encode(texts: list[str]) -> Tensor:
        found = model.encode(texts, batch_size=_BATCH, show_progress_bar=False, convert_to_tensor=True)
        return F.normalize(found.float().cpu(), dim=-1)

    queries, alone = encode(material.queries), encode([section.text for section in material.sections])
    tick()
    late, whole = [], []
    for document in material.documents:
        states, spans = read(model, material.texts(document))
        late.append(pool(model, states, spans))
        whole.append(pool(model, states, [range(len(states))]))
        tick()
    pairs = material.pairs
    likeness = torch.empty(0) if pairs is None else (encode(pairs.first) * encode(pairs.second)).sum(-1)
    in_context, documents = (F.normalize(torch.cat(each).float().cpu(), dim=-1) for each in (late, whole))
    return Embedded(queries, alone, in_context, documents, likeness)


def kept(file: Path, make: Callable[[], Embedded]) -> Embedded:
    """What a file holds, or what is made now and stored in it: a run that was killed does not embed again."""
    if not file.exists():
        content = io.BytesIO()
        torch.save(tuple(make()), content)
        write_whole(file, content.getvalue())
    return Embedded(*torch.load(file, weights_only=True))


def at_length(model: Any, material: Material, length: int, ways: Ways, clock: Clock, bar: Bar, folder: Path) -> Result:
    """Embed with every attention, dense first, and compare; then time documents, in turns.

    Args:
        folder: where embeddings are kept until all is done.

    Returns:
        for each attention, by its name: what was found `alone` and `late` by each query, the cosine of each document
        with the dense one (`fidelity`), `stsb`, and `documents_per_second`.
    """
    found: Result = {}
    dense: Embedded | None = None
    relevant = relevance(material.queries, [section.heading for section in material.sections])
    for name, way in ways.items():
        put(model, way)
        bar.begin(f"{length} tokens: {name}", len(material.documents) + 1)
        mine = kept(folder / f"{slug(name)}.pt", lambda: embed(model, material, bar.tick))
        dense = dense or mine
        found[name] = {
            "alone": judge((mine.queries @ mine.alone.T).numpy(), relevant)._asdict(),
            "late": judge((mine.queries @ mine.late.T).numpy(), relevant)._asdict(),
            "fidelity": (mine.documents * dense.documents).sum(-1).tolist(),
            "stsb": _stsb(mine, material),
        }
    for name, rate in _rates(model, material, length, ways, clock, bar).items():
        found[name]["documents_per_second"] = rate
    return found


def _stsb(mine: Embedded, material: Material) -> float:
    return math.nan if material.pairs is None else spearman(mine.likeness.numpy(), np.array(material.pairs.scores))


def _rates(model: Any, material: Material, length: int, ways: Ways, clock: Clock, bar: Bar) -> dict[str, float]:
    """Documents a second, from text to embedding."""
    most = max(1, clock.tokens // length)
    texts = [JOINT.join(material.texts(document)) for document in material.documents[:most]]

    def run(way: str | dict[str, str]) -> Callable[[], None]:
        def once() -> None:
            put(model, way)
            model.encode(texts, batch_size=len(texts), show_progress_bar=False)

        return once

    bar.begin(f"{length} tokens: time", clock.repeats + 1)
    seconds = interleaved({name: run(way) for name, way in ways.items()}, clock.repeats, bar.tick)
    return {name: len(texts) / taken for name, taken in seconds.items()}
