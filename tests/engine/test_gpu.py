"""The Triton kernels on a GPU: `TRITON_INTERPRET=0 pytest -m gpu`. Everywhere else, their interpreter runs them."""

from __future__ import annotations

import os

import pytest
import torch

import coterie
from tests.cases import CAUSAL, MECHANISMS, padding, tensors

missing = not torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] != "0"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing, reason="needs a GPU, and TRITON_INTERPRET=0")]
# Errors relative to 1 + |wanted|: sums are in float32, weights and what they multiply in these.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "causal"), [(n, False) for n in MECHANISMS] + [(n, True) for n in CAUSAL])
def test_every_mechanism_equals_the_reference(name, causal, dtype):
    for dim in (64, 80, 128):
        q, k, v = tensors(2, 4, 333, dim=dim, key_heads=2, dtype=dtype)
        mask = padding(2, 333, [333, 200])
        plan = MECHANISMS[name].plan(q.float(), k.float(), is_causal=causal, key_mask=mask)
        found = []
        for device, kind, backend in (("cuda", dtype, "triton"), ("cpu", torch.float64, "reference")):
            a, b, c = (x.detach().to(device, kind).requires_grad_() for x in (q, k, v))
            real = mask.to(device)
            out, lse = coterie.grouped_attention(
                a, b, c, plan.to(device), key_mask=real, query_mask=real, backend=backend
            )
            loss = out.square().sum() + torch.where(lse.isfinite(), lse, 0).sum()
            found.append([x.detach().cpu().double() for x in (out, lse, *torch.autograd.grad(loss, (a, b, c)))])
        for ours, want in zip(*found, strict=True):
            apart = torch.where(ours == want, 0, (ours - want).abs() / (1 + want.abs()))
            assert apart.max() <= TOLERANCE[dtype]


def test_a_call_waits_for_nothing():
    q, k, v = (x.cuda().requires_grad_() for x in tensors(1, 4, 333, dim=64, dtype=torch.float16))
    for name in ("smyrf", "clustered", "near-far"):
        coterie.attention(q, k, v, MECHANISMS[name]).sum().backward()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            coterie.attention(q, k, v, MECHANISMS[name]).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
