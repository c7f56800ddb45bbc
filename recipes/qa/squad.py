"""SQuAD v1.1's files, and paragraphs split into those to train on and those to test on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from coterie.cli.inputs import UserError
from recipes.common.hub import from_hub
from recipes.common.reading import expect_encodable, read_data

TEST_SHARE = 0.25  # of the paragraphs, if the data have one part alone


class Answer(NamedTuple):
    """What an annotator marked: a text, and its first character in the paragraph."""

    text: str
    start: int


class Question(NamedTuple):
    """A question on a paragraph."""

    text: str
    context: str
    answers: list[Answer]


class Data(NamedTuple):
    """Questions; `dev` is empty if the data do not say which are for tests."""

    train: list[Question]
    dev: list[Question]

    def parts(self, seed: int, limit: int | None, test_limit: int | None) -> tuple[list[Question], list[Question]]:
        """What to train and to test on: the data's own parts, or paragraphs that the seed draws.

        Args:
            limit, test_limit: how many questions of each part at most, of paragraphs that the seed draws.
        """
        train, test = (self.train, self.dev) if self.dev else split(self.train, seed)
        return _some(train, limit, seed), _some(test, test_limit, seed)


def load(data: str) -> Data:
    """A file, a folder with train*.json and dev*.json or with one file alone, or a data set on the hub."""
    path = Path(data)
    if path.is_dir():
        return _folder(path)
    if path.exists() or path.suffix == ".json":
        return Data(read_file(path), [])
    return _fetch(data)


def split(questions: list[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """Questions to train on and to test on; no paragraph is in both."""
    contexts = _shuffled(questions, seed)
    if len(contexts) < 2:
        raise UserError("there is one paragraph alone: two are needed, one to train on and one to test on.")
    held_out = set(contexts[: max(1, round(TEST_SHARE * len(contexts)))])
    return [q for q in questions if q.context not in held_out], [q for q in questions if q.context in held_out]


def read_file(file: Path) -> list[Question]:
    """The questions of a file. What is wrong with one is said with its place in the file."""
    found = read_data(file)
    questions = []
    articles = _get(found, "data", list, str(file))
    for i, article in enumerate(articles):
        place = f"{file}, data[{i}]"
        for j, paragraph in enumerate(_get(article, "paragraphs", list, place)):
            questions += _questions(paragraph, f"{place}.paragraphs[{j}]")
    if not questions:
        raise UserError(f"{file} has no paragraphs with questions.")
    return questions


def _questions(paragraph: Any, place: str) -> list[Question]:
    context = _get(paragraph, "context", str, place)
    found = []
    for i, asked in enumerate(_get(paragraph, "qas", list, place)):
        here = f"{place}.qas[{i}]"
        text = _get(asked, "question", str, here)
        answers = [
            Answer(_get(answer, "text", str, here), _get(answer, "answer_start", int, here))
            for answer in _get(asked, "answers", list, here)
        ]
        found.append(_checked(Question(text, context, answers), here, bool(asked.get("is_impossible"))))
    return found


def _checked(question: Question, place: str, impossible: bool = False) -> Question:
    """A question whose answers are in its paragraph; SQuAD v2's questions without an answer are refused."""
    if impossible or not question.answers:
        raise UserError(f"{place}: the question has no answer (SQuAD v2's is_impossible); expected SQuAD v1.1.")
    for text, start in question.answers:
        there = question.context[start : start + len(text)] if start >= 0 else ""
        if not text.strip() or there != text:
            raise UserError(f"{place}: the answer {text!r} is not at answer_start {start}, where there is {there!r}.")
    return question


def _get(found: Any, key: str, kind: type, place: str) -> Any:
    value = found.get(key) if isinstance(found, dict) else None
    if isinstance(value, str):
        expect_encodable(value, f"{place}, {key!r}")
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {list: "a list", str: "a text", int: "a number"}
        raise UserError(f"{place}: expected {names[kind]} {key!r}, as in SQuAD's format.")
    return value


def _folder(folder: Path) -> Data:
    files = sorted(folder.glob("*.json"))
    train, dev = ([file for file in files if file.name.startswith(part)] for part in ("train", "dev"))
    if len(train) == 1 and len(dev) == 1:
        return Data(read_file(train[0]), read_file(dev[0]))
    if len(files) == 1:
        return Data(read_file(files[0]), [])
    names = ", ".join(file.name for file in files) or "none"
    raise UserError(f"{folder}: expected one train*.json and one dev*.json, or one JSON file alone, got {names}.")


def _fetch(name: str) -> Data:
    found = from_hub(name)
    parts = {"train": "train", "validation": "dev"}
    known = {parts[split]: _rows(found[split], f"{name}, {split}") for split in parts if split in found}
    if not known:
        raise UserError(f"{name} has neither a split 'train' nor 'validation': it has {', '.join(found)}.")
    if "train" not in known:
        return Data(known["dev"], [])
    return Data(known["train"], known.get("dev", []))


def _rows(rows: Any, place: str) -> list[Question]:
    for column in ("question", "context", "answers"):
        if column not in rows.column_names:
            _no_column(place, column)
    found = []
    for i, row in enumerate(rows):
        answers = [Answer(*pair) for pair in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)]
        found.append(_checked(Question(row["question"], row["context"], answers), f"{place}, row {i}"))
    return found


def _no_column(place: str, column: str) -> NoReturn:
    raise UserError(f"{place}: no column {column!r}.")


def _shuffled(questions: list[Question], seed: int) -> list[str]:
    """Their paragraphs, each once, in an order that the seed draws."""
    contexts = list(dict.fromkeys(question.context for question in questions))
    random.Random(seed).shuffle(contexts)
    return contexts


def _some(questions: list[Question], limit: int | None, seed: int) -> list[Question]:
    if limit is None or limit >= len(questions):
        return questions
    rank = {context: i for i, context in enumerate(_shuffled(questions, seed))}
    return sorted(questions, key=lambda question: rank[question.context])[:limit]
