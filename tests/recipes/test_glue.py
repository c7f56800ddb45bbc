"""GLUE: its files, what is refused, and the whole command on a tiny model, killed and not."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from datasets import Dataset
from recipes.common.reading import read_tabs, similarity
from recipes.common.scores import accuracy, f1, mcc, pearson, spearman
from recipes.glue import run, tasks

from coterie.cli import hub
from coterie.cli.inputs import UserError
from tests.command import recipe
from tests.recipes.conftest import WORDS

GOOD = {"good", "fine"}


def sentences(count, seed=0, length=40):
    """Sentences, and whether they say something good."""
    draw = random.Random(seed)
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(3, length))
        yield " ".join(words), int(bool(GOOD & set(words)))


def write(file, rows, header=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [*([header] if header else []), *rows]
    file.write_text("".join("\t".join(map(str, row)) + "\n" for row in lines), encoding="utf-8")


@pytest.fixture
def glue(tmp_path):
    """CoLA without a header, SST-2 whose test set has labels, RTE whose `val.tsv` has no header, STS-B."""
    folder = tmp_path / "glue"
    for name, count in (("train", 48), ("val", 8), ("dev", 24)):
        rows = [("gj04", label, "*" * (1 - label), text) for text, label in sentences(count, name)]
        write(folder / "CoLA" / f"{name}.tsv", rows)
    write(folder / "CoLA" / "test.tsv", [(0, "a cat")], ("index", "sentence"))
    for name, count in (("train", 20), ("dev", 6), ("test", 10)):
        write(folder / "SST-2" / f"{name}.tsv", sentences(count, name), ("sentence", "label"))
    header = ("index", "sentence1", "sentence2", "label")
    for name, count in (("train", 10), ("val", 3), ("dev", 5)):
        named = [(i, a, "the cat", tasks.TASKS["rte"].labels[y]) for i, (a, y) in enumerate(sentences(count, name))]
        write(folder / "RTE" / f"{name}.tsv", named, None if name == "val" else header)
    columns = ("index", "genre", "file", "year", "old", "from1", "from2", "sentence1", "sentence2", "score")
    for name in ("train", "dev"):
        scored = [(i, *"gfyoss", a, "the dog", f"{y * 2.5:.3f}") for i, (a, y) in enumerate(sentences(7, name))]
        write(folder / "STS-B" / f"{name}.tsv", scored, columns)
    return folder


def test_files_are_read_as_their_tasks_write_them(glue):
    cola = tasks.load("cola", str(glue), None, None)
    assert (len(cola.train), len(cola.test), cola.classes, cola.score) == (56, 24, 2, mcc)  # val is put back
    text, label = next(sentences(1, "dev"))
    assert cola.test[0] == {"text": text, "label": label}
    sst2 = tasks.load("sst2", str(glue), None, None)
    assert (len(sst2.train), len(sst2.test)) == (20, 10)  # the test set has labels, so it is what GLUE calls dev
    rte = tasks.load("rte", str(glue), None, None)
    assert (len(rte.train), len(rte.test)) == (13, 5)
    text, label = next(sentences(1, "val"))
    assert rte.train[10] == {"text": text, "pair": "the cat", "label": label}
    stsb = tasks.load("stsb", str(glue), None, None)
    assert (stsb.classes, stsb.score) == (1, spearman)
    assert set(stsb.train["label"]) <= {0.0, 2.5}
    assert tasks.load("cola", str(glue / "CoLA"), None, None).test[:] == cola.test[:]  # the task's own folder


def test_what_is_left_out_is_said(glue, tmp_path, capsys):
    tasks.load("sst2", str(glue), None, None)
    assert "test.tsv has labels and is what is tested on; dev.tsv beside it is left out" in told(capsys)
    columns = ("id", "qid1", "qid2", "question1", "question2", "is_duplicate")
    for name in ("train", "dev"):
        write(tmp_path / "QQP" / f"{name}.tsv", [(7, 1, 2, "who?", "which cat?", 1)], columns)
    with (tmp_path / "QQP" / "train.tsv").open("a") as file:
        file.write('"\tWas there a cat? …\t0\n')
    qqp = tasks.load("qqp", str(tmp_path), None, None)
    assert qqp.train[:] == {"text": ["who?"], "pair": ["which cat?"], "label": [1]}
    assert "train.tsv: 1 lines with fewer than 6 columns are left out" in told(capsys)


def told(capsys):
    return " ".join(capsys.readouterr().err.split())


def test_some_examples_are_the_same_ones_each_time(glue):
    some = [tasks.load("cola", str(glue), 10, 5) for _ in range(2)]
    assert some[0].train[:] == some[1].train[:]
    assert (len(some[0].train), len(some[0].test)) == (10, 5)
    assert len(tasks.load("cola", str(glue), 10_000, None).train) == 56


def test_quotes_belong_to_the_text(tmp_path):
    rows = [("gj04", 1, "", '"Never," he said'), ("gj04", 0, "*", 'a "cat')]
    for name in ("train", "dev"):
        write(tmp_path / "CoLA" / f"{name}.tsv", rows)
    assert tasks.load("cola", str(tmp_path), None, None).train["text"][:] == ['"Never," he said', 'a "cat']


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "CoLA" / "train.tsv").unlink(), r"train\.tsv cannot be read: No such file"),
        (lambda f: (f / "CoLA" / "dev.tsv").unlink(), r"dev\.tsv cannot be read: No such file"),
        (lambda f: (f / "CoLA" / "train.tsv").write_text(""), r"train\.tsv is empty"),
        (lambda f: (f / "CoLA" / "train.tsv").write_bytes(b"gj04\t1\t\t\xff"), r"train\.tsv is not UTF-8"),
        (lambda f: write(f / "CoLA" / "dev.tsv", [("gj04", 1)]), r"dev\.tsv, line 1: expected 4 columns, got 2"),
        (lambda f: write(f / "CoLA" / "dev.tsv", [("g", 1, "", "a", "b")]), r"line 1: expected 4 columns, got 5"),
        (lambda f: write(f / "CoLA" / "dev.tsv", [("g", 2, "", "cat")]), r"dev\.tsv, line 1: .* labels 0, 1, got '2'"),
        (lambda f: write(f / "CoLA" / "dev.tsv", [(1, "cat")], ("x", "sentence")), r"dev\.tsv has no column 'label'"),
        (lambda f: write(f / "CoLA" / "dev.tsv", [], ("label", "sentence")), r"dev\.tsv has no examples"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_a_sentence(glue, change, said):
    change(glue)
    with pytest.raises(UserError, match=said):
        tasks.load("cola", str(glue), None, None)


def test_a_test_set_without_labels_is_passed_over(glue):
    before = tasks.load("cola", str(glue), None, None)
    for header in (None, ("index", "sentence")):
        write(glue / "CoLA" / "test.tsv", [(0, "a cat"), (1, "a dog")], header)
        assert tasks.load("cola", str(glue), None, None).test[:] == before.test[:]


def test_empty_cells_at_the_end_of_a_line_are_nothing(glue):
    write(glue / "CoLA" / "dev.tsv", [("g", 1, "", "a cat", "", "")])
    assert tasks.load("cola", str(glue), None, None).test["text"][:] == ["a cat"]


def test_numbers_that_are_none_are_named(glue):
    write(glue / "STS-B" / "dev.tsv", [("a", "b", "much")], ("sentence1", "sentence2", "score"))
    with pytest.raises(UserError, match=r"dev\.tsv, line 2: expected a number, got 'much'"):
        tasks.load("stsb", str(glue), None, None)


def test_tasks_and_folders_that_are_not_there(glue):
    with pytest.raises(UserError, match="--task must be one of cola, sst2"):
        tasks.load("kola", str(glue), None, None)
    with pytest.raises(UserError, match="no folder QNLI: expected GLUE's own layout"):
        tasks.load("qnli", str(glue), None, None)
    with pytest.raises(UserError, match=r"there are no data at '\./nowhere'"):
        tasks.load("cola", "./nowhere", None, None)


def test_scores_against_their_definitions():
    logits = [[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    labels = [1, 0, 0, 1, 1]  # answers 1 0 1 1 0: tp 2, tn 1, fp 1, fn 1
    assert accuracy(logits, labels) == pytest.approx(3 / 5)
    assert f1(logits, labels) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert mcc(logits, labels) == pytest.approx((2 * 1 - 1 * 1) / (3 * 3 * 2 * 2) ** 0.5)
    assert mcc([[1.0, 0.0]] * 5, labels) == 0.0
    assert spearman([[1.0], [1.0]], [0.0, 1.0]) == 0.0
    assert pearson([[1.0], [1.0]], [0.0, 1.0]) == 0.0
    assert spearman([[1.0], [2.0]], [3.0, 3.0]) == pearson([[1.0], [2.0]], [3.0, 3.0]) == 0.0
    x, y = [1.0, 2.0, 4.0, 3.0], [0.0, 1.0, 1.0, 5.0]  # means 2.5 and 1.75
    over = sum((a - 2.5) * (b - 1.75) for a, b in zip(x, y, strict=True))
    under = sum((a - 2.5) ** 2 for a in x) * sum((b - 1.75) ** 2 for b in y)
    assert pearson([[a] for a in x], y) == pytest.approx(over / under**0.5)


# --- the whole command ------------------------------------------------------------------------------------------------


def settings(glue, tiny_bert, out, *more):
    return ("--data", glue, "--model", tiny_bert, "--out", out, "--examples", 48, "--batch", 4, "--epochs", 2, *more)


def figures(out):
    """What must be equal in two runs: all but times and memory."""
    found = json.loads((out / "results.json").read_text())
    return [{key: r[key] for key in ("trained", "seed", "scores", "losses")} for r in found["results"]]


def test_the_command_prints_both_tables_and_writes_what_it_says(glue, tiny_bert, tmp_path):
    out = tmp_path / "out"
    mechanism = "smyrf:rounds=1,cluster_size=4"
    said = recipe("glue", *settings(glue, tiny_bert, out, "--mechanism", mechanism, "--seeds", 2))
    assert "CoLA" in said
    assert "2 seeds" in said
    assert "dense → clustered" in said
    found = json.loads((out / "results.json").read_text())
    assert [(r["trained"], r["seed"]) for r in found["results"]] == [
        (name, seed) for seed, name in itertools.product((0, 1), ("dense", mechanism))
    ]
    assert all(set(r["scores"]) == {"dense", mechanism} for r in found["results"])
    dense, smyrf = found["costs"]
    assert dense["scores"] == pytest.approx(dense["dense_scores"])
    assert 0 < smyrf["scores"] < dense["scores"]
    assert (out / "results.png").stat().st_size > 1000
    assert not list((out / "work").iterdir())
    again = recipe("glue", *settings(glue, tiny_bert, out, "--mechanism", mechanism, "--seeds", 2))
    assert said.splitlines()[:8] == again.splitlines()[:8]  # read, not trained again


def test_refusals_of_the_command(glue, tiny_bert, tmp_path):
    said = recipe("glue", *settings(glue, tiny_bert, tmp_path / "o", "--mechanism", "smurf"), fails=1)
    assert "smurf" in said
    said = recipe("glue", "--data", glue, "--model", tmp_path / "none", fails=1)
    assert "there is no model at" in said
    said = recipe("glue", "--data", tmp_path / "nothing", fails=1)
    assert "there are no data at" in said
    said = recipe("glue", *settings(glue, tiny_bert, tmp_path / "o", "--length", "4000"), fails=1)
    assert "128 positions" in said
    said = recipe("glue", *settings(glue, tiny_bert, tmp_path / "o", "--rate", "nan"), fails=1)
    assert "--rate must be a number above 0, not nan" in said
    assert not (tmp_path / "o").exists()  # nothing half-written


def test_a_hub_name_without_a_network_is_a_sentence(monkeypatch, tiny_bert):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = recipe("glue", "--data", "nobody/has-this", "--model", tiny_bert, fails=1)
    assert "the data set nobody/has-this could not be had from the hub" in said


def test_where_the_hub_is_not_known_nothing_waits_for_it(monkeypatch, tiny_bert):
    def unknown(*_):
        raise OSError("Name or service not known")

    for name in hub._PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("coterie.cli.hub.socket.getaddrinfo", unknown)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    said = recipe("glue", "--data", "nobody/has-this", "--model", tiny_bert, fails=1)
    assert "the data set nobody/has-this could not be had from the hub" in said
    assert "Retrying" not in said
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    assert hub.reachable()


def test_killed_half_way_it_ends_with_the_same_numbers(glue, tiny_bert, tmp_path):
    """SIGKILL in the middle of training, twice; the run that goes on gives the bits of one that was left alone."""
    more = ("--mechanism", "smyrf:rounds=1,cluster_size=4,resample=true", "--epochs", 6)
    arguments = settings(glue, tiny_bert, tmp_path / "killed", *more)
    command = [sys.executable, "-m", "recipes.glue", *map(str, arguments)]
    kills = 0
    for folder in ("dense-0", "smyrf-rounds-1-cluster_size-4-resample-true-0"):
        work = tmp_path / "killed" / "work" / folder
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        try:
            while process.poll() is None:
                if len(list(work.glob("checkpoint-*/complete"))) >= 2:
                    process.send_signal(signal.SIGKILL)
                    kills += 1
                    break
                time.sleep(0.01)
        finally:
            process.wait()
    assert kills == 2
    recipe("glue", *arguments)
    recipe("glue", *settings(glue, tiny_bert, tmp_path / "whole", *more))
    assert figures(tmp_path / "killed") == figures(tmp_path / "whole")


def test_a_checkpoint_that_was_not_finished_is_not_taken(tmp_path):
    from recipes.common.training import last_checkpoint

    assert last_checkpoint(tmp_path) is None
    for step, complete in ((9, True), (10, True), (100, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / "complete").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_two_processes_share_out_the_same_batches(glue, tiny_bert, tmp_path):
    """As many steps as one process makes, losses of the same size, and one of them writes."""
    found = []
    for count in (1, 2):
        out = tmp_path / str(count)
        given = settings(glue, tiny_bert, out, "--mechanism", "dense")
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}", "-m", "recipes.glue"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([*launch, *map(str, given)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("wrote") == 2
        found.append(figures(out)[0]["losses"])
    assert [step for step, _ in found[0]] == [step for step, _ in found[1]]
    for (_, alone), (_, shared) in zip(*found, strict=True):
        assert shared == pytest.approx(alone, abs=0.1)  # dropout draws other numbers in each process


def test_a_model_that_was_fine_tuned_on_the_task_is_not_fine_tuned_on_it_again(glue, tiny_bert, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(tiny_bert, again)
    (again / "fine_tuned.json").write_text('{"task": "CoLA", "seed": 0}')
    said = recipe("glue", "--data", glue, "--model", again, "--out", tmp_path / "out", fails=1)
    assert "was fine-tuned on this task already" in said
    assert not (tmp_path / "out").exists()


def test_labels_from_the_hub_are_checked(monkeypatch):
    def fetched(labels, text="a cat"):
        part = Dataset.from_dict({"sentence": [text] * len(labels), "label": labels})
        monkeypatch.setattr(tasks, "from_hub", lambda *_: {"train": part, "validation": part})
        return tasks.load("cola", "nyu-mll/glue", None, None)

    assert fetched([0, 1]).test["label"][:] == [0, 1]
    with pytest.raises(UserError, match=r"train, example 1: expected a label below 2, got -1"):
        fetched([0, -1])
    with pytest.raises(UserError, match=r"train, example 0: expected a text, got None"):
        fetched([0], text=None)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "5.01"])
def test_similarities_are_from_0_to_5(text):
    with pytest.raises(UserError, match=f"line 3: expected a number from 0 to 5, got '{text}'"):
        similarity(text, "line 3")


def test_lines_are_counted_as_editors_do(tmp_path):
    file = tmp_path / "x.tsv"
    file.write_bytes(b"\xef\xbb\xbfa\tb\r\n\r\n" + b"long" * 50_000 + b'\t"c\n')
    assert read_tabs(file) == [(1, ["a", "b"]), (3, ["long" * 50_000, '"c'])]


def test_large_tasks_are_cut_to_what_half_an_hour_is_enough_for(tmp_path, monkeypatch):
    asked = []

    def stop(task, data, model, settings):
        asked.append((settings.examples, settings.tests))
        raise UserError("enough")

    monkeypatch.setattr("recipes.glue.run.tuning", stop)
    for arguments in (
        {"task": "cola"},
        {"task": "mnli"},
        {"task": "qqp", "examples": 0, "tests": 0},
        {"task": "sst2", "examples": 9000},
        {"task": "rte", "examples": 10, "tests": 5},
    ):
        with pytest.raises(UserError, match="enough"):
            run.main("nowhere", **arguments)
    assert asked == [(None, None), (4000, 2000), (None, None), (9000, 2000), (10, 5)]
