"""The native backend: C++ on the CPU, as torch custom ops with fake and autograd.

The kernels know nothing of torch: tensors reach them through DLPack. Accumulation is in float32 whatever comes in.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from coterie.errors import SECOND_DERIVATIVE
from coterie.plan import Means, Plan

_native: ModuleType | None = None
_missing, _instruction_set = "", ""
try:
    _native = import_module("coterie._native")
    _instruction_set = _native.instruction_set()
except ImportError as error:
    _missing = f"the C++ engine was not built when Coterie was installed ({error})"


def _torchs_team() -> int:
    """The address of GOMP_parallel in the OpenMP library that torch has loaded; 0 if it is another kind of library."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return 0
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "libgomp" in line}
    paths = {path for path in paths if "/torch/" in path or "/torch.libs/" in path} or paths
    if len(paths) != 1:
        return 0
    return ctypes.cast(ctypes.CDLL(paths.pop()).GOMP_parallel, ctypes.c_void_p).value or 0


if _native is not None:
    _native.adopt_team(_torchs_team())


def why_not() -> str:
    """Why the kernels cannot run here; empty if they can."""
    return _missing


def instruction_set() -> str:
    """Which copy of the kernels runs on this CPU: "avx512", "avx2" or "portable"."""
    return _instruction_set


def kernels() -> Any:
    """The compiled module."""
    if _native is None:
        raise RuntimeError(f"backend='native' is not available: {_missing}.")
    return _native


def last_contiguous(x: Tensor) -> Tensor:
    """The tensor as the kernels read it: any strides but the last."""
    x = x.detach()
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """A bool mask as bytes."""
    return None if mask is None else mask.detach().contiguous().view(torch.uint8)


def _pair_mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return mask.detach().contiguous().view(torch.uint8)
    return mask.detach().to(torch.float32)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().contiguous()


def _tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rounds: list[Tensor],
    biases: list[Tensor],
    skips: list[Tensor],
    layout: list[int],
    offset: Tensor,
    self_keys: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> Any:
    return kernels().Tensors(
        q=last_contiguous(q),
        k=last_contiguous(k),
        v=last_contiguous(v),
        rounds=[last_contiguous(x) for x in rounds],
        biases=[_contiguous(x) for x in biases],
        skips=[_contiguous(x) for x in skips],
        layout=layout,
        offset=_contiguous(offset),
        self_keys=_contiguous(self_keys),
        query_positions=_contiguous(query_positions),
        key_positions=_contiguous(key_positions),
        mask=_pair_mask(mask),
        key_mask=mask_bytes(key_mask),
        query_mask=mask_bytes(query_mask),
    )


@torch.library.custom_op("coterie::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rounds: list[Tensor],
    biases: list[Tensor],
    skips: list[Tensor],
    layout: list[int],
    offset: Tensor,
    self_keys: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    seed: Tensor | None,
    num_queries: int,
    num_keys: int,
    causal: bool,
    once: bool,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, who fell back on itself) for every real and virtual query row."""
    out, lse, alone = _empty_results(q, v, self_keys, num_queries)
    if out.numel() == 0 and lse.numel() == 0:
        return out, lse, alone
    kernels().forward(
        _tensors(
            q,
            k,
            v,
            mask,
            rounds,
            biases,
            skips,
            layout,
            offset,
            self_keys,
            query_positions,
            key_positions,
            key_mask,
            query_mask,
        ),
        num_queries,
        num_keys,
        causal,
        once,
        scale,
        dropout_p,
        0 if seed is None else int(seed),
        torch.get_num_threads(),
        out,
        lse,
        None if self_keys is None else alone,
    )
    return out, lse, alone


def _empty_results(q: Tensor, v: Tensor, self_keys: Tensor | None, num_queries: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    alone = (q.shape[0], q.shape[1], num_queries) if self_keys is not None else (0,)
    return (
        q.new_empty((*rows, v.shape[-1]), dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(alone, dtype=torch.uint8),
    )


@attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    self_keys, num_queries = rest[6], rest[12]
    return _empty_results(q, v, self_keys, num_queries)


@torch.library.custom_op("coterie::attend_backward", mutates_args=())
def attend_backward_op(
    grad_out: Tensor,
    grad_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    alone: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    rounds: list[Tensor],
    biases: list[Tensor],
    skips: list[Tensor],
    layout: list[int],
    offset: Tensor,
    self_keys: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    seed: Tensor | None,
    num_queries: int,
    num_keys: int,
    causal: bool,
    once: bool,
    scale: float,
    dropout_p: float,
    mask_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the float mask (empty unless asked for), in their own dtypes."""
    grads = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
    with_mask = mask is not None and mask_needs_grad
    grad_mask = torch.zeros(mask.shape if mask is not None and with_mask else (0,), dtype=torch.float32)
    if lse.numel():
        kernels().backward(
            _tensors(
                q,
                k,
                v,
                mask,
                rounds,
                biases,
                skips,
                layout,
                offset,
                self_keys,
                query_positions,
                key_positions,
                key_mask,
                query_mask,
            ),
            num_queries,
            num_keys,
            causal,
            once,
            scale,
            dropout_p,
            0 if seed is None else int(seed),
            torch.get_num_threads(),
            out.detach().contiguous(),
            lse.detach().contiguous(),
            None if self_keys is None else alone,
            last_contiguous(grad_out),
            grad_lse.detach().contiguous(),
            *grads,
            grad_mask if with_mask else None,
        )
    kinds = (q.dtype, k.dtype, v.dtype, mask.dtype if mask is not None and with_mask else torch.float32)
    first, second, third, fourth = (x.to(kind) for x, kind in zip((*grads, grad_mask), kinds, strict=True))
    return first, second, third, fourth


@attend_backward_op.register_fake
def _(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    q, k, v, mask, mask_needs_grad = *rest[:4], rest[-1]
    grad_mask = (
        mask.new_empty(mask.shape) if mask is not None and mask_needs_grad else q.new_empty(0, dtype=torch.float32)
    )
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_mask


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, mask, rounds, biases, skips, layout, *rest = inputs
    tensors, settings = rest[:7], rest[7:]
    ctx.save_for_backward(*output, q, k, v, mask, *tensors, *rounds, *biases, *skips)
    ctx.counts, ctx.layout, ctx.settings = (len(rounds), len(biases), len(skips)), layout, settings


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor, grad_alone: Any) -> tuple[Any, ...]:
    out, lse, alone, q, k, v, mask, *rest = ctx.saved_tensors
    tensors, lists = rest[:7], rest[7:]
    rounds, biases, skips = ctx.counts
    grads = attend_backward_op(
        grad_out,
        grad_lse,
        out,
        lse,
        alone,
        q,
        k,
        v,
        mask,
        lists[:rounds],
        lists[rounds : rounds + biases],
        lists[rounds + biases :],
        ctx.layout,
        *tensors,
        *ctx.settings,
        bool(ctx.needs_input_grad[3]),
    )
    wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[:4], strict=True)]
    nothing = [[None] * count for count in (rounds, biases, skips)]
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
        [int(x) for x in layout],
        plan.offset,
        plan.self_keys,
        plan.query_means.positions if plan.query_means else None,
        plan.key_means.positions if plan.key_means else None,
        key_mask,
        query_mask,
        seed,
        plan.num_queries,
        plan.num_keys,
        plan.causal,
        plan.duplicates == "once",
        scale,
        dropout_p,
    )
    return out, lse


@torch.library.custom_op("coterie::means", mutates_args=())
def means_op(x: Tensor, order: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Segment means of rows, float32."""
    result = x.new_empty((*start.shape, x.shape[-1]), dtype=torch.float32)
    segments = [last_contiguous(index) for index in (order, start, stop)]
    kernels().means(last_contiguous(x), *segments, torch.get_num_threads(), result)
    return result


@means_op.register_fake
def _(x: Tensor, order: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    return x.new_empty((*start.shape, x.shape[-1]), dtype=torch.float32)


@torch.library.custom_op("coterie::means_backward", mutates_args=())
def means_backward_op(grad: Tensor, order: Tensor, start: Tensor, stop: Tensor, rows: int) -> Tensor:
    """The gradient of the rows, float32."""
    result = grad.new_zeros((*grad.shape[:2], rows, grad.shape[-1]))
    segments = [last_contiguous(index) for index in (order, start, stop)]
    kernels().means_backward(grad.detach().contiguous(), *segments, torch.get_num_threads(), result)
    return result


@means_backward_op.register_fake
def _(grad: Tensor, order: Tensor, start: Tensor, stop: Tensor, rows: int) -> Tensor:
    return grad.new_empty((*grad.shape[:2], rows, grad.shape[-1]))


def _remember_segments(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.rows, ctx.dtype = inputs[0].shape[2], inputs[0].dtype
    ctx.save_for_backward(*inputs[1:])


def _share(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return means_backward_op(grad, *ctx.saved_tensors, ctx.rows).to(ctx.dtype), None, None, None


means_op.register_autograd(_share, setup_context=_remember_segments)
means_backward_op.register_autograd(_refuse)


def with_means(x: Tensor, means: Means | None) -> Tensor:
    """x with its segment means behind it, in the dtype of accumulation."""
    if means is None:
        return x
    return torch.cat([x.to(torch.float32), means_op(x, means.order, means.start, means.stop)], 2)
