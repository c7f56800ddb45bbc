"""`replacing` around models: names, nesting, threads, checkpoints, the compiler, and that nothing stays behind."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from torch.testing import assert_close as close
from torch.utils import checkpoint as checkpoints

import coterie
from coterie.sdpa.running import RUNNING
from tests.sdpa.models import Attention, Inline, Model, Twice, gradients, model, tokens

SMYRF, LOCAL = "smyrf:rounds=2,cluster_size=8", "local:window=6"
NAMES = ["blocks.0", "blocks.1", "blocks.1#1", "last.self_attn"]


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    before = checkpoints._checkpoint_without_reentrant_generator
    yield
    assert (RUNNING.frames, RUNNING.scopes, RUNNING.settled, RUNNING.passed_on) == ([], [], False, False)
    assert not _get_current_function_mode_stack()
    assert not torch_modules._global_forward_pre_hooks
    assert not torch_modules._global_forward_hooks
    assert checkpoints._checkpoint_without_reentrant_generator is before
    assert "apply" not in vars(checkpoints.CheckpointFunction)


@pytest.mark.parametrize("train", [True, False])
def test_full_equals_the_model_forward_and_backward(train):
    net, x = model(Attention, Twice, torchs=True).train(train), tokens()
    want = net(x)
    with coterie.replacing("full") as replaced:
        got = net(x)
    assert replaced.calls == dict.fromkeys(NAMES, "full")
    close(got, want)
    close(gradients(net, x, got), gradients(net, x, want))
    with torch.no_grad(), coterie.replacing("full") as replaced:  # PyTorch's fast path would go around it
        close(net(x), want)
    assert replaced.calls == dict.fromkeys(NAMES, "full")


def test_a_mechanism_in_each_call_by_name():
    net, x = model(Attention, Twice, torchs=True), tokens()
    dense = net(x)
    chosen = {"blocks.1": LOCAL, "blocks.1#1": "dense", "last.self_attn": SMYRF}
    with coterie.replacing(chosen) as replaced:
        got = net(x)
    assert replaced.calls == {"blocks.0": "dense", **chosen}
    assert not torch.allclose(got, dense)
    with coterie.replacing(dict.fromkeys(NAMES, "dense")) as replaced:
        assert torch.equal(net(x), dense)
    assert replaced.calls == dict.fromkeys(NAMES, "dense")


def test_a_call_belongs_to_the_innermost_module_that_the_model_knows():
    class Lends(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = [Attention().double()]  # in a list, so that the model does not know it

        def forward(self, x):
            return self.inner[0](x)

    with coterie.replacing("full") as replaced:
        Model(Lends()).double()(tokens())
        F.scaled_dot_product_attention(*torch.randn(3, 1, 20, 4))
    assert list(replaced.calls) == ["blocks.0", ""]


def test_a_shared_module_counts_anew_in_each_forward():
    block = Twice().double()
    with coterie.replacing("full") as replaced:
        Model(block, block)(tokens())
    assert list(replaced.calls) == ["blocks.0", "blocks.0#1"]


def test_names_of_a_model_that_is_given():
    net, other = model(Attention, Attention), model(Attention)
    x = tokens()
    with coterie.replacing({"blocks.1": LOCAL}, model=net) as replaced:
        net.encode(x)
        net.blocks[1](x)
        assert torch.equal(other(x), other(x))
    assert replaced.calls == {"blocks.0": "dense", "blocks.1": LOCAL}
    refused = pytest.raises(ValueError, match=r"mechanism: expected names among .*'blocks.1'.*, got \['block.1'\]")
    with refused, coterie.replacing({"block.1": LOCAL}, model=net):
        pass
    for name in ("blocks", "blocks.0#1"):  # names of the model's, but of no call that it made
        never = pytest.raises(ValueError, match=rf"expected names among \['blocks.0', 'blocks.1'\], got \['{name}'\]")
        with never, coterie.replacing({name: LOCAL}, model=net):
            net(x)
    no_model = pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str")
    with no_model, coterie.replacing("full", model="net"):  # type: ignore[arg-type]
        pass


def test_names_that_never_came_are_an_error():
    net = model(Twice)
    refused = pytest.raises(ValueError, match=r"expected names among \['blocks.0', 'blocks.0#1'\], got \['bl'\]")
    with refused, coterie.replacing({"bl": LOCAL}):
        net(tokens())
    with pytest.raises(ValueError, match="mechanism: expected one of"), coterie.replacing("nope"):
        pass


class HandMadeAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


def test_a_model_that_never_calls_it():
    refused = pytest.raises(RuntimeError, match=r"never calls .* like attention: blocks.0 \(HandMadeAttention\);")
    with refused, coterie.replacing("full"):
        Model(HandMadeAttention())(tokens())
    refused = pytest.raises(RuntimeError, match=r"never calls .*No module looks like attention\.")
    with refused, coterie.replacing("full"):
        nn.Linear(2, 2)(torch.randn(3, 2))
    with coterie.replacing("full") as replaced:
        pass
    assert replaced.calls == {}


def test_an_error_inside_leaves_nothing_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("mine")

    net = Model(Attention().double(), Fails())
    with pytest.raises(KeyError, match="mine"), coterie.replacing("full"):
        net(tokens())
    with coterie.replacing("full") as replaced:
        with pytest.raises(KeyError):
            net(tokens())
        with pytest.raises(KeyError):
            net(tokens())
    assert list(replaced.calls) == ["blocks.0"]

    class Interrupted(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), coterie.replacing("full"):
        Model(Interrupted())(tokens())


def test_the_innermost_context_that_decides_wins():
    net, x = model(Attention, Twice), tokens()
    with coterie.replacing(LOCAL):
        outer = net(x)
        with coterie.replacing("full") as inner:
            exact = net(x)
        with coterie.replacing({"blocks.1#1": "dense"}) as some:
            mixed = net(x)
        again = net(x)
    close(exact, net(x))
    assert inner.calls == dict.fromkeys(NAMES[:3], "full")
    assert some.calls == dict.fromkeys(NAMES[:3], "dense")
    assert torch.equal(again, outer)
    with coterie.replacing({"blocks.0": LOCAL, "blocks.1": LOCAL}):
        assert torch.equal(mixed, net(x))


def test_a_context_that_a_module_opens_names_from_there():
    class Opens(Model):
        def forward(self, x):
            with coterie.replacing(LOCAL) as self.replaced:
                return self.blocks[0](x)

    net = Opens(Model(Attention().double()))
    with coterie.replacing("full") as outer:
        net(tokens())
    assert list(net.replaced.calls) == ["blocks.0"]
    assert outer.calls == {}, "the inner one has decided"


def test_two_threads_at_once():
    net, x = model(Attention, Twice), tokens()
    want = {}
    for spec in (LOCAL, SMYRF):
        with coterie.replacing(spec):
            want[spec] = net(x)
    want["dense"] = net(x)
    found, meet = {}, threading.Barrier(3)

    def run(spec):
        meet.wait()
        if spec == "dense":
            found[spec] = [net(x) for _ in range(5)]
        else:
            with coterie.replacing(spec) as replaced:
                meet_inside.wait()
                found[spec] = [net(x) for _ in range(5)]
            assert replaced.calls == dict.fromkeys(NAMES[:3], spec)

    meet_inside = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(spec,)) for spec in want]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for spec, outs in found.items():
        assert all(torch.equal(out, want[spec]) for out in outs), spec
    assert set(found) == set(want)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("whole", [False, True], ids=["a call", "modules"])
def test_checkpoints_recompute_the_same_mechanisms(reentrant, inside, whole):
    """Wherever the backward pass is, by the same names and with the same draws; dropout too."""
    chosen = {"blocks.0": SMYRF, "blocks.1": LOCAL, "blocks.1#1": "full", "blocks.2": LOCAL, "blocks.2#2": SMYRF}
    net: Any = model(Attention, Twice, Inline)
    x = tokens()
    net.blocks[0].settings["dropout_p"] = 0.3
    torch.manual_seed(5)
    with coterie.replacing(chosen):
        want = net(x)
    wanted = backward(net, x, want)
    if whole:
        net.reentrant = reentrant
    else:
        net.blocks[2].reentrant = reentrant
    torch.manual_seed(5)
    with coterie.replacing(chosen):
        got = net(x)
        if inside:
            found = backward(net, x, got)
    if not inside:
        with coterie.replacing("full"):  # which is none of theirs
            pass
        found = backward(net, x, got)
    assert torch.equal(got, want)
    close(found, wanted)


def backward(net, x, out):
    """As `gradients`, by `backward()`: reentrant checkpoints know no other."""
    net.zero_grad(set_to_none=True)
    x.grad = None
    torch.manual_seed(9)
    out.backward(torch.randn_like(out))
    return [x.grad, *(p.grad for p in net.parameters())]


def test_weights_are_refused():
    net = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 30, 16)
    refused = pytest.raises(ValueError, match="need_weights: expected False in '', as clustered attention never forms")
    with refused, coterie.replacing("full"):
        net(x, x, x)
    want = net(x, x, x)[0]
    with coterie.replacing({"": "dense"}) as replaced:
        assert torch.equal(net(x, x, x)[0], want)
    assert replaced.calls == {"": "dense"}


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_runs_eagerly_inside():
    net, x = model(Attention, Twice), tokens()
    compiled = torch.compile(net, backend="eager")
    dense = compiled(x)
    with coterie.replacing(LOCAL) as replaced:
        got = compiled(x)
    with coterie.replacing(LOCAL):
        assert torch.equal(got, net(x))
    assert set(replaced.calls.values()) == {LOCAL}
    close(compiled(x), dense)

    def opens(x):
        with coterie.replacing(LOCAL):
            return net(x)

    with pytest.raises(Exception, match="cannot be caught in a graph that is being compiled"):
        torch.compile(opens, backend="eager", fullgraph=True)(x)
