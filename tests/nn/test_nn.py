"""coterie.nn against torch.nn: the same call, the same weights, the same answers with Full."""

import copy
import math
import pickle
import socket
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

import coterie
from tests.cases import MEANS, MECHANISMS, padding

OPTIONS = [
    {},
    {"batch_first": True},
    {"bias": False, "batch_first": True},
    {"kdim": 12, "vdim": 20, "batch_first": True},
    {"add_bias_kv": True, "batch_first": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
]


def pair(mechanism="full", **options):
    theirs = nn.MultiheadAttention(32, 4, **options).double()
    ours = coterie.nn.MultiheadAttention(32, 4, **options, mechanism=mechanism).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(options, queries=9, keys=11, batch=3):
    widths = (32, options.get("kdim", 32), options.get("vdim", 32))
    lengths = (queries, keys, keys)
    made = [torch.randn(batch, n, w, dtype=torch.float64) for n, w in zip(lengths, widths, strict=True)]
    return made if options.get("batch_first") else [x.transpose(0, 1) for x in made]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "masks", ["none", "padding", "float padding", "pairs", "float pairs", "per head", "both", "bias"]
)
def test_full_equals_torchs_module_forward_and_backward(options, masks):
    theirs, ours = pair(**options)
    x = inputs(options)
    hidden = ~padding(3, 11, [11, 7, 4], "left")
    pairs = torch.rand(9, 11) < 0.3
    pairs[:, -1] = False
    low = torch.zeros(3, 11).double().masked_fill(hidden, -math.inf)
    kwargs = {
        "none": {},
        "padding": {"key_padding_mask": hidden},
        "float padding": {"key_padding_mask": low},
        "pairs": {"attn_mask": pairs},
        "float pairs": {"attn_mask": torch.randn(9, 11).double()},
        "per head": {"attn_mask": torch.randn(12, 9, 11).double()},
        "both": {"attn_mask": pairs, "key_padding_mask": hidden},
        "bias": {"attn_mask": torch.randn(9, 11).double(), "key_padding_mask": low + torch.randn(3, 11).double()},
    }[masks]
    want = theirs(*x, need_weights=False, **kwargs)[0]
    got, weights = ours(*x, **kwargs)
    assert weights is None
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    wanted = torch.autograd.grad(want, list(theirs.parameters()), grad)
    found = torch.autograd.grad(got, list(ours.parameters()), grad)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_causal_self_attention(options):
    theirs, ours = pair(**{k: v for k, v in options.items() if k not in ("kdim", "vdim")})
    x = inputs({"batch_first": options.get("batch_first", False)}, 9, 9)[0]
    hint = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    # Without the hint: with it, torch drops the mask and hides bias_k and the zero key from every query.
    want = theirs(x, x, x, attn_mask=hint, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=hint, is_causal=True)[0], want)
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], want)


def test_unbatched_input():
    theirs, ours = pair()
    q, k = torch.randn(9, 32, dtype=torch.float64), torch.randn(11, 32, dtype=torch.float64)
    hidden = ~padding(1, 11, [6])[0]
    mask = torch.randn(4, 9, 11, dtype=torch.float64).masked_fill(hidden, 0)
    want = theirs(q, k, k, key_padding_mask=hidden, attn_mask=torch.zeros(9, 11).bool(), need_weights=False)[0]
    torch.testing.assert_close(ours(q, k, k, key_padding_mask=hidden)[0], want)
    torch.testing.assert_close(ours(q, k, k, attn_mask=mask)[0], theirs(q, k, k, attn_mask=mask)[0])


def test_padded_queries_of_self_attention_stay_out_of_the_grouping():
    _, ours = pair("clustered:clusters=3", batch_first=True)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    mask = padding(2, 20, [20, 12])
    out = ours(x, x, x, key_padding_mask=~mask)[0]
    changed = x.clone()
    changed[1, 12:] = 1e3
    again = ours(changed, changed, changed, key_padding_mask=~mask)[0]
    torch.testing.assert_close(out[mask], again[mask])
    # In cross-attention between equal lengths the keys' mask is not the queries'.
    assert (ours(x.clone(), x, x, key_padding_mask=~mask)[0][1, 12:] != ours.out_proj.bias).any()


def test_need_weights_is_refused():
    _, ours = pair()
    x = torch.randn(5, 2, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match="need_weights: expected False, as clustered attention never forms"):
        ours(x, x, x, need_weights=True)


def test_bad_calls_of_the_module():
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for kwargs, error, message in [
        ({"key_padding_mask": torch.zeros(2, 6).bool()}, ValueError, r"key_padding_mask: expected shape \(2, 5\)"),
        ({"key_padding_mask": torch.zeros(2, 5).int()}, TypeError, r"key_padding_mask: expected a bool or float"),
        ({"attn_mask": torch.zeros(5, 6).bool()}, ValueError, r"attn_mask: expected shape \(5, 5\) or \(8, 5, 5\)"),
        ({"attn_mask": torch.zeros(5, 5).int()}, TypeError, r"attn_mask: expected a bool or float dtype"),
    ]:
        with pytest.raises(error, match=message):
            ours(x, x, x, **kwargs)
    with pytest.raises(ValueError, match=r"query: expected 2 or 3 dimensions"):
        ours(x[None], x[None], x[None])
    with pytest.raises(ValueError, match=r"key: expected a last dimension of 32, got \(2, 5, 8\)"):
        ours(x, x[..., :8], x)
    with pytest.raises(TypeError, match=r"missing 1 required keyword-only argument: 'mechanism'"):
        coterie.nn.MultiheadAttention(32, 4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"layer: expected an int ≥ 0, got -1"):
        coterie.nn.MultiheadAttention(32, 4, mechanism="full", layer=-1)
    with pytest.raises(TypeError, match=r"query: expected a tensor, got list"):
        ours([1.0], x, x)
    nested = nested_of(torch.zeros(3, 32).double())
    with pytest.raises(ValueError, match="key: expected the query itself, as it is nested, got another tensor"):
        ours(nested, nested_of(torch.zeros(3, 32).double()), nested)
    with pytest.raises(ValueError, match="query: expected batch_first and no masks where it is nested"):
        ours(nested, nested, nested, attn_mask=torch.zeros(3, 3).bool())
    with pytest.raises(TypeError, match="key: expected a padded tensor, as the query is, got a nested one"):
        ours(x, nested, nested)


def nested_of(*rows):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that strided nested tensors are a prototype
        return torch.nested.as_nested_tensor(list(rows))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_partly_swapped_encoder_takes_the_nested_batches_of_the_rest(monkeypatch):
    model = encoder().eval()
    x = torch.randn(3, 20, 32, dtype=torch.float64)
    mask = padding(3, 20, [20, 11, 5])
    with torch.no_grad():
        want = model(x, src_key_padding_mask=~mask)
        calls = Calls(monkeypatch)
        coterie.nn.swap(model.layers[1], "full")
        torch.testing.assert_close(model(x, src_key_padding_mask=~mask)[mask], want[mask])
    assert calls.layers == [0]


def test_swapped_modules_can_be_reset_and_swapped_once():
    model = encoder()
    swapped = coterie.nn.swap(model, "full")
    model.layers[0].self_attn._reset_parameters()
    with pytest.raises(ValueError, match=r"model: expected .*, got one that is already swapped; undo\(\) that first"):
        coterie.nn.swap(model, "smyrf")
    model.layers[0].self_attn.out_proj = nn.Linear(32, 32, bias=False).double()
    swapped.undo()
    assert model.layers[0].self_attn.out_proj.bias is None, "undo keeps what was changed since"


def test_dropout_only_in_training():
    ours = coterie.nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True, mechanism="smyrf:cluster_size=4")
    x = torch.randn(1, 20, 32)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_resampling_only_in_training():
    mechanism = coterie.Smyrf(rounds=1, cluster_size=4, resample=True)
    ours = coterie.nn.MultiheadAttention(32, 4, batch_first=True, mechanism=mechanism)
    x = torch.randn(1, 40, 32)
    assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


# --- encoder layers and swap -----------------------------------------------------------------------------------------


def encoder(layers=2, norm_first=False, **options):
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first).double()


class Calls:
    """Counts the calls of coterie.attention that modules make."""

    def __init__(self, monkeypatch):
        self.layers: list[int] = []
        real = coterie.attention

        def counted(*args, **kwargs):
            self.layers.append(kwargs["layer"])
            return real(*args, **kwargs)

        monkeypatch.setattr(coterie.nn.multihead, "attention", counted)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_loads_torchs_weights(norm_first):
    theirs = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    ours = coterie.nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first, mechanism="full", layer=3
    ).double()
    assert ours.self_attn.layer == 3
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 15, 32, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(15, dtype=torch.float64)
    for training in (True, False):
        theirs.train(training)
        ours.train(training)
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours(x, mask, is_causal=True), theirs(x, mask, is_causal=True))
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_swap_holds_where_the_fast_path_would_go_around_it(monkeypatch, training, grad, padded):
    model = encoder().train(training)
    x = torch.randn(3, 20, 32, dtype=torch.float64)
    mask = padding(3, 20, [20, 11, 5]) if padded else torch.ones(3, 20, dtype=torch.bool)
    kwargs = {"src_key_padding_mask": ~mask} if padded else {}
    with torch.set_grad_enabled(grad):
        want = model(x, **kwargs)
        calls = Calls(monkeypatch)
        model(x, **kwargs)
        assert calls.layers == []
        swapped = coterie.nn.swap(model, "full")
        assert swapped.replaced == ["layers.0.self_attn", "layers.1.self_attn"]
        torch.testing.assert_close(model(x, **kwargs)[mask], want[mask])
        assert calls.layers == [0, 1]
        swapped.undo()
        assert torch.equal(model(x, **kwargs), want)
        assert calls.layers == [0, 1]


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_in_a_swapped_model(monkeypatch, name):
    model = encoder().eval()
    calls = Calls(monkeypatch)
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    with torch.no_grad(), coterie.nn.swap(model, MECHANISMS[name]):
        out = model(x, src_key_padding_mask=~padding(2, 50, [50, 31]))
    assert calls.layers == [0, 1]
    assert out.isfinite().all()
    assert not isinstance(model.layers[0].self_attn, coterie.nn.MultiheadAttention)


def test_an_encoder_of_our_layers_holds_in_eval_under_no_grad(monkeypatch):
    layer = coterie.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, mechanism="smyrf:cluster_size=8")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    calls = Calls(monkeypatch)
    with torch.no_grad():
        model(torch.randn(2, 30, 32), src_key_padding_mask=~padding(2, 30, [30, 9]))
    assert len(calls.layers) == 2


def test_swap_trains_the_same_parameters_and_undo_keeps_them():
    model = encoder()
    parameters = {name: id(p) for name, p in model.named_parameters()}
    swapped = coterie.nn.swap(model, "full")
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 10, 32, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    model.eval()
    after = copy.deepcopy(model.state_dict())
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    out = model(x)
    swapped.undo()
    swapped.undo()  # nothing left to do
    assert not model.layers[0].self_attn.training
    assert all(torch.equal(after[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(model(x), out)


def test_swap_reaches_decoders_with_causal_and_cross_attention():
    model = nn.Transformer(32, 4, 1, 2, 64, dropout=0.0, batch_first=True).double().eval()
    source, target = torch.randn(2, 13, 32, dtype=torch.float64), torch.randn(2, 13, 32, dtype=torch.float64)
    hidden = ~padding(2, 13, [13, 8])
    mask = nn.Transformer.generate_square_subsequent_mask(13, dtype=torch.float64)
    kwargs = {
        "tgt_mask": mask,
        "memory_key_padding_mask": hidden,
        "src_key_padding_mask": hidden,
        "tgt_is_causal": True,
    }
    want = model(source, target, **kwargs)
    with coterie.nn.swap(model, "full") as swapped:
        assert len(swapped.replaced) == 5
        torch.testing.assert_close(model(source, target, **kwargs), want)
    with coterie.nn.swap(model, MECHANISMS["improved"]), pytest.raises(ValueError, match="is_causal: expected False"):
        model(source, target, **kwargs)


def test_swap_keeps_a_shared_module_shared():
    attention = nn.MultiheadAttention(32, 4)
    model = nn.ModuleDict({"a": attention, "b": attention})
    swapped = coterie.nn.swap(model, "full")
    assert swapped.replaced == ["a", "b"]
    assert model["a"] is model["b"]
    swapped.undo()
    assert model["a"] is attention
    assert model["b"] is attention


def test_swap_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"model: expected a model that contains attention \(.*\), got Linear"):
        coterie.nn.swap(nn.Linear(2, 2), "full")
    with pytest.raises(ValueError, match=r"model: expected a model that contains .* got MultiheadAttention"):
        coterie.nn.swap(nn.MultiheadAttention(4, 1), "full")
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        coterie.nn.swap("model", "full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mechanism: expected one of"):
        coterie.nn.swap(encoder(), "nope")


def test_deepcopy_pickle_and_repr():
    model = encoder()
    coterie.nn.swap(model, "smyrf:rounds=2,cluster_size=8")
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    want = model(x)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), want)
        assert again.layers[1].self_attn.in_proj_weight is not model.layers[1].self_attn.in_proj_weight
        assert again.layers[1].self_attn.layer == 1
    assert "mechanism='smyrf:rounds=2,cluster_size=8', layer=1" in repr(model)


def test_autocast_and_checkpointing_through_a_layer():
    layer = coterie.nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.1, batch_first=True, mechanism="smyrf:cluster_size=8"
    )
    x = torch.randn(2, 30, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def _train_one_step(rank, port, results):
    import os

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = encoder()
    coterie.nn.swap(model, "improved-clustered:clusters=3,topk=4")
    data = torch.randn(4, 12, 32, dtype=torch.float64)
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(data[2 * rank : 2 * rank + 2]).square().mean().backward()
    results[rank] = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel_on_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        spawn(_train_one_step, args=(port, results), nprocs=2)
        first, second = dict(results[0]), dict(results[1])
    torch.manual_seed(0)
    model = encoder()
    coterie.nn.swap(model, "improved-clustered:clusters=3,topk=4")
    data = torch.randn(4, 12, 32, dtype=torch.float64)
    model(data).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.grad)


def test_means_are_not_asked_for_pair_masks_they_cannot_honour():
    model = encoder()
    mask = torch.rand(12, 12) < 0.2
    for name in MEANS:
        with (
            coterie.nn.swap(model, MECHANISMS[name]),
            pytest.raises(
                ValueError, match=r"attn_mask: expected a (mask of keys|key_mask), as this plan attends through means"
            ),
        ):
            model(torch.randn(1, 12, 32, dtype=torch.float64), mask=mask)


@pytest.mark.parametrize("kind", ["bool", "float", "per head", "hint"])
@pytest.mark.parametrize("keys", [30, 37])
def test_a_triangle_is_causality(kind, keys):
    """So mechanisms that take no mask of pairs take it, as PyTorch's encoder passes it."""
    theirs, ours = pair("near-far:near=4", batch_first=True)
    exact = coterie.nn.MultiheadAttention.from_torch(theirs, "full")
    q, k, _ = inputs({"batch_first": True}, 30, keys, batch=2)
    hidden = torch.ones(30, keys).triu(keys - 30 + 1).bool()
    mask = hidden if kind == "bool" else torch.zeros(30, keys).double().masked_fill(hidden, -math.inf)
    settings: dict[str, Any] = {"attn_mask": mask.expand(8, -1, -1) if kind == "per head" else mask}
    torch.testing.assert_close(exact(q, k, k, **settings)[0], theirs(q, k, k, attn_mask=mask, need_weights=False)[0])
    if kind == "hint" and keys == 30:
        settings["is_causal"] = True
    got, _ = ours(q, k, k, **settings)
    q, k, v = (ours._heads(x) for x in ours._project(q, k, k))
    want = coterie.attention(q, k, v, "near-far:near=4", is_causal=True, causal_offset=keys - 30)
    assert torch.equal(got, ours.out_proj(want.transpose(1, 2).flatten(2)))
