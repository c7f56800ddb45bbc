"""The attention of a trained generator: the clusters of its pixels, its maps, and what is refused."""

import json
import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from recipes.biggan.attention import attend_by, blocks
from recipes.biggan.deep import DeepConfig, DeepGenerator
from recipes.biggan.generator import Generator
from recipes.biggan.pretrained import save_pretrained
from recipes.biggan.sampling import draw_y, draw_z
from recipes.common import clusters, command

from recipes.biggan import memberships
from tests.command import _said
from tests.recipes.biggan.conftest import SMYRF, TINY
from tests.recipes.biggan.test_checkpoints import LAYERS


@pytest.fixture
def generator():
    """One whose attention does something."""
    torch.manual_seed(0)
    made = Generator(replace(TINY, attention=(16, 32))).eval()
    with torch.no_grad():
        for block in blocks(made):
            block.gamma.fill_(0.7)
    return made


@pytest.fixture
def model(generator, tmp_path):
    save_pretrained(attend_by(generator, SMYRF), tmp_path / "model")
    return tmp_path / "model"


def run(*arguments, fails=0):
    return _said(lambda: command.run("biggan.memberships", memberships.main), arguments, fails)


def plain(generator, z):
    """Queries and keys of the last block by hand: (1024, D) and (256, D)."""
    inside = []
    block = generator.get_submodule("blocks.2.1")
    hook = block.register_forward_pre_hook(lambda _, x: inside.append(x[0]))
    with torch.no_grad():
        generator(z)
        q, k = block.theta(inside[0])[0], block.phi(inside[0])[0]
    hook.remove()
    squares = k.unflatten(1, (16, 2)).unflatten(3, (16, 2)).amax((2, 4))
    return q.flatten(1).T, squares.flatten(1).T


def test_what_is_seen_is_dense_whatever_the_generator_runs(generator):
    z = draw_z(generator, 1, None, 3)
    q, k = plain(generator, z)
    found = memberships.watch(attend_by(generator, SMYRF), z, draw_y(generator, 1, 3))
    assert list(found) == ["blocks.1.1", "blocks.2.1"]
    assert found["blocks.2.1"].settings["scale"] == 1
    smyrf_before = found["blocks.2.1"].q[0, 0]  # the block before it attends densely too
    attend_by(generator, "dense")
    q, k = plain(generator, z)
    torch.testing.assert_close(smyrf_before, q, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["blocks.2.1"].k[0, 0], k, rtol=1e-4, atol=1e-5)


def test_a_key_stands_for_a_square_of_pixels(generator):
    seen = memberships.watch(generator, draw_z(generator, 1, None, 0), draw_y(generator, 1, 0))["blocks.2.1"]
    panels = clusters.memberships(seen, 5)
    assert list(panels) == ["2 clusters, queries", "2 clusters, keys", "128 clusters, queries", "128 clusters, keys"]
    met = clusters.hashed(seen, 128, 5).to_dense()[0, 0]
    queries, keys = (panels[f"128 clusters, {side}"].view(32, 32) for side in ("queries", "keys"))
    assert queries.flatten().bincount().tolist() == [8] * 128
    for row, column, to_row, to_column in ((0, 0, 31, 30), (7, 12, 7, 13), (31, 31, 0, 1)):
        key = to_row // 2 * 16 + to_column // 2
        together = queries[row, column] == keys[to_row, to_column]
        assert bool(met[row * 32 + column, key]) == bool(together)
    assert torch.equal(keys[::2, ::2], keys[1::2, 1::2])


def test_how_local_they_are_against_pairs_that_are_counted(generator):
    seen = memberships.watch(generator, draw_z(generator, 1, None, 1), draw_y(generator, 1, 1))["blocks.2.1"]
    found = clusters.localities({"it": seen}, 1)
    assert list(found) == [2, 128]
    labels = clusters.memberships(seen, 1)["2 clusters, queries"].view(32, 32).tolist()
    right = [labels[i][j] == labels[i][j + 1] for i in range(32) for j in range(31)]
    down = [labels[i][j] == labels[i + 1][j] for i in range(31) for j in range(32)]
    assert found[2].near == pytest.approx(sum(right + down) / len(right + down))
    assert found[2].chance == pytest.approx(511 / 1023)


def test_the_command_says_what_it_saw(model, generator, tmp_path):
    out = tmp_path / "out"
    said = run(model, "--out", out, "--count", 5)
    assert "+0.700" in said
    assert "over 1,024 tokens: 5 images" in said
    names = [*(f"memberships-{index}.png" for index in range(4)), "locality.png", "spectra.png"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "results.json"])
    for name in names:
        assert name in said
        with Image.open(out / name) as picture:
            assert picture.format == "PNG"
    found = json.loads((out / "results.json").read_text())
    assert found["block"] == "blocks.2.1"
    z = draw_z(generator, 5, None, 0)
    q, k = plain(attend_by(generator, "dense"), z[:1])
    values = torch.linalg.svdvals((q.double() @ k.double().T).softmax(-1))
    share = values / values.sum()
    rank = math.exp(float(-(share * share.log()).sum()))
    first = found["images"][0]
    assert first["ranks"]["effective rank"] == pytest.approx(rank, rel=1e-3)
    with torch.no_grad():
        before = generator(z[:1])
        generator.get_submodule("blocks.2.1").gamma.zero_()
        after = generator(z[:1])
    assert first["without"] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    again = run(model, "--out", out, "--count", 5)
    assert again == said


def test_another_block_can_be_asked_for(model, tmp_path):
    said = run(model, "--out", tmp_path / "out", "--count", 1, "--block", "blocks.1.1")
    assert "over 256 tokens: 1 image" in said
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["clusters"] for row in found["images"][0]["locality"]] == [2, 128]


def test_a_generator_of_biggan_deep(tmp_path):
    torch.manual_seed(0)
    save_pretrained(DeepGenerator(DeepConfig(32, 8, 6, 5, LAYERS, 3)).eval(), tmp_path / "deep")
    run(tmp_path / "deep", "--out", tmp_path / "out", "--count", 1)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["block"] == "layers.3"
    assert found["images"][0]["without"] == 0  # γ is 0


def test_refusals_write_nothing(model, tmp_path):
    out = tmp_path / "out"
    assert "--block blocks.9: expected one of blocks.1.1, blocks.2.1" in run(
        model, "--out", out, "--block", "blocks.9", fails=1
    )
    save_pretrained(Generator(replace(TINY, attention=())), tmp_path / "none")
    assert "none has no attention block" in run(tmp_path / "none", "--out", out, fails=1)
    assert "holds no generator" in run(tmp_path, "--out", out, fails=1)
    assert not out.exists()
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run(model, "--out", tmp_path / "file", fails=1)
