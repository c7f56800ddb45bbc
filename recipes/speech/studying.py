"""The runs of a study: a training and its tests with every mechanism, and what each mechanism costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from benchmarks.measure import peak_bytes

from recipes.common.draws import generator
from recipes.common.models import slug
from recipes.common.progress import Bar
from recipes.common.study import Result, Study
from recipes.common.trying import trying
from recipes.speech import kept
from recipes.speech.batches import batch_of, by_frames
from recipes.speech.corpus import Corpus
from recipes.speech.network import DENSE, Config, Recogniser, attend_by
from recipes.speech.testing import Reader, errors, hear, mean_tokens, milliseconds
from recipes.speech.training import Settings, Training, train, with_a_path

_LOOKED_AT = 20  # utterances of the test at which a training is looked at
_TIMED = 12  # utterances of the test that are timed


@dataclass(frozen=True)
class Plan:
    """What is trained, and what each of it runs with.

    Attributes:
        mechanisms: to train with, "dense" first.
        also: others to run with.
        beam: width of the beam search beside the greedy decoding; 0 for none.
    """

    corpus: Corpus
    config: Config
    settings: Settings
    mechanisms: list[str]
    also: list[str]
    layers: list[int]
    beam: int
    repeats: int = 5

    @property
    def running(self) -> list[str]:
        """All that models run with."""
        return [*self.mechanisms, *self.also]

    def sized(self, layers: int) -> Config:
        """A recogniser of so many layers."""
        return replace(self.config, layers=layers)

    def runs(self, seeds: int) -> int:
        """How many there are."""
        return (seeds * len(self.mechanisms) + 1) * len(self.layers)


def try_out(plan: Plan) -> None:
    """Run every mechanism once on noise: what one refuses is to be known before training."""
    model = Recogniser(plan.sized(1)).eval()
    features = torch.randn(2, 80, plan.config.channels, generator=generator(0, "noise"))
    for name in plan.running:
        with trying(name, "in this model"):
            attend_by(model, name)(features, torch.tensor([80, 50]))


def trained(plan: Plan, study: Study, seeds: int, bar: Bar) -> list[Result]:
    """Every mechanism, number of layers and seed: what came of the training, and errors by what it then ran with."""
    found = []
    for seed in range(seeds):
        for layers in plan.layers:
            for mechanism in plan.mechanisms:
                name = model_name(layers, mechanism, seed)
                found.append(study.run(name, partial(_train, plan, study, layers, mechanism, seed, bar)))
                bar.done()
    return found


def model_name(layers: int, mechanism: str, seed: int) -> str:
    """Of a run and its model.

    >>> model_name(4, "smyrf:rounds=2", 0)
    '4-layers-smyrf-rounds-2-0'
    """
    return f"{layers}-layers-{slug(mechanism)}-{seed}"


def _train(plan: Plan, study: Study, layers: int, mechanism: str, seed: int, bar: Bar, work: Path) -> Result:
    corpus, settings = plan.corpus, plan.settings
    training = Training(plan.sized(layers), settings, corpus, mechanism, seed)
    what = f"{layers} layers, {mechanism}, seed {seed}"

    def look(model: Recogniser) -> float:
        heard = hear(model, corpus.test[:_LOOKED_AT], settings.frames, bf16=settings.bf16)
        return float(errors(corpus, heard, Reader(corpus))[corpus.unit])

    bar.begin(what, settings.epochs)
    came = train(training, work, bar, look)
    model = training.model
    found, beam = {}, {}
    bar.begin(f"{what}: test", len(plan.running))
    for running in plan.running:
        heard = hear(attend_by(model, running), corpus.test, settings.frames, bf16=settings.bf16)
        found[running] = errors(corpus, heard, Reader(corpus))
        if plan.beam and running == mechanism:
            beam = errors(corpus, heard, Reader(corpus, plan.beam))
        bar.tick()
    name = model_name(layers, mechanism, seed)
    kept.keep(model, study.folder / "models" / f"{name}.pt", corpus, mechanism)
    return {"trained": mechanism, "layers": layers, "seed": seed, "errors": found, "beam": beam, **came}


def costs(plan: Plan, study: Study, bar: Bar) -> list[Result]:
    """For each number of layers and mechanism: milliseconds of an utterance, and memory of a training step."""
    found: list[Result] = []
    for layers in plan.layers:
        found += study.run(f"costs-{layers}-layers", partial(_costs, plan, study, layers, bar))["rows"]
        bar.done()
    return found


def _costs(plan: Plan, study: Study, layers: int, bar: Bar, _: Path) -> Result:
    """With the weights of the recogniser that was trained densely."""
    timed, bf16 = plan.corpus.test[:_TIMED], plan.settings.bf16
    bar.begin(f"{layers} layers: time and memory", plan.repeats + 1 + len(plan.mechanisms))
    model, _kept = kept.load(study.folder / "models" / f"{model_name(layers, DENSE, 0)}.pt")
    training = Training(plan.sized(layers), plan.settings, plan.corpus, DENSE, 0)
    times = milliseconds(model.to(training.device), timed, plan.running, plan.repeats, bar.tick, bf16=bf16)
    last = plan.settings.epochs - 1
    usable = with_a_path(plan.corpus.train(0, last, plan.settings.epochs), plan.corpus, training.config)
    order = by_frames([len(each.features) for each in usable], plan.settings.frames, 0, 0)
    batch = batch_of([usable[i] for i in order[-1]], plan.corpus)
    peaks = {}
    for mechanism in plan.mechanisms:
        attend_by(training.model, mechanism)
        peaks[mechanism] = peak_bytes(lambda: training.advance(batch, 0.5))
        bar.tick()
    return {
        "rows": [
            {
                "layers": layers,
                "mechanism": name,
                "milliseconds": times[name],
                "tokens": mean_tokens(model, timed),
                "peak_bytes": peaks.get(name),
            }
            for name in plan.running
        ]
    }
