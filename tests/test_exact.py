"""Exact rows against loops in float64: every mask, causality, offsets, GQA, odd lengths, whatever is in padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie import exact
from coterie.call import Call
from coterie.exact import ExactRows, blocks, softmax
from tests import oracles
from tests.cases import padding, tensors


def pairs(kind, shape):
    """A mask of pairs, in which one query sees nobody."""
    generator = torch.Generator().manual_seed(2)
    seen = torch.rand(shape, generator=generator) < 0.6
    if shape[2] > 1:
        seen[:, :, 3] = False
    if kind == "bool":
        return seen
    return torch.randn(shape, generator=generator, dtype=torch.float64).masked_fill(~seen, -math.inf)


SITUATIONS = {
    "plain": {},
    "keys": {"key_mask": padding(2, 41, [41, 17], "scattered")},
    "queries": {"query_mask": padding(2, 37, [11, 37], "left")},
    "no-keys": {"key_mask": padding(2, 41, [41, 0])},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "causal_offset": -5},
    "offsets": {"is_causal": True, "causal_offset": torch.tensor([-40, 9]), "key_mask": padding(2, 41, [41, 30])},
    "guests": {"query_mask": padding(2, 37, [11, 37]), "guests": padding(2, 37, [20, 37])},
    "pairs": {"attn_mask": pairs("bool", (2, 4, 37, 41))},
    "pairs-float": {"attn_mask": pairs("float", (2, 4, 37, 41)), "is_causal": True},
    "pairs-shared": {"attn_mask": pairs("bool", (1, 1, 37, 41)), "key_mask": padding(2, 41, [41, 30])},
    "pairs-rows": {"attn_mask": pairs("float", (1, 4, 37, 1))},
    "keys-as-pairs": {"attn_mask": padding(2, 41, [41, 17])[:, None, None]},
    "bias-of-keys": {"attn_mask": pairs("float", (2, 1, 1, 41))},
}
ROWS = torch.tensor([[3, 0, 36, 36, -1], [-1, 12, 7, 20, 3]])


def called(settings, dtype=torch.float64):
    """q (2, 4, 37, 8), two key heads, 41 keys; NaN in all padding."""
    q, k, v = tensors(2, 4, 37, 41, value_dim=5, key_heads=2, dtype=dtype)
    if dtype != torch.float64:
        settings = {name: x.to(dtype) if _is_float(x) else x for name, x in settings.items()}
    call = Call.of(q, k, v, scale=0.7, **settings, runs=False)
    if call.key_mask is not None:
        k, v = (x.masked_fill(~call.key_mask[:, None, :, None], math.nan) for x in (k, v))
    if call.answered is not None:
        q = q.masked_fill(~call.answered[:, None, :, None], math.nan)
    return Call.of(q, k, v, scale=0.7, **settings, runs=False)


def _is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def loops(call, settings, rows):
    """Weights (B, H, R, Nk), lse and answers, by the formula."""
    weights = torch.zeros(2, 4, rows.shape[1], 41, dtype=torch.float64)
    lse = torch.full(weights.shape[:3], -math.inf, dtype=torch.float64)
    answers = torch.zeros(*weights.shape[:3], 5, dtype=torch.float64)
    given, offset = settings.get("attn_mask"), settings.get("causal_offset", 41 - 37)
    full = None if given is None else given.expand(2, 4, 37, 41)
    for b in range(2):
        level = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
        for h in range(4):
            for r, i in enumerate(rows[b].tolist()):
                if i < 0 or (call.answered is not None and not call.answered[b, i]):
                    continue
                sees, bias = torch.ones(1, 41), torch.zeros(1, 41, dtype=torch.float64)
                for j in range(41):
                    padded = "key_mask" in settings and not settings["key_mask"][b, j]
                    future = "is_causal" in settings and j > i + level
                    hidden = full is not None and full.dtype == torch.bool and not full[b, h, i, j]
                    sees[0, j] = not (padded or future or hidden)
                    if full is not None and full.dtype != torch.bool:
                        bias[0, j] = full[b, h, i, j]
                one = (call.q[b, h, i : i + 1].double(), call.k[b, h // 2].double())
                out, total = oracles.softmax_over(*one, torch.eye(41, dtype=torch.float64), 0.7, sees, bias)
                weights[b, h, r], lse[b, h, r] = out[0], total[0]
                answers[b, h, r], _ = oracles.softmax_over(*one, call.v[b, h // 2].double(), 0.7, sees, bias)
    return weights, lse, answers


@pytest.mark.parametrize("budget", [1 << 21, 7 * 2 * 4 * 5], ids=["one-block", "many-blocks"])
@pytest.mark.parametrize("name", SITUATIONS)
def test_exact_rows_are_those_of_loops(name, budget, monkeypatch):
    monkeypatch.setattr(exact, "BUDGET", budget)
    settings = SITUATIONS[name]
    call = called(settings)
    want, lse, answers = loops(call, settings, ROWS)
    found = ExactRows(call, ROWS)
    parts = list(found.blocks())
    assert len(parts) == (1 if budget > 1000 else 6)
    weights = torch.cat([found.weights(columns) for columns in parts], -1)
    torch.testing.assert_close(weights, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.lse, lse, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(softmax(found.scores()), want, rtol=1e-12, atol=1e-14)
    summed = sum(found.answers(found.weights(columns), columns) for columns in parts)
    torch.testing.assert_close(summed, answers, rtol=1e-12, atol=1e-13)
    assert (want[..., found.visible :] == 0).all()
    assert (found.lse == -math.inf).any()  # the rows of −1, and those who see nobody


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_in_lower_precision_are_widened_afterwards(dtype):
    """float32 inputs are exact in float64; a float32 product of them is what differs, and by its rounding alone."""
    settings = SITUATIONS["pairs-float"]
    call = called(settings, dtype)
    want, _, _ = loops(call, {"attn_mask": call.pair_mask, "is_causal": True}, ROWS)
    for products, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = softmax(ExactRows(call, ROWS, products).scores())
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 1)])
def test_little_to_attend_to(queries, keys):
    q, k, v = tensors(1, 2, queries, keys)
    found = ExactRows(Call.of(q, k, v, is_causal=True, runs=False), torch.arange(queries)[None])
    assert found.scores().shape == softmax(found.scores()).shape == (1, 2, queries, keys)
    assert (found.lse == -math.inf).all() == (queries * keys == 0)


def test_no_gradient_is_recorded():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 9))
    found = ExactRows(Call.of(q, k, v, runs=False), torch.arange(9)[None])
    assert not found.answers(found.weights(slice(0, 9)), slice(0, 9)).requires_grad


@given(st.integers(0, 100), st.integers(0, 10), st.integers(1, 50))
def test_blocks_cover_a_length_once(length, each, budget):
    before, exact.BUDGET = exact.BUDGET, budget
    try:
        parts = list(blocks(length, each))
    finally:
        exact.BUDGET = before
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(length))
    assert all((part.stop - part.start) * each <= max(budget, each) for part in parts)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_nan_in_a_key_that_a_mask_of_pairs_hides_is_never_seen(kind):
    q, k, v = tensors(1, 1, 6, 6, dtype=torch.float64)
    k = k.index_fill(2, torch.tensor(5), math.nan)
    seen = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    seen[..., 5] = False
    mask = seen if kind == "bool" else torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    weights = ExactRows(Call.of(q, k, v, attn_mask=mask, runs=False), torch.arange(6)[None]).weights(slice(0, 6))
    want = (q @ k[:, :, :5].mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(weights, torch.cat([want, torch.zeros(1, 1, 6, 1, dtype=torch.float64)], -1))


def test_a_query_that_sees_nan_has_no_weights_that_look_like_numbers():
    q, k, v = tensors(1, 1, 6, 6, dtype=torch.float64)
    k = k.index_fill(2, torch.tensor(5), math.nan)
    exact_rows = ExactRows(Call.of(q, k, v, is_causal=True, runs=False), torch.arange(6)[None])
    nan = exact_rows.weights(slice(0, 6)).isnan()
    assert nan[0, 0, 5].all()
    assert not nan[0, 0, :5].any()
