"""The pictures of docs/architecture.md: `python docs/draw_architecture.py` writes them to docs/_static."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "_static"
WIDTH = 880
STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1d2730; }
  .name { font: 600 14px ui-monospace, monospace; } .note { fill: #52616e; font-size: 12.5px; }
  .page { fill: #fbfaf7; } .box { fill: #ffffff; stroke: #9aa7b2; } .core { fill: #e3effa; stroke: #4b86b4; }
  .cpp { fill: #fbeadb; stroke: #c07b3e; }
  .line { stroke: #52616e; fill: none; stroke-width: 1.5; } .tip { fill: #52616e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6ebef; } .note { fill: #a9b6c1; }
    .page { fill: #15191d; } .box { fill: #20262c; stroke: #5c6a76; } .core { fill: #1d3347; stroke: #5f9fd0; }
    .cpp { fill: #40291a; stroke: #cf8f55; } .line { stroke: #a9b6c1; } .tip { fill: #a9b6c1; }
  }
"""


class Box(NamedTuple):
    """A module, a package or a step, and what it is for."""

    name: str
    note: str
    kind: str = "box"


# A box imports only boxes below it or to its right; planning/ and engine/ do not import each other at all.
LAYERS = [
    [Box("cli/", "the command"), Box("report/", "the page that it writes")],
    [Box("fitting/", "coterie.fit"), Box("analysis/", "errors, spectra, figures/, the theory")],
    [Box("hosts.py", "where attention sits in a model")],
    [
        Box("rounds_schedule.py", "rounds in training"),
        Box("checking.py", "check_mechanism"),
        Box("hf/", "Hugging Face models"),
        Box("nn.py", "PyTorch modules"),
    ],
    [Box("functional.py", "attention(): call → plan → execute", "core"), Box("observe.py", "calls that are watched")],
    [Box("mechanisms/", "one file each: who meets whom", "core")],
    [
        Box("planning/", "the costly steps of plans: reference, native", "core"),
        Box("engine/", "executes any plan: reference, native", "core"),
    ],
    [Box("plan/", "Plan, Round, Means; tiles and slices", "core"), Box("call.py", "one call, checked once", "core")],
    [
        Box("backend.py", "which can run"),
        Box("compiled.py", "loads the C++"),
        Box("draws.py", "random numbers"),
        Box("checks.py", "clear errors"),
        Box("files.py", "whole or not at all"),
        Box("timing.py", "runs in turns"),
    ],
    [Box("native/", "C++ kernels, one copy for each instruction set; they know nothing of torch", "cpp")],
]

WAY = [
    [Box("attention(q, k, v, mechanism, …)", "nn, hf, swap and your own code all end up here")],
    [Box("Call.of(…)", "autocast, every check, masks split and joined, backend chosen: once", "core")],
    [Box("plan_call(mechanism, call)", "no gradient; Tokens is the mechanism's view of the call", "core")],
    [
        Box("steps: reference", "PyTorch, float64", "core"),
        Box("steps: native", "custom ops on C++", "cpp"),
    ],
    [Box("Plan", "who meets whom: index tensors; can be shown, stored, passed in again", "core")],
    [Box("execute(call, plan)", "a plan that you bring is checked to its last index", "core")],
    [
        Box("engine: reference", "attend, backward", "core"),
        Box("engine: native", "attend, backward on C++", "cpp"),
    ],
    [Box("out, lse", "answers that were borrowed are merged; gradients reach q, k, v and a float mask")],
]


def _box(box: Box, x: float, y: float, width: float, height: float) -> str:
    middle = x + width / 2
    lines = [f'<rect class="{box.kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>']
    top = y + height / 2 + (-4 if box.note else 5)
    lines.append(f'<text class="name" x="{middle:g}" y="{top:g}" text-anchor="middle">{escape(box.name)}</text>')
    if box.note:
        lines.append(
            f'<text class="note" x="{middle:g}" y="{top + 18:g}" text-anchor="middle">{escape(box.note)}</text>'
        )
    return "\n".join(lines)


def _arrow(x: float, y: float, to: float) -> str:
    return (
        f'<path class="line" d="M{x:g} {y:g} V{to - 5:g}"/>\n'
        f'<path class="tip" d="M{x - 4.5:g} {to - 7:g} h9 L{x:g} {to:g} z"/>'
    )


def draw(rows: list[list[Box]], title: str, *, arrows: bool) -> str:
    """Rows of boxes, with arrows between them or without."""
    height, gap, margin = 54, 30 if arrows else 12, 20
    parts, y = [], margin
    for index, row in enumerate(rows):
        width = (WIDTH - 2 * margin - 12 * (len(row) - 1)) / len(row)
        places = [margin + place * (width + 12) for place in range(len(row))]
        parts += [_box(box, x, y, width, height) for box, x in zip(row, places, strict=True)]
        if arrows and index + 1 < len(rows):
            ends = row if len(row) > 1 else rows[index + 1]
            step = (WIDTH - 2 * margin) / len(ends)
            parts += [_arrow(margin + step * (place + 0.5), y + height, y + height + gap) for place in range(len(ends))]
        y += height + gap
    total = y - gap + margin
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total:g}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{total:g}" rx="12"/>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def pictures() -> dict[Path, str]:
    """Each file and what it holds."""
    return {
        FOLDER / "architecture-layers.svg": draw(
            LAYERS, "The layers of Coterie: each imports only those below it", arrows=False
        ),
        FOLDER / "architecture-call.svg": draw(WAY, "The way of a call, from attention() to its output", arrows=True),
    }


def main() -> None:
    """Write them."""
    FOLDER.mkdir(exist_ok=True)
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
