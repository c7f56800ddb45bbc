"""attention(): check the call, plan it, execute the plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from coterie import observe
from coterie.call import Call, Settings
from coterie.checks import check_flag, expect, expect_int, expect_type
from coterie.engine.api import Attended, check_plan, execute
from coterie.mechanisms import Mechanism, as_mechanism
from coterie.mechanisms.at_least import at_least
from coterie.mechanisms.base import plan_call
from coterie.plan import Plan

MechanismLike = Mechanism | str | dict[str, Any]
_Spec = MechanismLike | None


class Options(Settings, total=False):
    """What `attention` takes, besides tensors, mechanism and `return_lse`."""

    plan: Plan | None
    dense_below: int


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mechanism: _Spec, *, return_lse: Literal[False] = ..., **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, mechanism: _Spec, *, return_lse: Literal[True], **options: Unpack[Options]
) -> Attended: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: MechanismLike | None,
    *,
    attn_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    guests: Tensor | None = None,
    dropout_p: float = 0,  # not 0.0, which torch.compile would take for an input of the graph, and then start over
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layer: int = 0,
    plan: Plan | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    dense_below: int = 0,
) -> Tensor | Attended:
    """Clustered attention in the place of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q, k, v: (B, H, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv); float32, bfloat16, float16 or float64.
        mechanism: who meets whom: an object, its string ("smyrf:rounds=4,cluster_size=64") or its JSON form; may be
            None if a plan is given.
        attn_mask: as in SDPA: bool (True = may attend) or float (added to the scores, and differentiable), of any
            shape that broadcasts to (B, H, Nq, Nk). One of shape (B, 1, 1, Nk) or (B, Nk) is a key mask.
        key_mask: (B, Nk) bool, True for real tokens. Padded keys take no part in anything and are never read.
        query_mask: (B, Nq) bool. Padded queries give 0. With Nq = Nk and only a key mask, it is taken for the queries
            too; in cross-attention between equal lengths, pass the queries' own mask.
        guests: (B, Nq) bool: queries outside of `query_mask` that still get an answer without influencing anybody
            else's, such as padding whose output a model reads; see `Mechanism.plan`. If you pass a plan, it must hold
            them already.
        dropout_p: probability of dropping a pair's weight, applied whenever it is > 0, as in SDPA.
        is_causal: query i sees keys ≤ i + causal_offset; a query that would see nobody attends to itself.
        causal_offset: an int or (B,) integers. The default is Nk − Nq, bottom right, as generation with a cache
            needs; SDPA's own is 0.
        scale: 1/√D by default.
        enable_gqa: let k and v have fewer heads than q.
        layer: index of the layer, so that layers draw different hashes.
        plan: a plan made before, used as it is; `is_causal` must say what it was made with.
        backend: "auto", "reference", "native" or "triton"; an explicit choice never falls back on another.
        return_lse: also return the log of the softmax's denominator, (B, H, Nq), which is differentiable.
        dense_below: samples with fewer real keys meet every pair, as with `AtLeast`.

    Returns:
        out (B, H, Nq, Dv), or `Attended(out, lse)`.

    Example:
        >>> import coterie, torch
        >>> q, k, v = torch.randn(3, 2, 4, 1000, 32).unbind(0)
        >>> out = coterie.attention(q, k, v, coterie.Smyrf(rounds=4, cluster_size=64), is_causal=True)
        >>> out.shape
        torch.Size([2, 4, 1000, 32])
    """
    check_flag("return_lse", return_lse)
    expect_int("dense_below", dense_below, at_least=0)
    settings: Settings = {
        "attn_mask": attn_mask,
        "key_mask": key_mask,
        "query_mask": query_mask,
        "guests": guests,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "causal_offset": causal_offset,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "layer": layer,
        "backend": backend,
    }
    call = Call.of(q, k, v, **settings)
    if not torch.compiler.is_compiling() and (observer := observe.current()) is not None:
        known = observer(observe.Seen(call, mechanism, {**settings, "dense_below": dense_below}, observe.name()))
        if isinstance(known, Tensor) and not return_lse:
            return known
    if plan is None:
        attended = execute(call, plan_call(at_least(dense_below, as_mechanism(mechanism)), call))
    else:
        expect(dense_below == 0, "dense_below", "0 with a plan, which is used as it is", dense_below)
        _check_given_plan(plan, mechanism, call, causal_offset is not None)
        attended = execute(call, plan, given=True)
    return attended if return_lse else attended.out


def _check_given_plan(plan: Plan, mechanism: MechanismLike | None, call: Call, placed: bool) -> None:
    expect_type(isinstance(plan, Plan), "plan", "a coterie.Plan", type(plan).__name__)
    if mechanism is not None:
        as_mechanism(mechanism)
    check_plan(plan, call.sizes, call.q.device)
    expect(plan.causal == call.causal, "is_causal", f"{plan.causal}, which the plan was made with", call.causal)
    if placed:
        same = torch.equal(call.offset, plan.offset)
        expect(same, "causal_offset", f"{plan.offset.tolist()}, which the plan was made with", call.offset.tolist())


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mechanism: MechanismLike,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    causal_offset: int | Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layer: int = 0,
    backend: str = "auto",
    return_lse: bool = False,
    dense_below: int = 0,
) -> Tensor | Attended:
    """Attention over packed sequences, laid out as in flash-attn: each sequence attends to itself alone.

    Args:
        q, k, v: (total queries, H, D), (total keys, Hk, D), (total keys, Hk, Dv).
        mechanism: as in `attention`; each sequence is planned as if it were alone.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers from 0 to the totals: where each sequence starts.
        causal_offset: an int, or one integer for each sequence; by default each sequence's own Nk − Nq.
        dropout_p, is_causal, scale, enable_gqa, layer, backend, dense_below: as in `attention`.
        return_lse: also return lse, (total queries, H).

    Returns:
        out (total queries, H, Dv), or `Attended(out, lse)`.

    Example:
        >>> import coterie, torch
        >>> q = k = v = torch.randn(30, 4, 16)           # three sequences of 5, 15 and 10 tokens
        >>> starts = torch.tensor([0, 5, 20, 30])
        >>> coterie.attention_varlen(q, k, v, "smyrf:cluster_size=4", starts, starts).shape
        torch.Size([30, 4, 16])
    """
    check_flag("return_lse", return_lse)
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect_type(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
        expect(x.ndim == 3, name, "3 dimensions (total, heads, dim)", tuple(x.shape))
    chosen = as_mechanism(mechanism)
    query_starts = _check_starts("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    key_starts = _check_starts("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    sequences = len(query_starts) - 1
    expect(len(key_starts) - 1 == sequences, "cu_seqlens_k", f"{sequences} sequences", len(key_starts) - 1)
    expect(v.shape[0] == k.shape[0], "v", f"the {k.shape[0]} rows of k", v.shape[0])
    offsets = _sequence_offsets(causal_offset, sequences)
    settings: Settings = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "layer": layer,
        "backend": backend,
    }
    # Checked once in full, so that an error comes before any work and also when there is no sequence at all.
    call = Call.of(*(x.transpose(0, 1)[None] for x in (q, k, v)), **settings)
    assert call.v is not None
    kind = torch.promote_types(call.q.dtype, torch.float32)
    outs = [call.v.new_zeros(1, q.shape[1], 0, v.shape[-1])]
    lses = [call.q.new_zeros(1, q.shape[1], 0, dtype=kind)]
    for s in range(sequences):
        queries = slice(query_starts[s], query_starts[s + 1])
        keys = slice(key_starts[s], key_starts[s + 1])
        settings["causal_offset"] = offsets[s]
        out, lse = attention(
            call.q[:, :, queries],
            call.k[:, :, keys],
            call.v[:, :, keys],
            chosen,
            dense_below=dense_below,
            return_lse=True,
            **settings,
        )
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, 2)[0].transpose(0, 1)
    return Attended(out, torch.cat(lses, 2)[0].transpose(0, 1)) if return_lse else out


def _check_starts(name: str, starts: Tensor, total: int) -> list[int]:
    expect_type(isinstance(starts, Tensor), name, "a tensor", type(starts).__name__)
    integer = starts.dtype in (torch.int32, torch.int64)
    expect_type(integer, name, "dtype torch.int32 or torch.int64", starts.dtype)
    expect(starts.ndim == 1 and starts.numel() >= 1, name, "shape (sequences + 1,)", tuple(starts.shape))
    listed: list[int] = starts.tolist()
    ascending = all(a <= b for a, b in pairwise(listed))
    expect(ascending and listed[0] == 0, name, "starts that ascend from 0", listed)
    expect(listed[-1] == total, name, f"a last entry of {total}, the number of rows", listed[-1])
    return listed


def _sequence_offsets(causal_offset: int | Tensor | None, sequences: int) -> list[Any]:
    if not isinstance(causal_offset, Tensor):
        return [causal_offset] * sequences
    shape = tuple(causal_offset.shape)
    expect(shape in ((), (sequences,)), "causal_offset", f"shape () or ({sequences},)", shape)
    return list(causal_offset.expand(sequences))
