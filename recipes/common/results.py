"""How a study ends: tables on the screen, `results.json`, and a plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.analysis import save
from coterie.cli.console import out, print_table, wrote
from coterie.files import read_json, write_json
from recipes.common.processes import processes

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


def finish(
    folder: Path,
    tables: list[Table],
    figures: dict[str, Any],
    draw: Callable[..., None],
    words: str = "",
    panels: int = 1,
) -> None:
    """Print the tables and what they say, write the figures, draw the plot; the first process of several does.

    Args:
        figures: what goes into `results.json` besides settings and tables.
        draw: what draws into the axes of `results.png`; it gets one pair for each panel.
    """
    if not processes().is_main_process:
        return
    for table in tables:
        print_table(*table)
    if words:
        out.print(words, highlight=False)
    stored = [{"title": title, "columns": columns, "rows": rows} for title, columns, rows in tables]
    found = {"settings": read_json(folder / "settings.json"), "tables": stored, "words": words, **figures}
    write_json(folder / "results.json", found)
    plot(folder / "results.png", draw, panels)
    wrote(folder / "results.json")
    wrote(folder / "results.png")


def plot(path: Path, draw: Callable[..., None], panels: int = 1) -> None:
    """A picture with one pair of axes, or several side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(7 if panels == 1 else 5.5 * panels, 4), squeeze=False)
    draw(*axes[0])
    for each in axes[0]:
        each.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, path)
    pyplot.close(figure)
