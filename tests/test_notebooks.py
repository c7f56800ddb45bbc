"""Every notebook runs, as `make notebooks` runs it, and one that fails leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("[a-z]*.py"))


def python(*arguments, cwd=ROOT):
    """In a process of its own: a kernel's client brings an event loop and its warnings along."""
    command = [sys.executable, *map(str, arguments)]
    threads = {"OMP_NUM_THREADS": "1"} if os.environ.get("PYTEST_XDIST_WORKER") else {}  # as in conftest.py
    return subprocess.run(command, cwd=cwd, env={**os.environ, **threads}, capture_output=True, text=True, check=False)


def run(script, out, **settings):
    """`notebooks.__main__.run`; the last line that it wrote to stderr, or "" if it did not fail."""
    code = f"""
from pathlib import Path
from notebooks.__main__ import run
run(Path({str(script)!r}), Path({str(out)!r}), **{settings!r})
"""
    done = python("-c", code)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, tmp_path):
    done = python("-m", "notebooks", "--quick", "--out", tmp_path, name)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.iterdir()
    assert path.name == f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert notebook.cells[0].source.startswith("# ")
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    data = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in each for each in data) >= 1, "plots are inline"
    assert any("<table>" in each.get("text/html", "") for each in data), "results show themselves"
    assert sum("<progress" in each.get("text/html", "") for each in data) <= 1, "progress is stored once"
    assert not any("application/vnd.jupyter.widget-view+json" in each for each in data), "nothing needs widgets"
    assert max(len(cell.outputs) for cell in code) <= 3


def test_the_script_of_a_notebook_can_be_read_as_text():
    for name in NAMES:
        text = (ROOT / "notebooks" / f"{name}.py").read_text()
        assert text.startswith("# %% [markdown]\n# # "), "a title first"
        assert 'QUICK = os.environ.get("COTERIE_QUICK") == "1"' in text
        assert str(ROOT) not in text
        for link in re.findall(r"\]\(([^):#]+)\)", text):  # as from where the notebook is read
            assert (ROOT / "out" / "notebooks" / link).resolve().exists(), link


def test_a_cell_that_raises_fails_and_what_was_there_stays(tmp_path):
    script, out = tmp_path / "wrong.py", tmp_path / "out"
    script.write_text("# %%\nprint('fine')\n\n# %%\nraise KeyError('gone')\n")
    out.mkdir()
    (out / "wrong.ipynb").write_text("older")
    said = run(script, out)
    assert "NotebookError: wrong.py: a cell raised" in said
    assert "KeyError: 'gone'" in said
    assert [(path.name, path.read_text()) for path in out.iterdir()] == [("wrong.ipynb", "older")]


@pytest.mark.parametrize(
    ("cell", "settings", "words"),
    [
        ("import warnings\nwarnings.warn('mind this')", {}, "a cell wrote to stderr"),
        ("import time\ntime.sleep(60)", {"seconds": 1}, "a cell took more than 1 s"),
        ("import os\nos._exit(3)", {}, "its kernel died"),
    ],
    ids=["warns", "hangs", "dies"],
)
def test_what_else_fails(cell, settings, words, tmp_path):
    script, out = tmp_path / "wrong.py", tmp_path / "out"
    script.write_text(f"# %%\n{cell}\n")
    assert f"NotebookError: wrong.py: {words}" in run(script, out, **settings)
    assert not out.exists()


def test_a_notebook_is_told_quick_runs_beside_its_script_and_finds_the_repository(tmp_path):
    script = tmp_path / "tells.py"
    cell = "import os, benchmarks\nprint(os.environ['COTERIE_QUICK'], os.path.exists('tells.py'))"
    script.write_text(f"# %%\n{cell}\n")
    for quick, told in ((True, "1 True\n"), (False, "0 True\n")):
        assert run(script, tmp_path, quick=quick) == ""
        notebook = nbformat.read(tmp_path / "tells.ipynb", as_version=4)
        assert notebook.cells[0].outputs[0].text == told
        assert notebook.metadata.kernelspec.name == "python3"


def test_an_unknown_name_is_refused():
    done = python("-m", "notebooks", "nowhere")
    assert done.returncode == 2
    assert f"NAME: expected some of {', '.join(NAMES)}, got 'nowhere'" in done.stderr


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    done = python("-m", "notebooks", "--quick", "--out", tmp_path / "file", NAMES[0])
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
