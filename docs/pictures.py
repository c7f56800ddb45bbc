"""The drawings of the documentation: `python -m docs.pictures` writes them to docs/_static.

They follow the reader's light or dark theme. The bars are read from the tables of docs/numbers.md.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

DOCS = Path(__file__).parent
LIGHT = {"ink": "#1f2328", "soft": "#6b7280", "line": "#c4c9d1", "near": "#cf5c00", "far": "#2463c4", "pale": "#e8eef9"}
DARK = {"ink": "#e6e8eb", "soft": "#9aa3ae", "line": "#4b525c", "near": "#ff9d4d", "far": "#78a9ff", "pale": "#1e2a3f"}
NEAR_FAR_TITLE = (
    "A group of similar queries meets its near keys exactly, and all other keys as the means of their clusters"
)


def svg(width: float, height: float, title: str, parts: list[str]) -> str:
    """A whole drawing; classes name colours: `near` fills, `near-line` strokes."""
    rules = "".join(f".{name}{{fill:var(--{name})}}.{name}-line{{stroke:var(--{name})}}" for name in LIGHT)
    light, dark = (";".join(f"--{name}:{value}" for name, value in each.items()) for each in (LIGHT, DARK))
    style = (
        f"svg{{{light};font:16px system-ui,sans-serif}}{rules}.open{{fill:none}}.thick{{stroke-width:2}}"
        f".dashed{{stroke-dasharray:5 5}}.bold{{font-weight:600}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", f"<style>{style}</style>", *parts, "</svg>", ""])


def dot(x: float, y: float, radius: float, kind: str) -> str:
    """A circle."""
    return f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" class="{kind}"/>'


def line(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    """A line."""
    return f'<path d="M{x:.5g} {y:.5g}L{to_x:.5g} {to_y:.5g}" class="{kind}"/>'


def box(x: float, y: float, width: float, height: float, kind: str, round: float = 12) -> str:
    """A rectangle."""
    size = f'width="{width:.5g}" height="{height:.5g}"'
    return f'<rect x="{x:.5g}" y="{y:.5g}" {size} rx="{round:g}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.5g}" y="{y:.5g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def near_far() -> str:
    """Queries in groups; one group's near keys, and the means of all clusters."""
    groups, clusters = [(42, 70), (42, 150), (42, 230)], [(330, 70), (430, 152), (565, 118), (310, 232), (545, 236)]
    sizes, near = [7, 6, 8, 7, 6], {(0, 1), (0, 2), (0, 5), (1, 0), (1, 4)}
    parts = [
        text(20, 22, "queries, in groups", "ink bold"),
        text(445, 22, "keys, in clusters", "ink bold", "middle"),
    ]
    keys, means, lines = [], [], []
    start = (groups[0][0] + 92, groups[0][1])
    for c, ((x, y), size) in enumerate(zip(clusters, sizes, strict=True)):
        parts.append(dot(x, y, 42, "pale"))
        lines.append(line(*start, x, y, "far-line open dashed thick"))
        means += [dot(x, y, 12, "far"), text(x, y + 5, str(size - sum(k[0] == c for k in near)), "pale bold", "middle")]
        for i in range(size):
            angle = 2 * math.pi * (i / size + 0.13 * c)
            to = x + 29 * math.cos(angle), y + 29 * math.sin(angle)
            if (c, i) in near:
                lines.append(line(*start, *to, "near-line open thick"))
            keys.append(dot(*to, 5.5, "near" if (c, i) in near else "soft"))
    for g, (x, y) in enumerate(groups):
        kind = "near-line thick" if g == 0 else "line-line"
        parts.append(box(x - 20, y - 24, 112, 48, f"open {kind}"))
        parts += [dot(x + 24 * i, y + 7 * (-1) ** i, 6, "near" if g == 0 else "soft") for i in range(4)]
    parts += [*lines, *keys, *means]
    for row, (kind, words) in enumerate(
        [
            ("near-line open thick", "near keys: met one by one, exactly"),
            ("far-line open dashed thick", "all others: met as the mean of their cluster, which counts for n keys"),
        ]
    ):
        y = 302 + 26 * row
        parts += [line(20, y, 60, y, kind), text(72, y + 5, words)]
    parts.append(text(20, 358, "One softmax over both. No key is dropped.", "ink bold"))
    return svg(640, 372, NEAR_FAR_TITLE, parts)


def causal() -> str:
    """A query looks back: exact chunks, then means that grow coarser."""
    parts = [text(12, 22, "old", "soft"), text(574, 22, "now", "soft", "end"), line(45, 17, 535, 17, "line-line thick")]
    blocks = [(12, 128, 2, 15), (148, 62, 2, 12), (216, 62, 2, 12), (288, 62, 4, 7), (356, 62, 4, 7)]
    for x, width, count, radius in blocks:
        parts.append(box(x, 36, width, 56, "pale", 8))
        parts += [dot(x + width * (i + 0.5) / count, 64, radius, "far") for i in range(count)]
    parts += [dot(x, y, 5, "near") for x, y in ((60, 46), (105, 80), (163, 44), (240, 82), (319, 46), (396, 82))]
    for x, count in ((430, 8), (502, 6)):
        parts.append(box(x, 36, 66, 56, "open line-line", 8))
        parts += [dot(x + 12 + 14 * (i % 4), 52 + 24 * (i // 4), 5, "near") for i in range(count)]
    parts += [dot(556, 76, 7, "open ink-line thick"), text(600, 82, "query", "ink bold", "middle")]
    for row, (kind, words) in enumerate(
        [
            ("near", "met exactly: its own chunk, the one before, and near keys of any age"),
            ("far", "everything else, as means; the older, the coarser"),
        ]
    ):
        y = 122 + 26 * row
        parts += [dot(24, y - 5, 6, kind), text(42, y, words)]
    return svg(640, 160, "Causal near–far attention: recent chunks exactly, older ones as ever coarser means", parts)


def tile() -> str:
    """What a program of the GPU's kernels does: some queries of a group, and the keys that it meets, by blocks."""
    parts = [
        text(20, 22, "keys and values, where they lie", "ink bold"),
        text(20, 152, "the group’s", "ink bold"),
        text(20, 172, "list of keys", "ink bold"),
        text(20, 226, "queries", "ink bold"),
        text(590, 178, "out, lse", "ink bold", "middle"),
    ]
    picked = [1, 4, 5, 9, 12, 16, 18, 23]
    for j in range(26):
        parts.append(box(20 + 23 * j, 34, 18, 40, "near" if j in picked else "pale", 3))
    columns = [150 + 42 * place + (26 if place > 3 else 0) for place in range(8)]
    for x, j in zip(columns, picked, strict=True):
        parts += [line(29 + 23 * j, 76, x + 16, 134, "line-line open"), box(x, 144, 32, 32, "near", 4)]
    for x, words in ((150, "block 1"), (344, "block 2")):
        parts += [
            box(x - 6, 138, 170, 122, "open far-line thick dashed", 8),
            text(x + 79, 280, words, "soft", "middle"),
        ]
    for y in (186, 210, 234):
        parts += [box(100, y, 32, 18, "far", 4), *(box(x, y, 32, 18, "pale", 4) for x in columns)]
        parts += [text(534, y + 14, "→", "soft", "middle"), box(560, y, 60, 18, "far", 4)]
    parts += [
        text(20, 312, "The scores of a block stay on the chip.", "soft"),
        text(20, 334, "The running maximum and sum go on to the next block and round.", "soft"),
    ]
    return svg(640, 346, "A tile: some queries of a group, and the keys that it meets, gathered block by block", parts)


def rows(first: str) -> list[list[str]]:
    """The table of docs/numbers.md whose first column is called so."""
    lines = (DOCS / "numbers.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, each in enumerate(lines) if each.startswith(f"| {first} |"))
    found = []
    for each in lines[start + 2 :]:
        if not each.startswith("|"):
            break
        found.append([re.sub(r"[`*]", "", cell).strip() for cell in each.strip("|").split("|")])
    return found


def bars(title: str, found: list[tuple[str, float, str]]) -> str:
    """Horizontal bars; near–far stands out."""
    most, parts = max(value for _, value, _ in found), [text(12, 22, title, "ink bold")]
    for row, (name, value, said) in enumerate(found):
        y = 40 + 30 * row
        kind = "near" if name.lower().startswith("near") else "far"
        parts += [text(318, y + 16, name, "ink", "end"), box(326, y, 240 * value / most, 22, kind, 3)]
        parts.append(text(334 + 240 * value / most, y + 16, said, "soft"))
    return svg(640, 46 + 30 * len(found), title, parts)


def fidelity() -> str:
    """The error of every mechanism at an equal number of keys."""
    found = [(row[0].partition(":")[0], float(row[2]), row[2]) for row in rows("mechanism, 216 heads")]
    return bars("Relative error of attention (MiniLM, 96 of 512 keys; less is better)", found)


def speed() -> str:
    """How many times as fast as SDPA, forward, on the machine of the first column of ratios."""
    found = []
    for case, _, _, ratio, *_ in rows("case"):
        name, forward, rest = case.partition(", forward")
        ratio = ratio.strip("*")  # bold is what falls short
        if forward and not rest.strip() and ratio.endswith("×"):
            short = re.sub(r"\(.*?\)| 2 × 64| tokens", "", name)
            found.append((short, float(ratio[:-1]), ratio))
    return bars("Times as fast as SDPA (forward, planning included, 2 cores)", found)


PICTURES = {
    "near-far.svg": near_far,
    "causal.svg": causal,
    "tile.svg": tile,
    "fidelity.svg": fidelity,
    "speed.svg": speed,
}


def main() -> None:
    """Draw."""
    for name, draw in PICTURES.items():
        (DOCS / "_static" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
