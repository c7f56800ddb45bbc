"""The native backend: C++ on the CPU, as torch custom ops with fake and autograd.

The kernels know nothing of torch: tensors reach them through DLPack. Accumulation is in float32 whatever comes in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.call import Call
from coterie.compiled import kernels, last_contiguous, mask_bytes, unwatched, without_grad
from coterie.engine.flat import Inputs, declare
from coterie.plan import Plan


def _pair_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return mask.detach().contiguous().view(torch.uint8)
    return mask.detach().to(torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else without_grad(x).contiguous()


def _segments(means: list[Tensor]) -> list[Tensor]:
    return [last_contiguous(x) for x in means[:3]] + [x.contiguous() for x in means[3:]]


def packed(given: Inputs) -> tuple[Any, Any]:
    """A call as the compiled module reads it."""
    tensors = kernels().Tensors(
        q=last_contiguous(given.q),
        k=last_contiguous(given.k),
        v=last_contiguous(given.v),
        rounds=[last_contiguous(x) for x in given.rounds],
        biases=[_contiguous(x) for x in given.biases],
        skips=[_contiguous(x) for x in given.skips],
        counts=[_contiguous(x) for x in given.counts],
        layout=given.layout,
        offset=_contiguous(given.offset),
        self_keys=_contiguous(given.self_keys),
        query_means=_segments(given.query_means),
        key_means=_segments(given.key_means),
        mask=_pair_mask(given.mask),
        key_mask=mask_bytes(given.key_mask),
        query_mask=mask_bytes(given.query_mask),
    )
    draw = 0 if given.seed is None else int(given.seed)
    threads = torch.get_num_threads()
    return tensors, kernels().Settings(given.causal, given.once, given.scale, given.dropout_p, draw, threads)


def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, who fell back on itself) for every real and virtual query row."""
    return _forward(Inputs(*inputs))


def _forward(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, alone = given.empty_results()
    kernels().forward(*packed(given), out, lse, None if given.self_keys is None else alone)
    return out, lse, alone


def backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, mask_needs_grad: bool, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the float mask (empty unless asked for), in their own dtypes."""
    given = Inputs(*inputs)
    wanted = given.differentiable(mask_needs_grad)
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in wanted[:3]] + [torch.zeros(wanted[3].shape)]
    kernels().backward(
        *packed(given),
        out.detach().contiguous(),
        lse.detach().contiguous(),
        None if given.self_keys is None else alone.contiguous(),
        last_contiguous(grad_out),
        grad_lse.detach().contiguous(),
        *grads[:3],
        grads[3] if mask_needs_grad else None,
    )
    first, second, third, fourth = (grad.to(x.dtype) for grad, x in zip(grads, wanted, strict=True))
    return first, second, third, fourth


attend_op, attend_backward_op = declare("attend", forward, backward)


def attend(call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
    """(out, lse) for every real and virtual query row, float32."""
    given = Inputs.of(call, plan)
    out, lse, _ = attend_op(*given) if _needs_dispatch(given) else _forward(given)
    return out, lse


def borrows(plan: Plan, out: Tensor, lse: Tensor) -> bool:
    """Whether there are answers to be merged, and nobody watches."""
    return plan.answer is not None and unwatched(out, lse)


def borrow(plan: Plan, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Each query's answer merged with that of the row that it borrows from."""
    assert plan.answer is not None
    merged = out.new_empty((*out.shape[:2], plan.num_queries, out.shape[3]))
    masses = lse.new_empty(merged.shape[:3])
    rows, mass = _contiguous(plan.answer), _contiguous(plan.mass)
    kernels().borrow_answers(without_grad(out), without_grad(lse), rows, mass, torch.get_num_threads(), merged, masses)
    return merged, masses


def _needs_dispatch(given: Inputs) -> bool:
    """Whether torch must know of the call: for a gradient, or because somebody watches."""
    tensors = [given.q, given.k, given.v, *([] if given.mask is None else [given.mask])]
    if not unwatched(*tensors):
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
