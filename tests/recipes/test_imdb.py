"""IMDB's reviews in each of their formats, and the recipe from end to end."""

from __future__ import annotations

import json
import os

import pytest
from datasets import Dataset
from recipes.imdb import reviews

from coterie.cli.inputs import UserError
from tests.command import recipe

COUNT = 12  # of each class and part


def write_folders(root, count=COUNT):
    for part in ("train", "test"):
        for name in ("neg", "pos"):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_7.txt").write_text(f"{part} {name} {i}, élan. " * (i + 1), encoding="utf-8")
    (root / "train" / "unsup").mkdir()  # the data set has reviews without labels too
    return root


def write_json(folder, rows):
    folder.mkdir(exist_ok=True)
    (folder / "reviews.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


def rows(count=2 * COUNT):
    """Sorted by class, as in the package."""
    return [{"t": f"review {label} {i}", "s": label} for label in (0, 1) for i in range(count)]


def texts(part):
    return set(part["text"])


@pytest.mark.parametrize("inside", ["", "aclImdb"])
def test_the_data_sets_own_folders(tmp_path, inside):
    write_folders(tmp_path / inside)
    task = reviews.load(str(tmp_path), 10, 6)
    assert (len(task.train), sum(task.train["label"])) == (10, 5)
    assert (len(task.test), sum(task.test["label"])) == (6, 3)
    for part, name in ((task.train, "train"), (task.test, "test")):
        for text, label in zip(part["text"], part["label"], strict=True):
            assert text.startswith(f"{name} {('neg', 'pos')[label]} ")


def test_json_is_split_by_itself(tmp_path):
    folder = write_json(tmp_path, rows())
    task = reviews.load(str(folder), 20, 10)
    assert (len(task.train), sum(task.train["label"])) == (20, 10)
    assert (len(task.test), sum(task.test["label"])) == (10, 5)
    assert not texts(task.train) & texts(task.test)
    assert all(text.startswith(f"review {label}") for text, label in zip(*task.train[:].values(), strict=True))
    again = reviews.load(str(folder), 30, 10)
    assert texts(again.test) == texts(task.test)  # more training, the same test


def test_what_occurs_twice_is_in_one_part_alone(tmp_path):
    twice = write_json(tmp_path / "json", rows(6) * 2)
    task = reviews.load(str(twice), 8, 4)
    assert len(texts(task.train)) == 8
    assert not texts(task.train) & texts(task.test)
    with pytest.raises(UserError, match="6 different texts of class 0, and 7 were asked for"):
        reviews.load(str(twice), 10, 4)

    folders = write_folders(tmp_path / "folders", 4)
    shared = (folders / "test" / "pos" / "3_7.txt").read_text(encoding="utf-8")
    (folders / "train" / "pos" / "0_7.txt").write_text(shared, encoding="utf-8")
    with pytest.raises(UserError, match=r"the training set of .*folders has 3 different texts of class 1"):
        reviews.load(str(folders), 8, 2)


def test_from_the_hub(monkeypatch):
    parts = {
        name: Dataset.from_dict({"text": [f"{name} {i}" for i in range(8)], "label": [0, 1] * 4})
        for name in ("train", "test")
    }
    monkeypatch.setattr(reviews, "from_hub", lambda name: parts)
    task = reviews.load("stanfordnlp/imdb", 6, 4)
    assert (len(task.train), len(task.test)) == (6, 4)
    del parts["test"]
    with pytest.raises(UserError, match="stanfordnlp/imdb has no split 'test': it has train"):
        reviews.load("stanfordnlp/imdb", 6, 4)


def test_refusals_of_folders(tmp_path):
    with pytest.raises(UserError, match="no data at 'nowhere'"):
        reviews.load("nowhere", 2, 2)
    with pytest.raises(UserError, match="holds no reviews: expected aclImdb/"):
        reviews.load(str(tmp_path), 2, 2)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UserError, match="file is no folder"):
        reviews.load(str(file), 2, 2)
    (tmp_path / "train" / "neg").mkdir(parents=True)
    with pytest.raises(UserError, match=r"train/neg holds no review: expected files that end in \.txt"):
        reviews.load(str(tmp_path), 2, 2)
    (tmp_path / "train" / "neg" / "0_1.txt").write_text("bad")
    with pytest.raises(UserError, match="train/pos is missing"):
        reviews.load(str(tmp_path), 2, 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"caf\xe9", r"0_7\.txt is not UTF-8 text"), (b" \n", r"0_7\.txt is empty")],
)
def test_refusals_of_review_files(tmp_path, content, words):
    write_folders(tmp_path, 2)
    (tmp_path / "test" / "pos" / "0_7.txt").write_bytes(content)
    with pytest.raises(UserError, match=words):
        reviews.load(str(tmp_path), 2, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_review_that_may_not_be_read(tmp_path):
    write_folders(tmp_path, 2)
    (tmp_path / "test" / "pos" / "0_7.txt").chmod(0)
    with pytest.raises(UserError, match=r"0_7\.txt cannot be read: Permission denied"):
        reviews.load(str(tmp_path), 2, 2)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "reviews.json is empty or no list"),
        ({"t": "a", "s": 0}, "reviews.json is empty or no list"),
        ([*rows(2), {"t": "a\ud800", "s": 0}], "review 5: character 1 is half of one"),
        ([*rows(2), {"text": "a", "s": 0}], "reviews.json, review 5: expected the keys 't' and 's'"),
        ([["a", 0]], "reviews.json, review 1: expected the keys"),
        ([{"t": "a", "s": 2}], "reviews.json, review 1: expected 's' to be 0 or 1, got 2"),
        ([{"t": "a", "s": "1"}], "expected 's' to be 0 or 1, got '1'"),
        ([{"t": "a", "s": True}], "expected 's' to be 0 or 1, got True"),
        ([{"t": " ", "s": 0}], "expected 't' to be a text that is not empty"),
        ([{"t": 3, "s": 0}], "expected 't' to be a text that is not empty"),
    ],
)
def test_refusals_of_json(tmp_path, found, words):
    with pytest.raises(UserError, match=words):
        reviews.load(str(write_json(tmp_path, found)), 2, 2)


@pytest.mark.parametrize("content", [b"[{", b'[{"t": "caf\xe9", "s": 0}]'])
def test_what_is_no_json(tmp_path, content):
    (tmp_path / "reviews.json").write_bytes(content)
    with pytest.raises(UserError, match=r"reviews\.json is not JSON"):
        reviews.load(str(tmp_path), 2, 2)


def test_unknown_mechanism(tmp_path):
    said = recipe("imdb", "--data", tmp_path, "--mechanism", "guess:keys=3", "--out", tmp_path / "out", fails=1)
    assert said.startswith("error: --mechanism guess:keys=3:")
    assert not (tmp_path / "out").exists()


def test_end_to_end(tmp_path, tiny_bert):
    data = write_folders(tmp_path / "aclImdb")
    mechanisms = ["smyrf:rounds=2,cluster_size=8", "reformer:rounds=2,chunk_size=4"]
    arguments = ["--data", data, "--model", tiny_bert, "--reviews", 8, "--tests", 6, "--length", 32, "--batch", 4]
    arguments += [word for spec in mechanisms for word in ("--mechanism", spec)]
    arguments += ["--seeds", 2, "--quick", "--out", tmp_path / "out"]
    recipe("imdb", *arguments)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    (table,) = found["tables"]
    names = ["dense", *(row[1] for row in table["rows"][1:])]
    assert [row[0] for row in table["rows"]] == ["dense", "smyrf", "reformer"]
    assert [(r["trained"], r["seed"]) for r in found["results"]] == [(name, seed) for seed in (0, 1) for name in names]
    for result in found["results"]:
        assert list(result["scores"]) == [result["trained"]]
        assert round(6 * result["scores"][result["trained"]], 6) in range(7)  # of 6 reviews
    met = {row["mechanism"]: row["scores"] for row in found["costs"]}
    assert met["dense"] == found["costs"][0]["dense_scores"] > max(met[name] for name in names[1:])
    assert (tmp_path / "out" / "results.png").stat().st_size > 1000
    before = [run.stat().st_mtime_ns for run in sorted((tmp_path / "out" / "runs").iterdir())]
    recipe("imdb", *arguments)  # goes on where it was: nothing is left to do
    assert before == [run.stat().st_mtime_ns for run in sorted((tmp_path / "out" / "runs").iterdir())]
    assert found == json.loads((tmp_path / "out" / "results.json").read_text())
    assert "another rate" in recipe("imdb", *arguments, "--rate", 1e-4, fails=1)
