"""Small plots as SVG in the colours of the page: a frame with two axes, and what is drawn into it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from coterie.tables import as_html

WIDTH, HEIGHT = 440, 300  # a phone shows it at four fifths of that, a desktop somewhat larger
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 14, 46
_LINE = 15  # between labels
_SHAPES = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>',
    '<path d="M{x:.1f} {y:.1f}m0 -7l7 7l-7 7l-7 -7z"/>',
    '<path d="M{x:.1f} {y:.1f}m-5 -5h10v10h-10z"/>',
    '<path d="M{x:.1f} {y:.1f}m0 -6.5l6.5 11.5h-13z"/>',
    '<path d="M{x:.1f} {y:.1f}m0 6.5l6.5 -11.5h-13z"/>',
    '<path d="M{x:.1f} {y:.1f}m-7 -3h14v6h-14z"/>',
)
GREY = len(_SHAPES) - 1  # for what is there to compare with; colours of the page are .k0 to .k5


def drawable(*values: float) -> bool:
    """Whether all of them are numbers that an axis can hold: a file may say anything.

    >>> drawable(1.0, 0.5), drawable(float("nan")), drawable(1e300)
    (True, False, False)
    """
    return all(abs(value) < 1e12 for value in values)


def kinds(names: Sequence[str], grey: str) -> dict[str, int]:
    """A colour and a shape for each name; one of them is grey.

    >>> kinds(["dense", "local", "near-far"], grey="dense")
    {'dense': 5, 'local': 0, 'near-far': 1}
    """
    others = [name for name in names if name != grey]
    return {name: GREY if name == grey else others.index(name) % GREY for name in names}


class Axis(NamedTuple):
    """What an axis spans, and the values that it names."""

    low: float
    high: float
    marks: list[tuple[float, str]]
    title: str

    def part(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def axis(title: str, values: Sequence[float], *, least: float | None = None, most: float | None = None) -> Axis:
    """An axis of round numbers around some values; `least` and `most` are ends that it has at any rate.

    Example:
        >>> from coterie.report.svg import axis
        >>> found = axis("ms", [3.0, 17.5], least=0)
        >>> found.low, found.high, [text for _, text in found.marks]
        (0, 20.0, ['0', '5', '10', '15', '20'])
        >>> [text for _, text in axis("fidelity", [0.991, 0.9985], most=1).marks]
        ['0.990', '0.992', '0.994', '0.996', '0.998', '1.000']
    """
    low = min([*values, *([] if least is None else [least])], default=0.0)
    high = max([*values, *([] if most is None else [most])], default=1.0)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (low - 0.005, high) if most is not None else (low, low + 1.0)
    step = _step((high - low) / 5)
    low = low if low == least else math.floor(low / step + 1e-9) * step
    high = high if high == most else math.ceil(high / step - 1e-9) * step
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Axis(low, high, [(n * step, f"{n * step:,.{digits}f}") for n in range(first, last + 1)], title)


def _step(size: float) -> float:
    """The next of 1, 2, 5, 10, 20, …"""
    power = 10.0 ** math.floor(math.log10(size))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= size * (1 - 1e-9))


def categories(title: str, names: Sequence[str]) -> Axis:
    """An axis that names things, side by side; the i-th is at i."""
    return Axis(-0.5, len(names) - 0.5, [(float(i), name) for i, name in enumerate(names)], title)


class Frame:
    """A plot: axes first, then what is drawn, in the order of the calls."""

    def __init__(self, x: Axis, y: Axis, label: str) -> None:
        self.x, self.y, self.label = x, y, label
        self.parts: list[str] = []
        self.taken: list[tuple[float, float, float, float]] = []
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
        for value, text in y.marks:
            at = self.at(x.low, value)[1]
            self.parts.append(f'<path class=grid d="M{_LEFT} {at:.1f}H{right}"/>')
            self.text(_LEFT - 6, at + 4, text, "end", "mark")
        for value, text in x.marks:
            at = self.at(value, y.low)[0]
            self.parts.append(f'<path class=tick d="M{at:.1f} {bottom}v5"/>')
            self.text(at, bottom + 18, text, "middle", "mark")
        self.parts.append(f'<path class=axis d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        self.text((_LEFT + right) / 2, HEIGHT - 8, x.title, "middle", "title")
        middle = (_TOP + bottom) / 2
        self.parts.append(
            f'<text class=title text-anchor=middle transform="translate(13 {middle:.1f})rotate(-90)">'
            f"{as_html(y.title)}</text>"
        )

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where values lie on the page."""
        across, up = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        return _LEFT + across * self.x.part(x), HEIGHT - _BOTTOM - up * self.y.part(y)

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "label") -> None:
        """Words at a place on the page."""
        self.parts.append(f'<text class={kind} x="{x:.1f}" y="{y:.1f}" text-anchor={anchor}>{as_html(words)}</text>')

    def point(self, x: float, y: float, tip: str, kind: int = 0, *, full: bool = True, series: str = "") -> None:
        """A value; `tip` is what pointing at it tells, and `series` the legend's name for it."""
        where = dict(zip("xy", self.at(x, y), strict=True))
        look = f"point k{kind}{'' if full else ' hollow'}"
        self.parts.append(
            f'<g class="{look}" data-series="{as_html(series)}" data-tip="{as_html(tip)}">'
            f"{shape(kind).format(**where)}</g>"
        )
        self.taken.append((where["x"] - 8, where["y"] - 8, where["x"] + 8, where["y"] + 8))

    def whisker(self, x: float, low: float, high: float, kind: int = 0) -> None:
        """A line from a bound up to a value."""
        (at, bottom), (_, top) = self.at(x, low), self.at(x, high)
        self.parts.append(f'<path class="whisker k{kind}" d="M{at - 6:.1f} {bottom:.1f}h12m-6 0V{top:.1f}"/>')

    def level(self, y: float, words: str) -> None:
        """A dotted line across, and what it stands for at its right end."""
        at, right = self.at(self.x.low, y)[1], WIDTH - _RIGHT
        self.parts.append(f'<path class=level d="M{_LEFT} {at:.1f}H{right}"/>')
        self.name(right, at - 5, words, "end")

    def bar(self, x: float, y: float, tip: str, words: str, kind: int = 0) -> None:
        """A bar from 0, and a few words above it."""
        (at, top), (_, bottom) = self.at(x, y), self.at(x, max(0.0, self.y.low))
        self.parts.append(
            f'<g class="bar k{kind}" data-tip="{as_html(tip)}">'
            f'<rect x="{at - 20:.1f}" y="{top:.1f}" width="40" height="{max(0.0, bottom - top):.1f}"/></g>'
        )
        self.text(at, top - 5, words, "middle")

    def label_point(self, x: float, y: float, words: str) -> None:
        """Words beside a point, on the side where there is more room."""
        at, up = self.at(x, y)
        right = at < (_LEFT + WIDTH) / 2
        self.name(at + (11 if right else -11), up + 4, words, "start" if right else "end")

    def name(self, x: float, y: float, words: str, anchor: str) -> None:
        """Words that overlap neither a point nor other names: they move down, or up where the plot ends."""
        wide = 7.2 * len(words)
        left = x if anchor == "start" else x - wide
        steps = sorted((n * _LINE for n in range(-12, 13)), key=lambda step: (abs(step), -step))
        for step in steps:
            box = (left, y + step - 11, left + wide, y + step + 3)
            inside = box[1] >= 2 and box[3] <= HEIGHT - _BOTTOM - 2
            if inside and not any(_overlap(box, other) for other in self.taken):
                break
        else:
            step, box = 0, (left, y - 11, left + wide, y + 3)
        self.taken.append(box)
        self.text(x, y + step, words, anchor)

    def svg(self) -> str:
        """The whole plot."""
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{as_html(self.label)}">'
        return f"{head}{''.join(self.parts)}</svg>"


def shape(kind: int) -> str:
    """What points of a kind look like; to be formatted with x and y."""
    return _SHAPES[kind]


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
