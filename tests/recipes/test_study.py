"""Studies: what is stored, what goes on, what is refused."""

import json

import pytest
from recipes.common.study import Study

from coterie.cli.inputs import UserError


def test_a_run_is_made_once_and_read_afterwards(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "scratch").write_text("…")
        return {"score": 0.1 + 0.2, "rows": [1, 2], "nan": float("nan")}

    study = Study.open(tmp_path / "study", {"a": 1})
    first = study.run("one", make)
    again = Study.open(tmp_path / "study", {"a": 1}).run("one", make)
    assert first == again == {"score": 0.1 + 0.2, "rows": [1, 2], "nan": None}
    assert len(made) == 1
    assert not made[0].exists()  # what it worked with is removed


def test_a_run_that_fails_keeps_its_folder_and_stores_nothing(tmp_path):
    study = Study.open(tmp_path, {})

    def fails(folder):
        (folder / "checkpoint").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        study.run("one", fails)
    assert not (tmp_path / "runs" / "one.json").exists()
    assert study.run("one", lambda folder: {"found": (folder / "checkpoint").read_text()}) == {"found": "half"}


def test_other_settings_are_refused_by_name(tmp_path):
    Study.open(tmp_path, {"rate": 1e-5, "batch": 8})
    with pytest.raises(UserError, match=r"another rate \(1e-05 instead of 3e-05\).*--fresh"):
        Study.open(tmp_path, {"rate": 3e-5, "batch": 8})
    assert json.loads((tmp_path / "settings.json").read_text()) == {"rate": 1e-5, "batch": 8}


def test_a_study_goes_on_with_more_seeds(tmp_path):
    Study.open(tmp_path, {"rate": 1, "seeds": 1}).run("one", lambda _: {"score": 1})
    more = Study.open(tmp_path, {"rate": 1, "seeds": 3})
    assert more.run("one", lambda _: {"score": 2}) == {"score": 1}
    assert json.loads((tmp_path / "settings.json").read_text()) == {"rate": 1, "seeds": 3}


def test_fresh_removes_a_study_and_nothing_else(tmp_path):
    study = Study.open(tmp_path / "study", {"rate": 1})
    study.run("one", lambda _: {"score": 1})
    anew = Study.open(tmp_path / "study", {"rate": 2}, fresh=True)
    assert anew.run("one", lambda _: {"score": 2}) == {"score": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(UserError, match="holds no study, so --fresh removes nothing"):
        Study.open(tmp_path / "mine", {}, fresh=True)
    with pytest.raises(UserError, match="is not empty and holds no study"):
        Study.open(tmp_path / "mine", {})
    assert (tmp_path / "mine" / "letter.txt").read_text() == "Dear"


@pytest.mark.parametrize("content", ["[1]", "{", ""])
def test_settings_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises((UserError, ValueError), match=r"settings\.json"):
        Study.open(tmp_path, {})


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "study").write_text("a file")
    with pytest.raises(OSError, match="Not a directory"):
        Study.open(tmp_path / "study", {})
