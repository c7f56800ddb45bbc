"""Fine-tuning a classifier with several mechanisms, and running each of the models densely and clustered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

from recipes.common import models
from recipes.common.costs import costs
from recipes.common.progress import Bar
from recipes.common.scores import Score
from recipes.common.study import Result, Study
from recipes.common.training import Schedule, predict, train

DENSE = "dense"


class Task(NamedTuple):
    """Labelled texts. Columns: text, pair if there are two texts, and label."""

    name: str
    score: Score
    classes: int  # 1: the label is a number
    train: Dataset
    test: Dataset


@dataclass(frozen=True)
class FineTuning:
    """How models are fine-tuned on a task.

    Attributes:
        model: a folder, a hub name, or "demo".
        length: tokens that longer texts are cut to.
        positions: how many the model must have; a table that is shorter is interpolated.
    """

    task: Task
    model: str
    length: int
    schedule: Schedule
    positions: int | None = None

    @property
    def together(self) -> int:
        """How many texts are in memory at once."""
        return self.schedule.at_once or self.schedule.batch

    def tokenized(self) -> tuple[Dataset, Dataset, Any]:
        """The tokens of both parts, and what makes batches of them."""
        tokenizer = models.load_tokenizer(self.model)

        def tokens(rows: Any) -> Any:
            texts = [rows["text"], rows["pair"]] if "pair" in rows else [rows["text"]]
            return {**tokenizer(*texts, truncation=True, max_length=self.length), "labels": rows["label"]}

        parts = [
            part.map(tokens, batched=True, remove_columns=part.column_names, keep_in_memory=True, new_fingerprint=name)
            for name, part in (("train", self.task.train), ("test", self.task.test))
        ]
        return parts[0], parts[1], DataCollatorWithPadding(tokenizer)

    def check(self, mechanisms: list[str]) -> None:
        """Raise what is wrong with the model, its length or a mechanism in it, before anything is written."""
        model = self.new_model(0)
        models.expect_positions(model, self.model, self.length)
        for mechanism in mechanisms:
            models.attend_by(model, mechanism)

    def new_model(self, seed: int) -> Any:
        """The pre-trained model with a new head; the seed draws it."""
        set_seed(seed)
        return models.load(self.model, AutoModelForSequenceClassification, self.positions, num_labels=self.task.classes)

    def run(
        self, study: Study, mechanisms: list[str], seeds: Iterable[int], bar: Bar, *, interchange: bool = True
    ) -> list[Result]:
        """Train with each mechanism and seed, and run each model as it was trained.

        Args:
            interchange: run it densely too, and the one that was trained densely with every mechanism.

        Returns:
            for each: `trained`, `seed`, `scores` by what ran, `seconds_per_step`, `losses`.
        """
        training, test, collate = self.tokenized()

        def make(trained: str, seed: int, folder: Path) -> Result:
            model = models.attend_by(self.new_model(seed), trained)
            bar.begin(f"{trained}, seed {seed}")
            took = train(model, training, collate, self.schedule, seed, folder, bar)
            scores = {}
            others = (mechanisms if trained == DENSE else [DENSE]) if interchange else []
            for running in dict.fromkeys([*others, trained]):
                bar.begin(f"{trained}, seed {seed}: test with {running}")
                found = predict(models.attend_by(model, running), test, collate, 2 * self.together, folder)
                scores[running] = self.task.score(*found)
            return {"trained": trained, "seed": seed, "scores": scores, **took._asdict()}

        results = []
        for seed in seeds:
            for trained in mechanisms:
                name = f"{models.slug(trained)}-{seed}"
                results.append(study.run(name, partial(make, trained, seed)))
                bar.done()
        return results

    def costs(self, study: Study, mechanisms: list[str], repeats: int, bar: Bar, *, texts: int = 32) -> list[Result]:
        """What a training step costs with each mechanism on the longest texts.

        Args:
            texts: how many, of all lengths, scores are counted on.
        """
        training, _, collate = self.tokenized()

        def make(_: Path) -> Result:
            bar.begin("time and memory of a step", repeats + 1 + len(mechanisms))
            by_length = sorted(range(len(training)), key=lambda i: -len(training[i]["input_ids"]))
            sample = by_length[:: -(-len(by_length) // texts)]
            longest = collate([training[i] for i in by_length[: self.together]])
            single = [collate([training[i]]) for i in sample]
            return {"rows": costs(self.new_model(0), longest, single, mechanisms, repeats, bar.tick)}

        found = study.run("costs", make)["rows"]
        bar.done()
        return list(found)
