"""The report on one fit as an HTML file."""

from __future__ import annotations

from pathlib import Path

from coterie.files import write_whole
from coterie.fitting.result import Fit
from coterie.report import sections
from coterie.report.document import document
from coterie.report.pictures import Pictures


def write(path: Path, found: Fit, pictures: Pictures | None = None, *, model: str, command: str) -> None:
    """Write the report on one fit, whole or not at all.

    Args:
        pictures: of heads and plans, which need the model; None leaves them out.
        model: what the page calls it.
        command: how to make the fit again.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from coterie.fitting.fit import Fit
        >>> from coterie.report import write
        >>> found = Fit({"a": "near-far"}, "hidden", 0.9, 0.95, 0.94, [], (0.2, 0.05), [], 0)
        >>> path = Path(tempfile.mkdtemp()) / "report.html"
        >>> write(path, found, model="mine", command="coterie fit mine")
        >>> "cosine of the final hidden states" in path.read_text(encoding="utf-8")
        True
    """
    write_whole(Path(path), page(found, pictures, model=model, command=command))


def page(found: Fit, pictures: Pictures | None = None, *, model: str, command: str) -> str:
    """The report as text."""
    parts = [
        sections.summary(found),
        sections.means(found),
        sections.runs(found),
        sections.by_length(found),
        sections.new_tokens(found),
        sections.tried(found),
        *([sections.heads(pictures), sections.meetings(pictures)] if pictures is not None else []),
        sections.reproduce(found, command),
    ]
    shown = [sections.meeting_pictures(pictures)] if pictures is not None and pictures.meetings else []
    return document(
        f"Coterie: {model}", f"{model}: attention at fidelity {found.fidelity:g}", parts, {"meetings": shown}
    )
