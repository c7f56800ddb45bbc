"""Call: one attention call, checked once."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from coterie.backend import choose_backend
from coterie.checks import (
    check_dropout,
    check_flag,
    check_scale,
    check_token_mask,
    check_transforms,
    expect,
    expect_int,
    expect_type,
    is_int,
)

HIDDEN = -9_000.0  # what a model's float mask hides; some write −10,000 for −inf, which is −9,984 in bfloat16
_FAR = 2**30  # beyond every key of every tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_A_DTYPE = "a dtype of " + ", ".join(map(str, _DTYPES))  # not written anew in every call


class Sizes(NamedTuple):
    """The sizes of one attention call."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int


class Masks(TypedDict, total=False):
    """Which pairs a call may attend to, and the scale of their scores; see `Call.of`."""

    attn_mask: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    is_causal: bool
    causal_offset: int | Tensor | None
    scale: float | None


class Settings(Masks, total=False):
    """What a call that runs is checked from, besides its tensors."""

    guests: Tensor | None
    dropout_p: float
    enable_gqa: bool
    layer: int
    backend: str


class Planning(TypedDict, total=False):
    """What `Mechanism.plan` takes, besides tensors."""

    key_mask: Tensor | None
    query_mask: Tensor | None
    guests: Tensor | None
    is_causal: bool
    causal_offset: int | Tensor | None
    scale: float | None
    layer: int
    backend: str


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: every argument checked, every default filled in, every mask in its place.

    Mechanisms plan it, the engine executes it, and nobody checks it again.

    Attributes:
        q, k, v: (B, H, Nq, D), (B, Hk, Nk, D), (B, Hk, Nk, Dv); a call that is only planned has no values.
        sizes: batch, heads, key_heads, queries, keys.
        key_mask, query_mask: (B, Nk), (B, Nq) bool, True for real tokens; None: all are.
        guests: (B, Nq) bool, queries outside of `query_mask` that are answered all the same.
        pair_mask: (B | 1, H | 1, Nq | 1, Nk | 1), bool or float: what `attn_mask` says that no mask of keys can.
        causal: query i sees keys ≤ i + offset.
        offset: (B,) int32.
        scale: of the scores.
        layer: index for the random draws.
        dropout_p: probability of dropping a pair's weight.
        backend: the one that runs, never "auto".
        seed: of dropout; drawn when the call is executed.
        causal_offset: what `offset` was made from, as it came.

    Example:
        >>> import torch
        >>> from coterie.call import Call
        >>> q, k, v = torch.randn(3, 2, 4, 50, 16).unbind(0)
        >>> real = torch.arange(50) < torch.tensor([[50], [30]])
        >>> call = Call.of(q, k, v, attn_mask=real[:, None, None], is_causal=True)
        >>> call.key_mask.sum(-1).tolist(), call.pair_mask, call.scale
        ([50, 30], None, 0.25)
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    sizes: Sizes
    key_mask: Tensor | None
    query_mask: Tensor | None
    guests: Tensor | None
    pair_mask: Tensor | None
    causal: bool
    offset: Tensor
    scale: float
    layer: int
    dropout_p: float
    backend: str
    seed: Tensor | None = None
    causal_offset: int | Tensor | None = None

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        guests: Tensor | None = None,
        dropout_p: float = 0,
        is_causal: bool = False,
        causal_offset: int | Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = True,
        layer: int = 0,
        backend: str = "auto",
        runs: bool = True,
        same_tokens: bool = True,
    ) -> Call:
        """Check what a user passed, as `coterie.attention` takes it.

        Args:
            runs: the call will be executed: autocast applies, and derivatives that there is no rule for are refused. A
                call that is only planned or looked at takes its tensors as they are.
            same_tokens: with Nq = Nk and only a mask of keys, it is the mask of the queries too.
        """
        check_flag("is_causal", is_causal)
        check_flag("enable_gqa", enable_gqa)
        if runs:
            check_transforms(q, k, v, attn_mask, key_mask, query_mask, guests, causal_offset)
            q, k, v = _autocast(q, k, v)
        sizes = check_tensors(q, k, v, enable_gqa=enable_gqa)
        expect_type(v is not None or not runs, "v", "a tensor", "NoneType")
        check_dropout(dropout_p)
        factor = check_scale(scale, q.shape[-1])
        check_token_mask("key_mask", key_mask, (sizes.batch, sizes.keys), q.device)
        check_token_mask("query_mask", query_mask, (sizes.batch, sizes.queries), q.device)
        check_token_mask("guests", guests, (sizes.batch, sizes.queries), q.device)
        expect_int("layer", layer, at_least=0, at_most=2**24 - 1)
        split = split_mask(attn_mask, sizes, q)
        if split.key_mask is not None:
            key_mask = split.key_mask if key_mask is None else key_mask & split.key_mask
        if same_tokens and query_mask is None and sizes.queries == sizes.keys:
            query_mask = key_mask
        expect(guests is None or query_mask is not None, "guests", "a query_mask beside it", "none")
        return Call(
            q=q,
            k=k,
            v=v,
            sizes=sizes,
            key_mask=key_mask,
            query_mask=query_mask,
            guests=guests,
            pair_mask=split.pair_mask,
            causal=is_causal,
            offset=check_offset(causal_offset, sizes, q.device),
            scale=factor,
            layer=layer,
            dropout_p=dropout_p,
            backend=choose_backend(backend, q.device, q.dtype, max(q.shape[3], 0 if v is None else v.shape[3])),
            causal_offset=causal_offset,
        )

    @property
    def answered(self) -> Tensor | None:
        """(B, Nq) bool: the queries that get an answer; None: all."""
        if self.query_mask is None or self.guests is None:
            return self.query_mask
        return self.query_mask | self.guests

    @property
    def real_queries(self) -> Tensor:
        """(B, Nq) bool, whether there is a mask or not."""
        return _everyone(self.sizes.batch, self.sizes.queries, self.q) if self.query_mask is None else self.query_mask

    @property
    def real_keys(self) -> Tensor:
        """(B, Nk) bool, whether there is a mask or not."""
        return _everyone(self.sizes.batch, self.sizes.keys, self.k) if self.key_mask is None else self.key_mask

    def planning(self) -> Planning:
        """The arguments of `Mechanism.plan` that say the same, but for guests; a mask of pairs is none of them."""
        return {
            "key_mask": self.key_mask,
            "query_mask": self.query_mask,
            "is_causal": self.causal,
            "causal_offset": self.causal_offset,
            "scale": self.scale,
            "layer": self.layer,
            "backend": self.backend,
        }


def _everyone(batch: int, length: int, like: Tensor) -> Tensor:
    return torch.ones(batch, length, dtype=torch.bool, device=like.device)


def check_tensors(q: Tensor, k: Tensor, v: Tensor | None = None, *, enable_gqa: bool = True) -> Sizes:
    """q (B, H, Nq, D), k (B, Hk, Nk, D) and v (B, Hk, Nk, Dv) must fit together."""
    named = [("q", q), ("k", k)] + ([("v", v)] if v is not None else [])
    for name, x in named:
        if not (isinstance(x, Tensor) and not x.is_nested and x.ndim == 4 and x.dtype in _DTYPES):
            _refuse(name, x)
        expect_type(x.dtype == q.dtype, name, "the dtype of q, {}", x.dtype, q.dtype)
        expect(x.device == q.device, name, "the device of q, {}", x.device, q.device)
        if x.shape[0] != q.shape[0]:
            expect(False, name, "the batch size of q, {}", x.shape[0], q.shape[0])
    queries, keys = q.shape, k.shape
    if not queries[3] > 0:
        expect(False, "q", "a head dim ≥ 1", tuple(queries))
    expect(keys[3] == queries[3], "k", "the head dim of q, {}", keys[3], queries[3])
    # Numbers, also in a graph that is being compiled: heads do not change between calls as lengths do.
    heads, key_heads = index(queries[1]), index(keys[1])
    if v is not None:
        values = v.shape
        expect(values[1] == key_heads, "v", "the {} heads of k", values[1], key_heads)
        expect(values[2] == keys[2], "v", "the length of k, {}", values[2], keys[2])
    if heads != key_heads:
        expect(enable_gqa, "k", "the {} heads of q (fewer need enable_gqa=True)", key_heads, heads)
        fits = key_heads > 0 and heads % key_heads == 0
        expect(fits, "k", "a number of heads that divides the {} of q", key_heads, heads)
    expect(heads > 0, "q", "at least one head", heads)
    return Sizes(queries[0], heads, key_heads, queries[2], keys[2])


def _refuse(name: str, x: Any) -> None:
    """Say what is wrong with a tensor."""
    expect_type(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
    expect_type(not x.is_nested, name, "a padded tensor", "a nested one")
    expect(x.ndim == 4, name, "4 dimensions (batch, heads, length, dim)", tuple(x.shape))
    expect_type(x.dtype in _DTYPES, name, _A_DTYPE, x.dtype)


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
    """Whether a tensor's values can be looked at: not in a graph that is being compiled, nor on the meta device, nor in
    torch.vmap."""
    return not (torch.compiler.is_compiling() or x.is_meta or torch._C._functorch.is_batchedtensor(x))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, which the meta device does not know; most calls have none to leave."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def no_gradients() -> AbstractContextManager[object]:
    """A context without gradients; many calls are made in one."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, the tensors in its dtype, as scaled_dot_product_attention takes them; float64 stays."""
    if not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors):
        return tensors  # check_tensors says what is wrong
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
