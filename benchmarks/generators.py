"""The gallery's pages on image generators: what studies of recipes/terrain and recipes/biggan left in their folders."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from recipes.common.models import slug
from recipes.terrain.run import main as terrain_study

from coterie.cli.inputs import UserError
from coterie.files import read_json
from recipes.biggan import memberships

MOST = 200_000  # bytes of a picture
_ROWS, _COLUMNS = 4, 8  # of a sheet of generated images

Put = Callable[[str, bytes], str]  # a name and a PNG → what Markdown calls it


def terrain(put: Put, study: Path) -> list[str]:
    """The page on the terrain generator; its study goes on in this folder, or is made there (some minutes)."""
    mechanisms = ["smyrf", "near-far", "improved-clustered"]
    terrain_study(mechanism=mechanisms, parts="4", seeds=3, out=study)
    errors, ranks, local = _tables(study)
    last = sorted(study.glob("memberships-head-*.png"))[0]
    return [
        "A pre-trained generator makes a map of heights from noise in one step. Its 28 attention blocks run a "
        "mechanism at a quarter of the pairs, without training. [The results](../results.md) have more sizes and more "
        "images. `python -m benchmarks.gallery --only terrain` draws this page again.",
        "Rows are ways to attend, columns are images. In the second row every query gets one answer, that of the mean "
        "query: what is left of attention if it chooses nothing. A mechanism is of use if it stays well below "
        "its error.",
        put("terrain-images", _png(study / "images.png")),
        "What each way adds to the dense images: red is higher, blue is lower. Each row has a scale of its own.",
        put("terrain-differences", _png(study / "differences.png")),
        errors,
        "## Singular values",
        "The attention maps of the first image (supplement §11, Figure 5): one line for each head, and the error of "
        "SMYRF against the effective rank.",
        put("terrain-spectra", _png(study / "spectra.png")),
        ranks,
        "## Memberships",
        "The clusters of the pixels of the first image in one hashing round of SMYRF (supplement §12, Figure 7), in "
        "the last block over 1,024 pixels, first head. A pixel asks as a query and answers as a key.",
        put("terrain-memberships", _png(last)),
        "How often two pixels are in one cluster, by their distance, over all heads of the nine largest blocks. The "
        "dashed lines are the average over any two pixels.",
        put("terrain-locality", _png(study / "locality.png")),
        local,
    ]


def biggan(put: Put, study: Path) -> list[str]:
    """The page on generators that were trained: sheets, films, and the attention of the last one."""
    found = results_of(study)
    settings = found["settings"]
    steps, resolution = settings["training"]["steps"], settings["config"]["resolution"]
    parts = [
        f"Generators of {resolution}² images with attention at full resolution, trained from scratch for {steps:,} "
        "steps ([results](../results.md)): the first seed, and the same z in all pictures. "
        "`python -m benchmarks.gallery --only biggan --biggan FOLDER` draws this page from the folder of a study.",
        *_tables(study)[:2],
    ]
    for mechanism in settings["mechanisms"]:
        pictures = study / "pictures" / f"{slug(mechanism)}-0"
        sheet = sorted(pictures.glob("step-*.png"))[-1]
        name = f"biggan-{mechanism.partition(':')[0]}"
        parts += [
            f"## Trained with {mechanism}",
            put(f"{name}-sheet", _png(sheet, rows=range(_ROWS))),
            "The film of its training: a row for each look, the first before the first step.",
            put(f"{name}-film", _png(pictures / "film.png", rows=range(0, 99, 2))),
        ]
    parts += _rounds(found)
    return parts + _attention(put, study, settings["mechanisms"][-1])


def results_of(study: Path) -> dict[str, Any]:
    """What a study of recipes/biggan found; an error if this is not the folder of one that is done."""
    file = study / "results.json"
    found = read_json(file) if file.exists() else {}
    if not isinstance(found, dict) or found.get("settings", {}).get("recipe") != "biggan":
        raise UserError(f"{study} holds no study of recipes.biggan that is done: expected its results.json.")
    return found


def _rounds(found: dict[str, Any]) -> list[str]:
    """The tables of rounds that a schedule chose."""
    tables = found["tables"][2:]
    return ["## Rounds over training", *map(_markdown, tables)] if tables else []


def _attention(put: Put, study: Path, mechanism: str) -> list[str]:
    """Figures 5 and 7 of the supplement for the generator that was trained with a mechanism."""
    with tempfile.TemporaryDirectory() as held:
        out = Path(held)
        memberships.main(study / "models" / f"{slug(mechanism)}-0", out=out)
        maps, local = _tables(out)
        return [
            "## Memberships",
            f"The generator that was trained with `{mechanism}`, run densely. The clusters of its pixels in one "
            "hashing round of SMYRF (supplement §12, Figure 7): 2 of them, and 128. A pixel asks as a query, and "
            "a square of four pixels answers as a key.",
            *(put(f"biggan-memberships-{index}", _png(out / f"memberships-{index}.png")) for index in range(2)),
            "How often two pixels are in one cluster, by their distance. The dashed lines are the average over any two "
            "pixels.",
            put("biggan-locality", _png(out / "locality.png")),
            local,
            "## Singular values",
            "Its attention maps (supplement §11, Figure 5), one line for each image.",
            put("biggan-spectra", _png(out / "spectra.png")),
            maps,
        ]


# --- pictures and tables ----------------------------------------------------------------------------------------------


def _png(file: Path, rows: range | None = None) -> bytes:
    """A picture of at most 200 kB; some rows alone of a sheet or a film."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    return fitted(image if rows is None else some_rows(image, rows))


def some_rows(sheet: Image.Image, rows: range) -> Image.Image:
    """Some rows of a sheet of square images, eight in a row."""
    height = sheet.width // _COLUMNS
    kept = [row for row in rows if (row + 1) * height <= sheet.height]
    made = Image.new("RGB", (sheet.width, height * len(kept)), "white")
    for index, row in enumerate(kept):
        made.paste(sheet.crop((0, row * height, sheet.width, (row + 1) * height)), (0, index * height))
    return made


def fitted(image: Image.Image, most: int = MOST) -> bytes:
    """A PNG of at most so many bytes: as it is, or of 256 colours, or of those and smaller.

    >>> fitted(Image.new("RGB", (20, 10)))[:4]
    b'\\x89PNG'
    """
    found = _encoded(image)
    while len(found) > most:
        found = _encoded(image.quantize(256, dither=Image.Dither.NONE))
        image = image.resize((image.width * 7 // 8, image.height * 7 // 8), Image.Resampling.LANCZOS)
    return found


def _encoded(image: Image.Image) -> bytes:
    held = io.BytesIO()
    image.save(held, "PNG", optimize=True)
    return held.getvalue()


def _tables(study: Path) -> list[str]:
    return [_markdown(each) for each in read_json(study / "results.json")["tables"]]


def _markdown(table: dict[str, Any]) -> str:
    """A table of a study; its title stands above it."""
    lines = [table["columns"], ["---", *["---:"] * (len(table["columns"]) - 1)], *table["rows"]]
    title = table["title"][:1].upper() + table["title"][1:]
    return f"{title}:\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
