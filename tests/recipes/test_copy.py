"""Masked copy: the sequences, the model, resumed runs, what is refused, and the whole command on tiny models."""

import doctest
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from recipes.common.progress import Bar
from recipes.copy import learning, tables
from recipes.copy.cells import Cell, cells_of, check
from recipes.copy.costs import costs
from recipes.copy.learning import Learner, Schedule, accuracy
from recipes.copy.network import Copier, Shape, read
from recipes.copy.sequences import MASK, SEPARATOR, SYMBOLS, batch, causal_copy, masked_copy

from coterie.cli.inputs import UserError
from tests.command import recipe

TINY = Shape(layers=1, width=8, heads=2)
SCHEDULE = Schedule(steps=6, rate=1e-3, warmup=2, tokens=32, tests=3, every=2)
SILENT = Bar(lambda what, done, total: None, 1)


@pytest.mark.parametrize("name", ["copy.sequences", "copy.network", "copy.cells", "common.templates"])
def test_the_examples_of_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"recipes.{name}"))
    assert found.attempted
    assert not found.failed


# --- sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [8, 30, 64])
def test_masked_copies(length):
    seen, wanted, scored = masked_copy(50, length, torch.Generator().manual_seed(1))
    symbols = length // 2 - 1
    for row, truth, hidden in zip(seen.tolist(), wanted.tolist(), scored.tolist(), strict=True):
        assert len(row) == length
        assert truth[0] == truth[symbols + 1] == SEPARATOR
        word = truth[1 : symbols + 1]
        assert truth[symbols + 2 :] == word
        assert set(word) <= set(range(1, SYMBOLS + 1))
        first, second = hidden[1 : symbols + 1], hidden[symbols + 2 :]
        assert not any(a and b for a, b in zip(first, second, strict=True))  # one of both can always be read
        assert sum(hidden) == round(0.4 * symbols)
        assert row == [MASK if covered else each for each, covered in zip(truth, hidden, strict=True)]
    sides = scored.sum(0)
    assert sides[: symbols + 1].sum() == pytest.approx(sides[symbols + 1 :].sum(), rel=0.5)


@pytest.mark.parametrize("length", [8, 30])
def test_causal_copies(length):
    seen, wanted, scored = causal_copy(20, length, torch.Generator().manual_seed(1))
    symbols = length // 2
    for row, truth in zip(seen.tolist(), wanted.tolist(), strict=True):
        whole = [*row, truth[-1]]
        assert row[1:] == truth[:-1]
        assert whole == [*whole[:symbols], SEPARATOR, *whole[:symbols]]
    assert scored.tolist() == 20 * [[place >= symbols for place in range(length)]]


def test_batches_follow_from_seed_and_step_and_tests_are_fresh():
    def drawn(*where, fresh=False):
        return batch("masked", 4, 64, *where, fresh=fresh).wanted.flatten().tolist()

    assert drawn(3, 7) == drawn(3, 7)
    places = [(seed, step) for seed in (0, 1, 1023) for step in (0, 1, 2**20 - 1)]
    found = [drawn(*place, fresh=fresh) for place in places for fresh in (False, True)]
    assert len({tuple(each) for each in found}) == len(found)


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", ["topk:k=99", "near-far:near=99", "strided:stride=1", "fixed:stride=99"])
def test_layers_that_meet_everybody_are_pytorchs(spec, causal):
    torch.manual_seed(0)
    dense, ours = (Copier(each, 13, Shape(2, 8, 2), causal=causal).double() for each in ("dense", spec))
    ours.load_state_dict(dense.state_dict())
    seen, push = torch.randint(12, (2, 13)), torch.randn(2, 13, 12, dtype=torch.float64)
    found, wanted = ours(seen), dense(seen)
    torch.testing.assert_close(found, wanted)
    pairs = (
        torch.autograd.grad(out, list(model.parameters()), push) for out, model in ((found, ours), (wanted, dense))
    )
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("spec", ["dense", "smyrf:cluster_size=4", "local:window=4", "dynamic-conv:kernel=4"])
def test_a_causal_model_does_not_see_what_comes_later(spec):
    torch.manual_seed(0)
    model = Copier(spec, 12, TINY, causal=True).double()
    seen = torch.randint(1, 11, (1, 12))
    other = torch.cat([seen[:, :7], (seen[:, 7:] % 10) + 1], 1)
    if not spec.startswith("smyrf"):  # which groups by later tokens too, and averages none of them in
        torch.testing.assert_close(model(seen)[:, :7], model(other)[:, :7])
    assert not torch.allclose(model(seen)[:, 7:], model(other)[:, 7:])


@pytest.mark.parametrize("spec", ["isab:points=3", "dynamic-conv:kernel=5", "strided:stride=3", "clustered:clusters=3"])
def test_every_parameter_learns(spec):
    model = Copier(spec, 10, TINY)
    learning.loss_of(model, "masked", 3, 10, 0, 0).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())


def test_names_that_there_are_not():
    for spec, message in [
        ("isab:points=none", r"isab: expected points=NUMBER, got 'points=none'"),
        ("isab:kernel=3", r"isab: expected points=NUMBER, got 'kernel=3'"),
        ("dynamic-conv:kernel=0", r"dynamic-conv: expected kernel=NUMBER, got 'kernel=0'"),
        ("smurf", r"mechanism: expected one of smyrf"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(spec)


class Copies(torch.nn.Module):
    """Reads each masked symbol in the other copy."""

    def forward(self, seen):
        other = seen.roll(seen.shape[1] // 2, 1)
        return torch.nn.functional.one_hot(torch.where(seen == MASK, other, seen), 12).double()


class Constant(torch.nn.Module):
    """Always says 1."""

    def forward(self, seen):
        return torch.nn.functional.one_hot(torch.ones_like(seen), 12).double()


def test_the_accuracy_of_who_can_copy_and_of_who_cannot():
    schedule = SCHEDULE._replace(tests=400)
    assert accuracy(Copies(), "masked", schedule, 32, 0, 5) == 1
    examples = batch("masked", 400, 32, 0, 5, fresh=True)
    ones = (examples.wanted[examples.scored] == 1).double().mean()
    found = accuracy(Constant(), "masked", schedule, 32, 0, 5)
    assert found == pytest.approx(float(ones))
    assert 0.05 < found < 0.15


# --- learning ---------------------------------------------------------------------------------------------------------

CELL = Cell("smyrf", 0, "smyrf:rounds=1,cluster_size=4,resample=true", 10)


def figures(result):
    return {key: value for key, value in result.items() if not key.startswith("seconds")}


def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(tmp_path, monkeypatch):
    whole = Learner(CELL, "masked", TINY, SCHEDULE, 1, tmp_path / "whole").learn(SILENT)
    assert [step for step, _ in whole["tests"]] == [2, 4, 6]
    assert (whole["steps"], len(Learner(CELL, "masked", TINY, SCHEDULE, 1, tmp_path / "whole").seconds)) == (6, 6)
    killed = Learner(CELL, "masked", TINY, SCHEDULE, 1, tmp_path / "killed")
    step = killed._step

    def stop():
        if killed.step == 5:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(killed, "_step", stop)
    with pytest.raises(KeyboardInterrupt):
        killed.learn(SILENT)
    torch.manual_seed(99)  # what another process would have
    again = Learner(CELL, "masked", TINY, SCHEDULE, 1, tmp_path / "killed")
    assert again.step == 4
    assert figures(again.learn(SILENT)) == figures(whole)
    assert len(again.seconds) == 6


def test_it_stops_when_it_is_solved(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "SOLVED", -1.0)
    found = Learner(CELL, "masked", TINY, SCHEDULE, 0, tmp_path).learn(SILENT)
    assert (found["solved"], found["steps"], len(found["tests"])) == (True, 2, 1)


def test_a_model_learns_the_shortest_copy(tmp_path):
    cell = Cell("dense", 0, "dense", 8)
    schedule = Schedule(steps=400, rate=1e-2, warmup=10, tokens=256, tests=100, every=25)
    found = Learner(cell, "masked", Shape(2, 16, 2), schedule, 0, tmp_path).learn(SILENT)
    assert found["accuracy"] > 0.9  # a guess is 0.1


def test_a_rate_that_is_too_high_is_a_sentence(tmp_path):
    schedule = SCHEDULE._replace(rate=1e30, warmup=0)
    with pytest.raises(UserError, match=r"diverged at length 10 \(the loss of step .* try a --rate below 1e\+30"):
        Learner(CELL, "masked", TINY, schedule, 0, tmp_path).learn(SILENT)


def test_what_a_step_costs():
    names = ["dense", "topk:k=3", "dynamic-conv:kernel=3", "isab:points=3"]
    rows = costs(names, "masked", 16, TINY, SCHEDULE, 1)
    assert [row["scores"] for row in rows] == [16, 3, None, 3]
    assert all(row["step"] > 0 and row["sequences"] == 2 for row in rows)
    assert costs(["dense"], "causal", 16, TINY, SCHEDULE, 1)[0]["scores"] == 17 / 2


# --- cells ------------------------------------------------------------------------------------------------------------


def test_every_mechanism_is_trained_once_a_length():
    found = cells_of(["full", "clustered:clusters={clusters}", "clustered:clusters=9", "dense"], [5, 9], [32, 64])
    names = ["dense", "clustered:clusters=5", "clustered:clusters=9"]
    assert [(cell.length, cell.mechanism) for cell in found] == [(n, name) for n in (32, 64) for name in names]
    assert [cell.clusters for cell in found[:3]] == [0, 5, 9]
    assert found[4].name(2) == "clustered-clusters-5-64-2"


@pytest.mark.parametrize(
    ("task", "spec", "length", "shape", "message"),
    [
        ("poetry", "dense", 32, TINY, r"--task must be one of masked, causal, not 'poetry'"),
        ("masked", "dense", 33, TINY, r"--lengths must be even and at least 8, as there are two copies, not 33"),
        ("masked", "dense", 6, TINY, r"--lengths must be even and at least 8, .* not 6"),
        ("masked", "dense", 32, Shape(1, 9, 2), r"--width 9 must be a multiple of --heads 2"),
        ("causal", "clustered", 32, TINY, r"clustered cannot run on the causal copy: is_causal: expected False"),
        (
            "causal",
            "isab",
            32,
            TINY,
            r"isab:points=32 cannot run on the causal copy: is_causal: expected False for ind",
        ),
    ],
)
def test_what_cannot_be_trained(task, spec, length, shape, message):
    with pytest.raises(UserError, match=message):
        check(cells_of([spec], [1], [length]), task, shape)


# --- tables -----------------------------------------------------------------------------------------------------------


def result(mechanism, length, seed, steps, right, template=None, clusters=0):
    cell = Cell(template or mechanism, clusters, mechanism, length)._asdict()
    return {**cell, "seed": seed, "solved": right > 0.99, "steps": steps, "accuracy": right, "seconds": steps / 10}


FOUND = [
    result("dense", 32, 0, 100, 1.0),
    result("dense", 32, 1, 200, 0.995),
    result("dense", 64, 0, 300, 1.0),
    result("dense", 64, 1, 900, 0.5),
    *(
        result("clustered:clusters=5", n, s, 900, 0.2, "clustered:clusters={clusters}", 5)
        for n in (32, 64)
        for s in (0, 1)
    ),
]


def test_the_table_and_the_words_say_who_solved_what():
    title, columns, rows = tables.solved(FOUND, "masked")
    assert "2 seeds" in title
    assert columns == ["layers mix by", "N = 32", "N = 64"]
    assert rows[0] == ["dense", "150 steps, 15 s", "1 of 2: 300 steps, 30 s"]
    assert rows[1][1] == "no: 20.0 ± 0.0 % at 900 steps"
    said = tables.words(FOUND, "masked").splitlines()
    assert said[0] == "masked copy, N = 32: solved by dense (150 steps); not by clustered:clusters=5 (20.0 ± 0.0 %)."
    assert "not by dense (75.0 ± 25.0 %, 1 of 2 seeds), clustered" in said[1]


def test_a_heat_map_for_each_template():
    from matplotlib.figure import Figure

    assert tables.panels(FOUND) == ["clustered:clusters={clusters}", ""]
    assert tables.panels(FOUND[:4]) == [""]
    axes = Figure().subplots(1, 2)
    tables.draw(*axes, found=FOUND)
    assert [each.get_text() for each in axes[1].texts] == ["150", "75 %\n1 of 2"]
    assert [each.get_text() for each in axes[0].get_yticklabels()] == ["5"]


# --- the whole command ------------------------------------------------------------------------------------------------

SMALL = ["--layers", 1, "--width", 8, "--heads", 2, "--tokens", 32, "--tests", 3, "--steps", 4, "--every", 2]


def test_the_command_prints_its_tables_and_goes_on(tmp_path):
    out = tmp_path / "study"
    arguments = [*SMALL, "--lengths", "10,8", "--clusters", "2,3", "--out", out]
    arguments += ["--mechanism", "dense", "--mechanism", "improved-clustered:clusters={clusters},topk=3"]
    said = recipe("copy", *arguments)
    assert "N = 10" in said
    assert "ms a step" in said
    found = json.loads((out / "results.json").read_text())
    assert len(found["results"]) == 2 * 3
    assert len(found["costs"]) == 2 * 3
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "masked copy, N = 8:" in found["words"]
    again = recipe("copy", *arguments, "--seeds", 2)
    assert "2 seeds" in again
    more = json.loads((out / "results.json").read_text())["results"]
    assert [each for each in more if each["seed"] == 0] == found["results"]


def test_the_causal_copy_runs_with_what_can(tmp_path):
    said = recipe("copy", "--task", "causal", *SMALL, "--lengths", "8", "--quick", "--out", tmp_path / "study")
    assert "causal copy, N = 8: not by dense" in " ".join(said.split())


def test_killed_half_way_it_ends_with_the_same_numbers(tmp_path):
    """SIGKILL in the middle of training; the run that goes on gives the bits of one that was left alone."""
    given = ["--mechanism", CELL.mechanism, *SMALL[:-4], "--steps", 60, "--every", 5, "--lengths", "10"]
    command = [sys.executable, "-m", "recipes.copy", *map(str, given), "--out", str(tmp_path / "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    file = tmp_path / "killed" / "work" / f"{CELL.name(0)}" / "checkpoint.pt"
    try:
        while process.poll() is None and not file.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        assert process.wait() == -signal.SIGKILL
    assert file.exists()
    for name in ("killed", "whole"):
        recipe("copy", *given, "--out", tmp_path / name)
    results = [json.loads((tmp_path / name / "results.json").read_text())["results"] for name in ("killed", "whole")]
    assert [figures(each) for each in results[0]] == [figures(each) for each in results[1]]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--mechanism", "smurf"), "--mechanism smurf: mechanism: expected one of"),
        (("--mechanism", "smurf:x={clusters}"), "--mechanism smurf:x={clusters} with 15"),
        (("--task", "poetry"), "--task must be one of masked, causal, not 'poetry'"),
        (("--lengths", "32,x"), "--lengths must be numbers separated by commas, not '32,x'"),
        (("--lengths", "33"), "--lengths must be even and at least 8"),
        (("--clusters", "0"), "--clusters must be at least 1, not '0'"),
        (("--rate", "0"), "--rate must be above 0 and a number, not 0"),
        (("--rate", "nan"), "--rate must be above 0 and a number, not nan"),
        (("--rate", "inf"), "--rate must be above 0 and a number, not inf"),
        (("--seeds", "1025"), "--seeds must be at most 1,024, not 1,025"),
        (("--task", "causal", "--mechanism", "clustered"), "clustered cannot run on the causal copy"),
    ],
)
def test_refusals_write_nothing(tmp_path, more, said):
    found = recipe("copy", *more, "--out", tmp_path / "out", fails=1)
    assert said in " ".join(found.split())
    assert not (tmp_path / "out").exists()


def test_a_study_does_not_go_on_with_another_rate(tmp_path):
    recipe("copy", "--mechanism", "dense", *SMALL, "--lengths", "8", "--out", tmp_path)
    said = recipe("copy", "--mechanism", "dense", *SMALL, "--lengths", "8", "--rate", 0.5, "--out", tmp_path, fails=1)
    assert "holds a study with another rate" in " ".join(said.split())


def test_ratios_of_times_are_to_dense_attention_wherever_it_stands():
    measured = [
        {"mechanism": name, "length": 32, "sequences": 1, "step": step, "peak_bytes": 0, "scores": None}
        for name, step in (("local:window=8", 0.004), ("dense", 0.002))
    ]
    _, columns, rows = tables.times(measured)
    assert "ms a step (to dense)" in columns
    assert [row[3] for row in rows] == ["4 (2.00×)", "2 (1.00×)"]
    assert "ms a step (to local:window=8)" in tables.times(measured[:1])[1]
