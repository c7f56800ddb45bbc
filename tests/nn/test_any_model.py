"""`swap` on models that call SDPA or write attention out by hand: names, adapters, refusals, fit, and undoing."""

import copy
import importlib.util
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close as close

import coterie
from coterie.analysis.head_errors import head_errors
from coterie.analysis.spectra import spectra
from coterie.nn import adapters
from tests.sdpa.models import Attention, Inline, Model, Twice, gradients, model, tokens

SMYRF, LOCAL = "smyrf:rounds=2,cluster_size=8", "local:window=6"
CALLS = ["blocks.0", "blocks.1", "blocks.1#1"]


@pytest.fixture
def registry(monkeypatch):
    """Adapters that a test registers are forgotten after it."""
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))


def forwards(net):
    return [name for name, module in net.named_modules() if "forward" in vars(module)]


def test_both_kinds_of_attention_in_one_model():
    net, x = model(Attention, Twice, torchs=True), tokens()
    want = net(x)
    swapped = coterie.nn.swap(net, "full")
    assert swapped.replaced == ["last.self_attn"]
    got = net(x)
    assert swapped.calls == dict.fromkeys(CALLS, "full")
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    swapped.undo()
    assert forwards(net) == []
    assert torch.equal(net(x), want)
    swapped.undo()  # nothing left to do


def test_a_swap_gives_what_replacing_gives():
    net, x = model(Attention, Twice), tokens()
    with coterie.replacing(SMYRF):
        want = net(x)
    with coterie.nn.swap(net, SMYRF) as swapped:
        assert torch.equal(net(x), want)
        assert torch.equal(net.encode(x), net.blocks[0](x))  # not by the model's own forward
        with coterie.replacing("full"):  # what is swapped is nearer
            assert torch.equal(net(x), want)
    assert swapped.calls == dict.fromkeys(CALLS, SMYRF)


def test_choices_by_name():
    net, x = model(Attention, Twice, torchs=True), tokens()
    with coterie.replacing({"blocks.1#1": LOCAL}):
        want = net(x)
    with coterie.nn.swap(net, {"blocks.1#1": LOCAL, "blocks.0": None}) as swapped:
        assert torch.equal(net(x), want)
        assert swapped.calls == {
            "blocks.0": "dense",
            "blocks.1": "dense",
            "blocks.1#1": LOCAL,
            "last.self_attn": "dense",
        }
    with coterie.nn.swap(net, {"blocks.1#1": LOCAL, "last.self_attn": SMYRF}) as swapped:
        net(x)
        assert swapped.replaced == ["last.self_attn"]
    with pytest.raises(ValueError, match=r"mechanism: expected names among .*'blocks.1'.*, got \['blocks.2#1'\]"):
        coterie.nn.swap(net, {"blocks.2#1": LOCAL})
    assert forwards(net) == []


def test_a_choice_by_name_leaves_others_to_what_is_around():
    net, x = model(Attention, Attention), tokens()
    with coterie.nn.swap(net, {"blocks.0": SMYRF}), coterie.replacing(LOCAL):
        got = net(x)
    with coterie.replacing({"blocks.0": SMYRF, "blocks.1": LOCAL}):
        assert torch.equal(got, net(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["a call", "modules"])
def test_checkpoints_recompute_the_same_mechanisms(reentrant, whole):
    net: Any = model(Attention, Twice, Inline)
    x, found = tokens(), []
    for way in (None, reentrant):
        if whole:
            net.reentrant = way
        else:
            net.blocks[2].reentrant = way
        net.zero_grad(set_to_none=True)
        x.grad = None
        with coterie.nn.swap(net, SMYRF):
            out = net(x)
            out.square().sum().backward()
        found.append([out, x.grad, *(p.grad for p in net.parameters())])
    close(found[1], found[0])
    with coterie.nn.swap(net, SMYRF):
        out = net(x)
    with pytest.raises(RuntimeError, match=r"undone between the forward and the backward pass of a checkpoint"):
        out.square().sum().backward()


def test_copies_and_pickles_are_swapped_for_themselves():
    net, x = model(Attention, Twice), tokens()
    dense = net(x)
    swapped = coterie.nn.swap(net, LOCAL)
    want = net(x)
    again = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]
    swapped.undo()
    assert torch.equal(net(x), dense)
    for each in again:
        assert torch.equal(each(x), want)
        with torch.no_grad():
            each.blocks[0].out.bias.add_(1.0)
        assert not torch.equal(each(x), want), "it runs its own weights"


def test_swapping_twice_is_refused():
    net = model(Attention)
    with coterie.nn.swap(net, LOCAL), pytest.raises(ValueError, match=r"already swapped; undo\(\) that first"):
        coterie.nn.swap(net, SMYRF)


def test_undo_where_somebody_has_wrapped_the_forward_since():
    """As accelerate does: the wrapper stays, and what it calls is the model's own."""
    net, x = model(Attention), tokens()
    dense = net(x)
    for first in (True, False):
        block: Any = net.blocks[0]
        calls: list[int] = []
        swapped = coterie.nn.swap(net, LOCAL) if first else None
        inner = block.forward

        def outer(*args, inner=inner, calls=calls):
            calls.append(1)
            return inner(*args)

        block.forward = outer
        swapped = coterie.nn.swap(net, LOCAL) if swapped is None else swapped
        assert not torch.equal(net(x), dense)
        swapped.undo()
        assert block.forward is outer
        assert torch.equal(net(x), dense)
        assert len(calls) == 2
        del block.forward


def test_an_error_and_an_interrupt_leave_nothing_open():
    class Fails(nn.Module):
        error: type[BaseException] = KeyError

        def forward(self, x):
            raise self.error

    last, x = Fails(), tokens()
    net = Model(Attention().double(), last)
    with coterie.nn.swap(net, LOCAL):
        for last.error in (KeyError, KeyboardInterrupt):
            with pytest.raises(last.error):
                net(x)
        assert not coterie.sdpa.running.RUNNING.scopes
        assert not coterie.sdpa.running.RUNNING.frames


def test_two_threads_with_two_models():
    nets, x, found = [model(Attention, Twice) for _ in range(2)], tokens(), {}
    swaps = [coterie.nn.swap(net, spec) for net, spec in zip(nets, (LOCAL, SMYRF), strict=True)]
    want = [net(x) for net in nets]
    threads = [threading.Thread(target=lambda i=i: found.update({i: [nets[i](x) for _ in range(5)]})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, want[i]) for i, outs in found.items() for out in outs)
    assert len(found) == 2
    for swapped in swaps:
        swapped.undo()


def test_the_signature_of_forward_is_the_models():
    import inspect

    net = model(Attention)
    want = inspect.signature(net.forward)
    with coterie.nn.swap(net, LOCAL):
        assert inspect.signature(net.forward) == want


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_runs_eagerly():
    net, x = model(Attention, Twice), tokens()
    with coterie.nn.swap(net, LOCAL) as swapped:
        want = net(x)
        swapped.calls.clear()
        compiled = torch.compile(net, backend="eager")
        assert torch.equal(compiled(x), want)
        assert swapped.calls == dict.fromkeys(CALLS, LOCAL)


# --- adapters ---------------------------------------------------------------------------------------------------------


class OddAttention(nn.Module):
    """One that the library has never seen: no scale, a mask where 1 is hidden, an extra result."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)

    def forward(self, x, hidden=None):
        scores = self.one(x) @ x.mT
        if hidden is not None:
            scores = scores - 1e5 * hidden[:, None]
        return self.two(torch.softmax(scores, -1) @ x), "odd"


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = OddAttention()

    def forward(self, x, hidden=None):
        return self.attn(x, hidden=hidden)[0]


def register():
    @coterie.nn.adapter(OddAttention)
    def odd(module, x, hidden=None):
        mask = None if hidden is None else (hidden == 0)[:, None]
        return module.two(F.scaled_dot_product_attention(module.one(x), x, x, attn_mask=mask, scale=1.0)), "odd"


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("padded", [False, True])
def test_an_adapter_for_a_module_that_nobody_knows(padded):
    register()
    net, x = Odd().double(), tokens()
    hidden = torch.zeros(2, 41, dtype=torch.float64)
    hidden[1, 30:] = float(padded)
    want = net(x, hidden)
    with coterie.nn.swap(net, "full") as swapped:
        assert swapped.replaced == ["attn"]
        got = net(x, hidden)
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    with coterie.nn.swap(net, LOCAL) as swapped:
        real = hidden == 0
        mine, their = (y[:, None] for y in (net.attn.one(x), x))
        settings: dict[str, Any] = {"key_mask": real, "query_mask": real, "guests": ~real, "scale": 1.0}
        want = net.attn.two(coterie.attention(mine, their, their, LOCAL, **settings)[:, 0])
        close(net(x, hidden), want)
        assert swapped.calls == {"attn": LOCAL}


@pytest.mark.usefixtures("registry")
def test_fit_inspection_and_observers_see_swapped_modules_by_name():
    register()

    class Mixed(Model):
        odd: nn.Module

        def forward(self, x):
            return super().forward(x + self.odd(x)[0])

    torch.manual_seed(0)
    net = Mixed(Attention(), Twice(), torchs=True).eval()
    net.odd = OddAttention()
    names = ["blocks.0", "blocks.1", "blocks.1#1", "last.self_attn", "odd"]
    batches = [torch.randn(2, 60, 16) for _ in range(3)]
    found = coterie.fit(net, batches, 0.5, candidates=[LOCAL])
    assert sorted(found.choices) == names
    assert found.holds
    assert {row.module for row in found.table} == set(names)
    assert forwards(net) == []
    assert sorted(head_errors(net, batches[0], coterie.as_mechanism(LOCAL))) == names
    assert {each.module for each in spectra(net, batches[0]).heads} == set(names)
    seen: list[coterie.Seen] = []
    with coterie.nn.swap(net, LOCAL), coterie.observing(seen.append):
        net(batches[0])
    assert sorted(each.name for each in seen) == names
    chosen = dict(found.choices) | {"odd": LOCAL, "blocks.1#1": LOCAL}
    applied = coterie.Fit(**{**vars(found), "choices": chosen}).apply(net)
    net(batches[0])
    assert (applied.calls["odd"], applied.calls["blocks.1#1"]) == (LOCAL, LOCAL)
    applied.undo()


def test_fit_on_images():
    class Pixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Attention(dim=16)

        def forward(self, x):
            return x + self.attn(x.flatten(2).mT).mT.unflatten(2, x.shape[2:])

    found = coterie.fit(Pixels().eval(), [torch.randn(1, 16, 8, 8) for _ in range(3)], 0.5, candidates=[LOCAL])
    assert list(found.choices) == ["attn"]
    assert found.lengths[0].tokens == 64


@pytest.mark.parametrize("output", [dict, lambda **parts: None], ids=["a dict", "nothing"])
def test_a_model_whose_output_begins_with_no_tensor(output):
    """As those that find objects: it can be looked into, and fitted by a measure of one's own."""

    class Finds(Model):
        def forward(self, x):
            self.seen = super().forward(x)
            return output(boxes=self.seen)

    net, batches = Finds(Attention(), torchs=True).eval(), [torch.randn(1, 40, 16) for _ in range(2)]
    assert sorted(head_errors(net, batches[0], coterie.as_mechanism(LOCAL))) == ["blocks.0", "last.self_attn"]
    refused = r"measure: expected a callable, as Finds gives no tensor, and nothing that begins with one, got 'hidden'"
    with pytest.raises(ValueError, match=refused):
        coterie.fit(net, batches, 0.5, candidates=[LOCAL])
    assert forwards(net) == []

    def fidelity(model, batch):
        model(batch)
        return float(model.seen.isfinite().all())

    assert coterie.fit(net, batches, 0.5, candidates=[LOCAL], measure=fidelity).holds


def test_attention_by_hand_that_no_adapter_knows_is_refused():
    net = Odd()
    listed = r"attention that is written out by hand in attn \(OddAttention\)"
    with pytest.raises(ValueError, match=listed):
        coterie.nn.swap(net, LOCAL)
    with pytest.raises(ValueError, match=listed):
        coterie.nn.swap(net, {"attn": LOCAL})
    with pytest.raises(ValueError, match=listed):
        coterie.fit(net, [torch.randn(1, 30, 16)] * 2)
    both = nn.ModuleDict({"odd": net, "good": Attention()})
    with pytest.raises(ValueError, match=r"by hand in odd.attn \(OddAttention\)"):
        coterie.nn.swap(both, LOCAL)
    coterie.nn.swap(both, {"good": LOCAL}).undo()


def test_a_model_that_never_calls_sdpa():
    class Hidden(nn.Module):
        def forward(self, x):
            return by_hand(x)

    class HiddenAttention(Hidden):
        pass

    net = Model(HiddenAttention())
    with coterie.nn.swap(net, LOCAL):
        with pytest.raises(RuntimeError, match=r"Model never calls .* like attention: blocks.0 \(HiddenAttention\)"):
            net(tokens())
        net.encode(tokens())  # only the whole model knows that nothing was called


def by_hand(x):
    return (x @ x.mT).softmax(-1) @ x


@pytest.mark.usefixtures("registry")
def test_adapters_are_checked():
    with pytest.raises(TypeError, match=r'kind: expected a class, "package.module.Class", or a function'):
        coterie.nn.adapter(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"kind: expected a class of torch.nn.Module"):
        coterie.nn.adapter(int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="adapter: expected a function"):
        coterie.nn.adapter(OddAttention)("no")  # type: ignore[type-var]

    @coterie.nn.adapter(f"{__name__}.OddAttention")
    def forgets(module, x, hidden=None):
        return x, "odd"

    net, x = Odd().double(), tokens()
    refused = pytest.raises(RuntimeError, match=r"the adapter for attn \(OddAttention\) called no scaled_dot_product")
    with coterie.nn.swap(net, LOCAL), refused:
        net(x)
    register()  # the later one goes first
    with coterie.nn.swap(net, LOCAL) as swapped:
        net(x)
        with pytest.raises(TypeError, match="unexpected keyword argument 'weights'"):
            net.attn(x, weights=True)
    assert swapped.calls == {"attn": LOCAL}


# --- known ones -------------------------------------------------------------------------------------------------------


class BigGanAttention(nn.Module):
    """The block of the BigGAN paper as BigGAN-PyTorch lays it out, under its names, written with loops in mind."""

    theta: nn.Module
    phi: nn.Module
    g: nn.Module

    def __init__(self, channels=16):
        super().__init__()
        sizes = {"theta": channels // 8, "phi": channels // 8, "g": channels // 2}
        for name, size in sizes.items():
            setattr(self, name, nn.utils.parametrizations.spectral_norm(nn.Conv2d(channels, size, 1, bias=False)))
        self.o = nn.Conv2d(channels // 2, channels, 1, bias=False)
        self.gamma = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, y=None):
        theta, phi, g = self.theta(x), F.max_pool2d(self.phi(x), 2), F.max_pool2d(self.g(x), 2)
        weights = torch.einsum("bcij,bckl->bijkl", theta, phi).flatten(3).softmax(-1)
        return self.gamma * self.o(torch.einsum("bijk,bck->bcij", weights, g.flatten(2))) + x


class UnpooledAttention(BigGanAttention):
    """The same parts, put together in another way."""

    def forward(self, x, y=None):
        return x + self.gamma * self.o(self.g(x) * self.theta(x).mean((1, 2, 3), keepdim=True).softmax(0))


def test_biggans_block():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 1), BigGanAttention()).double().eval()
    x = torch.randn(2, 3, 10, 14, dtype=torch.float64, requires_grad=True)
    want = net(x)
    with coterie.nn.swap(net, "full") as swapped:
        got = net(x)
        assert (swapped.replaced, swapped.calls) == (["1"], {"1": "full"})
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    with coterie.nn.swap(net, SMYRF):
        clustered = net(x)
    assert 1e-3 < float((clustered - want).detach().norm() / want.detach().norm()) < 1
    found = coterie.fit(net, [x.detach()] * 2, 0.5, candidates=[SMYRF])
    assert list(found.choices) == ["1"]
    with pytest.raises(ValueError, match=r"written out by hand in 0 \(UnpooledAttention\)"):
        coterie.nn.swap(nn.Sequential(UnpooledAttention()), "full")


def test_biggans_generator_of_the_package():
    biggan = pytest.importorskip("pytorch_pretrained_biggan")
    from pytorch_pretrained_biggan.model import SelfAttn

    torch.manual_seed(0)
    net: Any = nn.Sequential(SelfAttn(16, 1e-4)).double()
    x = torch.randn(2, 16, 10, 14, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        net[0].gamma.fill_(0.7)
        for _ in range(5):
            net(x)  # its spectral norms settle
    net.eval()
    want = net(x)
    with coterie.nn.swap(net, "full") as swapped:
        got = net(x)
    assert swapped.replaced == ["0"]
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    config = biggan.BigGANConfig(
        output_dim=128, z_dim=8, class_embed_dim=8, channel_width=8, num_classes=10, attention_layer_position=2,
        layers=[(False, 16, 16), (True, 16, 8), (True, 8, 4), (True, 4, 2), (True, 2, 1)],
    )  # fmt: skip
    whole = biggan.BigGAN(config)
    z, label = torch.randn(2, 8), F.one_hot(torch.tensor([1, 2]), 10).float()
    with torch.no_grad():
        for parameter in whole.generator.bn.parameters():
            parameter.fill_(0.5)  # the package leaves it as memory is
        for _ in range(3):
            whole(z, label, 1.0)
    whole.eval()
    with torch.no_grad():
        want = whole(z, label, 1.0)
        assert want.isfinite().all()
        with coterie.nn.swap(whole, "full") as swapped:
            assert swapped.replaced == ["generator.layers.2"]
            close(whole(z, label, 1.0), want, rtol=1e-4, atol=1e-4)
    (seen,) = head_errors(whole, (z, label, 1.0), coterie.as_mechanism(SMYRF)).items()
    assert seen[0] == "generator.layers.2"


def test_diffusers_calls_sdpa():
    """So `swap` and `replacing` reach it as it is, in a UNet with cross-attention and in an autoencoder."""
    pytest.importorskip("diffusers")
    from diffusers import AutoencoderKL, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 16), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=12, attention_head_dim=4,
    ).eval()  # fmt: skip
    x, text, mask = torch.randn(2, 4, 8, 8), torch.randn(2, 20, 12), torch.ones(2, 20)
    mask[1, 9:] = 0
    call = {"timestep": torch.tensor(3), "encoder_hidden_states": text, "encoder_attention_mask": mask}
    with torch.no_grad():
        want = unet(x, **call).sample
        with coterie.nn.swap(unet, "full") as swapped:
            close(unet(x, **call).sample, want, rtol=1e-4, atol=1e-4)
        assert "down_blocks.0.attentions.0.transformer_blocks.0.attn1" in swapped.calls
        assert set(swapped.calls.values()) <= {"full", "dense"}
        assert list(swapped.calls.values()).count("full") >= 4
        with coterie.replacing("near-far:near=8", model=unet) as replaced:
            unet(x, **call)
        assert list(replaced.calls) == list(swapped.calls)
        vae = AutoencoderKL(
            block_out_channels=(8, 8), norm_num_groups=4, latent_channels=2, sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        )  # fmt: skip
        latents = torch.randn(1, 2, 8, 8)
        want = vae.decode(latents).sample
        with coterie.nn.swap(vae, "full") as swapped:
            close(vae.decode(latents).sample, want, rtol=1e-4, atol=1e-4)
        assert swapped.calls == {"decoder.mid_block.attentions.0": "full"}
    found = coterie.fit(vae.eval(), [torch.randn(1, 3, 16, 16) for _ in range(2)], 0.5, candidates=[LOCAL])
    assert sorted(found.choices) == ["decoder.mid_block.attentions.0", "encoder.mid_block.attentions.0"]


def test_timms_attention_calls_sdpa():
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("timm imports torchvision, which has no build for this torch without CUDA here")
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(img_size=32, patch_size=4, embed_dim=16, depth=2, num_heads=2, num_classes=3).eval()
    x = torch.randn(1, 3, 32, 32)
    want = net(x)
    with coterie.nn.swap(net, "full") as swapped:
        close(net(x), want, rtol=1e-4, atol=1e-4)
    assert swapped.calls == {"blocks.0.attn": "full", "blocks.1.attn": "full"}


# --- what looks alike -------------------------------------------------------------------------------------------------


class Shifted(nn.MultiheadAttention):
    """PyTorch's attention with a forward of its own."""

    def forward(self, query, key, value, **settings):  # type: ignore[override]
        out, weights = super().forward(2 * query, key, value, need_weights=False)
        return out + 1, weights


class Wraps(nn.Module):
    """Some attention module, called as PyTorch's is."""

    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


def changed(how: str) -> Any:
    """PyTorch's attention, which somebody has changed in one of three ways."""
    torch.manual_seed(0)
    attn: Any = (Shifted if how == "a subclass" else nn.MultiheadAttention)(16, 2, batch_first=True).double()
    if how == "a wrapper":
        inner = attn.forward
        attn.forward = lambda *args, **kwargs: (inner(*args, **kwargs)[0] + 1, None)
    if how == "parametrized":
        nn.utils.parametrizations.weight_norm(attn, "in_proj_weight")
        with torch.no_grad():
            attn.parametrizations.in_proj_weight.original0.mul_(1.5)
    return attn


@pytest.mark.parametrize("how", ["a subclass", "a wrapper", "parametrized"])
def test_pytorchs_attention_that_somebody_changed_stays_and_its_call_is_caught(how):
    net, x = Wraps(changed(how)), tokens()
    want = net(x)
    with coterie.nn.swap(net, "full") as swapped:
        got = net(x)
        assert (swapped.replaced, swapped.calls) == ([], {"attn": "full"})
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    with coterie.nn.swap(net, {"attn": LOCAL}) as swapped, torch.no_grad():
        assert not torch.allclose(net.eval()(x), want)
        assert swapped.calls == {"attn": LOCAL}
    assert torch.equal(net(x), want)


@pytest.mark.parametrize("how", ["a subclass", "a wrapper"])
def test_it_stays_in_pytorchs_own_layers_too(how):
    """Where nothing else is there to be caught, and PyTorch's fast path would go around it."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
    layer.self_attn = changed(how)
    net, x = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), tokens()
    if how == "a wrapper":  # the encoder has copied the layer, whose wrapper is still that of the original
        net.layers = nn.ModuleList([layer])
    want = net(x)
    net.eval()
    with torch.no_grad(), coterie.nn.swap(net, "full") as swapped:
        close(net(x), want)
    assert swapped.calls == {"layers.0.self_attn": "full"}
    with torch.no_grad(), coterie.nn.swap(net, LOCAL):
        assert not torch.allclose(net(x), want)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("by_name", [False, True])
def test_an_adapter_does_not_know_a_subclass_with_a_forward_of_its_own(by_name):
    class Louder(OddAttention):
        def forward(self, x, hidden=None):
            return super().forward(2 * x, hidden)

    class Calls(OddAttention):
        def forward(self, x, hidden=None):
            return F.scaled_dot_product_attention(x, x, x), "odd"

    class Same(OddAttention):
        pass

    register()
    if by_name:
        kind = adapters._REGISTRY.pop(OddAttention)
        coterie.nn.adapter(f"{__name__}.OddAttention")(kind)
    net, x = Odd().double(), tokens()
    for net.attn in (Louder().double(), OddAttention().double()):
        if type(net.attn) is OddAttention:
            net.attn.forward = lambda x, hidden=None: (x, "other")  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=rf"written out by hand in attn \({type(net.attn).__name__}\)"):
            coterie.nn.swap(net, "full")
    for net.attn, replaced in ((Same().double(), ["attn"]), (Calls().double(), [])):
        want = net(x)
        with coterie.nn.swap(net, "full") as swapped:
            assert swapped.replaced == replaced
            close(net(x), want)
            assert swapped.calls == {"attn": "full"}


def test_names_that_can_make_no_call_are_refused():
    """Those of PyTorch's own layers around attention, of a linear layer, of a shared module's second place."""
    net = model(Attention, torchs=True)
    net.blocks.append(net.blocks[0])
    for name in ("last", "blocks.0.qkv", "blocks.1", "last.linear1#1"):
        refused = rf"mechanism: expected names among \['', 'blocks.0', 'last.self_attn'\], got \['{name}'\]"
        with pytest.raises(ValueError, match=refused):
            coterie.nn.swap(net, {name: LOCAL})
    assert forwards(net) == []


def test_names_that_no_call_had_are_warned_of_once():
    net, x = model(Attention, Twice), tokens()
    with coterie.nn.swap(net, {"": LOCAL, "blocks.1#7": LOCAL, "blocks.0": LOCAL, "blocks.0#1": None}):
        net.encode(x)
        with pytest.warns(
            UserWarning, match=r"nothing was replaced in \['', 'blocks.1#7'\], .* it made \['blocks.0', "
        ):
            net(x)
        net(x)
