"""Run fine-tuned models densely and with every mechanism of a sweep; each run is stored."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from coterie.hf import FEW_QUERIES
from recipes.approximate.kept import resampled
from recipes.common import models
from recipes.common.costs import inference_costs
from recipes.common.progress import Bar
from recipes.common.study import Result, Study
from recipes.common.tuning import DENSE, Parts, Tuning, batches


class Tuned(NamedTuple):
    """A fine-tuned model: where it is, and the seed of its test set."""

    name: str
    seed: int


def given(tuning: Tuning) -> Tuned | None:
    """The model that was asked for, if it is fine-tuned already."""
    if not models.has_head(tuning.model, tuning.head):
        return None
    return Tuned(tuning.model, int(models.kept_about(tuning.model).get("seed", 0)))


def fine_tuned(tuning: Tuning, study: Study, seeds: int, bar: Bar) -> Iterator[Tuned]:
    """One dense model a seed, made as the task's own recipe makes it, and kept in the study."""

    def make(seed: int, kept: Path, folder: Path) -> Result:
        model, took = tuning.fit(DENSE, seed, tuning.tokenized(seed), folder, bar)
        tuning.keep(model, seed, kept)
        return took._asdict()

    for seed in range(seeds):
        kept = study.folder / "models" / f"{DENSE}-{seed}"
        study.run(f"fine-tune-{seed}", partial(make, seed, kept))
        bar.done()
        yield Tuned(str(kept), seed)


def scores(tuning: Tuning, study: Study, tuned: Tuned, mechanisms: list[str], bar: Bar) -> list[Result]:
    """For each mechanism: `mechanism`, `seed`, `score`, `also`, and `resampled`, the scores of drawn examples."""
    loaded = _Once(tuning, tuned)

    def make(mechanism: str, folder: Path) -> Result:
        bar.begin(f"seed {tuned.seed}: {mechanism}")
        model, parts = loaded.get()
        answers = tuning.test(model, mechanism, parts, folder)
        score = answers.score(range(answers.examples))
        found = {"mechanism": mechanism, "seed": tuned.seed, "examples": answers.examples, "score": score}
        return {**found, "chance": answers.chance, "also": answers.also, "resampled": resampled(answers)}

    results = []
    for mechanism in mechanisms:
        results.append(study.run(f"{models.slug(mechanism)}-{tuned.seed}", partial(make, mechanism)))
        bar.done()
    return results


def costs(
    tuning: Tuning, study: Study, tuned: Tuned, mechanisms: list[str], repeats: int, texts: int, bar: Bar
) -> tuple[list[Result], float]:
    """What a forward costs with each mechanism, on the longest of the test set's texts; and the share of its texts that
    are so short that models run them densely, whatever is asked.

    Args:
        texts: how many, of all lengths, scores are counted on.
    """

    def make(_: Path) -> Result:
        bar.begin("time of a batch", repeats + 1 + len(mechanisms))
        model, parts = _Once(tuning, tuned).get()
        longest, single = batches(parts.test, parts.collate, tuning.together, texts)
        short = statistics.fmean(len(ids) <= FEW_QUERIES for ids in parts.test["input_ids"])
        rows = inference_costs(model, longest, single, mechanisms, repeats, bar.tick, bf16=tuning.schedule.bf16)
        return {"rows": rows, "short": short}

    found = study.run("costs", make)
    bar.done()
    return list(found["rows"]), float(found["short"])


class _Once:
    """A model and its test set, loaded when a run needs them: a study that is done needs neither."""

    def __init__(self, tuning: Tuning, tuned: Tuned) -> None:
        self.tuning, self.tuned = tuning, tuned
        self.found: tuple[Any, Parts] | None = None

    def get(self) -> tuple[Any, Parts]:
        if self.found is None:
            self.found = self.tuning.fine_tuned(self.tuned.name), self.tuning.tokenized(self.tuned.seed)
        return self.found
