"""The gallery: its first page, the pages on image generators, and what its command refuses."""

import doctest
import io
import sys

import numpy as np
import pytest
from benchmarks import gallery, generators
from PIL import Image

from tests.command import recipe
from tests.docs.test_docs import ROOT

FOLDER = ROOT / "docs" / "gallery"


def test_the_first_page_shows_every_page_that_is_there():
    """`python -m benchmarks.gallery` writes it with each of them."""
    assert (FOLDER / "index.md").read_text() == gallery.index(FOLDER)
    assert {path.stem for path in FOLDER.glob("*.md")} - {"index"} <= set(gallery.PAGES) == set(gallery.PARTS)


@pytest.mark.parametrize("page", ["terrain", "biggan"])
def test_pictures_of_generators_are_small(page):
    found = list(FOLDER.glob(f"{page}-*.png"))
    assert bool(found) == (FOLDER / f"{page}.md").exists()
    for path in found:
        assert path.stat().st_size <= generators.MOST, path.name
        assert f"({path.name})" in (FOLDER / f"{page}.md").read_text(), f"{path.name} is on the page"


def test_the_examples_of_docstrings():
    found = doctest.testmod(generators)
    assert found.attempted
    assert not found.failed


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def opened(content):
    return Image.open(io.BytesIO(content))


def test_a_picture_loses_colours_first_and_then_size():
    image = noise(100, 60)
    assert np.array_equal(np.asarray(opened(generators.fitted(image))), np.asarray(image))
    fewer = generators.fitted(image, 10_000)
    assert (opened(fewer).size, opened(fewer).mode) == ((100, 60), "P")
    small = generators.fitted(image, 3_000)
    assert len(small) <= 3_000
    assert opened(small).width < 70


def test_rows_of_a_sheet():
    sheet = noise(16, 10)
    found = np.asarray(generators.some_rows(sheet, range(0, 99, 2)))
    pixels = np.asarray(sheet)
    assert np.array_equal(found, np.concatenate([pixels[0:2], pixels[4:6], pixels[8:10]]))


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Of a generator that learned nothing."""
    folder = tmp_path_factory.mktemp("study")
    images, out = folder / "images", folder / "out"
    images.mkdir()
    for number in range(24):
        noise(32, 32).save(images / f"{number}.png")
    small = ("--quick", "--ch", 2, "--dim-z", 6, "--batch", 4, "--steps", 2, "--tests", 8, "--no-bf16")
    smyrf = ("--mechanism", "smyrf:rounds=1,cluster_size=128", "--max-error", 0.5, "--look", 1)
    recipe("biggan", "--data", images, "--out", out, *small, *smyrf)
    return out


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gallery", *map(str, arguments)])
    gallery.main()


def test_a_page_is_made_of_a_study(study, tmp_path, monkeypatch):
    run(monkeypatch, "--only", "biggan", "--biggan", study, "--out", tmp_path)
    page = (tmp_path / "biggan.md").read_text()
    pictures = [path.name for path in tmp_path.glob("*.png")]
    assert len(pictures) == 2 * 2 + 2 + 2
    for name in pictures:
        assert f"]({name})" in page
    assert opened((tmp_path / "biggan-smyrf-sheet.png").read_bytes()).size == (822, 4 * 102)
    assert "## Rounds over training" in page
    assert page.index("(not FID)") < page.index("## Trained with dense") < page.index("## Memberships")
    first = (tmp_path / "index.md").read_text()
    assert "](biggan.md)" in first
    assert "terrain" not in first


def test_what_the_command_refuses(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    for arguments, said in (
        (("--only", "biggan"), "--only biggan: expected --biggan FOLDER"),
        (("--only", "cats"), "--only: expected some of spectra, memberships"),
        (("--only", "biggan", "--biggan", tmp_path), "holds no study of recipes.biggan that is done"),
    ):
        with pytest.raises(SystemExit):
            run(monkeypatch, *arguments, "--out", out)
        assert said in capsys.readouterr().err
    assert not out.exists()
