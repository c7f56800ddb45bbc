"""Images and networks small enough for tests."""

import numpy as np
import pytest
import torch
from PIL import Image
from recipes.biggan.config import Config
from recipes.biggan.images import Images

TINY = Config(resolution=32, ch=2, dim_z=6, attention=(32,))
SMYRF = "smyrf:rounds=2,cluster_size=128"


def discs(count, size=32, seed=0):
    """Discs of random colours on grounds of random colours, (count, size, size, 3) uint8."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:size, :size]
    found = np.empty((count, size, size, 3), np.uint8)
    for image in found:
        ground, disc = draw.integers(0, 256, (2, 3))
        inside = (rows - size / 2) ** 2 + (columns - size / 2) ** 2 < (size / 3) ** 2
        image[:] = np.where(inside[..., None], disc, ground)
    return found


@pytest.fixture
def images():
    """Two dozen of them in two classes."""
    pixels = torch.from_numpy(discs(24)).permute(0, 3, 1, 2).contiguous()
    return Images(pixels, torch.arange(24) % 2, ["even", "odd"])


@pytest.fixture
def folder(tmp_path):
    """The same in a folder."""
    where = tmp_path / "images"
    where.mkdir()
    for number, pixels in enumerate(discs(24)):
        Image.fromarray(pixels).save(where / f"{number:03d}.png")
    return where
