"""The articles of SemEval-2019 Task 4 that people labelled: two XML files, or from the hub."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any
from xml.parsers import expat

from coterie.cli.inputs import UserError
from recipes.common.hub import from_hub
from recipes.common.reading import read_text
from recipes.common.splits import Labelled

CLASSES = ("mainstream", "hyperpartisan")  # labels 0 and 1
_TRUTH = {"false": 0, "true": 1}
_LABELS = ("hyperpartisan", "label")  # what copies on the hub call it


def load(data: str) -> list[Labelled]:
    """All articles; label 1 is hyperpartisan."""
    return read(Path(data)) if Path(data).exists() else _fetch(data)


def read(folder: Path) -> list[Labelled]:
    """The articles of one file with the labels of the other; both must know the same ids."""
    texts_file, truth_file = _only(folder, "articles*.xml"), _only(folder, "ground-truth*.xml")
    texts = {name: " ".join(" ".join(each.itertext()).split()) for name, each in _articles(texts_file).items()}
    truth = {name: each.get("hyperpartisan") for name, each in _articles(truth_file).items()}
    for have, other, file in ((texts, truth, truth_file), (truth, texts, texts_file)):
        missing = sorted(have.keys() - other.keys())
        if missing:
            raise UserError(f"{file} has no article {missing[0]}, and the other file has.")
    for name, label in truth.items():
        if label not in _TRUTH:
            raise UserError(f"{truth_file}, article {name}: expected hyperpartisan to be true or false, got {label!r}.")
        if not texts[name]:
            raise UserError(f"{texts_file}, article {name}: it has no text.")
    return [Labelled(text, _TRUTH[str(truth[name])]) for name, text in texts.items()]


def _only(folder: Path, pattern: str) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: expected one with articles*.xml and ground-truth*.xml.")
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise UserError(f"{folder} has {len(files)} files {pattern}: expected exactly one.")
    return files[0]


def _articles(file: Path) -> dict[str, ElementTree.Element]:
    """The articles of a file by their ids."""
    found: dict[str, ElementTree.Element] = {}
    for article in _parse(file).iter("article"):
        name = article.get("id")
        if name is None or name in found:
            raise UserError(f"{file}: an article has {'no id' if name is None else f'the id {name} of another one'}.")
        found[name] = article
    if not found:
        raise UserError(f"{file} has no article.")
    return found


def _parse(file: Path) -> ElementTree.Element:
    """An XML file that declares nothing: a few lines of entities can stand for gigabytes, or for other files.

    It must be UTF-8, and is parsed as such whatever it says of itself.
    """
    text = read_text(file)

    def refuse(*_: Any) -> None:
        raise UserError(f"{file} has a DOCTYPE, which could declare entities: it is not read.")

    first = expat.ParserCreate("utf-8")
    first.StartDoctypeDeclHandler = refuse
    try:
        first.Parse(text, True)
        return ElementTree.fromstring(text)
    except (expat.ExpatError, ElementTree.ParseError) as error:
        raise UserError(f"{file} is no well-formed XML: {error}.") from error


def _fetch(name: str) -> list[Labelled]:
    """All splits together: each seed makes its own."""
    found = []
    for split, rows in from_hub(name).items():
        label = next((each for each in _LABELS if each in rows.column_names), None)
        if label is None or "text" not in rows.column_names:
            raise UserError(f"{name}, {split}: expected the columns 'text' and 'hyperpartisan' or 'label'.")
        for number, row in enumerate(rows, start=1):
            if row[label] not in (0, 1):  # True and False among them
                raise UserError(f"{name}, {split}, article {number}: expected {label!r} to be 0 or 1: {row[label]!r}.")
            if not isinstance(row["text"], str) or not row["text"].strip():
                raise UserError(f"{name}, {split}, article {number}: it has no text.")
            found.append(Labelled(" ".join(row["text"].split()), int(row[label])))
    return found
