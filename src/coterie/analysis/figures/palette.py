"""Colours for many groups, as different from each other as they can be."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from coterie.checks import expect_int

MOST = 17**3 - 1  # colours before they repeat
_TWO = ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
_NOBODY = (0.0, 0.0, 0.0)


def palette(count: int) -> Tensor:
    """(count, 3) colours in [0, 1]: each is as far as possible, to the eye (CIELAB), from black and those before it.

    Two are grey and white, as in Figure 7 of the SMYRF supplement. Black is left for what is in no group. After 4,912
    the colours repeat.

    Example:
        >>> from coterie.analysis.figures.palette import palette
        >>> palette(2).tolist(), palette(128).unique(dim=0).shape
        ([[0.5, 0.5, 0.5], [1.0, 1.0, 1.0]], torch.Size([128, 3]))
    """
    expect_int("count", count, at_least=1)
    if count <= 2:
        return torch.tensor(_TWO[:count])
    return _spread(min(count, MOST))[torch.arange(count) % MOST]


def paint(labels: Tensor) -> Tensor:
    """The colour of each label's group, (…, 3); −1 is black.

    Example:
        >>> import torch
        >>> from coterie.analysis.figures.palette import paint
        >>> paint(torch.tensor([1, -1]))
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """
    colours = palette(max(1, int(labels.max()) + 1)) if labels.numel() else palette(1)
    return torch.cat([colours, torch.tensor([_NOBODY])])[labels.cpu()]


@lru_cache(maxsize=8)
def _spread(count: int) -> Tensor:
    """Greedily, the colour of an even lattice whose nearest neighbour among those taken is farthest."""
    steps = torch.linspace(0, 1, round((MOST + 1) ** (1 / 3)))
    candidates = torch.cartesian_prod(steps, steps, steps)
    places = lab(candidates)
    nearest = (places - lab(torch.tensor([_NOBODY]))).norm(dim=-1)
    chosen = []
    for _ in range(count):
        index = int(nearest.argmax())
        chosen.append(index)
        nearest = torch.minimum(nearest, (places - places[index]).norm(dim=-1))
    return candidates[chosen]


def lab(colours: Tensor) -> Tensor:
    """CIELAB of sRGB colours (…, 3) under the light D65: distances are about as the eye sees them.

    Example:
        >>> import torch
        >>> from coterie.analysis.figures.palette import lab
        >>> lab(torch.ones(1, 3)).round().abs()                # white
        tensor([[100.,   0.,   0.]])
    """
    linear = torch.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    to_xyz = torch.tensor([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = linear @ to_xyz.mT / to_xyz.sum(1)
    bent = torch.where(ratio > (6 / 29) ** 3, ratio.clamp(min=1e-12) ** (1 / 3), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = bent.unbind(-1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)
