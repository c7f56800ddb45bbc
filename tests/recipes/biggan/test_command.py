"""The commands: a study, killed and not; images from what it kept; conversion; costs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from PIL import Image
from recipes.biggan.generator import Generator
from recipes.biggan.pretrained import save_pretrained
from recipes.common import command

from recipes.biggan import convert, costs, sample, source
from tests.command import _said, recipe
from tests.recipes.biggan.conftest import TINY

MECHANISM = "smyrf:rounds=1,cluster_size=128,resample=true"


def settings(folder, out, *more):
    small = ("--quick", "--ch", 2, "--dim-z", 6, "--batch", 4, "--steps", 3, "--tests", 8, "--no-bf16")
    return ("--data", folder, "--out", out, *small, "--mechanism", MECHANISM, *more)


def figures(out):
    """What must be equal in two runs: all but times."""
    found = json.loads((out / "results.json").read_text())
    return [{key: value for key, value in r.items() if key != "seconds_per_step"} for r in found["results"]]


def test_a_study_says_and_keeps_what_came_out(folder, tmp_path):
    out = tmp_path / "out"
    said = recipe("biggan", *settings(folder, out, "--max-error", 0.5, "--look", 1, "--ema", 0.9))
    assert "not FID" in said
    found = json.loads((out / "results.json").read_text())
    assert found["tables"][2]["title"] == f"rounds of g.blocks.2.1, {MECHANISM}"
    assert [r["trained"] for r in found["results"]] == ["dense", MECHANISM]
    dense, smyrf = found["results"]
    assert dense["pairs"] == 1
    assert smyrf["pairs"] >= 1 / 8  # of a round; the schedule may have taken more
    assert set(dense["quality"]) == {"dense", MECHANISM}
    assert dense["rounds"] == []
    assert [entry[0] for entry in smyrf["rounds"]] == [1, 2, 3]
    pictures = out / "pictures" / "dense-0"
    assert {file.name for file in pictures.glob("*.png")} >= {"film.png", "losses.png", "step-000003.png"}
    model = out / "models" / "dense-0"
    ours, theirs = source.generator(model, None), source.generator(model / "biggan-pytorch", None)
    z = torch.randn(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(ours(z), theirs(z))
    again = recipe("biggan", *settings(folder, out, "--max-error", 0.5, "--look", 1, "--ema", 0.9))
    assert said.splitlines()[:8] == again.splitlines()[:8]  # read, not trained again


def test_killed_half_way_it_ends_with_the_same_numbers(folder, tmp_path):
    """SIGKILL in the middle of training; what goes on gives the bits of a run that was left alone."""
    arguments = settings(folder, tmp_path / "killed", "--steps", 6, "--max-error", 0.5, "--look", 2)
    line = [sys.executable, "-m", "recipes.biggan", *map(str, arguments)]
    checkpoint = tmp_path / "killed" / "work" / "smyrf-rounds-1-cluster_size-128-resample-true-0" / "training.pt"
    # Convolutions sum in another order on another number of threads.
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while process.poll() is None and not checkpoint.exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.wait()
    assert process.returncode == -signal.SIGKILL
    recipe("biggan", *arguments)
    recipe("biggan", *settings(folder, tmp_path / "whole", "--steps", 6, "--max-error", 0.5, "--look", 2))
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")
    name = "models/smyrf-rounds-1-cluster_size-128-resample-true-0/model.safetensors"
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--ttur", "both"), "--ttur must be one of supplement, code, got 'both'"),
        (("--mechanism", "smurf"), "smurf"),
        (("--batch", 6, "--accumulate", 4), "--batch 6 cannot be cut into 4 equal parts"),
        (("--tests", 24), "there are 24 images, of which --tests 24 are kept aside"),
        (("--resolution", 48), "resolution: expected one of 32, 64"),
        (("--resolution", 64, "--ch", 4), "is 32×32 instead of 64×64"),
        (("--attention", 12), "attention: expected some of 8, 16, 32, got 12"),
        (("--d-attention", 32), "d_attention: expected some of 8, 16, got 32"),
        (("--inception", "nowhere.pt"), "--inception nowhere.pt is not Inception"),
        (("--data", "nowhere"), "there is no folder nowhere"),
    ],
)
def test_refusals_come_before_anything_is_written(folder, tmp_path, more, said):
    assert said in recipe("biggan", *settings(folder, tmp_path / "out", *more), fails=1)
    assert not (tmp_path / "out").exists()


def test_options_that_need_others(folder, tmp_path):
    dense = [*settings(folder, tmp_path / "out", "--max-error", 0.5)]
    dense[dense.index(MECHANISM)] = "dense"
    assert "--max-error adapts the rounds of SMYRF" in recipe("biggan", *dense, fails=1)
    said = recipe("biggan", "--quick", "--conditional", "--out", tmp_path / "out", fails=1)
    assert "--conditional needs images with classes" in said


@pytest.fixture
def model(tmp_path):
    save_pretrained(Generator(TINY), tmp_path / "model")
    return tmp_path / "model"


def run_sample(*arguments, fails=0):
    return _said(lambda: command.run("biggan.sample", sample.main), arguments, fails)


def test_sampling(model, tmp_path):
    said = run_sample(model, "--out", tmp_path / "out", "--count", 6, "--columns", 3, "--truncation", 0.5)
    assert "samples.png" in said
    with Image.open(tmp_path / "out" / "samples.png") as sheet, Image.open(tmp_path / "out" / "between.png") as path:
        assert sheet.size == ((3 * 34 + 2) * 3, (2 * 34 + 2) * 3)
        assert path.size == ((3 * 34 + 2) * 3, (3 * 34 + 2) * 3)
    first = (tmp_path / "out" / "samples.png").read_bytes()
    run_sample(model, "--out", tmp_path / "out", "--count", 6, "--columns", 3, "--truncation", 0.5)
    assert (tmp_path / "out" / "samples.png").read_bytes() == first
    assert "knows the classes 0 … 0" in run_sample(model, "--class", 3, fails=1)
    assert "smurf" in run_sample(model, "--mechanism", "smurf", fails=1)
    assert "holds no generator" in run_sample(tmp_path / "out", fails=1)


def run_convert(*arguments, fails=0):
    return _said(lambda: command.run("biggan.convert", convert.main), arguments, fails)


def test_conversion_there_and_back(model, tmp_path):
    run_convert(model, tmp_path / "theirs", "--to", "biggan-pytorch")
    assert (tmp_path / "theirs" / "G.pth").exists()
    run_convert(tmp_path / "theirs", tmp_path / "ours")
    same = [(folder / "model.safetensors").read_bytes() for folder in (model, tmp_path / "ours")]
    assert same[0] == same[1]
    assert "is there already" in run_convert(model, tmp_path / "ours", fails=1)
    assert "--to must be" in run_convert(model, tmp_path / "new", "--to", "onnx", fails=1)


def test_costs(tmp_path, monkeypatch):
    """In this process, where they are measured as in another."""
    monkeypatch.setattr(costs, "in_process", costs.measure)
    monkeypatch.setattr(costs, "parameters", lambda *_: 0)

    def run(*arguments, fails=0):
        line = ("--out", tmp_path / "costs.json", "--channels", 16, "--ch", 8, "--resolution", 32, *arguments)
        return _said(lambda: command.run("biggan.costs", costs.main), line, fails)

    said = run("--whole")
    assert "whole step of D and G" in said
    rows = json.loads((tmp_path / "costs.json").read_text())["rows"]
    assert [(r["what"], r["mechanism"]) for r in rows] == [
        (what, name)
        for what in ("block", "step")
        for name in ("written-out", "dense", "smyrf:rounds=4,cluster_size=128")
    ]
    assert all(r["seconds"] > 0 for r in rows)
    monkeypatch.setattr(costs, "free_bytes", lambda: 1000)
    assert "needs > " in run()
    assert "smurf" in run("--mechanism", "smurf", fails=1)


def test_costs_of_a_process_of_its_own():
    found = costs.in_process("block", 32, 16, 1, "dense", False, False)
    assert found is not None
    assert found["seconds"] > 0
    assert costs.map_bytes(128, 1) == 4 * 16_384 * 4_096
