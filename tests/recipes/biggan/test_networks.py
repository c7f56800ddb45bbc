"""Generator and discriminator: the papers' formulas, gradients, sizes, and what is recomputed."""

from functools import partial

import numpy as np
import pytest
import torch
from recipes.biggan.attention import SelfAttention, attend_by, blocks
from recipes.biggan.config import Config
from recipes.biggan.discriminator import Discriminator, d_loss, g_loss
from recipes.biggan.generator import Generator
from recipes.biggan.norms import BatchNorm, ClassBatchNorm
from recipes.biggan.spectral import SpectralConv2d, SpectralEmbedding, SpectralLinear, iterate

import coterie
from tests.recipes.biggan.conftest import SMYRF, TINY


def block(channels=16, conv=torch.nn.Conv2d, mechanism="dense", dtype=torch.float64):
    made = attend_by(SelfAttention(channels, conv), mechanism).to(dtype)
    torch.nn.init.constant_(made.gamma, 0.7)
    return made


def written(module, x):
    """The block's formula pixel by pixel."""
    theta, phi, g, o = (
        getattr(module, name).weight.detach().numpy()[:, :, 0, 0] for name in ("theta", "phi", "g", "o")
    )
    out = np.empty_like(x)
    for image, made in zip(x, out, strict=True):
        _, height, width = image.shape

        def pooled(weight, image=image, height=height, width=width):
            full = np.einsum("oc,chw->ohw", weight, image)
            return full.reshape(len(weight), height // 2, 2, width // 2, 2).max((2, 4)).reshape(len(weight), -1)

        keys, values = pooled(phi), pooled(g)
        for row in range(height):
            for column in range(width):
                scores = (theta @ image[:, row, column]) @ keys
                weights = np.exp(scores - scores.max())
                answer = values @ (weights / weights.sum())
                made[:, row, column] = image[:, row, column] + 0.7 * (o @ answer)
    return out


@pytest.mark.parametrize("mechanism", ["dense", "written-out", "full", "smyrf:rounds=1,cluster_size=1000"])
def test_the_block_is_its_formula(mechanism):
    """One cluster is dense attention."""
    module = block(mechanism=mechanism)
    x = torch.randn(2, 16, 6, 10, dtype=torch.float64)
    np.testing.assert_allclose(module(x).detach(), written(module, x.numpy()), rtol=1e-10)


@pytest.mark.parametrize("mechanism", ["dense", "written-out", "smyrf:rounds=2,cluster_size=7"])
def test_gradients_of_the_block(mechanism):
    module = block(8, mechanism=mechanism)
    x = torch.randn(1, 8, 4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, (x,))
    for name, value in module.named_parameters():
        assert torch.autograd.gradcheck(partial(_with, module, name, x), (value.detach().requires_grad_(),)), name


def _with(module, name, x, value):
    return torch.func.functional_call(module, {name: value}, (x,))


def test_the_block_calls_the_mechanism_with_a_scale_of_one():
    seen: list[coterie.Seen] = []
    module = block(mechanism=SMYRF, dtype=torch.float32)
    with coterie.observing(seen.append):
        module(torch.randn(1, 16, 8, 8))
    assert seen[0].settings["scale"] == 1.0
    assert (seen[0].q.shape, seen[0].k.shape, seen[0].v.shape) == ((1, 1, 64, 2), (1, 1, 16, 2), (1, 1, 16, 8))
    assert "smyrf" in repr(module)


def test_new_hashes_in_training_and_the_same_image_in_eval():
    module = block(mechanism="smyrf:rounds=1,cluster_size=8,resample=true")
    x = torch.randn(1, 16, 8, 8, dtype=torch.float64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


# --- spectral norm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [lambda: SpectralConv2d(3, 5, 3), lambda: SpectralLinear(7, 4), lambda: SpectralEmbedding(5, 9)],
    ids=["conv", "linear", "embedding"],
)
def test_power_iteration_finds_the_largest_singular_value(layer):
    made = layer().double()
    for _ in range(300):
        iterate(made)
    largest = torch.linalg.matrix_norm(made.weight.flatten(1), 2)
    torch.testing.assert_close(made.sv0[0], largest.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(made.normalised(), made.weight / largest, rtol=1e-6, atol=0)


def test_a_forward_leaves_the_iteration_alone_and_its_gradient_is_right():
    made = SpectralLinear(5, 4).double()
    before = made.u0.clone()
    x = torch.randn(3, 5, dtype=torch.float64)
    for _ in range(100):
        iterate(made)  # u and v are held constant, which is the true gradient once they have settled
    settled = made.u0.clone()
    assert torch.autograd.gradcheck(partial(_with, made, "weight", x), (made.weight.detach().requires_grad_(),))
    assert torch.equal(made.u0, settled)
    assert not torch.equal(before, settled)


# --- norms ------------------------------------------------------------------------------------------------------------


def test_norms_against_torch():
    x, y = torch.randn(4, 6, 5, 5), torch.tensor([0, 1, 1, 0])
    plain, torchs = BatchNorm(6), torch.nn.BatchNorm2d(6)
    torch.testing.assert_close(plain(x), torchs(x))
    torch.testing.assert_close(plain.stored_var, torchs.running_var)
    torch.testing.assert_close(plain.eval()(x), torchs.eval()(x))
    own = ClassBatchNorm(6, 2, shared=False)
    want = torch.nn.BatchNorm2d(6, affine=False)(x) * (1 + own.gain.weight[y])[:, :, None, None]
    torch.testing.assert_close(own(x, y), want + own.bias.weight[y][:, :, None, None])


# --- networks ---------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_published_networks():
    """BigGAN at 128² with 1,000 classes: 166 tensors and 70.4 M parameters in the generator."""
    config = Config(128, 96, 120, 1000, (64,), (64,), shared_dim=128, hierarchical=True)
    with torch.device("meta"):
        g, d = Generator(config), Discriminator(config)
    assert len(g.state_dict()) == 166
    assert sum(p.numel() for p in g.parameters()) == 70_433_988
    assert sum(p.numel() for p in d.parameters()) == 87_982_370
    assert {"blocks.3.1.gamma", "blocks.3.1.theta.u0", "output_layer.0.gain"} <= set(g.state_dict())
    assert "blocks.0.1.gamma" in d.state_dict()


def test_keys_of_a_single_class():
    """SMYRF's: no shared embedding, gain and bias are embeddings, attention behind the last block."""
    with torch.device("meta"):
        found = Generator(Config()).state_dict()
    assert found["blocks.0.0.bn1.gain.weight"].shape == (1, 16 * 96)
    assert not {"shared.weight", "blocks.0.0.bn1.gain.u0", "blocks.3.1.gamma"} & set(found)
    assert "blocks.4.1.gamma" in found


@pytest.mark.parametrize("resolution", [32, 64, 128, 256, 512])
def test_shapes_at_every_resolution(resolution):
    config = Config(resolution, 8, 5, attention=(16,), d_attention=(8,))
    with torch.device("meta"):
        g, d = Generator(config).eval(), Discriminator(config).eval()
        x = g(torch.empty(3, 5), torch.zeros(3, dtype=torch.long))
        assert x.shape == (3, 3, resolution, resolution)
        assert d(x).shape == (3,)
    assert sum(key.endswith("gamma") for key in d.state_dict()) == 1


def test_classes_and_a_hierarchical_z_matter():
    torch.manual_seed(0)
    config = Config(32, 2, 8, 3, (16,), shared_dim=4, hierarchical=True)
    g, d = Generator(config), Discriminator(config)
    z, y = torch.randn(2, 8), torch.tensor([0, 2])
    x = g(z, y)
    assert not torch.equal(x, g(z, torch.tensor([1, 2])))
    torch.testing.assert_close(g.eval()(z, y), g(z, g.shared(y)))  # a vector in the place of a class
    last = z.clone()
    last[:, -1] += 1
    assert not torch.equal(g(z, y), g(last, y))
    assert not torch.equal(d.eval()(x, y), d(x, torch.tensor([1, 1])))


def test_weights_do_not_know_the_mechanism():
    torch.manual_seed(0)
    dense, smyrf = Generator(TINY).eval(), attend_by(Generator(TINY), "full").eval()
    smyrf.load_state_dict(dense.state_dict())
    z = torch.randn(3, 6)
    torch.testing.assert_close(dense(z), smyrf(z), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mechanism", ["dense", "smyrf:rounds=2,cluster_size=128,resample=true"])
def test_recomputing_changes_nothing(mechanism):
    """Not the gradients, not what batch norms store, not the power iterations."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        config = Config(32, 2, 6, attention=(32,), d_attention=(16,))
        g, d = attend_by(Generator(config), mechanism), attend_by(Discriminator(config), mechanism)
        for module in (*blocks(g), *blocks(d)):
            torch.nn.init.ones_(module.gamma)
        g.recompute = d.recompute = recompute
        torch.manual_seed(2)
        d(g(torch.randn(3, 6))).sum().backward()
        grads = {f"grad {name}": p.grad for name, p in [*g.named_parameters(), *d.named_parameters()]}
        found.append({**g.state_dict(), **{f"d.{k}": v for k, v in d.state_dict().items()}, **grads})
    for key, value in found[0].items():
        torch.testing.assert_close(value, found[1][key], msg=key)


def test_orthogonal_weights():
    weight = Generator(TINY).state_dict()["blocks.0.0.conv1.weight"].flatten(1)
    torch.testing.assert_close(weight @ weight.T, torch.eye(len(weight)), atol=1e-5, rtol=0)


def test_hinge_losses():
    real, fake = torch.tensor([2.0, 0.5, -1.0]), torch.tensor([-3.0, 0.25])
    assert float(d_loss(real, fake)) == pytest.approx((0 + 0.5 + 2) / 3 + (0 + 1.25) / 2)
    assert float(g_loss(fake)) == pytest.approx(1.375)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resolution": 48}, "resolution: expected one of 32, 64, 128, 256, 512, got 48"),
        ({"ch": 0}, "ch: expected an int ≥ 1"),
        ({"attention": (96,)}, "attention: expected some of 8, 16, 32, 64, 128, got 96"),
        ({"d_attention": (128,)}, "d_attention: expected some of 4, 8, 16, 32, 64, got 128"),
        ({"ch": 4}, r"attention: expected at least 8 channels at 128² \(a larger ch\), got 4 channels"),
        ({"hierarchical": True}, "hierarchical: expected False without shared_dim, got True"),
        ({"hierarchical": True, "shared_dim": 4, "dim_z": 100}, "dim_z: expected a multiple of 6"),
    ],
)
def test_sizes_that_do_not_go_together(settings, said):
    with pytest.raises(ValueError, match=said):
        Config(**settings)


def test_a_config_survives_json():
    config = Config(64, 8, 12, 5, (64, 32), (16,), 7)
    assert Config.from_dict(config.to_dict()) == config
