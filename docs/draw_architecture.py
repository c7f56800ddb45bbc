"""The pictures of docs/architecture.md: `python -m docs.draw_architecture` writes them to docs/_static."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from docs.pictures import DOCS, box, svg, text

WIDTH, HEIGHT, MARGIN, BETWEEN = 880, 58, 4, 12
CORE, CPP = "pale far-line", "open near-line"


class Box(NamedTuple):
    """A module, a package or a step, and what it is for."""

    name: str
    note: str
    kind: str = "open line-line"

    def lines(self) -> list[tuple[float, str, str]]:
        """The name and the note: how far down, what, and how."""
        return [(25, self.name, "ink bold"), (46, self.note, "soft")]


# A box imports only boxes below it or to its right; planning/ and engine/ do not import each other at all. The order
# is that of tests/test_layers.py.
LAYERS = [
    [Box("cli/", "the command"), Box("report/", "the page that it writes")],
    [Box("analysis/", "errors, spectra, figures/, the theory"), Box("fitting/", "coterie.fit")],
    [Box("hosts.py", "where attention sits in a model")],
    [
        Box("hf/", "Hugging Face models"),
        Box("rounds_schedule.py", "rounds in training"),
        Box("checking/", "check_mechanism"),
        Box("nn/", "modules, swap, adapters"),
    ],
    [
        Box("sdpa/", "calls that any model makes"),
        Box("functional.py", "attention(): call → plan → execute", CORE),
        Box("observe.py", "calls that are watched"),
    ],
    [Box("mechanisms/", "one file each: who meets whom", CORE)],
    [
        Box("planning/", "the costly steps of plans: reference, native", CORE),
        Box("engine/", "executes any plan: reference, native, triton", CORE),
    ],
    [
        Box("plan/", "Plan, Round, Means; tiles, slices", CORE),
        Box("exact.py", "dense attention of some queries"),
        Box("call.py", "one call, checked once", CORE),
    ],
    [
        Box("backend.py", "which can run"),
        Box("compiled.py", "loads the C++"),
        Box("draws.py", "random draws"),
        Box("progress.py", "bars, also in notebooks"),
    ],
    [
        Box("tables.py", "tables as text and HTML"),
        Box("checks.py", "clear errors"),
        Box("files.py", "whole files"),
        Box("launching.py", "on a GPU"),
        Box("machine.py", "the CPU"),
        Box("timing.py", "in turns"),
    ],
    [Box("native/", "C++ kernels, one copy for each instruction set; they know nothing of torch", CPP)],
]

WAY = [
    [Box("attention(q, k, v, mechanism, …)", "nn, hf, swap and your own code all end up here")],
    [Box("Call.of(…)", "autocast, every check, masks split and joined, backend chosen: once", CORE)],
    [Box("plan_call(mechanism, call)", "no gradient; Tokens is the mechanism's view of the call", CORE)],
    [
        Box("steps: reference", "PyTorch, float64", CORE),
        Box("steps: native", "custom ops on C++", CPP),
    ],
    [Box("Plan", "who meets whom: index tensors; can be shown, stored, passed in again", CORE)],
    [Box("execute(call, plan)", "a plan that you bring is checked to its last index", CORE)],
    [
        Box("engine: reference", "attend, backward", CORE),
        Box("engine: native", "attend, backward on C++", CPP),
    ],
    [Box("out, lse", "answers that were borrowed are merged; gradients reach q, k, v and a float mask")],
]


def _drawn(each: Box, x: float, y: float, width: float) -> list[str]:
    middle = x + width / 2
    name, note = (text(middle, y + at, escape(words), kind, "middle") for at, words, kind in each.lines())
    return [box(x, y, width, HEIGHT, each.kind, 8), name, note]


def _arrow(x: float, y: float, to: float) -> str:
    return f'<path d="M{x:g} {y:g}V{to:g}m-5 -7l5 7l5 -7" class="open soft-line thick"/>'


def draw(rows: list[list[Box]], title: str, gap: float, *, arrows: bool = False) -> str:
    """Rows of boxes, with arrows from one to the next or without."""
    parts, y = [], float(MARGIN)
    for index, row in enumerate(rows):
        width = (WIDTH - 2 * MARGIN - BETWEEN * (len(row) - 1)) / len(row)
        for place, each in enumerate(row):
            parts += _drawn(each, MARGIN + place * (width + BETWEEN), y, width)
        if arrows and index + 1 < len(rows):
            ways = max(len(row), len(rows[index + 1]))
            top, bottom = y + HEIGHT + 4, y + HEIGHT + gap - 4
            parts += [_arrow(WIDTH * (place + 0.5) / ways, top, bottom) for place in range(ways)]
        y += HEIGHT + gap
    return svg(WIDTH, y - gap + MARGIN, title, parts)


PICTURES = {
    "architecture-layers.svg": draw(LAYERS, "The layers of Coterie: a box imports those below or to its right", 10),
    "architecture-call.svg": draw(WAY, "The way of a call, from attention() to its output", 30, arrows=True),
}


def main() -> None:
    """Draw."""
    for name, picture in PICTURES.items():
        (DOCS / "_static" / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
