"""Pictures of memberships: pixels and tokens in the colours of their groups, who meets whom, and how local it is."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from coterie.analysis.figures.palette import paint
from coterie.analysis.memberships import Locality, check_grid
from coterie.checks import expect, expect_int, expect_type
from coterie.files import readable, shown

_PANEL = 4.0  # inches


def draw_grid(panels: Mapping[str, Tensor], grid: tuple[int, int], *, image: Tensor | None = None) -> Figure:
    """Groups as colours over a grid of pixels, a panel for each entry (Figure 7 of the SMYRF supplement).

    Args:
        panels: a title and the group of each token, (H·W,) integers, −1 (black) for none; see `groups_of`.
        grid: (H, W).
        image: (H, W, 3) in [0, 1], drawn first.

    Example:
        >>> import torch
        >>> from coterie.analysis.figures.memberships import draw_grid
        >>> len(draw_grid({"two": torch.arange(12) % 2, "three": torch.arange(12) % 3}, (3, 4)).axes)
        2
    """
    expect(bool(panels), "panels", "at least one", "none")
    pictures = {} if image is None else {"image": image}
    for title, labels in panels.items():
        _check_labels(labels)
        check_grid(grid, len(labels))
        pictures[title] = paint(labels).view(*grid, 3)
    shape = (*grid, 3)
    fits = image is None or tuple(image.shape) == shape
    expect(fits, "image", f"shape {shape}", None if image is None else tuple(image.shape))
    height = _PANEL * min(2.0, max(0.25, grid[0] / grid[1])) + 0.4
    figure = Figure(figsize=(_PANEL * len(pictures), height), layout="constrained")
    for index, (title, picture) in enumerate(pictures.items()):
        axes = figure.add_subplot(1, len(pictures), index + 1)
        axes.imshow(picture.cpu().numpy(), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_title(shown(title), fontsize=10, parse_math=False)
    return figure


def draw_tokens(tokens: Sequence[str], labels: Tensor, *, columns: int = 100, title: str = "") -> Figure:
    """Text with each token in the colour of its group.

    Args:
        tokens: as they are to be read; line breaks inside them become ⏎.
        labels: the group of each, −1 (black) for none.
        columns: characters in a line.
        title: above the text.

    Example:
        >>> import torch
        >>> from coterie.analysis.figures.memberships import draw_tokens
        >>> figure = draw_tokens(["who ", "meets ", "whom"], torch.tensor([0, 1, 0]))
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['who ', 'meets ', 'whom']
    """
    _check_tokens(tokens, labels)
    expect_int("columns", columns, at_least=1)
    colours, placed, column, line = paint(labels), [], 0, 0
    for token in tokens:
        word = _one_line(token)
        if column and column + len(word) > columns:
            column, line = 0, line + 1
        placed.append((column, line, word))
        column += len(word)
    width = max((column + len(word) for column, _, word in placed), default=1)
    figure = Figure(figsize=(0.09 * width + 0.4, 0.2 * (line + 1) + (0.7 if title else 0.3)), layout="constrained")
    axes = figure.add_subplot()
    for (column, line, word), colour in zip(placed, colours.tolist(), strict=True):
        axes.add_patch(Rectangle((column, line), len(word), 1, facecolor=colour, edgecolor="white", linewidth=0.4))
        axes.text(
            column + len(word) / 2,
            line + 0.5,
            word,
            parse_math=False,  # a dollar is a dollar
            color=_ink(colour),
            family="monospace",
            fontsize=7,
            ha="center",
            va="center",
        )
    axes.set(xlim=(0, width), ylim=(placed[-1][1] + 1 if placed else 1, 0))
    axes.set_axis_off()
    if title:
        axes.set_title(shown(title), fontsize=10, parse_math=False)
    return figure


def tokens_html(tokens: Sequence[str], labels: Tensor, *, title: str = "") -> str:
    """A page of its own with each token in the colour of its group; the group is told where the pointer rests.

    Args:
        tokens, labels, title: as in `draw_tokens`; line breaks stay.

    Example:
        >>> import torch
        >>> from coterie.analysis.figures.memberships import tokens_html
        >>> "&lt;b&gt;" in tokens_html(["<b>", "bold"], torch.tensor([0, 1]))
        True
    """
    _check_tokens(tokens, labels)
    spans = []
    for token, label, colour in zip(tokens, labels.tolist(), paint(labels).tolist(), strict=True):
        back = "#" + "".join(f"{round(255 * x):02x}" for x in colour)
        told = f"group {label}" if label >= 0 else "in no group"
        spans.append(f'<span style="background:{back};color:{_ink(colour)}" title="{told}">{html.escape(token)}</span>')
    name = html.escape(title or "Who is grouped with whom")
    return readable(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        "<style>body{font:15px/1.7 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
        "p{white-space:pre-wrap}span{border-radius:3px}</style></head>\n"
        f"<body><h1>{name}</h1>\n<p>{''.join(spans)}</p></body></html>\n"
    )


def draw_meetings(shares: Tensor, *, title: str = "") -> Figure:
    """Who meets whom, as `meetings` shrunk it: the darker a cell, the more of its pairs meet.

    Example:
        >>> import coterie, torch
        >>> from coterie.analysis.figures.memberships import draw_meetings
        >>> from coterie.analysis.memberships import meetings
        >>> q = torch.randn(1, 1, 90, 8)
        >>> draw_meetings(meetings(coterie.Local(window=9).plan(q, q))).axes[0].get_xlabel()
        'keys'
    """
    expect(shares.ndim == 2 and shares.numel() > 0, "shares", "(rows, columns), see meetings()", tuple(shares.shape))
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    top = float(shares.max())
    drawn = axes.imshow(
        shares.cpu().numpy(), cmap="Blues", vmin=0, vmax=top or 1, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(drawn, label="share of pairs that meet")
    axes.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    if title:
        axes.set_title(shown(title), fontsize=10, parse_math=False)
    return figure


def draw_locality(found: Mapping[str, Locality], *, title: str = "") -> Figure:
    """How often tokens are together, by distance; the dashed line is the share of all pairs.

    Example:
        >>> from coterie.analysis.figures.memberships import draw_locality
        >>> from coterie.analysis.memberships import Locality
        >>> figure = draw_locality({"smyrf": Locality("groups", (1, 2), (0.9, 0.5), (10, 9), 0.3)})
        >>> len(figure.axes[0].lines)
        2
    """
    expect(bool(found), "found", "at least one Locality", "none")
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, each in found.items():
        (line,) = axes.plot(each.distances, each.shares, marker="o", markersize=4, label=name)
        axes.axhline(each.chance, color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="distance", ylabel="share of pairs that are together", ylim=(0, None))
    axes.legend(frameon=False)
    if title:
        axes.set_title(shown(title), fontsize=10, parse_math=False)
    return figure


def _check_labels(labels: Tensor) -> None:
    expect_type(isinstance(labels, Tensor), "labels", "a tensor", type(labels).__name__)
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    expect_type(whole, "labels", "integers", labels.dtype)
    expect(labels.ndim == 1, "labels", "one group for each token, (N,)", tuple(labels.shape))
    lowest = int(labels.min()) if labels.numel() else 0
    expect(lowest >= -1, "labels", "groups from 0, or −1 for none", lowest)


def _check_tokens(tokens: Sequence[str], labels: Tensor) -> None:
    _check_labels(labels)
    words = not isinstance(tokens, str) and all(isinstance(token, str) for token in tokens)
    expect_type(words, "tokens", "a list of strings", type(tokens).__name__)
    expect(len(tokens) == len(labels), "tokens", f"one for each of the {len(labels)} labels", len(tokens))


def _one_line(token: str) -> str:
    return shown(token.replace("\n", "⏎").replace("\t", " "))


def _ink(colour: Sequence[float]) -> str:
    """Black or white, whichever can be read on the colour."""
    brightness = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return "black" if brightness > 0.5 else "white"
