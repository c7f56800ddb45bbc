"""Benchmark history: what --save writes, --against reads; other machines and other files are named."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from benchmarks import records, speed
from benchmarks.records import AGAINST_REFERENCE, AGAINST_SDPA, MEMORY, Figure, Record, compare
from rich.console import Console

import coterie

FIGURES = [
    Figure("smyrf, 8,192, forward", AGAINST_SDPA, 20.0, {"sdpa": 0.4, "ours": 0.02}),
    Figure("smyrf, 8,192, forward", AGAINST_REFERENCE, 5.0, {"reference": 0.1, "native": 0.02}),
    Figure("near-far, 65,536, forward: peak memory", MEMORY, None),
]
MACHINE = {"cpu": "Abacus 1", "cores": 2, "instruction_set": "avx2", "threads": 2, "torch": "2.13.0"}


def record(figures=FIGURES, note="", **machine):
    return Record(MACHINE | machine, "0.1.0", "0123456789ab", "2026-01-02", 3, note, figures)


def shown(*parts):
    text = io.StringIO()
    Console(width=200, file=text).print(*parts, sep="\n")
    return text.getvalue()


def cells(text, case, unit):
    """The cells of one row."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if case in line]
    [found] = [row[2:] for row in rows if row[1] == unit]
    return found


def test_a_record_comes_back(tmp_path):
    path = tmp_path / "new" / "0.1.0.json"
    record(note="on a train").write(path)
    assert Record.read(path) == record(note="on a train")
    assert json.loads(path.read_text())["format"] == records.FORMAT


def test_here_says_where_and_what():
    found = Record.here(FIGURES, repeats=5, note="x")
    assert found.coterie == coterie.__version__
    assert found.machine["instruction_set"] in coterie.backends()["native"]
    assert all(found.machine[name] for name in records.SAME_MACHINE)
    assert (found.repeats, found.note, found.figures) == (5, "x", FIGURES)


def test_the_commit_is_what_git_says(tmp_path):
    assert records.commit(tmp_path) == "unknown"
    (tmp_path / "store" / "logs").mkdir(parents=True)
    zero, one = "0" * 40, "abcdef0123456789" * 2 + "01234567"
    (tmp_path / "store" / "logs" / "HEAD").write_text(f"{zero} {zero} A <a> 1 +0\tone\n{zero} {one} A <a> 2 +0\ttwo\n")
    (tmp_path / ".git").write_text("gitdir: store\n")  # a worktree
    assert records.commit(tmp_path) == one[:12]


def test_the_same_machine_compares_everything():
    faster = [FIGURES[0]._replace(value=30.0, seconds={"sdpa": 0.3, "ours": 0.01}), *FIGURES[1:]]
    notes, table = compare(record(), record(faster))
    text = shown(table)
    assert notes == []
    assert cells(text, "smyrf", AGAINST_SDPA) == ["20.00", "30.00", "1.50", "20.0", "10.0"]
    assert cells(text, "smyrf", AGAINST_REFERENCE) == ["5.00", "5.00", "1.00", "20.0", "20.0"]
    assert cells(text, "near-far", MEMORY) == ["–"] * 5


def test_another_machine_compares_ratios_against_sdpa_alone():
    notes, table = compare(record(note="on a train"), record(cpu="Abacus 2", instruction_set="portable"))
    text = shown(*notes, table)
    assert "cpu: Abacus 1 then, Abacus 2 now" in notes
    assert "instruction_set: avx2 then, portable now" in notes
    assert "seconds cannot be compared" in text
    assert "on a train" in text
    assert cells(text, "smyrf", AGAINST_SDPA) == ["20.00", "20.00", "1.00"]
    assert AGAINST_REFERENCE not in text
    assert "near-far" not in text


def test_another_torch_is_named():
    notes, table = compare(record(), record(torch="9.9"))
    assert notes == ["torch 2.13.0 then, 9.9 now: SDPA may have changed."]
    assert cells(shown(table), "smyrf", AGAINST_SDPA)[-1] == "20.0"


def test_cases_of_one_run_alone_stay_visible():
    other = [Figure("routing, 8,192, forward", AGAINST_SDPA, 7.0, {"sdpa": 0.7, "ours": 0.1})]
    text = shown(compare(record(FIGURES[:1]), record(other))[1])
    assert cells(text, "smyrf", AGAINST_SDPA) == ["20.00", "–", "–", "20.0", "–"]
    assert cells(text, "routing", AGAINST_SDPA) == ["–", "7.00", "–", "–", "100.0"]


GOOD = json.loads(json.dumps({"format": records.FORMAT, **record([])._asdict()}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "expected a JSON file"),
        ("[1, 2]", "expected a file that .* --save"),
        ('{"settings": {}, "sweep": []}', "expected a file that .* --save"),
        (json.dumps(GOOD | {"format": "coterie speed, 999"}), "expected a file that .* --save"),
        (json.dumps({key: GOOD[key] for key in ("format", "machine")}), "missing .* 'figures'"),
        (json.dumps(GOOD | {"extra": 1}), "extra"),
        (json.dumps(GOOD | {"figures": 3}), "expected the fields"),
        (json.dumps(GOOD | {"machine": 3}), "expected the fields"),
        (json.dumps(GOOD | {"figures": [{"case": "a", "unit": "b", "value": "c"}]}), "a without numbers"),
        (json.dumps(GOOD | {"figures": [{"unit": "b"}]}), "'case'"),
        (json.dumps(GOOD | {"figures": [{"case": "a", "unit": "b", "value": 1, "seconds": 2}]}), "expected the fields"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content, message):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        Record.read(path)
    assert str(path) in str(raised.value)


@pytest.fixture
def command(monkeypatch):
    """`python -m benchmarks.speed` with figures that nobody had to wait for."""
    monkeypatch.setattr(speed, "check", list)
    monkeypatch.setattr(speed, "promises", lambda repeats: ("promises", FIGURES[:1]))
    monkeypatch.setattr(speed, "backends", lambda repeats: ("backends", FIGURES[1:]))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["speed", *map(str, arguments)])
        speed.main()

    return run


def test_saved_and_compared_by_the_command(command, capsys, tmp_path):
    path = tmp_path / "now.json"
    command("--save", path, "--note", "quiet")
    assert Record.read(path).figures == FIGURES
    command("--against", path)
    text = capsys.readouterr().out
    assert "Note of" in text
    assert "quiet" in text
    assert cells(text, "smyrf", AGAINST_SDPA) == ["20.00", "20.00", "1.00", "20.0", "20.0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "gone.json"], "No such file.*gone.json"),
        (["--against", "pyproject.toml"], "expected a JSON file, got pyproject.toml"),
        (["--save", "pyproject.toml/now.json"], "Not a directory.*now.json"),
        (["--note", "alone"], "--note: expected --save"),
    ],
)
def test_the_command_refuses_before_it_measures(command, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(Path(__file__).parent.parent)
    monkeypatch.setattr(speed, "check", lambda: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_every_release_in_the_history_can_be_read():
    files = sorted((Path(records.__file__).parent / "history").glob("*.json"))
    assert [path.stem for path in files] == [Record.read(path).coterie for path in files]


def test_runs_are_appended_and_each_machine_has_a_column(tmp_path):
    path = tmp_path / "new" / "runs.jsonl"
    slower = [FIGURES[0]._replace(value=10.0)]
    for each in (record(), record(slower), record(slower, cpu="Abacus 2")):
        each.append(path)
    assert Record.read_all(path) == [record(), record(slower), record(slower, cpu="Abacus 2")]
    text = shown(records.columns(Record.read_all(path)))
    assert "Abacus 1, avx2, 2 threads (2 runs)" in text
    assert "Abacus 2, avx2, 2 threads (1 run)" in text
    (row,) = (line for line in text.splitlines() if "15.0 (10.0–20.0)" in line)  # the median, and the range
    assert "10.0 " in row.rpartition("│")[0].rpartition("│")[2]
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="expected a file that"):
        Record.read_all(path)
