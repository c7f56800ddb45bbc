"""The table of families in docs/guide/hugging-face.md, made of the families that the tests go through.

`python -m tests.hf.support` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import coterie.hf
from coterie.hf.positions import learned_positions
from coterie.hf.sites import TESTED
from coterie.hosts import watch_dense
from coterie.observe import Seen
from tests.hf.families import BY_NAME, Family

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "hugging-face.md"
PLACE = re.compile(
    r"(?<=<!-- support: written by `python -m tests.hf.support` -->\n).*?(?=<!-- end of support -->)", re.S
)
COLUMNS = ("family", "tested as", "attention", "its own window", "padding", "table of positions")


def family_of(name: str) -> Family:
    """The family of a name as people write it."""
    return BY_NAME[re.sub(r"[ -]", "", name).lower()]


def table() -> str:
    """Markdown, a row for each family."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(_row, TESTED)]
    return "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"


def _row(name: str) -> tuple[str, ...]:
    family = family_of(name)
    model = family.build()
    sides = ", ".join(side for side in family.sides if side != "none")
    window = "yes" if coterie.hf.own_windows(model) else "–"
    positions = "–" if learned_positions(model) is None else "yes"
    return name, f"`{family.model}`", _attention(family, model), window, sides or "–", positions


def _attention(family: Family, model: Any) -> str:
    """What kinds of attention run."""
    kinds = {layer.name: layer.kind for layer in coterie.hf.describe(model)}
    found: set[str] = set()

    def look(name: str, seen: Seen) -> None:
        found.add("causal" if seen.call.causal else kinds[name])

    watch_dense(model, family.inputs("none")[0], look)
    return ", ".join(kind for kind in ("self", "causal", "cross") if kind in found)


def main() -> None:
    """Write the table into the page."""
    PAGE.write_text(PLACE.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
