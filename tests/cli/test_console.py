"""Tables on narrow terminals: nothing is cut off."""

from __future__ import annotations

import pytest

from coterie.cli import console
from coterie.fitting.profile import Tried
from coterie.fitting.result import Fit
from coterie.fitting.tables import choices_table, tried_table
from coterie.tables import Table
from tests.command import run as coterie

LONG = "improved-clustered:clusters=120,topk=64,iterations=12,space=euclidean,seed=123@2048"
MODULE = "vision_model.encoder.layers.11.self_attn"


def cells(said: str, columns: int, rows: int) -> list[list[str]]:
    """The rows of a table; what stands below each other in a cell is put together again."""
    found: list[list[str]] = [[] for _ in range(rows)]
    at = -1
    for line in said.splitlines():
        parts = [part.strip() for part in line.split("│")[1:-1]]
        if len(parts) == columns:
            if parts[-1]:  # a number is in the first line of its row
                at += 1
                found[at] = parts
            else:
                found[at] = [a + b for a, b in zip(found[at], parts, strict=True)]
    return found


@pytest.mark.parametrize("width", [60, 80, 100, 160, 300])
@pytest.mark.parametrize("spec", [LONG, "smyrf:rounds=2", "x" * 90], ids=["long", "short", "one word"])
def test_no_name_is_cut_in_the_table_of_a_fit(width, spec, monkeypatch, capsys):
    monkeypatch.setattr(console.out, "width", width)
    tried = [Tried(MODULE, "dense", 0.0, 1.25), Tried(MODULE, spec, 0.1, 0.05, "")]
    found = Fit({MODULE: spec, "a": "dense"}, "hidden", 0.9, 0.95, 0.94, tried, (0.2, 0.05), [], 0)
    console.print_table("a model", *choices_table(found))
    said = capsys.readouterr().out
    assert all(len(line) <= width for line in said.splitlines())
    assert "…" not in said
    assert cells(said, 5, 2) == [[MODULE, spec, "0.100", "50.0", "1250.0"], ["a", "dense", "–", "–", "–"]]


def test_notes_are_wrapped_between_words(monkeypatch, capsys):
    monkeypatch.setattr(console.out, "width", 80)
    note = "is_causal: expected False for 'clustered', whose mean queries would mix the future in, got True"
    table = tried_table(Fit({}, "hidden", 0.9, 1, 1, [Tried(MODULE, LONG, 0.5, 0.01, note)], (1, 1), [], 0))
    console.print_table("tried", *table)
    lines = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert " ".join(line[4].strip() for line in lines).split() == note.split()
    assert "".join(line[1].strip() for line in lines) == LONG


def test_a_table_without_rows_and_names_of_nothing(monkeypatch, capsys):
    monkeypatch.setattr(console.out, "width", 30)
    console.print_table("nothing", *Table(["attention module", "runs"], []))
    console.print_table("empty", ["name", "number"], [["", "1"]])
    assert "…" not in capsys.readouterr().out


def test_markup_in_a_name_is_text(monkeypatch, capsys):
    monkeypatch.setattr(console.out, "width", 80)
    console.print_table("[red]", ["name", "number"], [["[red]a[/]", "[red]"]])
    said = capsys.readouterr().out
    assert cells(said, 2, 1) == [["[red]a[/]", "[red]"]]
    assert said.split()[0] == "[red]"


def test_bench_and_mechanisms_at_80_columns(monkeypatch):
    monkeypatch.setattr(console.out, "width", 80)
    monkeypatch.setattr("coterie.cli.app.interleaved", lambda runs, *_: dict.fromkeys(runs, 0.5))
    bench, _, crossover = coterie("bench", LONG, "--lengths", "64").partition("crossover")
    assert cells(bench, 4, 2)[1] == [LONG, "64", "500.0", "1.00×"]
    lines = [line.split("│") for line in crossover.splitlines() if line.startswith("│")]
    assert "".join(line[1].strip() for line in lines) == LONG
    assert "improved-clustered " in coterie("mechanisms")
