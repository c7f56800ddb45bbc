"""Fine-tuning a classifier."""

from __future__ import annotations

from collections.abc import Sequence
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
    labels: tuple[str, ...]  # the names of the classes in order; empty: the label is a number
    train: Dataset
    test: Dataset
    also: tuple[Score, ...] = ()  # other scores that are reported
    drawn: bool = False  # both parts were drawn from one list

    @property
    def classes(self) -> int:
        """The outputs of a model."""
        return len(self.labels) or 1


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
        names = dict(enumerate(self.task.labels)) or {0: "score"}
        numbers = {name: number for number, name in names.items()}
        settings: dict[str, Any] = {"num_labels": self.task.classes, "id2label": names, "label2id": numbers}
        return models.load(self.model, AutoModelForSequenceClassification, self.positions, **settings)

    def fine_tuned(self, name: str) -> Any:
        model = models.load(name, AutoModelForSequenceClassification, self.positions)
        if model.config.num_labels != self.task.classes:
            raise UserError(
                f"{name} was fine-tuned for {model.config.num_labels} classes, and {self.name} has {self.task.classes}."
            )
        self._order(model)  # one that names other classes is refused before it runs
        return model

    def said(self, model: Any, logits: Any) -> Any:
        return np.asarray(logits)[:, self._order(model)]

    def _order(self, model: Any) -> list[int]:
        """Where a model has the task's classes."""
        return outputs_of(self.task, [str(model.config.id2label[i]) for i in range(self.task.classes)])

    @property
    def drawn(self) -> bool:
        return self.task.drawn

    def digests(self, seed: int) -> tuple[set[str], set[str]]:
        train, test = (
            {digest(row) for row in zip(*(part[name][:] for name in part.column_names if name != "label"), strict=True)}
            for part in (self.task.train, self.task.test)
        )
        return train, test

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


def outputs_of(task: Task, names: Sequence[str]) -> list[int]:
    """For each class of a task, which output of a model it is, by the names that the model's config gives them: those
    of the task in any order, or none (LABEL_0, 0).

    >>> nli = Task("MNLI", abs, ("entailment", "neutral", "contradiction"), None, None)
    >>> outputs_of(nli, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]), outputs_of(nli, ["LABEL_0", "LABEL_1", "LABEL_2"])
    ([2, 1, 0], [0, 1, 2])
    """
    said, wanted = [_plain(name) for name in names], [_plain(name) for name in task.labels]
    if not task.labels or said in ([f"label_{i}" for i in range(len(said))], [str(i) for i in range(len(said))]):
        return list(range(len(said)))
    if sorted(said) != sorted(wanted):
        raise UserError(
            f"the model's classes are called {', '.join(names)}, and those of {task.name} {', '.join(task.labels)}: "
            "id2label in its config.json must name these, in the model's order."
        )
    return [said.index(name) for name in wanted]


def _plain(name: str) -> str:
    name = name.lower().replace(" ", "_").replace("-", "_")
    return {"neg": "negative", "pos": "positive"}.get(name, name)
