"""`coterie report`: stored fits as a page, and a sentence for each file that is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the extra 'cli' is not installed")

from coterie.fitting.fit import AtLength, Fit
from tests.command import run as coterie

AT = AtLength(2048, 0.9942, 7.1, 3.7, 4, 0.9934, "t")
FIT = Fit({"a": "near-far", "b": "dense"}, "hidden", 0.99, 0.995, 0.9942, [], (0.3, 0.1), [AT], 0, certified=True)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "cheap.json", tmp_path / "exact.json"]
    replace(FIT, fidelity=0.95, choices={"a": "smyrf", "b": "near-far"}).save(paths[0])
    FIT.save(paths[1])
    return paths


def test_two_fits_are_compared(files, tmp_path):
    said = coterie("report", *files, "--out", tmp_path / "both.html")
    assert "0.9934" in said
    assert "cheap: With 95% confidence: a mean fidelity of at least 0.95 on documents like yours." in said
    assert "wrote" in said
    text = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<h1>cheap, exact: 2 fits compared</h1>" in text
    assert "id=trade-off" in text
    assert "cheap: asked 0.95" in text


def test_one_fit_is_shown_by_itself(files, tmp_path):
    coterie("report", files[0], "--out", tmp_path / "one.html")
    text = (tmp_path / "one.html").read_text(encoding="utf-8")
    assert "<h1>cheap: attention at fidelity 0.95</h1>" in text
    assert "id=trade-off" not in text


def test_json_is_for_programs(files, tmp_path):
    rows = json.loads(coterie("report", *files, "--out", tmp_path / "both.html", "--json"))
    assert [(row["fit"], row["fidelity"], row["bound"], row["certified"]) for row in rows] == [
        ("cheap", 0.95, 0.9934, True),
        ("exact", 0.99, 0.9934, True),
    ]
    assert rows[0]["model_speedup"] == pytest.approx(7.1 / 3.7)
    assert rows[1]["modules"] == {"a": "near-far", "b": "dense"}


def test_a_fit_of_old_has_no_bound(files, tmp_path):
    stored = json.loads(files[0].read_text())
    for new in ("confidence", "share", "certified", "windows"):
        del stored[new]
    stored["lengths"] = [
        {key: stored["lengths"][0][key] for key in ("tokens", "fidelity", "dense_seconds", "fitted_seconds")}
    ]
    files[0].write_text(json.dumps(stored))
    rows = json.loads(coterie("report", *files, "--out", tmp_path / "both.html", "--json"))
    assert [row["bound"] for row in rows] == [None, 0.9934]
    assert "Nothing is promised: 0.9942 was seen" in (tmp_path / "both.html").read_text(encoding="utf-8")


def test_files_of_one_name_are_told_apart_by_their_folders(files, tmp_path):
    other = tmp_path / "again" / "exact.json"
    other.parent.mkdir()
    FIT.save(other)
    rows = json.loads(coterie("report", files[1], other, "--out", tmp_path / "both.html", "--json"))
    assert [row["fit"] for row in rows] == [str(files[1]), str(other)]


def test_what_is_wrong_is_one_sentence(files, tmp_path):
    def complaint(*arguments: object) -> str:
        return " ".join(coterie("report", *arguments, "--out", tmp_path / "none.html", fails=1).split())

    assert "nowhere.json cannot be read: No such file or directory." in complaint(files[0], tmp_path / "nowhere.json")
    (tmp_path / "list.json").write_text("[]")
    assert "list.json is not what 'coterie fit --save' writes." in complaint(tmp_path / "list.json")
    (tmp_path / "text.json").write_bytes(b"\xff no JSON")
    assert "text.json is not what 'coterie fit --save' writes." in complaint(files[0], tmp_path / "text.json")
    assert "the same file was given twice." in complaint(files[0], files[0])
    replace(FIT, choices={"blocks.0": "dense"}).save(tmp_path / "other.json")
    said = complaint(files[0], tmp_path / "other.json")
    assert "these fits cannot be compared: fits: expected fits of one model" in said
    assert "cheap has 2 attention modules such as a, got other with 1 attention module such as blocks.0." in said
    assert not (tmp_path / "none.html").exists()


def test_where_the_page_cannot_go_is_known_first(files, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in coterie("report", files[0], "--out", tmp_path / "file" / "x.html", fails=1)
