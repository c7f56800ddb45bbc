"""Fine-tuning a classifier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, set_seed

from coterie.cli.inputs import UserError
from recipes.common import models
from recipes.common.digest import digest
from recipes.common.scores import Score
from recipes.common.study import Result
from recipes.common.training import Schedule
from recipes.common.tuning import Answers, Parts, Tuning


class Task(NamedTuple):
    """Labelled texts. Columns: text, pair if there are two texts, and label."""

    name: str
    score: Score
    classes: int  # 1: the label is a number
    train: Dataset
    test: Dataset
    also: tuple[Score, ...] = ()  # other scores that are reported
    drawn: bool = False  # both parts were drawn from one list, the test first


@dataclass(frozen=True)
class FineTuning(Tuning):
    """How classifiers are fine-tuned on a task.

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

    head: ClassVar[str] = "ForSequenceClassification"

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def score(self) -> str:
        return self.task.score.__name__

    def tokenized(self, seed: int = 0) -> Parts:
        """The task says which examples are for tests, whatever the seed."""
        tokenizer = models.load_tokenizer(self.model)

        def tokens(rows: Any) -> Any:
            texts = [rows["text"], rows["pair"]] if "pair" in rows else [rows["text"]]
            return {**tokenizer(*texts, truncation=True, max_length=self.length), "labels": rows["label"]}

        parts = [
            part.map(tokens, batched=True, remove_columns=part.column_names, keep_in_memory=True, new_fingerprint=name)
            for name, part in (("train", self.task.train), ("test", self.task.test))
        ]
        return Parts(parts[0], parts[1], DataCollatorWithPadding(tokenizer), partial(_judged, self.task))

    def new_model(self, seed: int) -> Any:
        set_seed(seed)
        return models.load(self.model, AutoModelForSequenceClassification, self.positions, num_labels=self.task.classes)

    def fine_tuned(self, name: str) -> Any:
        model = models.load(name, AutoModelForSequenceClassification, self.positions)
        if model.config.num_labels != self.task.classes:
            raise UserError(
                f"{name} was fine-tuned for {model.config.num_labels} classes, and {self.name} has {self.task.classes}."
            )
        return model

    def check_kept(self, name: str) -> None:
        super().check_kept(name)
        kept = models.kept_about(name).get("test examples", len(self.task.test))
        if self.task.drawn and len(self.task.test) > kept:
            raise UserError(
                f"{name} was trained on examples that follow the first {kept}: with --tests {len(self.task.test)} some "
                f"would be tested on; give at most {kept}."
            )

    def about(self) -> Result:
        return {
            "model": self.model,
            "training examples": len(self.task.train),
            "test examples": len(self.task.test),
            "data digest": digest(
                *(part[name][:] for part in (self.task.train, self.task.test) for name in part.column_names)
            ),
            "length": self.length,
            **self.schedule._asdict(),
        }


def _judged(task: Task, said: Any, labels: Any) -> Answers:
    said, labels = np.asarray(said), np.asarray(labels)
    also = {score.__name__: score(said, labels) for score in task.also}
    always = np.eye(task.classes)  # the logits of models that always say the same
    chance = max(task.score(np.tile(each, (len(labels), 1)), labels) for each in always)
    return Answers(len(labels), lambda some: task.score(said[some], labels[some]), also, chance)
