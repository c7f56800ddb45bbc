"""GLUE's tasks in its own files, with a header or without, or from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from datasets import Dataset, concatenate_datasets

from coterie.cli.inputs import UserError
from recipes.common.classification import Task
from recipes.common.hub import from_hub
from recipes.common.notes import note
from recipes.common.reading import Line, read_tabs, similarity
from recipes.common.scores import Score, accuracy, f1, mcc, pearson, spearman


class Kind(NamedTuple):
    """A task: its folder, how it is judged, and where its files have what."""

    folder: str
    score: Score
    texts: tuple[str, ...]  # columns
    labels: tuple[str, ...]  # as files write them, in the hub's order; empty for numbers
    label: str = "label"
    headless: tuple[str, ...] = ()  # the columns of files without a header
    dev: tuple[str, ...] = ("dev",)  # GLUE's development set, whose labels are public
    hub: tuple[str, ...] = ("sentence1", "sentence2")  # the hub's names of the texts
    hub_test: str = "validation"
    also: tuple[Score, ...] = ()  # where GLUE reports two scores
    names: tuple[str, ...] = ()  # what the labels are called, if files write numbers
    broken: bool = False  # GLUE's own file has lines that are cut off


_PAIR = ("sentence1", "sentence2")
_PAIR_ROWS = ("index", *_PAIR, "label")
_ENTAILED = ("entailment", "not_entailment")
TASKS = {
    "cola": Kind(
        "CoLA",
        mcc,
        ("sentence",),
        ("0", "1"),
        headless=("source", "label", "mark", "sentence"),
        hub=("sentence",),
        names=("unacceptable", "acceptable"),
    ),
    "sst2": Kind(
        "SST-2",
        accuracy,
        ("sentence",),
        ("0", "1"),
        headless=("sentence", "label"),
        hub=("sentence",),
        names=("negative", "positive"),
    ),
    "rte": Kind("RTE", accuracy, _PAIR, _ENTAILED, headless=_PAIR_ROWS),
    "mrpc": Kind(
        "MRPC",
        f1,
        ("#1 String", "#2 String"),
        ("0", "1"),
        label="Quality",
        also=(accuracy,),
        names=("not_equivalent", "equivalent"),
    ),
    "qnli": Kind("QNLI", accuracy, ("question", "sentence"), _ENTAILED, hub=("question", "sentence")),
    "qqp": Kind(
        "QQP",
        f1,
        ("question1", "question2"),
        ("0", "1"),
        label="is_duplicate",
        hub=("question1", "question2"),
        also=(accuracy,),
        names=("not_duplicate", "duplicate"),
        broken=True,
    ),
    "mnli": Kind(
        "MNLI",
        accuracy,
        _PAIR,
        ("entailment", "neutral", "contradiction"),
        label="gold_label",
        dev=("dev_matched",),
        hub=("premise", "hypothesis"),
        hub_test="validation_matched",
    ),
    "stsb": Kind("STS-B", spearman, _PAIR, (), label="score", also=(pearson,)),
    "wnli": Kind("WNLI", accuracy, _PAIR, ("0", "1"), headless=_PAIR_ROWS, names=_ENTAILED[::-1]),
}
LARGE = ("sst2", "qnli", "qqp", "mnli")  # 67 to 393 thousand texts


def load(name: str, data: str, limit: int | None, test_limit: int | None) -> Task:
    """A task from a folder that holds GLUE's task folders, or from the hub.

    Args:
        limit, test_limit: how many examples of each part at most; a seeded choice.
    """
    if name not in TASKS:
        raise UserError(f"--task must be one of {', '.join(TASKS)}, not {name!r}.")
    kind = TASKS[name]
    train, test = _read(kind, Path(data)) if Path(data).exists() else _fetch(kind, name, data)
    parts = _some(train, limit), _some(test, test_limit)
    return Task(kind.folder, kind.score, kind.names or kind.labels, *parts, also=kind.also)


def _some(part: Dataset, limit: int | None) -> Dataset:
    return part if limit is None or limit >= len(part) else part.shuffle(seed=0).select(range(limit))


def _fetch(kind: Kind, name: str, data: str) -> tuple[Dataset, Dataset]:
    found = from_hub(data, name)
    names = dict(zip(kind.hub, ("text", "pair"), strict=False))
    parts = []
    for split in ("train", kind.hub_test):
        if split not in found:
            raise UserError(f"{data} has no split {split!r}: it has {', '.join(found)}.")
        missing = {*kind.hub, "label"} - set(found[split].column_names)
        if missing:
            raise UserError(f"{data}, {split}: no column {sorted(missing)[0]!r}.")
        parts.append(found[split].select_columns([*kind.hub, "label"]).rename_columns(names))
        _check(kind, parts[-1], f"{data}, {split}")
    return parts[0], parts[1]


def _check(kind: Kind, part: Dataset, where: str) -> None:
    """Texts and labels from elsewhere are what they must be."""
    for name in part.column_names:
        for number, cell in enumerate(part[name]):
            if name != "label" and not isinstance(cell, str):
                raise UserError(f"{where}, example {number}: expected a text, got {cell!r}.")
            if name == "label" and kind.labels and cell not in range(len(kind.labels)):
                raise UserError(f"{where}, example {number}: expected a label below {len(kind.labels)}, got {cell!r}.")
            if name == "label" and not kind.labels:
                similarity(str(cell), f"{where}, example {number}")


def _read(kind: Kind, data: Path) -> tuple[Dataset, Dataset]:
    """Both parts. Some copies of GLUE cut `val.tsv` off its training set, or give the development set out as a
    `test.tsv` with labels: the first is put back, and the second is what is tested on."""
    folder = data if data.name == kind.folder else data / kind.folder
    if not folder.is_dir():
        raise UserError(f"{data} has no folder {kind.folder}: expected GLUE's own layout, {kind.folder}/train.tsv.")
    training = [read_file(kind, folder / "train.tsv")]
    if (folder / "val.tsv").exists():
        training.append(read_file(kind, folder / "val.tsv"))
    for name in ("test", *kind.dev):
        file = folder / f"{name}.tsv"
        if name != "test" or (file.exists() and _has_labels(kind, file)):
            if name == "test" and (folder / f"{kind.dev[0]}.tsv").exists():
                note(f"{file} has labels and is what is tested on; {kind.dev[0]}.tsv beside it is left out.")
            return concatenate_datasets(training), read_file(kind, file)
    raise AssertionError("dev is never empty")


def _header(kind: Kind, lines: list[Line]) -> tuple[str, ...] | None:
    """The columns that a file names in its first line; None if that is an example already."""
    first = tuple(lines[0].cells) if lines else ()
    return first if set(kind.texts) & set(first) else None


def _has_labels(kind: Kind, file: Path) -> bool:
    lines = read_tabs(file)
    header = _header(kind, lines)
    return kind.label in header if header else len(lines[0].cells) == len(kind.headless) if lines else False


def read_file(kind: Kind, file: Path) -> Dataset:
    """The examples of a file: text, pair and label. What is wrong with one is said with its line."""
    lines = read_tabs(file)
    header = _header(kind, lines)
    columns = header or kind.headless
    missing = [name for name in (*kind.texts, kind.label) if name not in columns]
    if not lines or missing:
        raise UserError(f"{file} has no column {missing[0]!r}." if lines and missing else f"{file} is empty.")
    where = [columns.index(name) for name in kind.texts]
    label = columns.index(kind.label)
    examples, cut_off = [], 0
    for line, row in lines[1:] if header else lines:
        if kind.broken and len(row) < len(columns):
            cut_off += 1
            continue
        if len(row) <= max(*where, label) or any(row[len(columns) :]):
            raise UserError(f"{file}, line {line}: expected {len(columns)} columns, got {len(row)}.")
        examples.append((*(row[i] for i in where), _label(kind, row[label], f"{file}, line {line}")))
    if not examples:
        raise UserError(f"{file} has no examples.")
    if cut_off:
        note(f"{file}: {cut_off:,} lines with fewer than {len(columns)} columns are left out, as GLUE's own has some.")
    names = [*("text", "pair")[: len(where)], "label"]
    found = {name: [example[i] for example in examples] for i, name in enumerate(names)}
    return Dataset.from_dict(found)


def _label(kind: Kind, text: str, where: str) -> float:
    if kind.labels:
        if text not in kind.labels:
            raise UserError(f"{where}: expected one of the labels {', '.join(kind.labels)}, got {text!r}.")
        return kind.labels.index(text)
    return similarity(text, where)
