"""Run the notebooks: `python -m notebooks [--quick] [NAMES]` writes them, executed, to out/notebooks.

A notebook is a script in this folder in jupytext's percent format. It runs from top to bottom in a kernel of its own.
If a cell raises, or writes to stderr, nothing is written and the command fails.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from coterie.files import expect_writable, write_whole

HERE = Path(__file__).parent
OUT = HERE.parent / "out" / "notebooks"
SECONDS = 600  # for one cell
_COLOURS = re.compile("\x1b\\[[0-9;]*m")  # of a traceback


class NotebookError(Exception):
    """A notebook that did not run to its end, or that complained."""


def scripts() -> dict[str, Path]:
    """Every notebook, by name."""
    return {path.stem: path for path in sorted(HERE.glob("*.py")) if not path.stem.startswith("_")}


def run(script: Path, out: Path, *, quick: bool = False, seconds: int = SECONDS) -> Path:
    """Execute a script as a notebook and write it into a folder, whole or not at all.

    Args:
        script: in jupytext's percent format.
        out: the folder.
        quick: the notebook sees COTERIE_QUICK=1.
        seconds: that one cell may take.

    Returns:
        The file that was written.
    """
    path = out / f"{script.stem}.ipynb"
    expect_writable(path)
    notebook = jupytext.read(script, fmt="py:percent")
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    client = NotebookClient(notebook, timeout=seconds, resources={"metadata": {"path": str(script.parent)}})
    try:
        with tempfile.TemporaryDirectory() as sockets:
            if os.name != "nt":  # sockets that are this user's alone, instead of ports
                manager = client.create_kernel_manager()
                manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
            client.execute(env=_environment(quick))
    except CellExecutionError as error:
        raise NotebookError(f"{script.name}: a cell raised\n{_COLOURS.sub('', str(error))}") from error
    except CellTimeoutError as error:
        raise NotebookError(f"{script.name}: a cell took more than {seconds} s") from error
    except DeadKernelError as error:
        raise NotebookError(f"{script.name}: its kernel died") from error
    complaints = complained(notebook)
    if complaints:
        raise NotebookError(f"{script.name}: a cell wrote to stderr\n{complaints}")
    notebook.metadata.pop("jupytext", None)  # the script is elsewhere
    write_whole(path, nbformat.writes(notebook))
    return path


def _environment(quick: bool) -> dict[str, str]:
    """What a kernel sees: what is here, the switch, and the repository's own folders, recipes and benchmarks."""
    places = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "COTERIE_QUICK": "1" if quick else "0", "PYTHONPATH": os.pathsep.join(places)}


def complained(notebook: Any) -> str:
    """What the cells wrote to stderr: warnings, mostly."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    return "".join(output.text for output in outputs if output.get("name") == "stderr")


def main() -> None:
    """The command."""
    known = scripts()
    parser = argparse.ArgumentParser("python -m notebooks", description="Run notebooks from top to bottom.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--quick", action="store_true", help="less data: about a minute each")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder to write to")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"NAME: expected some of {', '.join(known)}, got {unknown[0]!r}")
    failed = False
    for name in options.names or known:
        start = time.monotonic()
        try:
            written = run(known[name], options.out, quick=options.quick)
        except (NotebookError, OSError) as error:
            print(error, file=sys.stderr)
            failed = True
        else:
            print(f"wrote {written}: {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
