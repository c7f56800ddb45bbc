"""The mask that Coterie asks Hugging Face for: what a model hides, without a number for every pair.

Most masks are a rule: which keys are real, whether the future is hidden and where the queries sit, how far a window
reaches. A `Rules` mask is a small integer tensor that travels through a model like any other mask:

    (B, 1 + window, rows, Nk) int16:  [:, 0, 0] whether a key is real, [:, 0, 1:3] the key position of the first query

What a compiled graph must know is in its shape: 4 rows hide the future, 3 do not; the second axis is expanded, so it
costs nothing. No other mask is int16. Masks that are no such rule (packed sequences, chunks, image blocks) become a
bool for every pair, as in Hugging Face's own "sdpa".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from coterie.hf import turn
from coterie.hf.symbols import band_of

_ROWS = {True: 4, False: 3}  # causal or not
_DIGIT = 2**14  # positions are written with two of these


class Rules(NamedTuple):
    """A mask as a rule: query i sits at key position i + offset, and meets real keys alone.

    If `causal`, it meets no later key; if there is a `window`, no key that is so far away: causal, the last `window`
    keys; else those at a distance of at most `window`.
    """

    real: Tensor  # (B, Nk) bool
    offset: Tensor  # (B,) int32
    causal: bool
    window: int = 0  # 0: none

    def encode(self) -> Tensor:
        """As the tensor that a model passes on."""
        low, high = self.offset % _DIGIT, self.offset.div(_DIGIT, rounding_mode="floor")
        digits = [x[:, None].expand_as(self.real) for x in (low, high)]
        rows = torch.stack([self.real.to(torch.int32), *digits, *digits[: _ROWS[self.causal] - 3]], 1)
        return rows[:, None].to(torch.int16).expand(-1, 1 + self.window, -1, -1)

    @staticmethod
    def decode(mask: Tensor) -> Rules | None:
        """The rules that a tensor stands for, if it is such a tensor."""
        if mask.ndim != 4 or mask.dtype != torch.int16:
            return None
        digits = mask[:, 0, 1:3, :1].to(torch.int32).sum(-1)  # 0 if there is no key
        offset = digits[:, 0] + _DIGIT * digits[:, 1]
        return Rules(mask[:, 0, 0].bool(), offset, mask.shape[2] == _ROWS[True], mask.shape[1] - 1)

    def real_queries(self, count: int) -> Tensor:
        """Which of `count` queries are real tokens, (B, count) bool, where queries and keys are the same tokens."""
        at = (torch.arange(count, device=self.real.device) + self.offset[:, None]).long()
        inside = (at >= 0) & (at < self.real.shape[1])
        return inside & self.real.gather(1, at.clamp(0, max(0, self.real.shape[1] - 1)))

    def answered(self, count: int) -> Tensor:
        """Which of `count` queries see a key, (B, count) bool. Padded ones count: some models read what they say."""
        if not self.causal:
            return self.real.new_ones(self.real.shape[0], count)
        upto = torch.nn.functional.pad(self.real.cumsum(-1), (1, 0))
        at = torch.arange(count, device=self.real.device) + self.offset[:, None] + 1
        return upto.gather(1, at.clamp(0, self.real.shape[1]).long()) > 0

    def pairs(self, count: int) -> Tensor:
        """The mask of all pairs with `count` queries: (B, 1, count, Nk) bool."""
        keys = torch.arange(self.real.shape[1], device=self.real.device)
        ahead = torch.arange(count, device=self.real.device)[:, None] + self.offset[:, None, None] - keys
        met = self.real[:, None].expand(-1, count, -1)
        if self.causal:
            met = met & (ahead >= 0)
        if self.window:
            met = met & (ahead < self.window if self.causal else ahead.abs() <= self.window)
        return met[:, None]


def coterie_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **settings: Any,
) -> Tensor:
    """Hugging Face's mask interface: called by a model before its layers, the answer comes back in `attend`."""
    turn.new_pass()
    if not torch.compiler.is_compiling():
        _check_model(settings.get("config"))
    known = _rule(mask_function)
    if known is None:
        found: Tensor = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return found
    causal, window = known
    slots = torch.arange(kv_length, device=device) + kv_offset
    if attention_mask is None:
        real = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:
        real = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length].bool()
    if causal:  # the slots of a static cache that nobody has filled
        real = real & (slots < q_offset + q_length)
    offset = torch.zeros(batch_size, dtype=torch.int32, device=device) + (q_offset - kv_offset)
    if window and not isinstance(q_offset, Tensor):
        back, ahead = q_offset + q_length - 1 - kv_offset, kv_offset + kv_length - 1 - q_offset
        reaches_all = back < window if causal else max(back, ahead) <= window
        window = 0 if reaches_all else window
    return Rules(real, offset.to(torch.int32), causal, window).encode()


def _rule(function: Callable[..., Any]) -> tuple[bool, int] | None:
    """(causal, window) if a mask function is no more than that. What is not recognised is no rule."""
    band = band_of(function)
    if band is None:
        return None
    if band.low is None and band.high is None:
        return False, 0
    if band.low == 0:
        return (True, 0) if band.high is None else (True, band.high + 1) if band.high >= 0 else None
    if band.low is not None and band.high is not None and -band.low == band.high > 0:
        return False, band.high
    return None


def _check_model(config: Any) -> None:
    """A model that asks for a mask but never for attention would misread this one."""
    kind = type(config)
    if config is not None and not _uses_interface(kind.__module__):
        raise ValueError(
            f"{kind.__name__.removesuffix('Config')} models have attention of their own that ignores Hugging Face's "
            "attention interface: attn_implementation='coterie' cannot replace it."
        )


@cache
def _uses_interface(configuration: str) -> bool:
    """Whether the file of a config's models looks attention up; files that are not found are taken to."""
    name = configuration.replace(".configuration_", ".modeling_")
    if name == configuration or not name.startswith("transformers.models.") or find_spec(name) is None:
        return True
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(import_module(name))
