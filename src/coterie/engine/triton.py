"""The Triton backend: kernels for GPUs, as torch custom ops with fake and autograd.

The ops are declared here without Triton; what runs them, `coterie.engine.kernels`, is imported when one first runs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from coterie.call import Call
from coterie.engine.flat import Inputs, declare
from coterie.plan import Plan


def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, who fell back on itself) for every real and virtual query row."""
    from coterie.engine.kernels import launches

    return launches.forward(Inputs(*inputs))


def backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, mask_needs_grad: bool, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the float mask (empty unless asked for), in their own dtypes."""
    from coterie.engine.kernels import gradients

    return gradients.backward(Inputs(*inputs), grad_out, grad_lse, out, lse, alone, mask_needs_grad)


attend_op, attend_backward_op = declare("attend_triton", forward, backward)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse) for every real and virtual query row, float32."""
    out, lse, _ = attend_op(*Inputs.of(call, plan))
    return out, lse
