"""The error and the entropy of every head of a model, against loops over what its attention was called with."""

from __future__ import annotations

import math

import pytest
import torch

import coterie
from coterie.analysis.head_errors import entropies, head_errors, relative_errors
from coterie.call import Call
from tests import oracles
from tests.cases import padding


def encoder() -> torch.nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, dtype=torch.float64)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def seen_in(model, batch):
    found: list[coterie.Seen] = []
    with coterie.observing(found.append), coterie.nn.swap(model, "full"), torch.no_grad():
        model(**batch)
    return found


def entropy(q, k, sees, bias):
    """The sum over the rows that see somebody, and how many do, with loops."""
    weights, lse = oracles.softmax_over(q, k, torch.eye(len(k), dtype=torch.float64), q.shape[-1] ** -0.5, sees, bias)
    found = [-sum(w * math.log(w) for w in row.tolist() if w > 0) for row in weights[lse > -math.inf]]
    return sum(found), len(found)


PADDED = padding(2, 35, [35, 20])
HIDDEN = torch.rand(35, 35, generator=torch.Generator().manual_seed(0)) < 0.4
BATCHES = {
    "plain": {},
    "padded": {"src_key_padding_mask": ~PADDED},
    "pairs": {"mask": HIDDEN},
    "float": {"mask": torch.randn(35, 35, dtype=torch.float64).masked_fill(HIDDEN, -math.inf)},
    "both": {"mask": HIDDEN, "src_key_padding_mask": ~PADDED},
}


@pytest.mark.parametrize("name", BATCHES)
def test_entropy_is_that_of_what_each_query_sees(name):
    model, batch = encoder(), {"src": torch.randn(2, 35, 24, dtype=torch.float64), **BATCHES[name]}
    found = head_errors(model, batch, coterie.Local(window=9))
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    real = PADDED if "src_key_padding_mask" in batch else torch.ones(2, 35, dtype=torch.bool)
    mask = batch.get("mask", torch.zeros(35, 35, dtype=torch.bool))
    bias = torch.zeros(35, 35) if mask.dtype == torch.bool else mask
    for heads, seen in zip(found.values(), seen_in(model, batch), strict=True):
        for h in range(3):
            parts = []
            for b in range(2):
                sees = real[b].expand(35, 35) & ~(mask if mask.dtype == torch.bool else torch.zeros_like(mask).bool())
                rows = real[b].nonzero()[:, 0]
                parts.append(entropy(seen.q[b, h, rows], seen.k[b, h], sees[rows], bias[rows]))
            want = sum(total for total, _ in parts) / sum(count for _, count in parts)
            assert heads[h][1] == pytest.approx(want, rel=1e-9)


def test_entropy_of_a_causal_call_with_an_offset_and_shared_keys():
    """32 queries behind a cache of 9 keys, as in generation; two key heads."""
    q, k, v = (torch.randn(2, heads, n, 8, dtype=torch.float64) for heads, n in ((4, 32), (2, 41), (2, 41)))
    mask, offset = padding(2, 41, [41, 30], "left"), torch.tensor([9, -3])
    seen: list[coterie.Seen] = []
    with coterie.observing(seen.append):
        coterie.attention(q, k, v, "full", key_mask=mask, is_causal=True, causal_offset=offset, enable_gqa=True)
    for h, found in enumerate(entropies(seen[0].call).tolist()):
        parts = []
        for b in range(2):
            sees = mask[b] & (torch.arange(41) <= torch.arange(32)[:, None] + offset[b])
            parts.append(entropy(q[b, h], k[b, h // 2], sees, torch.zeros(32, 41)))
        assert found == pytest.approx(sum(total for total, _ in parts) / sum(count for _, count in parts), rel=1e-9)


def test_few_queries_of_many_are_looked_at_and_nobody_sees_nobody():
    q = torch.zeros(2, 2, 500, 4)
    real = padding(2, 500, [400, 0])
    found = entropies(Call.of(q, q, key_mask=real, runs=False))
    assert found.tolist() == pytest.approx([math.log(400)] * 2)  # alike: all keys of the only sample that has any
    assert entropies(Call.of(q, q, key_mask=torch.zeros_like(real), runs=False)).tolist() == [0.0, 0.0]


def test_errors_are_relative_to_the_dense_answer_of_the_head():
    model, x = encoder(), torch.randn(2, 35, 24, dtype=torch.float64)
    found = head_errors(model, {"src": x}, coterie.Local(window=9))
    for heads, seen in zip(found.values(), seen_in(model, {"src": x}), strict=True):
        out, exact = seen.attend("local:window=9"), seen.attend("full")
        for h in range(3):
            assert heads[h][0] == pytest.approx(float((out - exact)[:, h].norm() / exact[:, h].norm()), rel=1e-9)
    assert relative_errors(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4)).tolist() == [0.0, 0.0]
