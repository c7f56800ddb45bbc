"""An embedding, on the terminal and in a file."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.cli.inputs import UserError
from coterie.files import expect_writable, write_json, write_whole

_KINDS = (".npy", ".json", ".parquet")
_FIRST = 5


def check_file(path: Path) -> None:
    """Refuse a file that an embedding cannot be written to, before there is one."""
    if path.suffix.lower() not in _KINDS:
        raise UserError(f"--out must end in {' or '.join(_KINDS)}, not {path.suffix!r}.")
    if path.suffix.lower() == ".parquet" and find_spec("pyarrow") is None:
        raise UserError("--out: .parquet needs pyarrow: pip install pyarrow")
    expect_writable(path)


def write_vector(path: Path, vector: Tensor, facts: dict[str, Any]) -> None:
    """Write an embedding, whole or not at all.

    NumPy's format holds the numbers alone, JSON what `--json` prints, Parquet a row with a column "embedding".

    Args:
        path: its suffix says the format.
        vector: (dim,).
        facts: what JSON holds besides.
    """
    data = io.BytesIO()
    if path.suffix.lower() == ".json":
        write_json(path, {**facts, "embedding": vector.tolist()})
        return
    if path.suffix.lower() == ".npy":
        import numpy as np

        np.save(data, vector.numpy())
    else:
        import pyarrow
        import pyarrow.parquet

        column = pyarrow.array([vector.tolist()], pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(pyarrow.table({"embedding": column}), data)
    write_whole(path, data.getvalue())


def summary(vector: Tensor) -> str:
    """An embedding in one line.

    Example:
        >>> import torch
        >>> summary(torch.tensor([0.6, -0.8, 0, 0, 0, 0]))
        'embedding: shape (6,), norm 1.0000, 0.6000 -0.8000 0.0000 0.0000 0.0000 …'
        >>> summary(torch.tensor([3.0, 4.0]))
        'embedding: shape (2,), norm 5.0000, 3.0000 4.0000'
    """
    first = " ".join(f"{x:.4f}" for x in vector[:_FIRST].tolist())
    more = " …" if len(vector) > _FIRST else ""
    return f"embedding: shape ({len(vector)},), norm {float(vector.norm()):.4f}, {first}{more}"
