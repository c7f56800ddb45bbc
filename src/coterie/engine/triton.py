"""The Triton backend: kernels for GPUs, as torch custom ops with fake and autograd.

The ops are declared here without Triton; what runs them, `coterie.engine.kernels`, is imported when one first runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.call import Call
from coterie.engine.flat import Inputs, declare, refuse
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


def _take(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(2, rows[..., None].expand(*rows.shape, x.shape[-1]))


def _add(grad: Tensor, rows: Tensor, count: int) -> Tensor:
    from coterie.engine.kernels import taking

    return taking.add_rows(grad, rows, count)


take_op = torch.library.custom_op(
    "coterie::take_triton", _take, mutates_args=(), schema="(Tensor x, Tensor rows) -> Tensor"
)
take_op.register_fake(lambda x, rows: x.new_empty((*rows.shape, x.shape[-1])))
add_op = torch.library.custom_op(
    "coterie::add_triton", _add, mutates_args=(), schema="(Tensor grad, Tensor rows, int count) -> Tensor"
)
add_op.register_fake(lambda grad, rows, count: grad.new_empty((*rows.shape[:2], count, grad.shape[-1])))
add_op.register_autograd(refuse)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.count = inputs[0].shape[2]
    ctx.save_for_backward(inputs[1])


def _give_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return add_op(grad, *ctx.saved_tensors, ctx.count), None


take_op.register_autograd(_give_back, setup_context=_remember)


def rows_at(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (B, H, N) of x (B, H, R, D), whose gradients are added in the order of N."""
    found: Tensor = take_op(x, rows)
    return found


def numbers_at(x: Tensor, rows: Tensor) -> Tensor:
    """The same of x (B, H, R)."""
    return rows_at(x[..., None], rows)[..., 0]
