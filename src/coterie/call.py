"""Checks and normal forms of what users pass: tensors, masks, offsets."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from coterie.checks import FORWARD_MODE, TRANSFORM, expect, expect_type, is_int

_FAR = 2**30  # beyond every key of every tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Sizes(NamedTuple):
    """The sizes of one attention call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int


def check_transforms(*inputs: object) -> None:
    """Refuse derivatives that would silently be 0, and transforms that there is no rule for."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.compiler.is_compiling():
        # A graph does not see tangents, so it is compiled for calls outside of forward mode alone.
        if forward_ad._current_level >= 0:
            raise RuntimeError(FORWARD_MODE)
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(FORWARD_MODE)
    functorch = torch._C._functorch
    if any(functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x) for x in tensors):
        raise RuntimeError(TRANSFORM)


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None = None, *, enable_gqa: bool = True) -> Sizes:
    """q (B, H, Nq, D), k (B, Hk, Nk, D) and v (B, Hk, Nk, Dv) must fit together."""
    named = [("q", q), ("k", k)] + ([("v", v)] if v is not None else [])
    for name, x in named:
        expect_type(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
        expect_type(not x.is_nested, name, "a padded tensor", "a nested one")
        expect(x.ndim == 4, name, "4 dimensions (batch, heads, length, dim)", tuple(x.shape))
        expect_type(x.dtype in _DTYPES, name, "a dtype of " + ", ".join(map(str, _DTYPES)), x.dtype)
        expect_type(x.dtype == q.dtype, name, "the dtype of q, {}", x.dtype, q.dtype)
        expect(x.device == q.device, name, "the device of q, {}", x.device, q.device)
        expect(x.shape[0] == q.shape[0], name, "the batch size of q, {}", x.shape[0], q.shape[0])
    expect(q.shape[3] > 0, "q", "a head dim ≥ 1", tuple(q.shape))
    expect(k.shape[3] == q.shape[3], "k", "the head dim of q, {}", k.shape[3], q.shape[3])
    # Numbers, also in a graph that is being compiled: heads do not change between calls as lengths do.
    heads, key_heads = index(q.shape[1]), index(k.shape[1])
    if v is not None:
        expect(v.shape[1] == key_heads, "v", "the {} heads of k", v.shape[1], key_heads)
        expect(v.shape[2] == k.shape[2], "v", "the length of k, {}", v.shape[2], k.shape[2])
    if heads != key_heads:
        expect(enable_gqa, "k", "the {} heads of q (fewer need enable_gqa=True)", key_heads, heads)
        fits = key_heads > 0 and heads % key_heads == 0
        expect(fits, "k", "a number of heads that divides the {} of q", key_heads, heads)
    expect(heads > 0, "q", "at least one head", heads)
    return Sizes(q.shape[0], heads, key_heads, q.shape[2], k.shape[2])


def check_scale(scale: float | None, dim: int) -> float:
    """The scale of the scores; 1/√D by default."""
    if scale is None:
        return 1.0 / math.sqrt(index(dim))
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    expect_type(number, "scale", "a number", type(scale).__name__)
    expect(abs(scale) < math.inf, "scale", "a finite number", scale)  # isfinite is not traced
    return float(scale)


def check_dropout(dropout_p: float) -> None:
    """A probability."""
    number = isinstance(dropout_p, int | float) and not isinstance(dropout_p, bool)
    expect_type(number, "dropout_p", "a number", type(dropout_p).__name__)
    expect(0.0 <= dropout_p <= 1.0, "dropout_p", "a probability in [0, 1]", dropout_p)


def check_flag(name: str, value: object) -> None:
    """A bool, and nothing that merely looks like one."""
    expect_type(isinstance(value, bool), name, "a bool", type(value).__name__)


def check_token_mask(name: str, mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """A (batch, length) bool mask, True for real tokens."""
    if mask is None:
        return
    expect_type(isinstance(mask, Tensor), name, "a tensor", type(mask).__name__)
    expect(tuple(mask.shape) == shape, name, "shape {}", tuple(mask.shape), shape)
    expect_type(mask.dtype == torch.bool, name, "dtype torch.bool (True = real token)", mask.dtype)
    expect(mask.device == device, name, "device {}", mask.device, device)


def check_offset(causal_offset: int | Tensor | None, sizes: Sizes, device: torch.device) -> Tensor:
    """(B,) int32: query i sits at key position i + offset. By default the last query is level with the last key."""
    offset: object = sizes.keys - sizes.queries if causal_offset is None else causal_offset
    if isinstance(offset, Tensor):
        expect_type(
            not (offset.is_floating_point() or offset.is_complex() or offset.dtype == torch.bool),
            "causal_offset",
            "an integer dtype",
            offset.dtype,
        )
        fits = offset.ndim == 0 or (offset.ndim == 1 and offset.shape[0] == sizes.batch)
        expect(fits, "causal_offset", "shape () or ({},)", tuple(offset.shape), sizes.batch)
        return offset.to(device).clamp(-_FAR, _FAR).to(torch.int32).expand(sizes.batch)
    expect_type(is_int(offset), "causal_offset", "an int or an integer tensor", type(offset).__name__)
    assert is_int(offset)
    return torch.full((sizes.batch,), max(-_FAR, min(_FAR, offset)), dtype=torch.int32, device=device)


class SplitMask(NamedTuple):
    """An SDPA mask taken apart."""

    key_mask: Tensor | None  # (B, Nk) bool
    pair_mask: Tensor | None  # (B | 1, H | 1, Nq | 1, Nk | 1), bool or float


def split_mask(attn_mask: Tensor | None, sizes: Sizes, q: Tensor) -> SplitMask:
    """Tell a key mask, the fast path, from a mask of pairs, which is looked up where the plan needs it.

    A mask of shape (B, Nk) or (B | 1, 1, 1, Nk) is a key mask. A float one masks the keys where it is −inf or the
    lowest number of its dtype; if it says anything else about the other keys, it also stays a mask of pairs.
    """
    if attn_mask is None:
        return SplitMask(None, None)
    name = "attn_mask"
    expect_type(isinstance(attn_mask, Tensor), name, "a tensor", type(attn_mask).__name__)
    dtypes = {torch.bool, torch.float32, q.dtype}
    expect_type(attn_mask.dtype in dtypes, name, "torch.bool or {}", attn_mask.dtype, q.dtype)
    expect(attn_mask.device == q.device, name, "the device of q, {}", attn_mask.device, q.device)
    batch, heads, queries, keys = sizes.batch, sizes.heads, sizes.queries, sizes.keys
    shape = tuple(attn_mask.shape)
    expect(2 <= len(shape) <= 4, name, "2 to 4 dimensions", shape)
    if len(shape) == 2 and shape == (batch, keys) and (batch != 1 or queries == 1):
        expect(
            batch != queries or queries == 1,
            name,
            "a shape that can be told apart, ({0}, 1, 1, {2}) for keys or (1, 1, {1}, {2}) for pairs",
            "one that could be either, as there are as many queries as samples",
            *(batch, queries, keys),
        )
        mask = attn_mask[:, None, None, :]
    else:
        mask = attn_mask.reshape((1,) * (4 - len(shape)) + shape)
    full = (batch, heads, queries, keys)
    fits = all(got in (1, want) for got, want in zip(mask.shape, full, strict=True))
    expect(fits, name, "({}, {}) or a shape that broadcasts to {}", shape, batch, keys, full)
    if mask.shape[1:3] != (1, 1):
        return SplitMask(None, mask)
    if mask.dtype == torch.bool:
        return SplitMask(mask[:, 0, 0].expand(batch, keys), None)
    seen = (mask > torch.finfo(mask.dtype).min) | mask.isnan()
    says_more = mask.requires_grad or not readable(mask) or bool((seen & (mask != 0)).any())
    pair_mask = mask.masked_fill(~seen, float("-inf")) if says_more else None
    return SplitMask(seen[:, 0, 0].expand(batch, keys), pair_mask)


def readable(x: Tensor) -> bool:
    """Whether a tensor's values can be looked at: not in a graph that is being compiled, nor on the meta device."""
    return not (torch.compiler.is_compiling() or x.is_meta)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which the meta device does not know."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the tensors in its dtype, as scaled_dot_product_attention takes them; float64 stays."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return tensors  # check_tensors says what is wrong
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
