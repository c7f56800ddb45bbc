"""Checkpoints in and out: BigGAN-PyTorch's folder, pytorch-pretrained-biggan, our own; and every refusal."""

import io
import json
import random
import warnings
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes.biggan.attention import attend_by
from recipes.biggan.config import Config
from recipes.biggan.deep import DeepConfig
from recipes.biggan.discriminator import Discriminator
from recipes.biggan.generator import Generator
from recipes.biggan.training import Settings, Training
from recipes.common import weights

from coterie.cli.inputs import UserError
from recipes.biggan import deep_weights, pretrained, published, source
from tests.recipes.biggan.conftest import SMYRF, TINY

CONDITIONAL = Config(64, 4, 20, 3, (16, 64), (16,), shared_dim=6, hierarchical=True)


def published_state(config, seed=0):
    """A generator's state dict in BigGAN-PyTorch's layout, written down from its description, not from our classes."""
    draw = torch.Generator().manual_seed(seed)
    state = {}

    def normed(name, *shape):
        state[f"{name}.weight"] = torch.randn(shape, generator=draw) / shape[0] ** 0.5
        state[f"{name}.u0"] = F.normalize(torch.randn(1, shape[0], generator=draw))
        state[f"{name}.sv0"] = torch.ones(1)

    def conv(name, outputs, inputs, size, bias=True):
        normed(name, outputs, inputs, size, size)
        if bias:
            state[f"{name}.bias"] = 0.1 * torch.randn(outputs, generator=draw)

    def stored(name, channels):
        state[f"{name}.stored_mean"] = 0.1 * torch.randn(channels, generator=draw)
        state[f"{name}.stored_var"] = 1 + torch.rand(channels, generator=draw)

    widths = [4 * multiple for multiple in (16, 16, 8, 4, 2)]
    state["shared.weight"] = torch.randn(3, 6, generator=draw)
    normed("linear", 16 * widths[0], 4)
    state["linear.bias"] = torch.randn(16 * widths[0], generator=draw)
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        block = f"blocks.{i}.0"
        conv(f"{block}.conv1", outputs, inputs, 3)
        conv(f"{block}.conv2", outputs, outputs, 3)
        conv(f"{block}.conv_sc", outputs, inputs, 1)
        for name, channels in (("bn1", inputs), ("bn2", outputs)):
            stored(f"{block}.{name}", channels)
            normed(f"{block}.{name}.gain", channels, 6 + 4)
            normed(f"{block}.{name}.bias", channels, 6 + 4)
        if 8 * 2**i in config.attention:
            state[f"blocks.{i}.1.gamma"] = torch.tensor(0.6)
            conv(f"blocks.{i}.1.theta", outputs // 8, outputs, 1, bias=False)
            conv(f"blocks.{i}.1.phi", outputs // 8, outputs, 1, bias=False)
            conv(f"blocks.{i}.1.g", outputs // 2, outputs, 1, bias=False)
            conv(f"blocks.{i}.1.o", outputs, outputs // 2, 1, bias=False)
    stored("output_layer.0", widths[-1])
    state["output_layer.0.gain"] = torch.rand(widths[-1], generator=draw)
    state["output_layer.0.bias"] = torch.rand(widths[-1], generator=draw)
    conv("output_layer.2", 3, widths[-1], 3)
    return state


def published_image(state, z, y, config):
    """What BigGAN-PyTorch's generator computes from that in eval mode, in functions."""

    def weight(name):
        w = state[f"{name}.weight"]
        matrix = w.reshape(len(w), -1)
        v = F.normalize(state[f"{name}.u0"] @ matrix, eps=1e-6)
        u = F.normalize(v @ matrix.T, eps=1e-6)
        return w / (v @ matrix.T @ u.T)

    def conv(x, name, padding=0):
        return F.conv2d(x, weight(name), state.get(f"{name}.bias"), padding=padding)

    def standard(x, name):
        return F.batch_norm(x, state[f"{name}.stored_mean"], state[f"{name}.stored_var"], eps=1e-5)

    def norm(x, name, about):
        gain, bias = 1 + about @ weight(f"{name}.gain").T, about @ weight(f"{name}.bias").T
        return standard(x, name) * gain[..., None, None] + bias[..., None, None]

    parts = z.split(4, 1)
    label = state["shared.weight"][y]
    h = F.linear(parts[0], weight("linear"), state["linear.bias"]).view(len(z), -1, 4, 4)
    for i in range(4):
        block, about = f"blocks.{i}.0", torch.cat([label, parts[i + 1]], 1)
        x = F.interpolate(F.relu(norm(h, f"{block}.bn1", about)), scale_factor=2)
        x = conv(F.relu(norm(conv(x, f"{block}.conv1", 1), f"{block}.bn2", about)), f"{block}.conv2", 1)
        h = x + conv(F.interpolate(h, scale_factor=2), f"{block}.conv_sc")
        if 8 * 2**i in config.attention:
            name = f"blocks.{i}.1"
            theta = conv(h, f"{name}.theta").flatten(2)
            phi, g = (F.max_pool2d(conv(h, f"{name}.{each}"), 2).flatten(2) for each in ("phi", "g"))
            beta = torch.softmax(theta.transpose(1, 2) @ phi, -1)
            found = (g @ beta.transpose(1, 2)).view(len(h), -1, *h.shape[2:])
            h = h + state[f"{name}.gamma"] * conv(found, f"{name}.o")
    h = standard(h, "output_layer.0")
    h = h * state["output_layer.0.gain"][:, None, None] + state["output_layer.0.bias"][:, None, None]
    return conv(F.relu(h), "output_layer.2", 1).tanh()


@pytest.fixture
def foreign(tmp_path):
    """A folder as BigGAN-PyTorch writes it, with its own settings inside, a ReLU among them."""
    folder = tmp_path / "biggan"
    folder.mkdir()
    torch.save(published_state(CONDITIONAL), folder / "G_best0.pth")
    torch.save(published_state(CONDITIONAL, 1), folder / "G_ema_best0.pth")
    torch.save(Discriminator(CONDITIONAL).state_dict(), folder / "D_best0.pth")
    torch.save({"itr": 7, "config": {"G_activation": torch.nn.ReLU(False)}}, folder / "state_dict_best0.pth")
    return folder


def test_a_published_folder_gives_the_published_images(foreign):
    found = published.load(foreign, "best0")
    assert found.g.config == CONDITIONAL
    assert found.state["itr"] == 7
    z, y = torch.randn(3, 20), torch.tensor([0, 2, 1])
    with torch.no_grad():
        ours = found.g.eval()(z, y)
        torch.testing.assert_close(
            ours, published_image(published_state(CONDITIONAL), z, y, CONDITIONAL), atol=1e-4, rtol=0
        )
        assert found.ema is not None
        want = published_image(published_state(CONDITIONAL, 1), z, y, CONDITIONAL)
        torch.testing.assert_close(found.ema.eval()(z, y), want, atol=1e-4, rtol=0)
        assert float(ours.std()) > 0.05
    assert found.d is not None


def test_ours_out_and_in_again_with_optimisers(images, tmp_path):
    training = Training(TINY, Settings(batch=4, ema=0.5), images.unlabelled(), 0)
    training.advance()
    optims = (training.g_optim.state_dict(), training.d_optim.state_dict())
    published.save(tmp_path / "out", published.Checkpoint(training.g, training.d, training.ema, *optims, {"itr": 1}))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        *("D.pth", "D_optim.pth", "G.pth", "G_ema.pth", "G_optim.pth", "state_dict.pth")
    ]
    found = published.load(tmp_path / "out")
    again = Training(TINY, Settings(batch=4), images.unlabelled(), 1)
    again.g.load_state_dict(found.g.state_dict())
    assert found.d is not None
    assert found.g_optim is not None
    again.d.load_state_dict(found.d.state_dict())
    again.g_optim.load_state_dict(found.g_optim)
    for key, value in training.g_optim.state_dict()["state"].items():
        assert torch.equal(again.g_optim.state_dict()["state"][key]["exp_avg_sq"], value["exp_avg_sq"])
    for key, value in training.d.state_dict().items():
        assert torch.equal(again.d.state_dict()[key], value)


def test_the_order_of_parameters_is_the_published_one():
    """Optimisers know them by number: shared, linear, blocks (convolutions, then norms; γ first), output."""
    names = [name for name, _ in Generator(CONDITIONAL).named_parameters()]
    assert names[:3] == ["shared.weight", "linear.weight", "linear.bias"]
    block = [name.removeprefix("blocks.0.0.") for name in names if name.startswith("blocks.0.0.")]
    assert block == [
        *("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias", "conv_sc.weight", "conv_sc.bias"),
        *("bn1.gain.weight", "bn1.bias.weight", "bn2.gain.weight", "bn2.bias.weight"),
    ]
    attention = [name.removeprefix("blocks.3.1.") for name in names if name.startswith("blocks.3.1.")]
    assert attention == ["gamma", "theta.weight", "phi.weight", "g.weight", "o.weight"]
    assert names[-4:] == ["output_layer.0.gain", "output_layer.0.bias", "output_layer.2.weight", "output_layer.2.bias"]


def parameters(folder):
    """How many its generator has."""
    return len(list(published.load(folder, "best0").g.parameters()))


def changed(file, change):
    found = torch.load(file, weights_only=True)
    change(found)
    torch.save(found, file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "G_best0.pth").unlink(), r"there is no .*G_best0\.pth"),
        (lambda f: (f / "G_best0.pth").write_bytes(b"x" * 100), r"G_best0\.pth (is damaged|cannot be read)"),
        (lambda f: torch.save([1], f / "G_best0.pth"), "holds no state dict"),
        (lambda f: torch.save({"a": torch.ones(1)}, f / "G_best0.pth"), "is not a generator of BigGAN-PyTorch"),
        (lambda f: torch.save(Generator(TINY), f / "G_best0.pth"), "holds more than tensors and plain values"),
        (
            lambda f: changed(f / "G_best0.pth", lambda s: s.pop("blocks.1.0.conv2.u0")),
            r"G_best0\.pth has no blocks\.1\.0\.conv2\.u0, which this architecture needs",
        ),
        (
            lambda f: changed(f / "G_best0.pth", lambda s: s.update({"blocks.1.0.conv2.bias": torch.ones(3)})),
            r"blocks\.1\.0\.conv2\.bias has the shape \(3,\), expected \(32,\)",
        ),
        (
            lambda f: changed(f / "D_best0.pth", lambda s: s.update({"more": torch.ones(3)})),
            r"D_best0\.pth has more, which this architecture does not know",
        ),
        (
            lambda f: changed(f / "G_best0.pth", lambda s: s.update({"blocks.9.1.gamma": torch.ones(())})),
            "is not a generator of BigGAN-PyTorch",
        ),
        (lambda f: torch.save({"a": 1}, f / "G_optim_best0.pth"), "holds no state of an optimiser"),
        (
            lambda f: torch.save(
                {"state": {1: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": list(range(parameters(f)))}]},
                f / "G_optim_best0.pth",
            ),
            r"G_optim_best0\.pth: what belongs to linear\.weight has the shape \(2,\)",
        ),
        (
            lambda f: torch.save({"state": {}, "param_groups": [{"params": [0, 1]}]}, f / "G_optim_best0.pth"),
            r"is of a network with 2 parameters, expected \d\d",
        ),
        *(
            (lambda f, bad=bad: torch.save(bad, f / "G_optim_best0.pth"), "holds no state of an optimiser")
            for bad in (
                [1],
                {"state": {0: {}}, "param_groups": [{"params": [0]}]},
                {"state": {0: {"exp_avg": 3}}, "param_groups": [{"params": [0]}]},
                {"state": [], "param_groups": [{"params": [0]}]},
                {"state": {}, "param_groups": 3},
            )
        ),
        (lambda f: torch.save({1: torch.ones(1)}, f / "G_best0.pth"), "holds no state dict"),
        *(
            (
                lambda f, dtype=dtype: changed(
                    f / "G_best0.pth", lambda s: s.update({"linear.bias": s["linear.bias"].to(dtype)})
                ),
                rf"linear\.bias holds {str(dtype)[6:]}, expected floats",
            )
            for dtype in (torch.int64, torch.complex64)
        ),
        *(
            (
                lambda f, key=key, shape=shape: changed(
                    f / "G_best0.pth", lambda s: s.update({key: torch.ones(shape)})
                ),
                "is not a generator of BigGAN-PyTorch that is known here",
            )
            for key, shape in (
                ("output_layer.2.weight", ()),
                ("linear.weight", (3,)),
                ("shared.weight", (3,)),
                ("blocks.x.0", ()),
                ("blocks.30.0", ()),
            )
        ),
    ],
)
def test_files_that_do_not_fit_are_named(foreign, change, said):
    change(foreign)
    with pytest.raises(UserError, match=said):
        published.load(foreign, "best0")


def test_optimisers_of_old_files_go_by_addresses(foreign):
    """PyTorch 1.0, which the published folders are of, numbered parameters by where they lay in memory."""
    network = published.load(foreign, "best0").g
    places = [140_000_000_000_000 + 8 * index for index in range(len(list(network.parameters())))]
    rows: dict[int, Any] = {
        place: {"step": 3, "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
        for place, p in zip(places, network.parameters(), strict=True)
    }
    groups = [{"lr": 5e-5, "betas": (0.0, 0.999), "eps": 1e-6, "weight_decay": 0, "amsgrad": False, "params": places}]
    torch.save({"state": rows, "param_groups": groups}, foreign / "G_optim_best0.pth")
    found = published.load(foreign, "best0").g_optim
    optimiser = torch.optim.Adam(network.parameters())
    assert found is not None
    optimiser.load_state_dict(found)
    for place, parameter in zip(places, network.parameters(), strict=True):
        assert torch.equal(optimiser.state[parameter]["exp_avg"], rows[place]["exp_avg"])


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before PyTorch 1.6"])
def test_a_damaged_file_is_one_sentence_wherever_the_damage_is(tmp_path, old):
    file, stream = tmp_path / "G.pth", io.BytesIO()
    torch.save({"a": torch.randn(3, 4), "b": torch.ones(5)}, stream, _use_new_zipfile_serialization=not old)
    whole, drawn = stream.getvalue(), random.Random(0)
    for turn in range(100):
        data = bytearray(whole)
        if turn % 2:
            data = data[: drawn.randrange(len(data))]
        else:
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        file.write_bytes(data)
        with suppress(UserError), warnings.catch_warnings(action="ignore"):
            weights.read_state(file)


def test_weights_are_whole_or_absent(tmp_path):
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        weights.write(tmp_path / "a.pt", {"x": lambda: 0})
    assert list(tmp_path.iterdir()) == []


# --- pytorch-pretrained-biggan ----------------------------------------------------------------------------------------

LAYERS = ((False, 16, 16), (True, 16, 8), (False, 8, 8), (True, 8, 4), (False, 4, 2), (True, 2, 1))


@pytest.fixture
def theirs(tmp_path):
    """The real package's model with random weights, settled by some forwards in training mode."""
    package = pytest.importorskip("pytorch_pretrained_biggan")
    torch.manual_seed(0)
    config = package.BigGANConfig(
        output_dim=32,
        z_dim=6,
        class_embed_dim=6,
        channel_width=8,
        num_classes=5,
        layers=LAYERS,
        attention_layer_position=3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old spectral_norm
        model = package.BigGAN(config)
    for module in model.modules():
        if isinstance(module, package.model.BigGANBatchNorm):
            torch.nn.init.normal_(module.running_means, std=0.1)
            torch.nn.init.uniform_(module.running_vars, 0.5, 2)
            if not module.conditional:
                torch.nn.init.ones_(module.weight)
                torch.nn.init.zeros_(module.bias)
        if isinstance(module, package.model.SelfAttn):
            torch.nn.init.constant_(module.gamma, 0.8)
    with torch.no_grad():
        for _ in range(5):
            model.train()(torch.randn(2, 6), F.one_hot(torch.tensor([0, 3]), 5).float(), 1.0)
    model.eval()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(config.to_json_string())
    return model, tmp_path


@pytest.mark.parametrize("truncation", [1.0, 0.4, 0.433])
def test_deep_generators_give_the_packages_images(theirs, truncation):
    model, folder = theirs
    ours = deep_weights.load(folder)
    z, y = truncation * torch.randn(3, 6).clamp(-2, 2), torch.tensor([4, 0, 3])
    with torch.no_grad():
        want = model(z, F.one_hot(y, 5).float(), truncation)
        torch.testing.assert_close(ours(z, y, truncation), want, atol=1e-4, rtol=0)
        torch.testing.assert_close(ours(z, F.one_hot(y, 5).float(), truncation), want, atol=1e-4, rtol=0)
        attend_by(ours, "full")
        torch.testing.assert_close(ours(z, y, truncation), want, atol=1e-4, rtol=0)
    assert float(want.std()) > 0.05
    with pytest.raises(ValueError, match=r"truncation: expected a number in \(0, 1\]"):
        ours(z, y, 1.5)


def test_what_is_no_deep_generator(theirs):
    _, folder = theirs
    state = weights.read_state(folder / "pytorch_model.bin")
    state.pop("generator.gen_z.weight_u")
    with pytest.raises(UserError, match=r"has no generator\.gen_z\.weight_u and generator\.gen_z\.weight_v"):
        deep_weights.convert(state, DeepConfig(32, 8, 6, 5, LAYERS, 3))
    with pytest.raises(UserError, match=r"has the shape .* expected"):
        deep_weights.convert(weights.read_state(folder / "pytorch_model.bin"), DeepConfig(32, 8, 6, 4, LAYERS, 3))
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no config of pytorch-pretrained-biggan: there is no 'output_dim' in it"):
        deep_weights.load(folder)


# --- our own ----------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_is_the_same(tmp_path):
    g, d = attend_by(Generator(CONDITIONAL), SMYRF), Discriminator(CONDITIONAL)
    folder = tmp_path / "model"
    for _ in range(2):  # the second time it replaces the first
        pretrained.save_pretrained(g, folder, discriminator=d, about={"seed": 3})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]
    found = pretrained.from_pretrained(folder)
    z, y = torch.randn(2, 20), torch.tensor([0, 1])
    with torch.no_grad():
        assert torch.equal(found(z, y), g.eval()(z, y))
        dense = pretrained.from_pretrained(folder, mechanism="dense")
        assert torch.equal(dense(z, y), attend_by(g, "dense")(z, y))
    other = pretrained.discriminator_of(folder)
    assert other is not None
    assert torch.equal(other.eval()(dense(z, y)), d.eval()(dense(z, y)))
    card = (folder / "README.md").read_text()
    assert "smyrf:rounds=2,cluster_size=128" in card
    assert "| seed | 3 |" in card


def test_a_deep_one_too_and_all_sources(theirs, foreign, tmp_path):
    _, folder = theirs
    ours = source.generator(folder, None)
    pretrained.save_pretrained(ours, tmp_path / "deep")
    z = torch.randn(2, 6)
    with torch.no_grad():
        assert torch.equal(source.generator(tmp_path / "deep", "dense")(z), ours(z))
    assert pretrained.discriminator_of(tmp_path / "deep") is None
    assert source.generator(foreign, SMYRF, "best0").config == CONDITIONAL
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="holds no generator: expected"):
        source.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: (f / "config.json").write_text("{}"), "is no config of one of our generators"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x"), r"model\.safetensors cannot be read as weights"),
        (
            lambda f: (f / "config.json").write_text(json.dumps({"architecture": "biggan", **TINY.to_dict(), "ch": 4})),
            r"model\.safetensors: .* has the shape .* expected",
        ),
        (
            lambda f: (f / "config.json").write_text(json.dumps({"architecture": "biggan", "resolution": 33})),
            r"config\.json does not fit biggan: resolution: expected",
        ),
    ],
)
def test_a_folder_of_ours_that_is_broken(tmp_path, change, said):
    pretrained.save_pretrained(Generator(TINY), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(UserError, match=said):
        pretrained.from_pretrained(tmp_path / "model")


def test_what_could_not_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    pretrained.save_pretrained(Generator(TINY), tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def fails(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(pretrained, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        pretrained.save_pretrained(Generator(TINY), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
