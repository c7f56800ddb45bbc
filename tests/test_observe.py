"""What an observer sees of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import coterie
from tests.cases import CAUSAL, padding, tensors


def seen_by(observer, *inputs, **settings):
    with coterie.observing(observer):
        return coterie.attention(*inputs, **settings)


@pytest.mark.parametrize("kind", ["bool", "float", "two"])
@pytest.mark.parametrize("name", ["smyrf", "near-far", "topk"])
def test_a_key_mask_that_came_as_attn_mask_is_planned_with(name, kind):
    """Regression: it was lost, so that reports and pictures showed a plan that met padding."""
    q, k, v = tensors(2, 2, 63, dtype=torch.float32)
    real = padding(2, 63, [63, 40])
    mask = torch.where(real, 0.0, float("-inf")) if kind == "float" else real
    both = {"key_mask": padding(2, 63, [50, 63])} if kind == "two" else {}
    mechanism = CAUSAL[name]
    seen: list[coterie.Seen] = []
    seen_by(seen.append, q, k, v, mechanism="full", attn_mask=mask[:, None, None], is_causal=True, **both)
    plan = mechanism.plan(seen[0].q, seen[0].k, **seen[0].planning())
    hidden = ~(real & both["key_mask"] if both else real)
    met = plan.to_dense()
    assert met.sum() > 0
    assert met.masked_select(hidden[:, None, None, :].expand_as(met)).sum() == 0
    want = mechanism.plan(q, k, key_mask=~hidden, is_causal=True)
    assert torch.equal(met, want.to_dense())


def test_it_sees_the_call_checked_and_the_arguments_as_they_came():
    q, k, v = tensors(1, 2, 20, dtype=torch.float32)
    seen: list[coterie.Seen] = []
    seen_by(seen.append, q, k, v, mechanism="local:window=4", is_causal=True, layer=3)
    [one] = seen
    assert one.mechanism == "local:window=4"
    assert one.settings["scale"] is None
    assert one.settings["layer"] == one.call.layer == 3
    assert one.call.scale == pytest.approx(8**-0.5)
    assert one.call.offset.tolist() == [0]
    assert one.q is q
    assert one.v is v


def test_attending_again_is_the_same_call_and_nobody_sees_it():
    q, k, v = tensors(2, 2, 40, dtype=torch.float32)
    real = padding(2, 40, [40, 25])
    seen: list[coterie.Seen] = []
    settings = {"attn_mask": real[:, None, None], "dense_below": 30, "scale": 0.3}
    out = seen_by(seen.append, q, k, v, mechanism="smyrf:cluster_size=8", **settings)
    with coterie.observing(seen.append):
        again = seen[0].attend("smyrf:cluster_size=8")
    assert torch.equal(out, again)
    assert len(seen) == 1
    # the second sample has fewer than 30 real keys
    full = seen[0].attend("full")
    torch.testing.assert_close(full[1], out[1])
    assert not torch.allclose(full[0], out[0])


def test_under_autocast_it_sees_what_is_computed_with():
    q, k, v = tensors(1, 2, 20, dtype=torch.float32)
    seen: list[coterie.Seen] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = seen_by(seen.append, q, k, v, mechanism="full")
    assert seen[0].q.dtype == out.dtype == torch.bfloat16
    assert torch.equal(seen[0].attend("full"), out)


def test_what_was_not_said_stays_unsaid_in_planning():
    """So that it fits other queries of the same call, other samples and other dtypes."""
    q, k, v = tensors(2, 2, 20, dtype=torch.float32)
    seen: list[coterie.Seen] = []
    seen_by(seen.append, q, k, v, mechanism="full", is_causal=True)
    planning = seen[0].planning()
    mechanism = CAUSAL["local"]
    assert mechanism.plan(q[:, :, -1:], k, **planning).offset.tolist() == [19, 19]
    assert mechanism.plan(q[:1], k[:1], **planning).offset.tolist() == [0]
    assert mechanism.plan(q.double(), k.double(), **planning).offset.tolist() == [0, 0]


def test_settings_that_are_replaced_are_the_settings():
    q, k, v = tensors(1, 2, 40, dtype=torch.float32)
    seen: list[coterie.Seen] = []
    seen_by(seen.append, q, k, v, mechanism="full", dropout_p=0.5)
    plain = replace(seen[0], settings=seen[0].settings | {"dropout_p": 0.0}).attend("full")
    torch.testing.assert_close(plain, coterie.attention(q, k, v, "full"))
