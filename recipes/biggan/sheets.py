"""Sheets of images as PNG files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from coterie.files import write_whole

_GAP = 2


def to_bytes(images: Tensor) -> Tensor:
    """[−1, 1] → uint8; whatever is no number becomes grey."""
    return ((images.float().nan_to_num(0.0).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def grid(images: Tensor, columns: int, zoom: int = 1) -> Image.Image:
    """Images (count, 3, H, W) row by row, uint8 or in [−1, 1], on white."""
    pixels = images if images.dtype == torch.uint8 else to_bytes(images)
    count, _, height, width = pixels.shape
    rows = -(-count // columns)
    sheet = torch.full((3, rows * (height + _GAP) + _GAP, columns * (width + _GAP) + _GAP), 255, dtype=torch.uint8)
    for index, image in enumerate(pixels.cpu()):
        top = _GAP + index // columns * (height + _GAP)
        left = _GAP + index % columns * (width + _GAP)
        sheet[:, top : top + height, left : left + width] = image
    made = Image.fromarray(sheet.permute(1, 2, 0).contiguous().numpy())
    return made.resize((made.width * zoom, made.height * zoom), Image.Resampling.NEAREST) if zoom > 1 else made


def write(path: Path, images: Tensor, columns: int) -> None:
    """A sheet as a file that is whole or absent; small images are shown larger."""
    content = io.BytesIO()
    grid(images, columns, zoom=max(1, 96 // images.shape[-1])).save(content, "PNG")
    write_whole(path, content.getvalue())


def strip(path: Path, files: Sequence[Path], columns: int = 8) -> None:
    """The first row of each of some sheets of one size, one below the other: the same z at several times.

    Args:
        columns: images in a row of these sheets.
    """
    rows = []
    for file in files:
        with Image.open(file) as sheet:
            rows.append(sheet.convert("RGB").crop((0, 0, sheet.width, sheet.width // columns)))
    whole = Image.new("RGB", (rows[0].width, sum(row.height for row in rows)), "white")
    top = 0
    for row in rows:
        whole.paste(row, (0, top))
        top += row.height
    content = io.BytesIO()
    whole.save(content, "PNG")
    write_whole(path, content.getvalue())
