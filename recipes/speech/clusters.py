"""The clusters of a trained recogniser: how they change over heads and layers, and how they follow digits in time.

    python -m recipes.speech.clusters out/recipes/speech/models/3-layers-dense-0.pt --data fsdd

Strings of digits are joined from recordings, so where one ends is known. Of other corpora it is not, and only heads and
layers are compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from coterie.analysis import Segment, agreement, draw_agreement, draw_timeline, following, head_groups, save
from coterie.analysis.agreement import Agreement, Head
from coterie.cli.console import print_table, wrote
from coterie.cli.inputs import UserError
from recipes.common import command
from recipes.common.results import Table
from recipes.common.scores import shown
from recipes.speech import kept, loading
from recipes.speech.corpus import Utterance
from recipes.speech.network import DENSE, Config, Recogniser, attend_by
from recipes.speech.run import DIGITS, FIRST, digit_range

_SECONDS = 0.01  # of a frame
_MEASURES = {"segments": "agreement", "names": "by_name", "changes at borders": "at_boundaries", "inside": "inside"}


def groups(model: Recogniser, utterance: Utterance, mechanism: str) -> dict[Head, Tensor]:
    """The cluster of each token in every head, while the recogniser attends densely."""
    attend_by(model, DENSE).eval()
    batch = utterance.features[None], torch.tensor([len(utterance.features)])
    return head_groups(model, batch, mechanism)


def segments(utterance: Utterance, config: Config) -> list[Segment]:
    """What is said in which tokens; nothing if that is not known."""
    ends = [config.tokens(end) for end in utterance.ends]
    said = utterance.text.split() if " " in utterance.text else list(utterance.text)
    starts = [0, *ends[:-1]]
    return [Segment(a, b, name) for a, b, name in zip(starts, ends, said, strict=True) if a < b] if ends else []


def over_layers(found: Sequence[Agreement]) -> Table:
    """Layers against layers: the mean over utterances, with its standard error."""
    names = found[0].modules
    rows = [[a, *(shown([each.between(a, b) for each in found], 1, 2) for b in names)] for a in names]
    return "adjusted Rand index of two heads, layer ↓ and layer →", ["layer", *names], rows


def over_time(labels: Sequence[dict[Head, Tensor]], said: Sequence[list[Segment]]) -> Table:
    """For each layer, how clusters follow what is said: the mean over heads, then over utterances."""
    rows = []
    for module in dict.fromkeys(name for name, _ in labels[0]):
        cells = []
        for measure in _MEASURES.values():
            means = [
                _mean([getattr(following(mine[head], parts), measure) for head in mine if head[0] == module])
                for mine, parts in zip(labels, said, strict=True)
            ]
            cells.append(shown(means, 1, 2))
        rows.append([module, *cells])
    return "how clusters follow what is said", ["layer", *_MEASURES], rows


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return statistics.fmean(known) if known else math.nan


def main(
    model: Annotated[Path, typer.Argument(help="A file of a study's folder 'models'.")],
    data: Annotated[str, typer.Option(help="Speech of the same kind; its test is looked at.")],
    mechanism: Annotated[str, typer.Option(help="Whose clusters.")] = "clustered:clusters=25",
    utterances: Annotated[int, typer.Option(min=1, help="Of the test.")] = 20,
    digits: Annotated[str, typer.Option(help="FSDD: strings of so many.")] = DIGITS,
    out: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("out/recipes/speech-clusters"),
    debug: command.Debug = False,
) -> None:
    """Compare the clusters of heads and layers of a trained recogniser, and set them beside what is said when."""
    spec = command.checked([mechanism])[-1]
    network, about = kept.load(model)
    corpus = loading.load(
        data,
        first=digit_range("--first", FIRST),
        last=digit_range("--digits", digits),
        held_out=[],
        spelled=about["unit"] == "character",
        tests=utterances,
    )
    if about["symbols"] != corpus.symbols:
        raise UserError(f"{model} writes {about['symbols']!r}, and {corpus.name} is written in other symbols.")
    labels = [groups(network, each, spec) for each in corpus.test]
    said = [segments(each, network.config) for each in corpus.test]
    tables = [over_layers([agreement(each) for each in labels])]
    tables += [over_time(labels, said)] if all(said) else []
    for title, columns, rows in tables:
        print_table(f"{corpus.name}, {len(labels)} utterances, {spec}: {title}", columns, rows)
    drawn = {"layers": draw_agreement(agreement(labels[0]), title=f"{spec}: clusters of speech")}
    if said[0]:
        strips = {f"{name}, head {head}": each for (name, head), each in labels[0].items()}
        features, seconds = corpus.test[0].features.mT, _SECONDS * network.config.stride
        title = f"{spec}: clusters and digits"
        drawn["time"] = draw_timeline(strips, said[0], seconds=seconds, features=features, title=title)
    for name, figure in drawn.items():
        file = out / f"clusters-{name}.png"
        save(figure, file)
        wrote(file)


if __name__ == "__main__":
    command.run("speech.clusters", main)
