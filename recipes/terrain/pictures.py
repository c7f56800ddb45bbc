"""Sheets of images: by each way of attending, and how they differ from the dense ones."""

from __future__ import annotations

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

_CELL = 1.5  # inches
_LABEL = 1.9
_COLOURS = "gist_earth"


def coloured(image: Tensor, size: int) -> Tensor:
    """A map of heights as colours, (size, size, 3), each pixel the mean of those that it stands for.

    >>> coloured(torch.arange(16.0).view(4, 4), 2).shape
    torch.Size([2, 2, 3])
    """
    small = F.adaptive_avg_pool2d(image[None, None], size)[0, 0]
    low, high = small.min(), small.max()
    return torch.from_numpy(colormaps[_COLOURS](((small - low) / (high - low).clamp(min=1e-9)).numpy())[..., :3])


def sheet(names: list[str], images: Tensor, errors: list[list[float]], *, differences: bool = False) -> Figure:
    """A row for each way, the dense one first, and a column for each image.

    Args:
        names: of the rows.
        images: (rows, columns, H, W).
        errors: of each row but the first, of each column.
        differences: draw what is added to the dense image instead: blue is lower, red is higher. Each row has a scale
            of its own, which its label says.
    """
    rows, columns = images.shape[:2]
    figure = Figure(figsize=(_LABEL + _CELL * columns, _CELL * rows + 0.1))
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(left=_LABEL / (_LABEL + _CELL * columns), right=0.995, top=0.995, bottom=0.005, wspace=0.04)
    figure.subplots_adjust(hspace=0.04)
    for row, name in enumerate(names):
        apart = images[row] - images[0]
        most = float(apart.abs().max()) or 1.0
        label = name.replace(", ", "\n")
        if row:
            label += f"\n{100 * sum(errors[row - 1]) / columns:.2g} % of the image"
            label += f"\nred: +{most:.2g}" if differences else ""
        for column, axes in enumerate(grid[row]):
            if differences and row:
                axes.imshow(apart[column].numpy(), cmap="RdBu_r", vmin=-most, vmax=most, interpolation="nearest")
            else:
                low, high = float(images[0, column].min()), float(images[0, column].max())
                axes.imshow(images[row, column].numpy(), cmap=_COLOURS, vmin=low, vmax=high, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
        grid[row][0].set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8, parse_math=False)
    return figure
