"""Modules with PyTorch's own constructors, calls and state_dict keys, and a mechanism."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.call import readable
from coterie.checks import expect, expect_int, expect_type
from coterie.functional import MechanismLike, attention
from coterie.mechanisms import Mechanism, as_mechanism
from coterie.mechanisms.base import without_resampling
from coterie.observe import called
from coterie.sdpa.masks import said
from coterie.sdpa.running import settled


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with clustered attention inside; loads and saves the same state_dict.

    Masks are PyTorch's: in a bool `key_padding_mask` or `attn_mask`, True means *not* to attend. In self-attention
    (query and key are the same tensor) padded queries take no part either and get the output projection of 0.
    `is_causal=True` is honoured as it stands, with or without an `attn_mask` beside it; an `attn_mask` that hides the
    future and nothing else is causality too. `need_weights` is False by default, and True is an error: no mechanism
    ever forms the whole matrix.

    Args:
        embed_dim, num_heads, …: as in torch.nn.MultiheadAttention.
        mechanism: who meets whom; an object, a string or its JSON form.
        layer: index of the layer, for the random draws.

    Example:
        >>> import coterie, torch
        >>> x = torch.randn(2, 300, 64)
        >>> dense = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> ours = coterie.nn.MultiheadAttention(64, 4, batch_first=True, mechanism="full")
        >>> _ = ours.load_state_dict(dense.state_dict())
        >>> torch.allclose(ours(x, x, x)[0], dense(x, x, x)[0], atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mechanism: MechanismLike,
        layer: int = 0,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            add_bias_kv,
            add_zero_attn,
            kdim,
            vdim,
            batch_first,
            device,
            dtype,
        )
        self._adopt(mechanism, layer)

    def _adopt(self, mechanism: MechanismLike, layer: int, name: str = "") -> None:
        expect_int("layer", layer, at_least=0, at_most=2**24 - 1)
        self.mechanism = as_mechanism(mechanism)
        self.layer = layer
        self._called = name  # where it sits in a model, for whoever is observing
        # PyTorch's encoder layers look at this before they take the fast path that goes around self_attn.forward.
        self._qkv_same_embed_dim = False

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, mechanism: MechanismLike, layer: int = 0, name: str = ""
    ) -> MultiheadAttention:
        """The same attention, sharing the module's parameters, with a mechanism; `name` is what observers call it."""
        made = cls.__new__(cls)
        made.__dict__ = copy.copy(module.__dict__)
        for part in ("_parameters", "_buffers", "_modules"):
            made.__dict__[part] = copy.copy(module.__dict__[part])
        made._adopt(mechanism, layer, name)
        return made

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"mechanism={str(self.mechanism)!r}, layer={self.layer}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As torch.nn.MultiheadAttention.forward; returns (output, None)."""
        expect(
            not need_weights,
            "need_weights",
            "False, as clustered attention never forms the weights (coterie.Plan.to_dense() shows who meets whom)",
            need_weights,
        )
        named = (("query", query), ("key", key), ("value", value))
        for name, x in named:
            expect_type(isinstance(x, Tensor), name, "a tensor", type(x).__name__)
        if query.is_nested:
            return self._nested(query, key, value, key_padding_mask, attn_mask, is_causal), None
        for name, x in named:
            expect_type(not x.is_nested, name, "a padded tensor, as the query is", "a nested one")
            expect(x.ndim == query.ndim and x.ndim in (2, 3), name, "2 or 3 dimensions", tuple(x.shape))
        same = query is key
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        for name, x, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            expect(x.shape[-1] == width, name, f"a last dimension of {width}", tuple(x.shape))
        q, k, v = (self._heads(x) for x in self._project(query, key, value))
        extra = 0
        # Extra keys go in front, where no causal mask hides them.
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([self._heads(b.expand(x.shape[0], -1, -1)), x], 2)
                for b, x in ((self.bias_k, k), (self.bias_v, v))
            )
            extra += 1
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 1, 0)) for x in (k, v))
            extra += 1
        key_mask, key_bias = self._key_padding(key_padding_mask, key, extra)
        pair_mask = self._pair_mask(attn_mask, q, k, extra)
        causal_offset = extra if is_causal else None
        if pair_mask is not None and extra == 0 and _is_past(pair_mask, q.shape[2], k.shape[2]):
            pair_mask, past = None, k.shape[2] - q.shape[2]
            causal_offset = past if causal_offset is None else min(past, causal_offset)
        if key_bias is not None:
            pair_mask = key_bias if pair_mask is None else _added(pair_mask, key_bias)
        query_mask = None
        if key_mask is not None:
            everyone = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
            query_mask = key_mask[:, extra:] if same else everyone
        with nullcontext() if torch.compiler.is_compiling() else _apart(self._called):
            out = attention(
                q,
                k,
                v,
                self._current_mechanism(),
                attn_mask=pair_mask,
                key_mask=key_mask,
                query_mask=query_mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=causal_offset is not None,
                causal_offset=causal_offset,
                layer=self.layer,
            )
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if not batched:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def _nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """Self-attention of a batch that PyTorch's encoder has nested: padded, attended to, and nested again."""
        expect(query is key and key is value, "key", "the query itself, as it is nested", "another tensor")
        plain = key_padding_mask is None and attn_mask is None
        expect(plain and self.batch_first, "query", "batch_first and no masks where it is nested", "others")
        lengths = [sequence.shape[0] for sequence in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        lead = torch.arange(padded.shape[1], device=padded.device)
        hidden = lead >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = self.forward(padded, padded, padded, key_padding_mask=hidden, is_causal=is_causal)
        return torch.nested.as_nested_tensor([row[:length] for row, length in zip(out, lengths, strict=True)])

    def _current_mechanism(self) -> Mechanism:
        """The mechanism, with fresh hashes at every step in training only."""
        return self.mechanism if self.training else without_resampling(self.mechanism)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    @staticmethod
    def _key_padding(padding: Tensor | None, key: Tensor, extra: int) -> tuple[Tensor | None, Tensor | None]:
        """(B, Nk) mask of real keys, and what a float mask adds to their scores, (B, 1, 1, Nk)."""
        if padding is None:
            return None, None
        shape = (key.shape[0], key.shape[1])
        expect(tuple(padding.shape) == shape, "key_padding_mask", "shape {}", tuple(padding.shape), shape)
        if padding.dtype == torch.bool:
            return F.pad(~padding, (extra, 0), value=True), None
        expect_type(padding.is_floating_point(), "key_padding_mask", "a bool or float dtype", padding.dtype)
        real = padding > torch.finfo(padding.dtype).min
        more = padding.requires_grad or not readable(padding) or bool((real & (padding != 0)).any())
        bias = F.pad(padding.masked_fill(~real, 0), (extra, 0))[:, None, None, :] if more else None
        return F.pad(real, (extra, 0), value=True), bias

    def _pair_mask(self, mask: Tensor | None, q: Tensor, k: Tensor, extra: int) -> Tensor | None:
        """(L, S) or (N·heads, L, S), True = hidden, as a 4-dimensional SDPA mask."""
        if mask is None:
            return None
        length, keys = q.shape[2], k.shape[2] - extra
        wanted = {2: (length, keys), 3: (q.shape[0] * self.num_heads, length, keys)}
        expect(
            tuple(mask.shape) == wanted.get(mask.ndim),
            "attn_mask",
            "shape {} or {}",
            tuple(mask.shape),
            *(wanted[2], wanted[3]),
        )
        floating = mask.is_floating_point()
        expect_type(floating or mask.dtype == torch.bool, "attn_mask", "a bool or float dtype", mask.dtype)
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (q.shape[0], self.num_heads))
        return F.pad(mask, (extra, 0)) if floating else F.pad(~mask, (extra, 0), value=True)


@contextmanager
def _apart(name: str) -> Iterator[None]:
    """Inside, attention goes by this name, and what an observer does is no call of the model's."""
    with called(name), settled():
        yield


def _is_past(pair_mask: Tensor, queries: int, keys: int) -> bool:
    """Whether a mask hides the future and nothing else: mechanisms plan by causality, and look masks of pairs up."""
    found = said(pair_mask, queries, keys)
    return found.offset is not None and found.keys is not None and bool(found.keys.all())


def _added(pair_mask: Tensor, bias: Tensor) -> Tensor:
    if pair_mask.dtype == torch.bool:
        pair_mask = torch.zeros_like(pair_mask, dtype=bias.dtype).masked_fill(~pair_mask, float("-inf"))
    return pair_mask + bias


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` whose self-attention is clustered; loads and saves the same state_dict.

    Example:
        >>> import coterie, torch
        >>> layer = coterie.nn.TransformerEncoderLayer(64, 4, batch_first=True, mechanism="smyrf:cluster_size=32")
        >>> layer(torch.randn(2, 300, 64)).shape
        torch.Size([2, 300, 64])
    """

    def __init__(self, *args: Any, mechanism: MechanismLike, layer: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn = MultiheadAttention.from_torch(self.self_attn, mechanism, layer)
