"""The clusters of a clip's tokens: how they change over heads and layers, and how they follow words and phones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.analysis import Segment, agreement, draw_agreement, draw_timeline, following, head_groups, save
from coterie.analysis.agreement import Head
from recipes.common.results import Table
from recipes.common.study import Result
from recipes.whisper.alignment import Aligned, align
from recipes.whisper.clips import Clip
from recipes.whisper.listening import Listener, attend_by, tokens_of
from recipes.whisper.measure import DENSE

SECONDS = 0.02  # that a token of the encoder lasts
_MEASURES = ("agreement", "by_name", "at_boundaries", "inside")


def groups(listener: Listener, clip: Clip, mechanism: str) -> dict[Head, Tensor]:
    """The cluster of each token of a clip's first window, without its padding, in every head of the encoder."""
    samples = listener.cut(clip.samples)[0]
    batch = {"input_features": listener.heard([samples]), "decoder_input_ids": torch.tensor([listener.prompt])}
    attend_by(listener, DENSE)
    found = head_groups(listener.model, batch, mechanism, within="encoder")
    return {head: labels[: tokens_of(samples)] for head, labels in found.items()}


def looked_at(listener: Listener, clip: Clip, mechanism: str, folder: Path) -> Result:
    """What the clusters of a clip are like; the pictures go into a folder."""
    labels = groups(listener, clip, mechanism)
    found, aligned = agreement(labels), align(clip).before(min(map(len, labels.values())))
    save(draw_agreement(found, title=f"{mechanism}: clusters of speech"), folder / "clusters-layers.png")
    features = listener.heard([listener.cut(clip.samples)[0]])[0]
    for name, segments in aligned._asdict().items():
        figure = timeline(labels, features, segments, f"{mechanism}: clusters and {name}")
        save(figure, folder / f"clusters-{name}.png")
    return {
        "clip": clip.name,
        "mechanism": mechanism,
        "modules": list(found.modules),
        "layers": found.layers().tolist(),
        "words": found.describe(),
        "rows": rows(labels, aligned),
    }


def timeline(labels: Mapping[Head, Tensor], features: Tensor, segments: Sequence[Segment], title: str) -> Any:
    """The strips of all heads, over the time of the segments alone."""
    first, end = segments[0].start, segments[-1].end
    strips = {f"layer {_layer(name)}, head {head}": each[first:end] for (name, head), each in labels.items()}
    shifted = [Segment(each.start - first, each.end - first, each.name) for each in segments]
    return draw_timeline(strips, shifted, seconds=SECONDS, features=features[:, 2 * first : 2 * end], title=title)


def rows(labels: Mapping[Head, Tensor], aligned: Aligned) -> list[Result]:
    """For each layer, the mean over its heads of how clusters follow words, and phones."""
    found = []
    for module in dict.fromkeys(name for name, _ in labels):
        mine = [each for (name, _), each in labels.items() if name == module]
        row: Result = {"module": module}
        for kind, segments in aligned._asdict().items():
            each = [following(one, segments) for one in mine]
            row[kind] = {name: _mean([getattr(one, name) for one in each]) for name in _MEASURES}
        found.append(row)
    return found


def table(found: Result) -> Table:
    """Layers against words and phones."""
    cells = []
    for row in found["rows"]:
        numbers = [row[kind][name] for kind in ("words", "phones") for name in _MEASURES]
        cells.append([row["module"], *(f"{_number(each):.2f}" for each in numbers)])
    short = ("segments", "names", "changes at borders", "changes inside")
    columns = ["layer", *(f"{kind}: {name}" for kind in ("words", "phones") for name in short)]
    return f"{found['clip']}: how clusters of {found['mechanism']} follow words and phones", columns, cells


def _layer(module: str) -> str:
    return next((part for part in module.split(".") if part.isdigit()), module)


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON knows no NaN
