"""The native backend: C++ on the CPU, as torch custom ops with fake and autograd.

The kernels know nothing of torch: tensors reach them through DLPack. Accumulation is in float32 whatever comes in.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from coterie.call import check_transforms
from coterie.checks import SECOND_DERIVATIVE
from coterie.compiled import kernels, last_contiguous, mask_bytes
from coterie.plan import Means, Plan


def _pair_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return mask.detach().contiguous().view(torch.uint8)
    return mask.detach().to(torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().contiguous()


# What both ops take. A plan is flat here: five tensors a round; biases and skips of the rounds that have them; `layout`
# says which do, and their windows; means are order, start, stop and perhaps positions, or nothing.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor[] rounds, Tensor[] biases, Tensor[] skips, "
    "Tensor[] query_means, Tensor[] key_means, int[] layout, Tensor offset, Tensor? self_keys, Tensor? key_mask, "
    "Tensor? query_mask, Tensor? seed, bool causal, bool once, float scale, float dropout_p"
)
_LISTS = 5


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rounds: list[Tensor],
    biases: list[Tensor],
    skips: list[Tensor],
    query_means: list[Tensor],
    key_means: list[Tensor],
    layout: list[int],
    offset: Tensor,
    self_keys: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    once: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Any, ...]:
    """The inputs as the compiled module reads them."""
    tensors = kernels().Tensors(
        q=last_contiguous(q),
        k=last_contiguous(k),
        v=last_contiguous(v),
        rounds=[last_contiguous(x) for x in rounds],
        biases=[_contiguous(x) for x in biases],
        skips=[_contiguous(x) for x in skips],
        layout=layout,
        offset=_contiguous(offset),
        self_keys=_contiguous(self_keys),
        query_means=_segments(query_means),
        key_means=_segments(key_means),
        mask=_pair_mask(mask),
        key_mask=mask_bytes(key_mask),
        query_mask=mask_bytes(query_mask),
    )
    draw = 0 if seed is None else int(seed)
    return tensors, kernels().Settings(causal, once, scale, dropout_p, draw, torch.get_num_threads())


def _segments(means: list[Tensor]) -> list[Tensor]:
    return [last_contiguous(x) for x in means[:3]] + [x.contiguous() for x in means[3:]]


def _attend(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, who fell back on itself) for every real and virtual query row."""
    out, lse, alone = _empty_results(*inputs)
    kernels().forward(*_call(*inputs), out, lse, None if inputs[11] is None else alone)
    return out, lse, alone


def _empty_results(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, v, query_means, self_keys = inputs[0], inputs[2], inputs[7], inputs[11]
    rows = (*q.shape[:2], q.shape[2] + (query_means[1].shape[-1] if query_means else 0))
    wide = torch.promote_types(q.dtype, torch.float32)  # float64 has no kernel, but it has meta tensors
    return (
        q.new_empty((*rows, v.shape[-1]), dtype=wide),
        q.new_empty(rows, dtype=wide),
        q.new_empty(q.shape[:3] if self_keys is not None else (0,), dtype=torch.uint8),
    )


def _attend_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, mask_needs_grad: bool, *inputs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the float mask (empty unless asked for), in their own dtypes."""
    wanted = [*inputs[:3], _mask_or_nothing(inputs, mask_needs_grad)]
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in wanted[:3]] + [torch.zeros(wanted[3].shape)]
    kernels().backward(
        *_call(*inputs),
        out.detach().contiguous(),
        lse.detach().contiguous(),
        None if inputs[11] is None else alone.contiguous(),
        last_contiguous(grad_out),
        grad_lse.detach().contiguous(),
        *grads[:3],
        grads[3] if mask_needs_grad else None,
    )
    first, second, third, fourth = (grad.to(x.dtype) for grad, x in zip(grads, wanted, strict=True))
    return first, second, third, fourth


def _mask_or_nothing(inputs: tuple[Any, ...], mask_needs_grad: bool) -> Tensor:
    q, mask = inputs[0], inputs[3]
    return mask if mask_needs_grad else q.new_empty(0, dtype=torch.float32)


def _empty_gradients(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, mask_needs_grad: bool, *inputs: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (*inputs[:3], _mask_or_nothing(inputs, mask_needs_grad)))


attend_op = torch.library.custom_op(
    "coterie::attend", _attend, mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)"
)
attend_op.register_fake(_empty_results)
attend_backward_op = torch.library.custom_op(
    "coterie::attend_backward",
    _attend_backward,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, Tensor alone, bool mask_needs_grad, "
    f"{_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
attend_backward_op.register_fake(_empty_gradients)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    first, lists, layout, rest = inputs[:4], inputs[4 : 4 + _LISTS], inputs[4 + _LISTS], inputs[5 + _LISTS :]
    tensors, settings = rest[:5], rest[5:]
    ctx.save_for_backward(*output, *first, *tensors, *[x for each in lists for x in each])
    ctx.counts, ctx.layout, ctx.settings = [len(each) for each in lists], layout, settings


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor, grad_alone: Any) -> tuple[Any, ...]:
    check_transforms(grad_out, grad_lse)
    saved = list(ctx.saved_tensors)
    output, first, tensors, flat = saved[:3], saved[3:7], saved[7:12], iter(saved[12:])
    lists = [[next(flat) for _ in range(count)] for count in ctx.counts]
    inputs = (*first, *lists, ctx.layout, *tensors, *ctx.settings)
    grads = attend_backward_op(grad_out, grad_lse, *output, bool(ctx.needs_input_grad[3]), *inputs)
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[:4], strict=True)]
    nothing = [[None] * count for count in ctx.counts]
    return *wanted, *nothing, None, *[None] * (len(tensors) + len(ctx.settings))


attend_op.register_autograd(_differentiate, setup_context=_remember)


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise RuntimeError(SECOND_DERIVATIVE)


attend_backward_op.register_autograd(_refuse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    plan: Plan,
    *,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) for every real and virtual query row, float32."""
    rounds, biases, skips, layout = [], [], [], []
    for each in plan.rounds:
        rounds += [each.query_order, each.query_offsets, each.key_order, each.key_start, each.key_stop]
        biases += [] if each.bias is None else [each.bias]
        skips += [] if each.skip is None else [each.skip]
        low, high = each.window if each.window is not None else (0, 0)
        layout += [each.bias is not None, each.skip is not None, each.window is not None, low, high]
    out, lse, _ = attend_op(
        q,
        k,
        v,
        mask,
        rounds,
        biases,
        skips,
        _flat(plan.query_means),
        _flat(plan.key_means),
        [int(x) for x in layout],
        plan.offset,
        plan.self_keys,
        key_mask,
        query_mask,
        seed,
        plan.causal,
        plan.duplicates == "once",
        scale,
        dropout_p,
    )
    return out, lse


def _flat(means: Means | None) -> list[Tensor]:
    if means is None:
        return []
    return [x for x in (means.order, means.start, means.stop, means.positions) if x is not None]
