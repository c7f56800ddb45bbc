"""Fine-tuning with several mechanisms, whatever the task, and running each of the models densely and clustered."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset

from coterie.cli.inputs import UserError
from recipes.common import models
from recipes.common.costs import costs
from recipes.common.progress import Bar
from recipes.common.study import Result, Study
from recipes.common.training import Schedule, Trained, predict, train

DENSE = "dense"


class Settings(NamedTuple):
    """What command lines say of fine-tuning; None, where it is allowed, is all of them."""

    epochs: float
    batch: int
    rate: float
    length: int  # tokens that longer texts are cut to
    examples: int | None = None
    tests: int | None = None
    bf16: bool = False


class Answers(NamedTuple):
    """What a model's answers to a test set are worth."""

    examples: int
    score: Callable[[Any], float]  # of the examples with these numbers, each as often as it is named
    also: dict[str, float]  # other scores of all of them, by name
    chance: float = 0.0  # the best score of one answer to everything
    drawn_together: Sequence[int] | None = None  # for each example, what it shares with others; None: nothing


class Parts(NamedTuple):
    """The tokens of both parts of a task, what makes batches of them, and what judges (predictions, labels)."""

    train: Dataset
    test: Dataset
    collate: Any
    judge: Callable[[Any, Any], Answers]


class Tuning(ABC):
    """How models are fine-tuned and tested on a task.

    Attributes:
        head: how the classes of models with a head for such tasks are called at their end.
        model: a folder, a hub name, or "demo".
    """

    head: ClassVar[str]
    model: str
    length: int
    schedule: Schedule

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the task."""

    @property
    @abstractmethod
    def score(self) -> str:
        """The name of its score."""

    @property
    def together(self) -> int:
        """How many texts are in memory at once."""
        return self.schedule.at_once or self.schedule.batch

    @abstractmethod
    def tokenized(self, seed: int = 0) -> Parts:
        """Both parts; the seed draws them where the data do not say which examples are for tests."""

    @abstractmethod
    def new_model(self, seed: int) -> Any:
        """The pre-trained model with a new head; the seed draws it."""

    @abstractmethod
    def fine_tuned(self, name: str) -> Any:
        """A model that has its head already."""

    @abstractmethod
    def about(self) -> Result:
        """What a study's settings say of it."""

    @property
    @abstractmethod
    def drawn(self) -> bool:
        """Whether both parts were drawn from one list, so that other data or settings draw others."""

    @abstractmethod
    def digests(self, seed: int) -> tuple[set[str], set[str]]:
        """What stands for the texts of each part: none of the second must have been in the first."""

    def said(self, model: Any, logits: Any) -> Any:
        """What a model says, in the order of the task."""
        return logits

    def check(self, mechanisms: list[str]) -> None:
        """Raise what is wrong with the model, its length or a mechanism in it, before anything is written."""
        if not (math.isfinite(self.schedule.rate) and self.schedule.rate > 0):
            raise UserError(f"--rate must be a number above 0, not {self.schedule.rate}.")
        if models.kept_about(self.model).get("task") == self.name:
            raise UserError(
                f"{self.model} was fine-tuned on this task already, perhaps on what it would be tested on: give the "
                "model that it was made from, or test it with python -m recipes.approximate."
            )
        self.check_model(self.new_model(0), self.model, mechanisms)

    def check_kept(self, name: str) -> None:
        """Raise what is wrong with testing a model that a recipe fine-tuned."""
        about = models.kept_about(name)
        if (task := about.get("task", self.name)) != self.name:
            raise UserError(f"{name} was fine-tuned on {task}, and this is {self.name}.")
        if not (trained_on := set(about.get("trained on", ()))):
            return
        _, test = self.digests(about.get("seed", 0))
        if both := len(trained_on & test):
            raise UserError(
                f"{name} was trained on {both:,} of the {len(test):,} texts that it would be tested on: give the data "
                "and the numbers of examples and tests that it was made with."
            )

    def check_model(self, model: Any, name: str, mechanisms: list[str]) -> None:
        """The same of a model that is loaded."""
        models.expect_positions(model, name, self.length)
        models.try_out(model, models.load_tokenizer(self.model), name, self.length, mechanisms)

    def fit(self, mechanism: str, seed: int, parts: Parts, folder: Path, bar: Bar) -> tuple[Any, Trained]:
        """A model that was fine-tuned with a mechanism; checkpoints go into the folder."""
        model = models.attend_by(self.new_model(seed), mechanism)
        bar.begin(f"{mechanism}, seed {seed}")
        return model, train(model, parts.train, parts.collate, self.schedule, seed, folder, bar)

    def test(self, model: Any, mechanism: str, parts: Parts, folder: Path) -> Answers:
        """What a model says of the test set when it runs a mechanism."""
        said = predict(
            models.attend_by(model, mechanism),
            parts.test,
            parts.collate,
            2 * self.together,
            folder,
            bf16=self.schedule.bf16,
        )
        return parts.judge(self.said(model, said[0]), said[1])

    def keep(self, model: Any, seed: int, folder: Path) -> None:
        """Store a fine-tuned model, with the seed that drew its test set."""
        about = {**self.about(), "task": self.name, "seed": seed}
        if self.drawn:
            about["trained on"] = sorted(self.digests(seed)[0])
        models.keep(model, models.load_tokenizer(self.model), folder, about)

    def run(
        self,
        study: Study,
        mechanisms: list[str],
        seeds: Iterable[int],
        bar: Bar,
        *,
        interchange: bool = True,
        keep_models: bool = False,
    ) -> list[Result]:
        """Train with each mechanism and seed, and run each model as it was trained.

        Args:
            interchange: run it densely too, and the one that was trained densely with every mechanism.
            keep_models: store each model in the study's folder `models`.

        Returns:
            for each: `trained`, `seed`, `scores` and `also` by what ran, `chance`, `seconds_per_step`, `losses`.
        """
        tokenized = cache(self.tokenized)

        def make(trained: str, seed: int, name: str, folder: Path) -> Result:
            parts = tokenized(seed)
            model, took = self.fit(trained, seed, parts, folder, bar)
            if keep_models:
                self.keep(model, seed, study.folder / "models" / name)
            scores, also = {}, {}
            others = (mechanisms if trained == DENSE else [DENSE]) if interchange else []
            for running in dict.fromkeys([*others, trained]):
                bar.begin(f"{trained}, seed {seed}: test with {running}")
                answers = self.test(model, running, parts, folder)
                scores[running], also[running] = answers.score(range(answers.examples)), answers.also
            found = {"trained": trained, "seed": seed, "scores": scores, "also": also, "chance": answers.chance}
            return {**found, **took._asdict()}

        results = []
        for seed in seeds:
            for trained in mechanisms:
                name = f"{models.slug(trained)}-{seed}"
                results.append(study.run(name, partial(make, trained, seed, name)))
                bar.done()
        return results

    def costs(self, study: Study, mechanisms: list[str], repeats: int, bar: Bar, *, texts: int = 32) -> list[Result]:
        """What a training step costs with each mechanism on the longest texts.

        Args:
            texts: how many, of all lengths, scores are counted on.
        """

        def make(_: Path) -> Result:
            bar.begin("time and memory of a step", repeats + 1 + len(mechanisms))
            parts = self.tokenized()
            longest, single = batches(parts.train, parts.collate, self.together, texts)
            return {
                "rows": costs(
                    self.new_model(0), longest, single, mechanisms, repeats, bar.tick, bf16=self.schedule.bf16
                )
            }

        found = study.run("costs", make)["rows"]
        bar.done()
        return list(found)


def batches(examples: Dataset, collate: Any, batch: int, texts: int) -> tuple[Any, list[Any]]:
    """A batch of the longest texts, to be timed, and so many of all lengths, one by one, to count scores on."""
    by_length = sorted(range(len(examples)), key=lambda i: -len(examples[i]["input_ids"]))
    sample = by_length[:: -(-len(by_length) // texts)]
    return collate([examples[i] for i in by_length[:batch]]), [collate([examples[i]]) for i in sample]
