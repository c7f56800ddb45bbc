"""Pictures of how clusters change over heads and layers, and of how they follow words in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from coterie.analysis.agreement import Agreement, Segment, check_segments
from coterie.analysis.figures.palette import paint
from coterie.checks import expect, expect_choice
from coterie.files import shown

ACROSS = ("layers", "heads")


def draw_agreement(found: Agreement, *, across: str = "layers", module: str | None = None, title: str = "") -> Figure:
    """The adjusted Rand index as colours.

    Args:
        found: what `agreement` measured.
        across: "layers": the mean of every two layers, beside every two heads; "heads": the heads of one module.
        module: whose heads; the first by default.
        title: above it.

    Example:
        >>> import torch
        >>> from coterie.analysis import agreement
        >>> from coterie.analysis.figures.agreement import draw_agreement
        >>> found = agreement({("one", 0): torch.arange(9) % 3, ("two", 0): torch.arange(9) % 2})
        >>> len(draw_agreement(found).axes)
        3
    """
    expect_choice("across", across, ACROSS)
    if across == "heads":
        chosen = found.modules[0] if module is None else module
        panels = [(f"heads of {chosen}", found.of(chosen), 1)]
    else:
        expect(module is None, "module", "None across layers", module)
        every = len(found.heads) // len(found.modules)
        panels = [("layers: mean over heads", found.layers(), 1), ("every head, layer by layer", found.index, every)]
    top = max(0.05, max(float(_apart(values).max()) for _, values, _ in panels))
    figure = Figure(figsize=(4.6 * len(panels) + 0.8, 4.4), layout="constrained")
    axes = [figure.add_subplot(1, len(panels), index + 1) for index in range(len(panels))]
    for each, (words, values, step) in zip(axes, panels, strict=True):
        drawn = each.imshow(values.numpy(), cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
        each.set_title(shown(words), fontsize=10, parse_math=False)
        ticks = range(0, len(values), step)
        each.set_xticks(ticks, [str(tick // step) for tick in ticks], fontsize=7)
        each.set_yticks(ticks, [str(tick // step) for tick in ticks], fontsize=7)
        for line in ticks if step > 1 else ():
            each.axhline(line - 0.5, color="white", linewidth=0.5)
            each.axvline(line - 0.5, color="white", linewidth=0.5)
    figure.colorbar(drawn, ax=axes, label="adjusted Rand index", extend="max")
    if title:
        figure.suptitle(shown(title), fontsize=11, parse_math=False)
    return figure


def draw_timeline(
    rows: Mapping[str, Tensor],
    segments: Sequence[Segment],
    *,
    seconds: float,
    features: Tensor | None = None,
    title: str = "",
) -> Figure:
    """Clusters along time: a strip for each entry, whose colours are groups; lines are where segments begin.

    Args:
        rows: a name and the group of each token, (N,) integers, −1 (black) for none.
        segments: words or phones, in tokens; their names stand above.
        seconds: that a token lasts.
        features: (bins, frames), such as a log-mel spectrogram of the same time, drawn first.
        title: above it.

    Example:
        >>> import torch
        >>> from coterie.analysis import Segment
        >>> from coterie.analysis.figures.agreement import draw_timeline
        >>> words = [Segment(0, 3, "who"), Segment(3, 8, "met")]
        >>> figure = draw_timeline({"head 0": torch.arange(8) // 3}, words, seconds=0.02)
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['who', 'met']
    """
    expect(bool(rows), "rows", "at least one", "none")
    lengths = sorted({len(labels) for labels in rows.values()})
    expect(len(lengths) == 1, "rows", "as many tokens in each", lengths)
    check_segments(segments, lengths[0])
    end = lengths[0] * seconds
    with_features = features is not None
    heights = [1.6] * with_features + [max(1.0, 0.16 * len(rows))]
    figure = Figure(figsize=(min(16.0, max(7.0, 1.9 * end)), sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    if features is not None:
        picture = features.cpu().numpy()
        few = colormaps["magma"].resampled(16)  # colours, so that files stay small
        extent = (0, end, 0, len(picture))
        axes[0].imshow(picture, aspect="auto", origin="lower", cmap=few, interpolation="nearest", extent=extent)
        axes[0].set(yticks=[])
    strips = torch.stack([paint(_in_order(labels)) for labels in rows.values()])
    axes[-1].imshow(strips.numpy(), aspect="auto", interpolation="nearest", extent=(0, end, len(rows), 0))
    axes[-1].set_yticks([row + 0.5 for row in range(len(rows))], list(rows), fontsize=7)
    axes[-1].set(xlabel="seconds")
    for each in segments:
        for line in {each.start, each.end}:
            for one in axes:
                one.axvline(line * seconds, color="black" if one is axes[-1] else "white", linewidth=0.8)
        axes[0].text(
            (each.start + each.end) / 2 * seconds,
            1.02,
            shown(each.name),
            transform=axes[0].get_xaxis_transform(),
            parse_math=False,
            fontsize=7,
            ha="center",
            va="bottom",
            rotation=45 if len(segments) > 12 else 0,
        )
    if title:
        figure.suptitle(shown(title), fontsize=11, parse_math=False)
    return figure


def _in_order(labels: Tensor) -> Tensor:
    """The same groups, numbered as they appear: so few colours as there are groups, and the most different first."""
    numbers: dict[int, int] = {-1: -1}
    for label in labels.tolist():
        numbers.setdefault(label, len(numbers) - 1)
    return torch.tensor([numbers[label] for label in labels.tolist()])


def _apart(values: Tensor) -> Tensor:
    """Without the diagonal, which is 1 for heads, and without what is unknown."""
    off = values[~torch.eye(len(values), dtype=torch.bool)]
    return torch.cat([off[~off.isnan()], torch.zeros(1, dtype=values.dtype)])
