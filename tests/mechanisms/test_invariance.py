"""What must not matter: padding, the rest of the batch, repeated heads, memory layout, later tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import coterie
from coterie.mechanisms.base import Causality
from tests.cases import CAUSAL, MECHANISMS, POSITIONAL, STRICT, close, padding, tensors

pytestmark = pytest.mark.usefixtures("backend")


LENGTHS = [1, 2, 63, 111, 1000]


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_any_length_forward_and_backward(name, length):
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, length, dtype=torch.float32))
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], return_lse=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    if length == 1:
        close(out, v)


PADDED = [
    (name, side, causal)
    for name in MECHANISMS
    for side in ("right", "left", "scattered")
    for causal in (False, True)
    if not (causal and name not in CAUSAL) and not (side == "scattered" and name in POSITIONAL)
]


@pytest.mark.parametrize(("name", "side", "causal"), PADDED)
def test_padded_rows_equal_each_row_alone(name, side, causal):
    lengths = [111, 63, 2, 1, 0]
    q, k, v = tensors(5, 2, 111)
    mask = padding(5, 111, lengths, side)
    for x in (q, k, v):
        x.transpose(1, 2)[~mask] = math.nan
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], key_mask=mask, is_causal=causal, return_lse=True)
    assert (out.transpose(1, 2)[~mask] == 0).all()
    assert (lse.transpose(1, 2)[~mask] == -math.inf).all()
    real = mask[:, None, :].expand_as(lse)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum() + lse[real].sum(), (q, k, v))
    for b, length in enumerate(lengths):
        if length == 0:
            continue
        alone = [x[b : b + 1, :, mask[b]].detach().requires_grad_() for x in (q, k, v)]
        out_b, lse_b = coterie.attention(
            alone[0], alone[1], alone[2], MECHANISMS[name], is_causal=causal, return_lse=True
        )
        close(out[b : b + 1, :, mask[b]], out_b)
        close(lse[b : b + 1, :, mask[b]], lse_b)
        wanted = torch.autograd.grad((out_b * weight[b : b + 1, :, mask[b]]).sum() + lse_b.sum(), alone)
        for grad, want in zip(grads, wanted, strict=True):
            close(grad[b : b + 1, :, mask[b]], want)
            assert (grad[b, :, ~mask[b]] == 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_padded_cross_attention_equals_each_row_alone(name):
    q, k, v = tensors(3, 2, 40, 70)
    query_mask, key_mask = padding(3, 40, [40, 11, 3], "left"), padding(3, 70, [33, 70, 1], "right")
    q.transpose(1, 2)[~query_mask] = math.inf
    k.transpose(1, 2)[~key_mask] = math.nan
    v.transpose(1, 2)[~key_mask] = -math.inf
    # The padding differs between the sides, so the window's offset must be told.
    last_query, last_key = torch.tensor([40, 40, 40]), key_mask.sum(-1)
    offset = last_key - last_query
    out = coterie.attention(q, k, v, MECHANISMS[name], query_mask=query_mask, key_mask=key_mask, causal_offset=offset)
    assert (out.transpose(1, 2)[~query_mask] == 0).all()
    for b in range(3):
        alone = coterie.attention(
            q[b : b + 1, :, query_mask[b]], k[b : b + 1, :, key_mask[b]], v[b : b + 1, :, key_mask[b]], MECHANISMS[name]
        )
        close(out[b : b + 1, :, query_mask[b]], alone)


@pytest.mark.parametrize("name", MECHANISMS)
def test_no_sample_changes_when_another_does(name):
    q, k, v = tensors(3, 2, 63, dtype=torch.float32)
    before = coterie.attention(q, k, v, MECHANISMS[name])
    for x in (q, k, v):
        x[1] = x[1].roll(3, 1) * 50
    after = coterie.attention(q, k, v, MECHANISMS[name])
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [False, True])
def test_gqa_equals_repeated_heads(name, causal):
    causal = causal and name in CAUSAL
    q, k, v = (x.requires_grad_() for x in tensors(2, 6, 40, 50, key_heads=2, value_dim=5))
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], enable_gqa=True, is_causal=causal, return_lse=True)
    k2, v2 = (x.repeat_interleave(3, 1) for x in (k, v))
    out2, lse2 = coterie.attention(q, k2, v2, MECHANISMS[name], is_causal=causal, return_lse=True)
    close(out, out2)
    close(lse, lse2)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((out2 * weight).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize("name", MECHANISMS)
def test_memory_layout_does_not_matter(name):
    q, k, v = tensors(2, 3, 50, value_dim=5)
    want = coterie.attention(q, k, v, MECHANISMS[name])
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spaced = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    assert not spaced[0].is_contiguous()
    for a, b, c in (strided, spaced):
        close(coterie.attention(a, b, c, MECHANISMS[name]), want)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_inputs(name, batch, queries, keys):
    q, k, v = (x.requires_grad_() for x in tensors(batch, 2, queries, keys))
    out, lse = coterie.attention(q, k, v, MECHANISMS[name], return_lse=True)
    assert out.shape == (batch, 2, queries, 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 200), (200, 1), (7, 300), (300, 7)])
def test_very_unequal_lengths(name, queries, keys):
    q, k, v = tensors(1, 2, queries, keys)
    out = coterie.attention(q, k, v, MECHANISMS[name])
    met = MECHANISMS[name].plan(q, k).to_dense().sum(-1) > 0
    assert met.all() or name.startswith(("local", "strided", "fixed"))  # which meet by position alone
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["topk:k=2", "improved-clustered:clusters=1,topk=2", "routing:clusters=1,window=2"])
def test_padding_stays_out_even_if_every_real_score_overflows(name):
    q, k = torch.full((1, 1, 4, 4), 1e20), torch.full((1, 1, 4, 4), -1e20)
    mask = torch.tensor([[False, True, True, True]])
    k[:, :, 0] = math.nan
    assert not coterie.as_mechanism(name).plan(q, k, key_mask=mask).to_dense()[..., 0].any()


# --- causality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("wild", [1e6, math.inf, math.nan])
def test_no_value_of_a_later_token_reaches_an_earlier_output(name, wild):
    q, k, v = tensors(1, 2, 63)
    before = coterie.attention(q, k, v, CAUSAL[name], is_causal=True)
    for cut in (1, 31, 62):
        changed = v.clone()
        changed[:, :, cut:] = wild
        after = coterie.attention(q, k, changed, CAUSAL[name], is_causal=True)
        close(after[:, :, :cut], before[:, :, :cut])


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(cut=st.integers(1, 62), seed=st.integers(0, 100))
def test_strict_rows_do_not_depend_on_later_tokens(name, dtype, cut, seed):
    q, k, v = tensors(1, 2, 63, dtype=dtype)
    plan = STRICT[name].plan(q, k, is_causal=True)
    before = coterie.attention(q, k, v, STRICT[name], is_causal=True)
    other = tensors(1, 2, 63, dtype=dtype, seed=seed + 1)
    q2, k2, v2 = (torch.cat([x[:, :, :cut], 3 * y[:, :, cut:]], 2) for x, y in zip((q, k, v), other, strict=True))
    after = coterie.attention(q2, k2, v2, STRICT[name], is_causal=True)
    rows = STRICT[name].plan(q2, k2, is_causal=True).to_dense()[:, :, :cut]
    assert torch.equal(rows, plan.to_dense()[:, :, :cut])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    assert (after - before)[:, :, :cut].abs().max() <= tolerance * before.abs().max()


# Near-far's groups are those of the queries that come together.
@pytest.mark.parametrize("name", [n for n in STRICT if n != "near-far-strict"])
def test_strict_rows_do_not_depend_on_how_much_follows_with_a_cache_in_front(name):
    q, k, v = tensors(1, 2, 90)
    whole = coterie.attention(q, k, v, STRICT[name], is_causal=True)
    tail = coterie.attention(q[:, :, 50:], k, v, STRICT[name], is_causal=True)  # bottom right by default
    close(tail, whole[:, :, 50:])


def test_the_levels_that_the_mechanisms_claim():
    levels = {name: cls.causality for name, cls in coterie.list_mechanisms().items() if cls.__module__[:7] == "coterie"}
    assert levels == {
        "smyrf": "mask",
        "clustered": "none",
        "improved-clustered": "none",
        "near-far": "mask",
        "reformer": "mask",
        "routing": "mask",
        "local": "strict",
        "longformer": "strict",
        "topk": "strict",
        "full": "strict",
        "strided": "strict",
        "fixed": "strict",
    }


@pytest.mark.parametrize("cls", [coterie.NearFar, coterie.Reformer])
def test_an_instance_says_which_level_it_gives(cls):
    assert [cls(strict=strict).causality for strict in (False, True)] == ["mask", "strict"]
    assert coterie.AtLeast(100, cls(strict=True)).causality == "strict"


def test_a_word_for_causality_is_one_of_three():
    """Plain words will do, and stay comparable with plain words."""

    class Mine(coterie.Local):
        causality = "none"

    assert Mine.causality == "none"
    assert Mine.causality is Causality.NONE
    with pytest.raises(ValueError, match=r"is_causal: expected False for 'local'"):
        Mine().plan(*tensors()[:2], is_causal=True)
    message = r"^Unsure\.causality: expected one of 'none', 'mask', 'strict', got 'sometimes'$"
    with pytest.raises(ValueError, match=message):

        class Unsure(coterie.Local):
            causality = "sometimes"


# --- randomness ------------------------------------------------------------------------------------------------------

RANDOM = ["smyrf", "clustered", "improved-euclidean", "reformer", "routing"]


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_same_seed_gives_the_same_bits_whatever_torch_was_seeded_with(name):
    q, k, v = tensors(1, 2, 63, dtype=torch.float32)
    torch.manual_seed(1)
    first = coterie.attention(q, k, v, MECHANISMS[name])
    torch.manual_seed(2)
    assert torch.equal(first, coterie.attention(q, k, v, MECHANISMS[name]))


@pytest.mark.parametrize("name", RANDOM)
def test_seeds_layers_and_heads_draw_differently(name):
    from dataclasses import replace

    mechanism: Any = MECHANISMS[name]
    q, k, v = tensors(1, 2, 111)
    q[:, 1], k[:, 1], v[:, 1] = q[:, 0], k[:, 0], v[:, 0]
    base = coterie.attention(q, k, v, mechanism)
    assert not torch.equal(base, coterie.attention(q, k, v, replace(mechanism, seed=1)))
    assert not torch.equal(base, coterie.attention(q, k, v, mechanism, layer=1))
    assert not torch.equal(base[:, 0], base[:, 1])


def test_resample_differs_between_steps_and_follows_torchs_seed():
    q, k, v = tensors(1, 2, 111)
    fresh = coterie.Smyrf(rounds=1, cluster_size=8, resample=True)
    torch.manual_seed(5)
    first, second = (coterie.attention(q, k, v, fresh) for _ in range(2))
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(first, coterie.attention(q, k, v, fresh))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(name, dropout_p, reentrant):
    mechanism = MECHANISMS[name]
    if name == "smyrf":
        mechanism = coterie.Smyrf(rounds=2, cluster_size=16, resample=True)
    grads = []
    for again in (False, True):
        q, k, v = (x.requires_grad_() for x in tensors(1, 2, 40))
        torch.manual_seed(7)

        def run(q, k, v):
            return coterie.attention(q, k, v, mechanism, dropout_p=dropout_p)

        out = checkpoint(run, q, k, v, use_reentrant=reentrant) if again else run(q, k, v)
        out.square().sum().backward()
        grads.append((q.grad, k.grad, v.grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


# --- wild numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("wild", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_wild_numbers_neither_hang_nor_spread(name, wild, which):
    q, k, v = tensors(2, 2, 40, dtype=torch.float32)
    {"q": q, "k": k, "v": v}[which][0, 1, 7, 2] = wild
    out = coterie.attention(q, k, v, MECHANISMS[name])
    assert out.shape == q.shape
    assert out[1].isfinite().all(), "another sample"
    assert out[0, 0].isfinite().all(), "another head"
    met = MECHANISMS[name].plan(q, k).to_dense()[0, 1]
    clean = met[:, 7] == 0 if which != "q" else torch.arange(40) != 7
    if which == "q" and name.startswith(("clustered", "improved")):
        return  # a mean query carries it to its members
    assert out[0, 1, clean].isfinite().all(), "rows that do not meet it"
