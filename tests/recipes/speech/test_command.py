"""The recipe from end to end, and its tables."""

from __future__ import annotations

import json
from typing import Any

import pytest
from recipes.common.precision import in_bf16
from recipes.speech.digits import Range
from recipes.speech.tables import Point

from coterie.cli.inputs import UserError
from recipes.speech import again, loading, tables
from tests.command import recipe
from tests.recipes.speech.conftest import write_an4

SPEC = "smyrf:rounds=2,cluster_size=8"
ALSO = "local:window=8"
AS_QUICK: Any = {"first": Range(1, 3), "last": Range(3, 6), "held_out": [], "spelled": False, "tests": 6}


def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_end_to_end(recordings, tmp_path):
    (recordings / "0_ann_7.wav").write_bytes(b"no sound")
    out = tmp_path / "out"
    arguments = ["--data", recordings, "--mechanism", SPEC, "--also", ALSO, "--seeds", 2, "--quick", "--out", out]
    said = recipe("speech", *arguments)
    assert "FSDD, 2 layers, dense:" in said
    found = results(out)
    assert [
        sentence.endswith("0_ann_7.wav is no audio file, or is damaged: expected WAV or FLAC.")
        for sentence in found["left_out"]
    ] == [True]
    assert [(r["trained"], r["seed"]) for r in found["results"]] == [(n, s) for s in (0, 1) for n in ("dense", SPEC)]
    for result in found["results"]:
        assert list(result["errors"]) == ["dense", SPEC, ALSO]
        assert result["beam"]["digit"] >= 0
        assert len(result["losses"]) == 2
    assert {row["mechanism"] for row in found["costs"]} == {"dense", SPEC, ALSO}
    own, interchange, budget = found["tables"]
    assert [row[1] for row in own["rows"]] == ["dense", SPEC]
    assert [len(row) for row in interchange["rows"]] == [5, 5]
    assert sorted(row[2] for row in budget["rows"]) == sorted(["dense", SPEC, ALSO])
    times = [float(row[0]) for row in budget["rows"]]
    assert times == sorted(times)
    assert (out / "results.png").stat().st_size > 1000
    assert len(list((out / "models").iterdir())) == 4
    before = {file: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}
    recipe("speech", *arguments)  # goes on where it was: nothing is left to do
    assert before == {file: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}
    assert results(out) == found
    assert "another rate" in recipe("speech", *arguments, "--rate", 1e-4, fails=1)
    models = sorted((out / "models").iterdir())
    rows = again.measured(models, loading.load(str(recordings), **AS_QUICK), ["dense", ALSO], bf16=in_bf16(None))
    for (layers, trained), mine in rows.items():
        wanted = [r["errors"] for r in found["results"] if (r["layers"], r["trained"]) == (layers, trained)]
        assert mine == {name: [each[name]["digit"] for each in wanted] for name in ("dense", ALSO)}
    with pytest.raises(UserError, match="writes '0123456789', and AN4 is written in other symbols"):
        again.measured(models, loading.load(str(write_an4(tmp_path / "an4")), **AS_QUICK), ["dense"], bf16=False)


def test_cepstra_and_no_beam(tmp_path):
    folder, out = write_an4(tmp_path / "an4"), tmp_path / "out"
    recipe("speech", "--data", folder, "--mechanism", "dense", "--quick", "--beam", 0, "--out", out)
    (own, *_), found = results(out)["tables"], results(out)
    assert own["columns"][2:4] == ["character error, %", "word error, %"]
    assert found["words"].endswith("ms an utterance.")  # there is nothing beside it
    assert found["results"][0]["beam"] == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stride", 3], "--stride 3: expected one of 1, 2, 4"),
        (["--dim", 30], "--dim 30 must be a multiple of 2 × --heads 4"),
        (["--rate", 0], "--rate 0: expected more than 0"),
        (["--digits", "40-20"], "--digits 40-20: expected two numbers of digits, such as 20-40"),
        (["--first", "few"], "--first few: expected two numbers"),
        (["--digits", "0-3"], "--digits 0-3: expected two numbers"),
        (["--layers", "none"], "--layers"),
        (["--mechanism", "guess:keys=3"], "--mechanism guess:keys=3:"),
        (["--also", "guess"], "--also guess:"),
        (["--held-out", "eve"], "--held-out eve:"),
    ],
)
def test_refusals(recordings, tmp_path, arguments, words):
    said = recipe("speech", "--data", recordings, *arguments, "--out", tmp_path / "out", fails=1)
    assert said.startswith(f"error: {words}")
    assert not (tmp_path / "out").exists()


def test_options_for_digits_alone(tmp_path):
    said = recipe(
        "speech", "--data", write_an4(tmp_path), "--targets", "characters", "--out", tmp_path / "out", fails=1
    )
    assert said.startswith("error: --held-out and --targets are for strings of digits, and AN4 has its own texts")
    said = recipe("speech", "--data", tmp_path, "--digits", "3-4", "--out", tmp_path / "out", fails=1)
    assert said.startswith("error: --digits and --first are for strings of digits, and AN4 has its own texts")


DENSE = Point(4, "dense", "dense", [0.04, 0.06], 20.0)
QUICKER = Point(4, "smyrf", "smyrf", [0.05, 0.03], 10.0)
WORSE = Point(4, "dense", "smyrf", [0.5, 0.5], 10.0)
SLOWER = Point(2, "local", "local", [0.02, 0.02], 30.0)


def test_the_frontier_and_who_is_best_in_no_more_time():
    found = [DENSE, WORSE, QUICKER, SLOWER]
    assert tables.frontier(found) == [QUICKER, SLOWER]
    said = tables.words(found, "digit", "FSDD")
    assert said == (
        "FSDD, 4 layers, dense: 5.0 ± 1.0 % digit errors in 20.0 ms an utterance; best in no more time: smyrf, 4 "
        "layers, 4.0 ± 1.0 % in 10.0 ms."
    )
    rows = tables.fixed_budget(found, "digit")[2]
    assert [(row[2], row[3], row[5]) for row in rows] == [
        ("smyrf", "smyrf", "best so far"),
        ("dense", "dense", ""),
        ("local", "local", "best so far"),
    ]
    lucky = Point(4, "local", "smyrf", [0.0, 0.0], 10.0)  # trained with another, which the errors would have to choose
    assert tables.fixed_budget([*found, lucky], "digit")[2] == rows
    assert tables.words([*found, lucky], "digit", "FSDD") == said
    assert tables.as_trained([DENSE, WORSE, lucky]) == [WORSE, DENSE]
    assert WORSE.words == "smyrf (trained with dense), 4 layers"
    assert tables.words([DENSE, SLOWER], "digit", "FSDD").endswith("in 20.0 ms an utterance; nothing is as quick.")


def test_a_mechanism_that_cannot_run_is_known_before_training(recordings, tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise ValueError("mechanism: expected another")

    monkeypatch.setattr("coterie.attention", refuses)
    out = tmp_path / "out"
    said = recipe("speech", "--data", recordings, "--mechanism", SPEC, "--quick", "--out", out, fails=1)
    assert said.startswith(f"error: {SPEC} cannot run in this model: mechanism: expected another")
    assert not out.exists()
