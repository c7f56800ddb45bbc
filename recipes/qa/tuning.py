"""Fine-tuning a model that marks where an answer begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding, set_seed

from recipes.common import models
from recipes.common.digest import digest
from recipes.common.study import Result
from recipes.common.training import Schedule
from recipes.common.tuning import Answers, Parts, Tuning
from recipes.qa import windows
from recipes.qa.answers import exact_match, f1
from recipes.qa.squad import Data, Question
from recipes.qa.windows import Window


@dataclass(frozen=True)
class QuestionAnswering(Tuning):
    """How models are fine-tuned to answer.

    Attributes:
        model: a folder, a hub name, or "demo".
        length: tokens of a window, question included.
        stride: tokens of the paragraph that a window shares with the one before.
        examples, tests: how many questions of each part at most.
    """

    data: Data
    model: str
    length: int
    stride: int
    schedule: Schedule
    examples: int | None = None
    tests: int | None = None

    head: ClassVar[str] = "ForQuestionAnswering"
    name: ClassVar[str] = "question answering"
    score: ClassVar[str] = "F1"

    def tokenized(self, seed: int = 0) -> Parts:
        tokenizer = models.load_tokenizer(self.model)
        training, test = self.data.parts(seed, self.examples, self.tests)
        to_learn, to_answer = (windows.cut(tokenizer, part, self.length, self.stride) for part in (training, test))
        return Parts(
            Dataset.from_list([taught(window, training) for window in to_learn]),
            Dataset.from_list([window.inputs for window in to_answer]),
            DataCollatorWithPadding(tokenizer),
            partial(judged, to_answer, test),
        )

    def new_model(self, seed: int) -> Any:
        set_seed(seed)
        return self.fine_tuned(self.model)

    def fine_tuned(self, name: str) -> Any:
        return models.load(name, AutoModelForQuestionAnswering)

    @property
    def drawn(self) -> bool:
        return not self.data.dev

    def digests(self, seed: int) -> tuple[set[str], set[str]]:
        train, test = self.data.parts(seed, self.examples, self.tests)
        return {digest(question.context) for question in train}, {digest(question.context) for question in test}

    def about(self) -> Result:
        training, test = self.data.parts(0, self.examples, self.tests)
        return {
            "model": self.model,
            "training questions": len(training),
            "test questions": len(test),
            "data digest": digest(training, test),
            "length": self.length,
            "stride": self.stride,
            **self.schedule._asdict(),
        }


def taught(window: Window, questions: list[Question]) -> dict[str, Any]:
    """What the model is given of a window, and where the first annotator's answer is in it."""
    first, last = windows.find(window, questions[window.question].answers[0])
    return {**window.inputs, "start_positions": first, "end_positions": last}


def judged(cut: list[Window], questions: list[Question], logits: Any, _: Any) -> Answers:
    """F1, and exact match, of what the logits (starts, ends) say."""
    said = windows.answers(cut, questions, *logits)
    truths = [[answer.text for answer in question.answers] for question in questions]
    each = np.array([f1(*pair) for pair in zip(said, truths, strict=True)])
    exact = np.array([exact_match(*pair) for pair in zip(said, truths, strict=True)])
    paragraphs = {text: i for i, text in enumerate(dict.fromkeys(question.context for question in questions))}
    return Answers(
        len(questions),
        lambda some: float(each[some].mean()),
        {"exact match": float(exact.mean())},
        drawn_together=[paragraphs[question.context] for question in questions],
    )
