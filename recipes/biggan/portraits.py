"""Portraits drawn at any resolution, the stand-in for CelebA-HQ: the same ones for the same seed on every machine."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from coterie.cli.inputs import UserError
from coterie.files import write_whole
from recipes.biggan.images import Images

# The part of the drawing, 264 wide and 280 high, that is shown: a square with head and shoulders.
_WHOLE, _SHOWN = 'width="264px" height="280px" viewBox="0 0 264 280"', 'viewBox="22 8 220 220"'
_GROUNDS = ("#65c9ff", "#b6e3f4", "#c0aede", "#d1d4f9", "#ffd5dc", "#ffdfbf", "#a7ffc4", "#e6e6e6")

# What is everyday; no helmets, no hearts for eyes.
_HAIR = (
    "BIG_HAIR BOB BUN CAESAR CURLY CURVY DREADS FRO LONG_NOT_TOO_LONG MIA_WALLACE SHAGGY SHORT_CURLY SHORT_FLAT "
    "SHORT_ROUND SHORT_WAVED SIDES STRAIGHT_1 STRAIGHT_2 STRAIGHT_STRAND BUZZCUT PIXIE POMPADOUR QUIFF NONE"
)
_EYES = "DEFAULT DEFAULT DEFAULT HAPPY CLOSED SIDE SQUINT SURPRISED WINK"
_MOUTHS = "DEFAULT SMILE SMILE TWINKLE SERIOUS SAD BIG_SMILE CONCERNED"
_BROWS = "DEFAULT DEFAULT_NATURAL FLAT_NATURAL RAISED_EXCITED_NATURAL SAD_CONCERNED_NATURAL UP_DOWN_NATURAL"
_BEARDS = "NONE NONE NONE NONE BEARD_LIGHT BEARD_MEDIUM BEARD_MAGESTIC MOUSTACHE_MAGNUM"
_GLASSES = "NONE NONE NONE NONE PRESCRIPTION_1 PRESCRIPTION_2 ROUND SUNGLASSES WAYFARERS"
_CLOTHES = "BLAZER_SHIRT BLAZER_SWEATER COLLAR_SWEATER HOODIE OVERALL SHIRT_CREW_NECK SHIRT_SCOOP_NECK SHIRT_V_NECK"


def draw(seed: int, index: int, resolution: int) -> np.ndarray:
    """A portrait, (resolution, resolution, 3) uint8."""
    avatars, resvg = _packages()
    drawn = random.Random(f"{seed} {index}")

    def pick(kind: str, names: str) -> Any:
        return getattr(avatars, kind)[drawn.choice(names.split())]

    def colour(kind: str) -> Any:
        return drawn.choice(list(getattr(avatars, kind)))

    hair_colour = colour("HairColor")
    picture = avatars.Avatar(
        style=avatars.AvatarStyle.TRANSPARENT,
        top=pick("HairType", _HAIR),
        eyebrows=pick("EyebrowType", _BROWS),
        eyes=pick("EyeType", _EYES),
        nose=avatars.NoseType.DEFAULT,
        mouth=pick("MouthType", _MOUTHS),
        facial_hair=pick("FacialHairType", _BEARDS),
        skin_color=colour("SkinColor"),
        hair_color=hair_colour,
        facial_hair_color=hair_colour,
        accessory=pick("AccessoryType", _GLASSES),
        clothing=pick("ClothingType", _CLOTHES),
        clothing_color=colour("ClothingColor"),
    ).render()
    if _WHOLE not in picture:
        raise UserError("python-avatars draws on another canvas than 1.4 did: install python-avatars 1.4.")
    shown = picture.replace(_WHOLE, _SHOWN, 1)
    png = resvg.svg_to_bytes(
        svg_string=shown,
        width=resolution,
        height=resolution,
        background=drawn.choice(_GROUNDS),
        skip_system_fonts=True,
    )
    with Image.open(io.BytesIO(bytes(png))) as image:
        return np.asarray(image.convert("RGB"))


def load(
    count: int, resolution: int, folder: Path, *, seed: int = 0, tick: Callable[[], None] = lambda: None
) -> Images:
    """So many portraits; drawn once, and read from `folder` from then on.

    Args:
        tick: called for each that is drawn.
    """
    file = folder / f"portraits-{resolution}-{count}-{seed}-{_versions()}.npy"
    if not file.exists():
        pixels = np.stack([_ticked(draw(seed, index, resolution), tick) for index in range(count)])
        whole = io.BytesIO()
        np.save(whole, pixels.transpose(0, 3, 1, 2))
        write_whole(file, whole.getvalue())
    try:
        pixels = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}. Remove it, and portraits are drawn anew.") from error
    if pixels.shape != (count, 3, resolution, resolution) or pixels.dtype != np.uint8:
        raise UserError(f"{file} holds something else than {count} portraits: remove it, and they are drawn anew.")
    return Images(torch.from_numpy(pixels), torch.zeros(count, dtype=torch.long), ["portrait"])


def _ticked(drawn: np.ndarray, tick: Callable[[], None]) -> np.ndarray:
    tick()
    return drawn


def _packages() -> tuple[Any, Any]:
    try:
        import python_avatars
        import resvg_py
    except ImportError as error:
        raise UserError(
            f"portraits are drawn by two packages, of which {error.name} is missing: "
            "pip install python-avatars resvg-py, or give --data."
        ) from error
    return python_avatars, resvg_py


def _versions() -> str:
    """Other versions may draw other portraits."""
    _packages()
    return f"{version('python-avatars')}-{version('resvg-py')}"
