"""Pictures of spectra: Figures 5 and 6 of the SMYRF supplement for any model, and rank against error."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coterie.analysis.spectra import HeadSpectrum, Spectra
from coterie.checks import expect
from coterie.files import shown

SLOW, FAST = "#c1272d", "#3b6ea5"
_ERRORS = {
    "output": "relative error of the output",
    "map": "relative error of the map",
    "frobenius": "‖Â − A‖ of the map",
}
_LABELS = {
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "rate": "decay rate of the singular values",
    "r2": "R² of the exponential fit",
}


def draw_spectra(found: Spectra, *, against: str = "effective_rank", title: str = "") -> Figure:
    """The singular values of all heads, slow ones in red; beside them a measure of the spectrum against the error.

    Args:
        found: what `spectra` measured; without a mechanism there is no second part.
        against: "effective_rank", or another measure of `Spectra.correlation`.
        title: above both.

    Example:
        >>> import torch
        >>> from coterie.analysis.spectra import spectra
        >>> from coterie.analysis.figures.spectra import draw_spectra
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
        >>> found = spectra(layer, torch.randn(1, 40, 32), mechanism="smyrf:cluster_size=10")
        >>> [axes.get_xlabel() for axes in draw_spectra(found).axes]
        ['index', 'effective rank']
    """
    expect(bool(found.heads), "found", "at least one head", "none")
    # Asked first, so that a measure that cannot be drawn is refused before anything is.
    correlation = found.correlation(against) if found.errors_differ else None
    figure = Figure(figsize=(11 if correlation else 6, 4.2), layout="constrained")
    draw_values(figure.add_subplot(1, 2 if correlation else 1, 1), found.heads)
    if correlation is not None:
        axes = figure.add_subplot(1, 2, 2)
        for slow, colour in ((False, FAST), (True, SLOW)):
            part = [each for each in found.heads if each.slow == slow]
            axes.scatter([getattr(each, against) for each in part], [each.error for each in part], s=14, color=colour)
        axes.set(xlabel=_LABELS[against], ylabel=f"{_ERRORS[found.error_of]}\n{found.mechanism}")
        axes.set_title(
            f"Spearman {correlation.rho:+.2f} (p = {correlation.p_value:.1g}, {correlation.heads} heads)", fontsize=10
        )
    if title:
        figure.suptitle(shown(title), parse_math=False)  # a dollar is a dollar
    return figure


def draw_values(axes: Axes, heads: tuple[HeadSpectrum, ...]) -> None:
    """Singular values by index on a log scale, a line for each head.

    Example:
        >>> import torch
        >>> from matplotlib.figure import Figure
        >>> from coterie.analysis.figures.spectra import draw_values
        >>> from coterie.analysis.spectra import head_spectra
        >>> axes = Figure().add_subplot()
        >>> draw_values(axes, head_spectra(*torch.randn(2, 1, 3, 20, 4).unbind(0)))
        >>> len(axes.lines)
        3
    """
    first = max(float(each.values[0]) for each in heads)
    for each in sorted(heads, key=lambda each: each.slow):  # slow ones on top
        values = each.values[each.values > 0].tolist()
        colour, width = (SLOW, 1.1) if each.slow else (FAST, 0.6)
        axes.plot(range(1, len(values) + 1), values, color=colour, linewidth=width, alpha=0.8 if each.slow else 0.45)
    axes.set_yscale("log")
    if first > 0:
        axes.set_ylim(bottom=max(1e-8 * first, axes.get_ylim()[0]))  # below is rounding in most models' numbers
    slow = sum(each.slow for each in heads)
    axes.set(xlabel="index", ylabel="singular value")
    axes.set_title(f"{len(heads)} heads, {slow} decay slowly (red)", fontsize=10)
