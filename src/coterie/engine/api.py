"""grouped_attention: check the call, dispatch to a backend, merge borrowed answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.call import Call, Sizes, no_autocast, readable
from coterie.checks import expect, expect_choice, expect_type
from coterie.draws import fresh_seed
from coterie.engine import native, reference
from coterie.plan import Duplicates, Plan


class Attended(NamedTuple):
    """What attention gives: the output, and the log of the softmax's denominator."""

    out: Tensor
    lse: Tensor


def grouped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    attn_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    dropout_p: float = 0,  # not 0.0, which torch.compile would take for an input of the graph, and then start over
    scale: float | None = None,
    duplicates: Duplicates | None = None,
    backend: str = "auto",
) -> Attended:
    """Exact softmax attention over the pairs that a plan names; differentiable in q, k, v and a float mask.

        out_i = Σ exp(s_ij) v_j / Σ exp(s_ij),   lse_i = log Σ exp(s_ij)

    with s_ij = scale·q_i·k_j + bias + mask, over the multiset of keys j that query i meets in all rounds
    (`duplicates="count"`) or over their union ("once"). A query that meets nobody gives 0 and −inf.

    Args:
        q, k, v: (B, H, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv).
        plan: who meets whom; checked before anything is computed.
        attn_mask: any mask that `scaled_dot_product_attention` takes, looked up at the planned pairs only.
        key_mask, query_mask: (B, Nk) and (B, Nq) bool, True for real tokens, on top of what the plan leaves out.
        dropout_p: probability of dropping a pair's weight; the seed comes from PyTorch's generator.
        scale: 1/√D by default.
        duplicates: overrides the plan's own.
        backend: "auto", "reference", "native" or "triton".

    Returns:
        `Attended(out, lse)`: (B, H, Nq, Dv) in the dtype of q, and (B, H, Nq) in float32 (float64 for float64).

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 1, 4, 50, 8).unbind(0)
        >>> plan = coterie.Full().plan(q, k)
        >>> out, lse = coterie.grouped_attention(q, k, v, plan)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> torch.allclose(out, dense, atol=1e-6)
        True
    """
    expect_type(isinstance(plan, Plan), "plan", "a coterie.Plan", type(plan).__name__)
    call = Call.of(
        q,
        k,
        v,
        attn_mask=attn_mask,
        key_mask=key_mask,
        query_mask=query_mask,
        dropout_p=dropout_p,
        scale=scale,
        backend=backend,
        same_tokens=False,
    )
    if duplicates is not None:
        expect_choice("duplicates", duplicates, ("count", "once"))
        plan = replace(plan, duplicates=duplicates)
    return execute(call, plan, given=True)


class Backend(Protocol):
    """What a module in this folder is: the engine in one way of computing."""

    def attend(self, call: Call, plan: Plan) -> tuple[Tensor, Tensor]:
        """(out, lse) for every real and virtual query row, in the dtype of accumulation, with their gradients."""


_BACKENDS: dict[str, Backend] = {"reference": reference, "native": native}


def _backend(name: str) -> Backend:
    """The module of a backend. The one for GPUs is imported where it is used: most people have none."""
    if name == "triton":
        from coterie.engine import triton

        return triton
    return _BACKENDS[name]


def execute(call: Call, plan: Plan, *, given: bool = False) -> Attended:
    """Run a checked call. Its masks hold whatever the plan names.

    A plan that was `given` by a user is checked to its last index; one that a mechanism has just written, only where
    the backend does not look at what it is about to read.
    """
    if given:
        check_plan(plan, call.sizes, call.q.device)
    check_means(plan, call.pair_mask)
    if given or call.backend == "reference":
        validate_plan(plan)
    answered = call.answered
    if call.backend == "reference" or (given and call.backend == "triton" and readable(plan.offset)):
        check_padding(plan, call.key_mask, answered)
    if call.dropout_p > 0.0:
        call = replace(call, seed=fresh_seed())
    with no_autocast(call.q.device):
        out, lse = _backend(call.backend).attend(call, plan)
        plan = _without_padding(plan, answered)
        if call.backend == "native" and native.borrows(plan, out, lse):
            out, lse = _Borrowed.apply(out, lse, plan)
        else:
            out, lse = _borrow(plan, out, lse, call.backend)
    return Attended(out if out.dtype == call.q.dtype else out.to(call.q.dtype), lse)


def _without_padding(plan: Plan, query_mask: Tensor | None) -> Plan:
    """The plan without answers that padded queries would borrow."""
    if query_mask is None or plan.answer is None:
        return plan
    answer, mass = (None if x is None else torch.where(query_mask[:, None], x, -1) for x in (plan.answer, plan.mass))
    return replace(plan, answer=answer, mass=mass)


def validate_plan(plan: Plan) -> None:
    """Look at a plan's values, if there are any: in a compiled graph, the native op does so when it runs."""
    if readable(plan.offset):
        plan.validate()


def check_plan(plan: Plan, sizes: Sizes, device: torch.device) -> None:
    """The plan must be for tensors of these sizes."""
    made_for = Sizes(plan.batch, plan.heads, plan.key_heads, plan.num_queries, plan.num_keys)
    expect(made_for == sizes, "plan", "a plan for {}", made_for, sizes)
    expect(plan.device == device, "plan", "device {}", plan.device, device)


def check_means(plan: Plan, pair_mask: Tensor | None) -> None:
    """A mask of pairs that a plan with virtual rows cannot honour is refused, not ignored."""
    for means, axis, wanted, place in (
        (plan.query_means, 2, "a mask of keys", "row"),
        (plan.key_means, 3, "a key_mask", "column"),
    ):
        if means is not None and pair_mask is not None:
            fits = pair_mask.shape[axis] == 1
            reason = f"{wanted}, as this plan attends through means and a mean has no {place} in a mask of pairs"
            expect(fits, "attn_mask", reason, tuple(pair_mask.shape))


def check_padding(plan: Plan, key_mask: Tensor | None, query_mask: Tensor | None) -> None:
    """A mean that holds a padded row cannot be put right by a mask. The native op looks for itself when it runs; the
    kernels for GPUs do not look, as the host would have to wait for what they find."""
    for name, mask, means in (
        ("query_mask", query_mask, plan.query_means),
        ("key_mask", key_mask, plan.key_means),
    ):
        if mask is not None and means is not None:
            made_with = "to be the mask that the plan's means were made with"
            expect(not means.includes(~mask), name, made_with, "one that hides a row of a mean")


class _Borrowed(torch.autograd.Function):
    """`_borrow` in one native call, with its gradient: the same bits whether there is one or not."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out, lse)
        ctx.plan = plan
        return native.borrow(plan, out, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            out, lse = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            merged = _borrow(ctx.plan, out, lse, "native")
        return (*torch.autograd.grad(merged, (out, lse), grads), None)


Take = Callable[[Tensor, Tensor], Tensor]


def _takes(backend: str) -> tuple[Take, Take]:
    """How rows (B, H, N) are taken from out (B, H, R, Dv), and from lse (B, H, R)."""
    if backend == "triton":
        from coterie.engine import triton

        return triton.rows_at, triton.numbers_at
    return _rows_at, lambda lse, rows: lse.gather(-1, rows)


def _rows_at(out: Tensor, rows: Tensor) -> Tensor:
    batch, heads, count = out.shape[:3]
    head = torch.arange(batch * heads, device=out.device).view(batch, heads, 1)
    flat = (rows + head * count).flatten()
    return out.flatten(0, 2).index_select(0, flat).view(*rows.shape, out.shape[-1])


def _borrow(plan: Plan, out: Tensor, lse: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Merge each query's own answer with the virtual row's that `plan.answer` names, by softmax mass."""
    if plan.query_means is None:
        return out, lse
    rows_at, numbers_at = _takes(backend)
    own_out, own_lse = out[:, :, : plan.num_queries], lse[:, :, : plan.num_queries]
    if plan.mass is not None:
        stands_in = (plan.mass >= 0) & (own_lse != float("-inf"))  # for who met nobody there is nothing to weigh
        own_lse = torch.where(stands_in, numbers_at(lse, plan.mass.clamp(min=0).long()), own_lse)
    if plan.answer is None:
        return own_out, own_lse
    own_rows = torch.arange(plan.num_queries, device=out.device)
    rows = torch.where(plan.answer >= 0, plan.answer, own_rows).long()  # whoever borrows nothing reads no other row
    other_out = rows_at(out, rows)
    other_lse = torch.where(plan.answer >= 0, numbers_at(lse, rows), float("-inf"))
    top = torch.maximum(own_lse, other_lse).detach()
    base = torch.where(top == float("-inf"), 0, top)
    own, other = torch.exp(own_lse - base), torch.exp(other_lse - base)
    total = own + other
    heard = total != 0
    safe = torch.where(heard, total, 1)
    # In place where it may be: a fresh tensor of this size costs as much as the rest.
    kept = out.requires_grad or lse.requires_grad
    lerp, fill = (torch.lerp, torch.masked_fill) if kept else (Tensor.lerp_, Tensor.masked_fill_)
    merged = lerp(other_out, own_out, (1 - other / safe)[..., None])
    if plan.mass is not None:  # some may have an answer of their own and no mass
        merged = fill(merged, ~heard[..., None], 0)
    return merged, torch.where(heard, base + safe.log(), float("-inf"))
