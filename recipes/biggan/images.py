"""Images to train on: a folder of them, CIFAR-10's files, or portraits that are drawn here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.biggan import cifar

SUFFIXES = {".bmp", ".jpeg", ".jpg", ".png", ".webp"}
Tick = Callable[[], None]


class Images(NamedTuple):
    """All images in memory: 3 bytes a pixel."""

    pixels: Tensor  # (count, 3, resolution, resolution), uint8
    labels: Tensor  # (count,), int64
    names: list[str]  # of the classes

    def __len__(self) -> int:
        return len(self.pixels)

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Some of them in [−1, 1], and their classes."""
        return self.pixels[rows].float() / 127.5 - 1, self.labels[rows]

    def only(self, rows: slice) -> Images:
        """Some of them."""
        return Images(self.pixels[rows], self.labels[rows], self.names)

    def digest(self) -> str:
        """A few letters that stand for them: a study does not go on with other images."""
        seen = hashlib.sha256(self.pixels.numpy().tobytes())
        seen.update(self.labels.numpy().tobytes())
        return seen.hexdigest()[:12]

    def unlabelled(self) -> Images:
        """All of one class."""
        return Images(self.pixels, torch.zeros_like(self.labels), ["image"])


def load(folder: Path, resolution: int, *, resize: bool = False, tick: Tick = lambda: None) -> Images:
    """Images of a folder: its own are of one class, those in folders inside are of a class each. Or CIFAR-10's files.

    Args:
        resize: cut to a square and resize what has another size, which is an error otherwise.
        tick: called for each image.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: expected one with images, or with CIFAR-10's files.")
    if cifar.is_here(folder):
        if resolution != cifar.SIZE:
            raise UserError(f"CIFAR-10 has images of {cifar.SIZE}², so that --resolution {resolution} does not fit.")
        return Images(*cifar.load(folder), cifar.NAMES)
    files, names = _listed(folder)
    pixels = np.empty((len(files), resolution, resolution, 3), np.uint8)
    for row, (file, _) in enumerate(files):
        pixels[row] = _read(file, resolution, resize)
        tick()
    labels = torch.tensor([label for _, label in files])
    return Images(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), labels, names)


def _listed(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Its image files with their classes, and the names of these."""
    own = _files(folder)
    inside = {part.name: _files(part) for part in sorted(folder.iterdir()) if part.is_dir()}
    inside = {name: files for name, files in inside.items() if files}
    if own and inside:
        raise UserError(f"{folder} holds images and folders of images: expected the one or the other.")
    if not own and not inside:
        raise UserError(f"{folder} holds no images: expected files that end in {', '.join(sorted(SUFFIXES))}.")
    classes = inside or {"image": own}
    return [(file, label) for label, files in enumerate(classes.values()) for file in files], list(classes)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())


def _read(file: Path, resolution: int, resize: bool) -> np.ndarray:
    try:
        with Image.open(file) as opened:
            image = _coloured(ImageOps.exif_transpose(opened))
    except Exception as error:  # a damaged file may make its reader stumble anywhere
        raise UserError(f"{file} cannot be read as an image: {error}.") from error
    width, height = image.size
    if (width, height) != (resolution, resolution):
        if not resize:
            raise UserError(
                f"{file} is {width}×{height} instead of {resolution}×{resolution}: "
                "give that --resolution, or --resize to cut and shrink it."
            )
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
        image = image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    return np.asarray(image)


def _coloured(image: Image.Image) -> Image.Image:
    """Three bytes a pixel. What is transparent is seen on white, as on our sheets; 16 bits are scaled to 8, of which
    Pillow would take whatever is above 255 for white."""
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image, np.float64).clip(0, 65_535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")
