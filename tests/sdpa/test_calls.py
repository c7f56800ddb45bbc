"""Calls of SDPA inside `replacing`: with Full what SDPA gives, with a mechanism what `coterie.attention` gives."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close as close

import coterie
from coterie.sdpa.scope import layer_of
from tests.cases import MECHANISMS, padding

SDPA = F.scaled_dot_product_attention
LOCAL = "local:window=8"
N = 37


def tensors(*shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def both(q, k, v, mechanism="full", **settings):
    """Outputs and gradients of SDPA, and of what takes its place."""
    leaves = [x for x in (q, k, v, settings.get("attn_mask")) if x is not None and x.requires_grad]
    want = SDPA(q, k, v, **settings)
    with coterie.replacing(mechanism) as replaced:
        got = SDPA(q, k, v, **settings)
    assert replaced.calls == {"": mechanism}
    assert got.shape == want.shape
    grad = torch.randn_like(want)
    return (got, *torch.autograd.grad(got, leaves, grad)), (want, *torch.autograd.grad(want, leaves, grad))


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((N, 8), (50, 8)),
        ((3, N, 8), (3, 50, 8)),
        ((3, N, 8), (1, 50, 8)),
        ((2, 3, N, 8), (2, 3, 50, 8)),
        ((2, 3, N, 8), (1, 3, 50, 8)),
        ((2, 3, N, 8), (3, 50, 8)),
        ((2, 4, N, 8), (2, 1, 50, 8)),
        ((2, 2, 3, N, 8), (2, 2, 3, 50, 8)),
        ((2, 1, 3, N, 8), (1, 2, 3, 50, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["everyone", "causal"])
def test_any_leading_dimensions(query, key, causal):
    """Causal with more keys than queries, too: SDPA's triangle starts top left."""
    got, want = both(*tensors(query, key, (*key[:-1], 5)), is_causal=causal)
    close(got, want)


@pytest.mark.parametrize("keys", [20, 60])
def test_causal_starts_top_left_whatever_the_lengths(keys):
    q, k, v = tensors((1, 2, N, 8), (1, 2, keys, 8), (1, 2, keys, 8))
    got, _ = both(q, k, v, LOCAL, is_causal=True)
    by_hand = coterie.attention(q, k, v, LOCAL, is_causal=True, causal_offset=0, layer=layer_of(""))
    assert torch.equal(got[0], by_hand)
    close(*both(q, k, v, is_causal=True))


@pytest.mark.parametrize(
    "shape",
    [
        (N, 50),
        (1, 50),
        (1, 1, 1, 50),
        (2, 1, 1, 50),
        (2, 3, 1, 50),
        (2, 1, N, 50),
        (1, 3, N, 50),
        (2, 3, N, 50),
        (N, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bool", "float", "learned", "lowest"])
def test_masks_in_every_form(shape, kind):
    q, k, v = tensors((2, 3, N, 8), (2, 3, 50, 8), (2, 3, 50, 8))
    seen = torch.rand(shape) < 0.7
    seen[..., 0] = True
    mask = {
        "bool": seen,
        "float": torch.randn(shape, dtype=torch.float64).masked_fill(~seen, -math.inf),
        "learned": torch.randn(shape, dtype=torch.float64, requires_grad=True),
        "lowest": torch.zeros(shape, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min),
    }[kind]
    if shape == (N, 1):  # all or nothing: rows that see nobody give 0
        mask = torch.ones(shape, dtype=torch.bool) if kind in ("bool", "lowest") else mask.nan_to_num(neginf=0)
    got, want = both(q, k, v, attn_mask=mask)
    close(got, want)


@pytest.mark.parametrize(
    ("query", "mask"),
    [
        ((3, N, 8), (3, 1, N)),
        ((3, N, 8), (N, N)),
        ((2, 2, 3, N, 8), (2, 1, 1, 1, N)),
        ((2, 2, 3, N, 8), (1, 2, 3, N, N)),
    ],
    ids=str,
)
def test_masks_of_other_dimensions(query, mask):
    seen = torch.rand(mask) < 0.7
    seen[..., 0] = True
    close(*both(*tensors(query, query, query), attn_mask=seen))


@pytest.mark.parametrize("shape", [(4, N, 8), (2, 4, N, 8), (2, 2, 4, N, 8)], ids=str)
def test_grouped_heads(shape):
    few = (*shape[:-3], 2, 50, 8)
    close(*both(*tensors(shape, few, few), enable_gqa=True, scale=0.7))


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_gives_what_attention_gives_by_hand(name):
    mechanism = MECHANISMS[name]
    q, k, v = tensors((2, 2, N, 8), (2, 2, N, 8), (2, 2, N, 8), dtype=torch.float32)
    mask = padding(2, N, [N, 29])
    settings: dict[str, Any] = {"key_mask": mask, "query_mask": mask, "guests": ~mask}
    settings |= {"layer": layer_of(""), "scale": 0.5}
    want = coterie.attention(q, k, v, mechanism, **settings)
    for form in (mask[:, None, None], mask[:, None, None].expand(2, 2, N, N), mask[:, None, None].repeat(1, 2, N, 1)):
        with coterie.replacing(mechanism):
            got = SDPA(q, k, v, attn_mask=form, scale=0.5)
        assert torch.equal(got, want)
    grad = torch.randn_like(want)
    found, wanted = (torch.autograd.grad(out, (q, k, v), grad) for out in (got, want))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("float_mask", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(N, N), (N, 50)])
def test_a_triangle_is_causality(float_mask, queries, keys):
    """So mechanisms that take no mask of pairs take it; padding may be hidden in it too."""
    q, k, v = tensors((2, 2, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    real = padding(2, keys, [keys, keys - 7])
    seen = torch.ones(queries, keys).tril(keys - queries).bool() & real[:, None, None]
    mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -1e4) if float_mask else seen
    close(*both(q, k, v, attn_mask=mask))
    with coterie.replacing("near-far:near=4") as replaced:
        got = SDPA(q, k, v, attn_mask=mask)
    masks: dict[str, Any] = {"query_mask": torch.ones(2, queries).bool()}
    if queries == keys:
        masks = {"query_mask": real, "guests": ~real}
    masks |= {"key_mask": real, "is_causal": True, "causal_offset": keys - queries, "layer": layer_of("")}
    assert torch.equal(got, coterie.attention(q, k, v, "near-far:near=4", **masks))
    assert replaced.calls == {"": "near-far:near=4"}


def test_what_a_mechanism_cannot_do_is_refused_by_the_name_of_the_call():
    q, k, v = tensors(*[(1, 2, N, 8)] * 3)
    start = r"near-far cannot answer the attention call '': "
    with pytest.raises(ValueError, match=start + "attn_mask: expected a key_mask"), coterie.replacing("near-far"):
        SDPA(q, k, v, attn_mask=torch.rand(N, N) < 0.5)
    refused = pytest.raises(ValueError, match="call '': is_causal: expected False for 'clustered'")
    with refused, coterie.replacing("clustered:clusters=3"):
        SDPA(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("inputs", "settings", "error", "message"),
    [
        (((N,), (N, 8), (N, 8)), {}, ValueError, "query: expected 2 dimensions or more"),
        (((2, N, 8), (3, N, 8), (3, N, 8)), {}, ValueError, "query, key, value: expected leading dimensions that"),
        (((2, N, 8),) * 3, {"attn_mask": torch.ones(N, 5).bool()}, ValueError, "attn_mask: expected a shape that bro"),
        (((2, N, 8),) * 3, {"attn_mask": torch.ones(1, 1, N, N)}, ValueError, "attn_mask: expected a shape that bro"),
        (((2, N, 8),) * 3, {"attn_mask": torch.ones(N, N).int()}, TypeError, "attn_mask: expected a bool or float"),
        (((2, N, 8), (2, N, 4), (2, N, 8)), {}, ValueError, "k: expected the head dim of q"),
    ],
)
def test_malformed_calls(inputs, settings, error, message):
    with pytest.raises(error, match=message), coterie.replacing("full"):
        SDPA(*tensors(*inputs), **settings)


def test_nested_tensors():
    nested = torch.nested.nested_tensor([torch.randn(N, 8), torch.randn(20, 8)], layout=torch.jagged)
    refused = pytest.raises(TypeError, match="query: expected a padded tensor, got a nested one")
    with refused, coterie.replacing("full"):
        SDPA(nested, nested, nested)


def test_few_queries_and_short_calls_stay_dense():
    q, k, v = tensors((1, 2, 16, 8), (1, 2, 90, 8), (1, 2, 90, 8))
    with coterie.replacing(LOCAL) as replaced:
        assert torch.equal(SDPA(q, k, v), SDPA(q, k, v))
    assert replaced.calls == {"": "dense", "#1": "dense"}
    x = torch.randn(1, 2, 60, 8)
    want = SDPA(x, x, x)
    with coterie.replacing(f"{LOCAL}@61") as replaced:
        assert torch.equal(SDPA(x, x, x), want)
    assert replaced.calls == {"": "dense"}
    with coterie.replacing(f"{LOCAL}@60") as replaced:
        assert not torch.allclose(SDPA(x, x, x), want)
    assert replaced.calls == {"": f"{LOCAL}@60"}


def test_each_sample_counts_its_own_tokens():
    x = torch.randn(3, 2, 60, 8)
    mask = padding(3, 60, [60, 39, 10])
    with coterie.replacing(f"{LOCAL}@40"):
        got = SDPA(x, x, x, attn_mask=mask[:, None, None])
    dense = SDPA(x, x, x, attn_mask=mask[:, None, None])
    close(got[1:], dense[1:])
    assert not torch.allclose(got[0], dense[0])


def test_dropout_is_applied_as_it_comes():
    x = torch.ones(1, 1, 64, 4)
    with coterie.replacing("full"):
        torch.manual_seed(1)
        once = SDPA(x, x, x, None, 0.5)
        again = SDPA(x, x, x, None, 0.5)
        torch.manual_seed(1)
        assert torch.equal(SDPA(x, x, x, None, 0.5), once)
    assert not torch.equal(once, again)
    assert abs(float(once.mean()) - 1) < 0.1


def test_resampling_only_where_the_module_trains():
    class Alone(torch.nn.Module):
        def forward(self, x):
            return SDPA(x, x, x)

    model, x = Alone(), torch.randn(1, 1, 64, 8)
    with coterie.replacing(coterie.Smyrf(rounds=1, cluster_size=4, resample=True)):
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


def test_autocast_gives_its_dtype():
    q, k, v = tensors(*[(1, 2, N, 8)] * 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = SDPA(q, k, v)
        with coterie.replacing("full"):
            got = SDPA(q, k, v)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    got.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("keys", [0, N])
def test_a_batch_of_nothing(keys):
    q, k, v = tensors((0, 2, N, 8), (0, 2, keys, 8), (0, 2, keys, 5))
    for spec in ("full", LOCAL, "near-far@30"):
        with coterie.replacing(spec):
            got = SDPA(q, k, v)
        assert got.shape == (0, 2, N, 5)
        assert torch.autograd.grad(got.sum(), q)[0].shape == q.shape


def test_transforms_are_refused_in_words():
    x, mask = torch.randn(3, 1, N, 8), torch.rand(3, N, N) < 0.5
    for function, inputs in ((lambda x: SDPA(x, x, x), (x,)), (lambda x, mask: SDPA(x, x, x, mask), (x, mask))):
        with pytest.raises(RuntimeError, match=r"takes no torch\.func transform"), coterie.replacing("full"):
            torch.func.vmap(function)(*inputs)
