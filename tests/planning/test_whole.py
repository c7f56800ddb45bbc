"""Plans that one native call makes: to the last number those of the single steps, which compiled graphs are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import coterie
from coterie import compiled
from coterie.planning import whole
from tests.cases import CAUSAL, padding, tensors

pytestmark = pytest.mark.skipif(bool(compiled.why_not()), reason=compiled.why_not())

SPECS = {
    "full": "full",
    "local": "local:window=9",
    "longformer": "longformer:window=9,global_tokens=2",
    "smyrf": "smyrf:rounds=3,cluster_size=16",
    "e2lsh": "smyrf:rounds=2,cluster_size=9,hash=e2lsh,transform=none",
    "clustered": "clustered:clusters=7,iterations=3",
    "clustered, many": "clustered:clusters=90,space=euclidean",
    "improved": "improved-clustered:clusters=7,topk=9",
    "improved, many": "improved-clustered:clusters=60,topk=300,space=euclidean",
    "near-far": "near-far:near=9,chunk=16",
    "near-far, tiny chunks": "near-far:near=2,chunk=2,sinks=1",
    "near-far, fixed": "near-far:near=3,query_clusters=5,key_clusters=7,sinks=0,chunk=32",
    "near-far, many fixed": "near-far:near=3,query_clusters=200,key_clusters=300,iterations=0",
    "near-far, nobody near": "near-far:near=0",
}
SIZES = {
    "short": (2, 4, 2, 37, 37),
    "long": (1, 2, 2, 1200, 1200),
    "over a cache": (2, 2, 1, 40, 200),
    "fewer keys": (2, 2, 2, 130, 64),
    "one": (1, 2, 1, 1, 1),
    "no queries": (2, 2, 1, 0, 50),
    "no keys": (2, 2, 1, 50, 0),
}


def same(mechanism, monkeypatch, q, k, **settings):
    at_once = mechanism.plan(q, k, **settings).to_dict()
    with monkeypatch.context() as patched:
        patched.setattr(whole, "possible", lambda call: False)
        by_steps = mechanism.plan(q, k, **settings).to_dict()
    assert at_once.keys() == by_steps.keys()
    for name, found in at_once.items():
        assert found.dtype == by_steps[name].dtype, name
        assert torch.equal(found, by_steps[name]), name


@pytest.mark.parametrize("masked", ["all real", "padded", "scattered"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SPECS)
def test_one_call_plans_as_the_steps_do(name, size, masked, monkeypatch):
    batch, heads, key_heads, queries, keys = SIZES[size]
    q, k, _ = tensors(batch, heads, queries, keys, key_heads=key_heads, dtype=torch.float32)
    masks = {}
    if masked != "all real":
        side = "right" if masked == "padded" else "scattered"
        for which, length in (("query_mask", queries), ("key_mask", keys)):
            masks[which] = padding(batch, length, [length // 2 + length % 2, length][:batch], side)
    mechanism = coterie.as_mechanism(SPECS[name])
    same(mechanism, monkeypatch, q, k, **masks)
    for offset in (None, -3, torch.arange(batch) * 5) if mechanism.causality != "none" else ():
        same(mechanism, monkeypatch, q, k, is_causal=True, causal_offset=offset, **masks)


@pytest.mark.parametrize("name", ["smyrf", "near-far", "improved"])
def test_one_call_takes_what_the_steps_take(name, monkeypatch):
    """Half precision, heads that lie anywhere, and numbers that are not finite."""
    q, k, _ = tensors(2, 4, 90, key_heads=2, dtype=torch.bfloat16)
    q[0, 0, 3, 1], k[1, 1, 7, 0] = float("nan"), float("inf")
    mechanism = coterie.as_mechanism(SPECS[name])
    for x, y in ((q, k), (q.transpose(1, 2).contiguous().transpose(1, 2), k[..., ::2].repeat_interleave(2, -1))):
        for causal in (False, True) if mechanism.causality != "none" else (False,):
            same(mechanism, monkeypatch, x, y, is_causal=causal)


def test_two_threads_plan_as_one_does():
    q, k, _ = tensors(1, 3, 2000, dtype=torch.float32, dim=16)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append([coterie.NearFar().plan(q, k, is_causal=causal).to_dict() for causal in (False, True)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_profile_names_the_steps_and_a_subclass_sees_the_op():
    q, k, v = tensors(1, 2, 50, dtype=torch.float32)
    assert compiled.unwatched(q, k, v)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert not compiled.unwatched(q, k, v)
        coterie.attention(q, k, v, "near-far")
    names = {event.key for event in profiled.key_averages()}
    assert {"coterie::halve", "coterie::kmeans", "coterie::near_keys", "coterie::attend"} <= names
    assert not compiled.unwatched(q.as_subclass(type("Marked", (torch.Tensor,), {})))
    assert not compiled.unwatched(q.to("meta"))


def test_the_gradient_needs_the_op_and_nothing_else_does():
    q, k, v = (x.requires_grad_() for x in tensors(1, 2, 50, dtype=torch.float32))
    assert coterie.attention(q, k, v, "smyrf").requires_grad
    with torch.no_grad():
        assert not coterie.attention(q, k, v, "smyrf").requires_grad
    with torch.inference_mode():
        assert coterie.attention(q, k, v, "smyrf").is_inference()


@pytest.mark.parametrize("name", ["clustered", "improved"])
def test_answers_are_borrowed_as_with_a_gradient(name):
    """Padded queries borrow none; who meets nobody has nothing to weigh."""
    q, k, v = tensors(2, 2, 60, dtype=torch.float32)
    mask, pairs = padding(2, 60, [60, 41]), torch.zeros(2, 1, 1, 60)
    pairs[1, ..., 10:] = float("-inf")
    cases: list[dict[str, Any]] = [{}, {"key_mask": mask}, {"key_mask": mask, "attn_mask": pairs}]
    for settings in cases:
        wanted = coterie.attention(q.clone().requires_grad_(), k, v, SPECS[name], return_lse=True, **settings)
        with torch.no_grad():
            found = coterie.attention(q, k, v, SPECS[name], return_lse=True, **settings)
        torch.testing.assert_close(found.out, wanted.out.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.lse, wanted.lse.detach(), rtol=1e-6, atol=1e-6)


def test_what_causal_mechanisms_fall_back_on(monkeypatch):
    q, k, _ = tensors(2, 2, 30, 20, dtype=torch.float32)
    for mechanism in CAUSAL.values():
        same(mechanism, monkeypatch, q, k, is_causal=True, causal_offset=torch.tensor([-2, 40]))
