"""Progress as users ask for it: nothing, a function of theirs, bars on a terminal, one output in a notebook."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import coterie
from coterie import progress
from coterie.progress import ESTIMATE, Drawn, in_notebook, lines, notebook_bars, telling, terminal_bars
from tests.html_reader import read


class Outputs:
    """A stand-in for a notebook's outputs: what was shown first, and what took its place."""

    def __init__(self):
        self.shown: list[str] = []
        self.updates = 0

    def display(self, what, *, display_id):
        assert display_id is True
        self.shown.append(repr(what))
        return self

    def update(self, what):
        self.shown[-1] = repr(what)
        self.updates += 1


@pytest.fixture
def outputs(monkeypatch):
    found = Outputs()
    monkeypatch.setattr("IPython.display.display", found.display)
    return found


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("coterie.progress.time.monotonic", lambda: now.seconds)
    return now


def a_fit(**settings):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    batches = [torch.randn(1, 40, 32) for _ in range(3)]
    return coterie.fit(model, batches, fidelity=0.5, candidates=["local:window=9"], **settings)


def kernel(monkeypatch, shell):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.mark.parametrize("nothing", [None, False])
def test_nothing_is_drawn_unless_it_is_asked_for(nothing, capsys):
    a_fit(progress=nothing)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", ["yes", 1, 3.5])
def test_what_is_no_function_is_refused_before_any_work(wrong):
    with pytest.raises(TypeError, match=r"progress: expected True, False or a function \(what, done, total\), got"):
        a_fit(progress=wrong)


def test_a_function_is_told_everything():
    told = []
    a_fit(progress=lambda *step: told.append(step))
    assert {what for what, _, _ in told} >= {"dense answers", "candidates", "timing"}
    assert ("dense answers", 3, 3) in told
    assert all(0 < done <= total for what, done, total in told if what != ESTIMATE)


def test_an_estimate_is_told_in_words():
    said: list[str] = []
    lines(said.append, between=60)(ESTIMATE, 0, 130)  # at once
    assert said == ["about 2 min in all"]
    drawn = Drawn()
    drawn.tell(ESTIMATE, 0, 40, now=0.0)
    assert repr(drawn) == "about 40 s in all"
    assert "<progress" not in drawn._repr_html_()
    written = io.StringIO()
    with terminal_bars(Console(file=written, force_terminal=True)) as tell:
        tell(ESTIMATE, 0, 40)
    assert "about 40 s in all" in written.getvalue()


def test_spectra_tell_of_each_module():
    from coterie.analysis import spectra

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False).eval()
    told = []
    spectra(model, torch.randn(1, 20, 32), progress=lambda *step: told.append(step))
    assert told == [("spectra", 1, 2), ("spectra", 2, 2)]


# --- on a terminal ----------------------------------------------------------------------------------------------------


def test_true_draws_bars_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not in_notebook()
    with telling(True) as tell:
        tell("batches [b]", 3, 3)
    said = capsys.readouterr()
    assert said.out == ""
    assert "batches [b]" in said.err
    assert "3/3" in said.err


def test_bars_go_to_the_console_that_is_named():
    from rich.console import Console

    held = io.StringIO()
    with terminal_bars(Console(file=held, force_terminal=True)) as tell:
        tell("a", 1, 2)
        tell("a", 2, 2)
        tell("b", 5, 9)
    assert "2/2" in held.getvalue()
    assert "5/9" in held.getvalue()


def test_a_file_gets_lines_and_no_bars(clock):
    from rich.console import Console

    held = io.StringIO()
    with terminal_bars(Console(file=held)) as tell:
        tell("a", 1, 9)  # what is over soon is not worth a line
        clock.seconds += 11
        tell("a", 2, 9)
        clock.seconds += 1
        tell("a", 3, 9)
        clock.seconds += 9
        tell("b", 1, 2000)
    assert held.getvalue() == "a 2/9, 11 s\nb 1/2,000, 0 s\n"


def test_without_rich_bars_are_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(progress, "_has_rich", lambda: False)
    with pytest.raises(ValueError, match=r"progress: expected rich to draw bars with \(pip install rich\)"):
        a_fit(progress=True)
    a_fit(progress=print)


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_a_kernel_is_a_notebook_and_a_plain_shell_is_not(monkeypatch):
    kernel(monkeypatch, None)
    assert not in_notebook()
    kernel(monkeypatch, SimpleNamespace())
    assert not in_notebook()
    kernel(monkeypatch, SimpleNamespace(kernel=object()))
    assert in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_a_notebook_gets_one_output_that_is_drawn_a_few_times(outputs, clock):
    with notebook_bars() as tell:
        for done in range(1000):
            clock.seconds += 0.01
            tell("candidates", done + 1, 1000)
        tell("timing", 1, 3)
    assert outputs.shown == ["candidates 1,000/1,000, 10 s\ntiming 1/3, 0 s"]
    assert outputs.updates <= 10 / 0.2 + 1


def test_what_was_reached_is_shown_if_something_fails(outputs, clock):
    def fails():
        with notebook_bars() as tell:
            tell("candidates", 1, 9)
            tell("candidates", 2, 9)
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        fails()
    assert outputs.shown == ["candidates 2/9, 0 s"]


def test_no_output_if_nothing_was_told(outputs):
    with notebook_bars():
        pass
    assert outputs.shown == []


def test_true_draws_in_the_notebook(monkeypatch, outputs):
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    a_fit(progress=True)
    [shown] = outputs.shown
    assert "dense answers 3/3" in shown


def test_bars_are_html_and_nothing_breaks_out_of_them():
    drawn = Drawn()
    drawn.tell("<b>", 1, 4, now=0.0)
    assert drawn._repr_html_().count('<progress value="1" max="4"></progress> &lt;b&gt; 1/4, 0 s') == 1
    assert read(drawn._repr_html_()).tags == {"div", "progress"}
