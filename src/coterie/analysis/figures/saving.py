"""Pictures and pages into files that are either there in full or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.checks import expect, expect_type
from coterie.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def save(picture: Figure | str, path: str | Path) -> Path:
    """Write a figure as .png or .svg, or a page (a string) as .html; the file is whole or not there.

    The same picture gives the same bytes: no date is written, and ids in SVG are fixed.

    Example:
        >>> import tempfile
        >>> from matplotlib.figure import Figure
        >>> from coterie.analysis.figures.saving import save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(Figure(), f"{folder}/empty.svg").read_bytes()[:5]
        b'<?xml'
    """
    path = Path(path)
    kind = path.suffix.lower()
    if isinstance(picture, str):
        expect(kind in (".html", ".htm"), "path", "a name that ends in .html for a page", path.name)
        write_whole(path, picture)
        return path
    from matplotlib.figure import Figure

    expect_type(isinstance(picture, Figure), "picture", "a matplotlib Figure or a string", type(picture).__name__)
    expect(kind in (".png", ".svg"), "path", "a name that ends in .png or .svg for a figure", path.name)
    write_whole(path, _drawn(picture, kind[1:]))
    return path


def _drawn(figure: Figure, kind: str) -> bytes:
    import matplotlib

    held = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "coterie"}):
        figure.savefig(held, format=kind, dpi=DPI, metadata={"Date": None} if kind == "svg" else None)
    return held.getvalue()
