"""Studies: what is stored, what goes on, what is refused."""

import errno
import json
import os
import subprocess
import sys

import pytest
from recipes.common.study import Study, enough_room, versions

from coterie.cli.inputs import UserError


def stored(folder):
    return json.loads((folder / "settings.json").read_text())


def test_a_run_is_made_once_and_read_afterwards(tmp_path):
    made = []

    def make(folder):
        made.append(folder)
        (folder / "scratch").write_text("…")
        return {"score": 0.1 + 0.2, "rows": [1, 2], "nan": float("nan")}

    study = Study.open(tmp_path / "study", {"recipe": "pie", "a": 1})
    first = study.run("one", make)
    again = Study.open(tmp_path / "study", {"recipe": "pie", "a": 1}).run("one", make)
    assert first == again == {"score": 0.1 + 0.2, "rows": [1, 2], "nan": None}
    assert len(made) == 1
    assert not made[0].exists()  # what it worked with is removed


def test_a_run_that_fails_keeps_its_folder_and_stores_nothing(tmp_path):
    study = Study.open(tmp_path, {"recipe": "pie"})

    def fails(folder):
        (folder / "checkpoint").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        study.run("one", fails)
    assert not (tmp_path / "runs" / "one.json").exists()
    assert study.run("one", lambda folder: {"found": (folder / "checkpoint").read_text()}) == {"found": "half"}


def test_other_settings_are_refused_by_name(tmp_path):
    Study.open(tmp_path, {"recipe": "pie", "rate": 1e-5, "batch": 8})
    with pytest.raises(UserError, match=r"another rate \(1e-05 instead of 3e-05\).*--fresh"):
        Study.open(tmp_path, {"recipe": "pie", "rate": 3e-5, "batch": 8})
    assert stored(tmp_path)["rate"] == 1e-5


def test_a_study_goes_on_with_more_seeds(tmp_path):
    Study.open(tmp_path, {"recipe": "pie", "rate": 1, "seeds": 1}).run("one", lambda _: {"score": 1})
    more = Study.open(tmp_path, {"recipe": "pie", "rate": 1, "seeds": 3})
    assert more.run("one", lambda _: {"score": 2}) == {"score": 1}
    assert stored(tmp_path) == {"recipe": "pie", "rate": 1, "seeds": 3, "versions": versions()}


def test_data_may_lie_elsewhere_if_they_are_the_same(tmp_path):
    Study.open(tmp_path, {"recipe": "pie", "data": "here", "data digest": "abc"})
    Study.open(tmp_path, {"recipe": "pie", "data": "there", "data digest": "abc"})
    with pytest.raises(UserError, match=r"another data digest \('abc' instead of 'def'\)"):
        Study.open(tmp_path, {"recipe": "pie", "data": "there", "data digest": "def"})
    settings = {"recipe": "pie", "data digest": "abc", "examples": 9}
    Study.open(tmp_path / "examples", settings)
    with pytest.raises(UserError, match=r"another examples \(9 instead of 8\)"):  # a setting says more than a digest
        Study.open(tmp_path / "examples", {**settings, "data digest": "def", "examples": 8})
    Study.open(tmp_path / "more", {"recipe": "pie", "data": "here"})
    with pytest.raises(UserError, match=r"another data \('here' instead of 'there'\)"):
        Study.open(tmp_path / "more", {"recipe": "pie", "data": "there"})


def test_fresh_removes_a_study_and_nothing_else(tmp_path):
    study = Study.open(tmp_path / "study", {"recipe": "pie", "rate": 1})
    study.run("one", lambda _: {"score": 1})
    anew = Study.open(tmp_path / "study", {"recipe": "pie", "rate": 2}, fresh=True)
    assert anew.run("one", lambda _: {"score": 2}) == {"score": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("Dear")
    with pytest.raises(UserError, match="holds no study, so --fresh removes nothing"):
        Study.open(tmp_path / "mine", {"recipe": "pie"}, fresh=True)
    with pytest.raises(UserError, match="is not empty and holds no study"):
        Study.open(tmp_path / "mine", {"recipe": "pie"})
    assert (tmp_path / "mine" / "letter.txt").read_text() == "Dear"


@pytest.mark.parametrize("content", ["[1]", "{", "", '{"editor.fontSize": 12}'])
def test_settings_that_are_none_are_refused(tmp_path, content):
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(UserError, match=r"settings\.json holds no settings of a study"):
        Study.open(tmp_path, {"recipe": "pie"})


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "study").write_text("a file")
    with pytest.raises(OSError, match="Not a directory"):
        Study.open(tmp_path / "study", {"recipe": "pie"})


def test_fresh_leaves_folders_that_only_look_like_a_study(tmp_path):
    (tmp_path / "settings.json").write_text('{"editor.fontSize": 12}')
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("…")
    with pytest.raises(UserError, match="holds no settings of a study"):
        Study.open(tmp_path, {"recipe": "pie"}, fresh=True)
    assert (tmp_path / "precious" / "thesis.txt").exists()


def test_other_versions_are_refused(tmp_path):
    Study.open(tmp_path, {"recipe": "pie"})
    older = {**stored(tmp_path), "versions": {**versions(), "torch": "1.0"}}
    (tmp_path / "settings.json").write_text(json.dumps(older))
    with pytest.raises(UserError, match="holds a study with another versions"):
        Study.open(tmp_path, {"recipe": "pie"})


def test_killed_while_its_settings_were_written_it_starts_anew(tmp_path):
    (tmp_path / ".coterie-abc.tmp").write_text('{"rec')
    Study.open(tmp_path, {"recipe": "pie"})
    assert stored(tmp_path)["recipe"] == "pie"


def test_what_a_run_worked_with_goes_though_it_was_killed_just_after_it_was_stored(tmp_path):
    study = Study.open(tmp_path, {"recipe": "pie"})
    study.run("one", lambda _: {"score": 1})
    (tmp_path / "work" / "one").mkdir(parents=True)
    assert study.run("one", lambda _: {"score": 2}) == {"score": 1}
    assert not (tmp_path / "work" / "one").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_stored_run_that_is_none_is_named(tmp_path, content):
    study = Study.open(tmp_path, {"recipe": "pie"})
    study.run("one", lambda _: {"score": 1})
    (tmp_path / "runs" / "one.json").write_text(content)
    with pytest.raises(UserError, match=r"one\.json holds no result of a run: remove it"):
        study.run("one", lambda _: {"score": 2})


OTHER = """
import sys
from pathlib import Path
from recipes.common.study import Study
Study.open(Path(sys.argv[1]), {"recipe": "pie"})
"""


def test_two_commands_in_one_folder(tmp_path):
    Study.open(tmp_path, {"recipe": "pie"})
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", OTHER, tmp_path], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert "another command is at work in" in done.stderr


def test_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no space is left there"), enough_room(tmp_path / "not" / "there"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RuntimeError, match="unexpected pos"), enough_room(tmp_path):
        raise RuntimeError("unexpected pos 36672")  # there is room: it means something else
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(UserError, match="no space is left there"), enough_room(tmp_path):
        raise RuntimeError("unexpected pos 36672")
