"""A call and its plan as a flat list of tensors and numbers: what the custom ops of a backend take.

`declare` makes the two ops of a backend, forward and backward, and ties them together for autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch
from torch import Tensor

from coterie.call import Call
from coterie.checks import SECOND_DERIVATIVE, check_transforms
from coterie.plan import Means, Plan


def _flat(means: Means | None) -> list[Tensor]:
    if means is None:
        return []
    return [x for x in (means.order, means.start, means.stop, means.positions) if x is not None]


class Inputs(NamedTuple):
    """What both ops take, in the order of their schema.

    A plan is flat here: five tensors a round; biases, skips and counts of the rounds that have them; `layout` says
    which do, and their windows; means are order, start, stop and perhaps positions, or nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    rounds: list[Tensor]
    biases: list[Tensor]
    skips: list[Tensor]
    counts: list[Tensor]
    query_means: list[Tensor]
    key_means: list[Tensor]
    layout: list[int]
    offset: Tensor
    self_keys: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    seed: Tensor | None
    causal: bool
    once: bool
    scale: float
    dropout_p: float

    @staticmethod
    def of(call: Call, plan: Plan) -> Inputs:
        """A call and its plan, flat."""
        assert call.v is not None
        rounds: list[Tensor] = []
        layout: list[int] = []
        for each in plan.rounds:
            rounds += [each.query_order, each.query_offsets, each.key_order, each.key_start, each.key_stop]
            low, high = each.window if each.window is not None else (0, 0)
            layout += [int(x is not None) for x in (each.bias, each.skip, each.counts, each.window)]
            layout += [low, high]
        return Inputs(
            q=call.q,
            k=call.k,
            v=call.v,
            mask=call.pair_mask,
            rounds=rounds,
            biases=[each.bias for each in plan.rounds if each.bias is not None],
            skips=[each.skip for each in plan.rounds if each.skip is not None],
            counts=[each.counts for each in plan.rounds if each.counts is not None],
            query_means=_flat(plan.query_means),
            key_means=_flat(plan.key_means),
            layout=layout,
            offset=plan.offset,
            self_keys=plan.self_keys,
            key_mask=call.key_mask,
            query_mask=call.answered,
            seed=call.seed,
            causal=plan.causal,
            once=plan.duplicates == "once",
            scale=call.scale,
            dropout_p=call.dropout_p,
        )

    def empty_results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Room for (out, lse, who fell back on itself)."""
        q = self.q
        batch, heads, queries, _ = q.shape
        rows = (batch, heads, queries + (self.query_means[1].shape[-1] if self.query_means else 0))
        wide = torch.promote_types(q.dtype, torch.float32)  # float64 has no kernel, but it has meta tensors
        return (
            q.new_empty((*rows, self.v.shape[-1]), dtype=wide),
            q.new_empty(rows, dtype=wide),
            q.new_empty((batch, heads, queries) if self.self_keys is not None else (0,), dtype=torch.uint8),
        )

    def differentiable(self, mask_needs_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, and the mask or nothing."""
        mask = self.mask if mask_needs_grad else None
        return self.q, self.k, self.v, self.q.new_empty(0, dtype=torch.float32) if mask is None else mask


_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    list[Tensor]: "Tensor[]",
    list[int]: "int[]",
    bool: "bool",
    float: "float",
}
_FIELDS = {name: _KINDS[kind] for name, kind in get_type_hints(Inputs).items()}
_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())
_TENSORS = [name for name, kind in _FIELDS.items() if kind in ("Tensor", "Tensor?")]
_LISTS = [name for name, kind in _FIELDS.items() if kind == "Tensor[]"]


def _empty_gradients(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, alone: Tensor, mask_needs_grad: bool, *inputs: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in Inputs(*inputs).differentiable(mask_needs_grad))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    given = Inputs(*inputs)._asdict()
    tensors, lists = [given.pop(name) for name in _TENSORS], [given.pop(name) for name in _LISTS]
    ctx.save_for_backward(*output, *tensors, *[x for each in lists for x in each])
    ctx.lengths, ctx.settings = [len(each) for each in lists], given


def refuse(ctx: Any, *grads: Any) -> NoReturn:
    """The gradient of a gradient."""
    raise RuntimeError(SECOND_DERIVATIVE)


def declare(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[Any, Any]:
    """The ops `coterie::NAME` and `coterie::NAME_backward`, with fake, autograd, and no second derivative."""
    op = torch.library.custom_op(
        f"coterie::{name}", forward, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)"
    )
    op.register_fake(lambda *inputs: Inputs(*inputs).empty_results())
    backward_op = torch.library.custom_op(
        f"coterie::{name}_backward",
        backward,
        mutates_args=(),
        schema="(Tensor grad_out, Tensor grad_lse, Tensor out, Tensor lse, Tensor alone, bool mask_needs_grad, "
        f"{_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    backward_op.register_fake(_empty_gradients)

    def differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor, grad_alone: Any) -> tuple[Any, ...]:
        check_transforms(grad_out, grad_lse)
        saved = iter(ctx.saved_tensors)
        output = [next(saved) for _ in range(3)]
        tensors = {name: next(saved) for name in _TENSORS}
        lengths = zip(_LISTS, ctx.lengths, strict=True)
        lists: dict[str, Any] = {name: [next(saved) for _ in range(length)] for name, length in lengths}
        inputs = Inputs(**tensors, **lists, **ctx.settings)
        grads = backward_op(grad_out, grad_lse, *output, bool(ctx.needs_input_grad[3]), *inputs)
        wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[:4], strict=True)]
        nothing = [[None] * len(lists[name]) if name in lists else None for name in Inputs._fields[4:]]
        return *wanted, *nothing

    op.register_autograd(differentiate, setup_context=_remember)
    backward_op.register_autograd(refuse)
    return op, backward_op
