"""Queries from an image: one for each pixel, alike where pixels are alike in colour and place."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.checks import expect, expect_int, expect_seed, expect_type


class Pixels(NamedTuple):
    """An image as tokens."""

    q: Tensor  # (1, 1, H·W, dim) float32: queries, and keys as well
    image: Tensor  # (H, W, 3) in [0, 1], what the queries were made of
    grid: tuple[int, int]


def image_queries(
    image: Any, *, grid: tuple[int, int] | None = None, dim: int = 32, place: float = 1.0, seed: int = 0
) -> Pixels:
    """A query for each pixel: red, green and blue, and `place` times its row and column, each of mean 0 and variance 1,
    multiplied by a random matrix (5, dim) from N(0, 1/dim).

    A random projection keeps inner products to within about 1/√dim (Johnson and Lindenstrauss), so that pixels which
    are alike in colour and near each other want to meet. There is no model in it: it shows what a mechanism does with
    an image, as Figure 7 of the SMYRF supplement does with the queries of a BigGAN.

    Args:
        image: (H, W, 3), a tensor or an array of integers in [0, 255] or of floats in [0, 1].
        grid: average the image to this many rows and columns first; as it is by default.
        dim: of the queries.
        place: how much the place counts against the colour.
        seed: of the random matrix.

    Example:
        >>> import numpy
        >>> from coterie.analysis.images import image_queries
        >>> found = image_queries(numpy.zeros((20, 30, 3), dtype="uint8"), grid=(10, 15))
        >>> found.q.shape, found.grid
        (torch.Size([1, 1, 150, 32]), (10, 15))
    """
    expect_int("dim", dim, at_least=1)
    expect_seed(seed)
    number = isinstance(place, int | float) and not isinstance(place, bool)
    expect_type(number, "place", "a number", type(place).__name__)
    colours = _colours(image)
    if grid is not None:
        fits = all(
            isinstance(wanted, int) and 0 < wanted <= side for wanted, side in zip(grid, colours.shape, strict=False)
        )
        expect(len(grid) == 2 and fits, "grid", f"(H, W), at most the image's {tuple(colours.shape[:2])}", grid)
        colours = F.adaptive_avg_pool2d(colours.movedim(-1, 0), grid).movedim(0, -1)
    height, width = colours.shape[:2]
    rows = torch.arange(height, dtype=torch.float32)[:, None].expand(height, width)
    columns = torch.arange(width, dtype=torch.float32).expand(height, width)
    features = torch.cat([_unit(colours), place * _unit(torch.stack([rows, columns], -1))], -1).flatten(0, 1)
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, dim, generator=generator) / dim**0.5
    return Pixels((features @ matrix)[None, None], colours, (height, width))


def _colours(image: Any) -> Tensor:
    """(H, W, 3) float32 in [0, 1]."""
    found = image.detach().cpu() if isinstance(image, Tensor) else torch.tensor(image)
    coloured = found.ndim == 3 and found.shape[-1] == 3 and found.numel() > 0
    expect(coloured, "image", "shape (H, W, 3)", tuple(found.shape))
    scaled = found.float() if found.is_floating_point() else found.float() / 255
    inside = bool(((scaled >= 0) & (scaled <= 1)).all())  # NaN is not
    expect(inside, "image", "integers in [0, 255] or floats in [0, 1]", "others")
    return scaled


def _unit(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 for each channel of (H, W, channels); a constant one is 0."""
    centred = x - x.mean((0, 1))
    spread = centred.square().mean((0, 1)).sqrt()
    return centred / torch.where(spread > 1e-6, spread, 1)
