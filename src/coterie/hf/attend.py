"""The attention that Hugging Face's models call: `attn_implementation="coterie"`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from coterie.call import HIDDEN
from coterie.functional import attention
from coterie.hf import all_keys, choice, decoding, turn
from coterie.hf.asked import Asked
from coterie.hf.masks import Rules, coterie_mask
from coterie.mechanisms import Mechanism
from coterie.mechanisms.by_sample import where_it_pays

NAME = "coterie"

# What models pass along that changes nothing here.
_HARMLESS = {
    *("cache_position", "position_ids", "position_embeddings", "layer_idx", "target_dtype", "deterministic"),
    *("past_key_value", "past_key_values", "use_cache", "output_hidden_states", "return_dict", "num_items_in_batch"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),  # the mask says the same
    "sliding_window",  # the mask says it, too
}
_REFUSED = {
    "softcap": "softcap, which caps scores before the softmax",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks",
    "head_mask": "head_mask",
    "cache": "a paged cache",
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface: (B, H, Nq, D) queries, (B, Hk, Nk, D) keys; the output is (B, Nq, H, Dv)."""
    _refuse(module, rest)
    choice.count(module)
    call = Asked(module, query, key, value, scaling, dropout)
    over_cache = choice.decode_of(module)
    if over_cache is not None and decoding.is_step(query, key):
        out = decoding.answer(call, over_cache, attention_mask, position_bias)
        return out.transpose(1, 2).contiguous(), None
    if not torch.compiler.is_compiling() and decoding.is_step(query, key):
        visible = decoding.visible(call, attention_mask) if position_bias is None else None
        if visible is not None and all_keys.answers(call):
            return all_keys.answer(call, visible).transpose(1, 2).contiguous(), None
        if visible is not None and visible.all:
            return _sdpa(call, None).transpose(1, 2).contiguous(), None
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    rules = _rules(call, attention_mask, causal)
    pairs = attention_mask if rules is None else None
    if pairs is not None and pairs.dtype != torch.bool and not pairs.is_floating_point():
        raise ValueError(f"attention_mask: expected bool or float for a mask of pairs, got {pairs.dtype}.")
    who = _who(call, rules, pairs)
    turn.leave(module, who.queries)
    mechanism = _runs(choice.of(module), who, rules)
    if mechanism is None:
        out = _dense(call, rules, pairs, position_bias)
    else:
        out = _clustered(call, mechanism, who, rules, pairs, position_bias)
    return out.transpose(1, 2).contiguous(), None


class Who(NamedTuple):
    """Who takes part in a call, (B, N) bool each."""

    queries: Tensor  # real tokens: those that mechanisms plan with
    guests: Tensor  # answered too, as a model may read what padding says
    keys: Tensor

    def offset(self) -> Tensor:
        """(B,) int32: where queries sit if nobody says so: the last real one is level with the last real key."""
        last_query, last_key = (
            torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(-1)
            for mask in (self.queries, self.keys)
        )
        return (last_key - last_query).to(torch.int32)


def _who(call: Asked, rules: Rules | None, pairs: Tensor | None) -> Who:
    batch, count = call.q.shape[0], call.q.shape[2]
    everyone = call.q.new_ones(batch, count, dtype=torch.bool)
    if rules is not None:
        keys, answered = rules.real, rules.answered(count)
    else:  # a token that nobody may look at is padding
        assert pairs is not None
        seen = pairs if pairs.dtype == torch.bool else pairs > HIDDEN
        keys, answered = seen.any(1).any(1).expand(batch, call.k.shape[2]), everyone
    if rules is not None and rules.causal:
        queries = rules.real_queries(count)
    elif count == call.k.shape[2] and not choice.crosses(call.module):
        queries = keys
    else:
        before = turn.queries_before(call.module, (batch, count))
        queries = everyone if before is None else before
    return Who(queries & answered, answered & ~queries, keys)


def _runs(mechanism: Mechanism | None, who: Who, rules: Rules | None) -> Mechanism | None:
    """What runs, None for dense attention. A sample counts its own tokens, so that its padding does not matter."""
    if mechanism is None:
        return None
    window, causal = (0, False) if rules is None else (rules.window, rules.causal)
    return where_it_pays(mechanism, who.queries, who.keys, window, causal)


def _refuse(module: nn.Module, rest: dict[str, Any]) -> None:
    if rest.pop("output_attentions", False):
        raise ValueError(
            "output_attentions: clustered attention never has the matrix of weights; "
            "load the model with attn_implementation='eager' to get it."
        )
    for name, value in rest.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        what = _REFUSED.get(name, f"the argument {name!r}, which this version of Coterie does not know")
        raise ValueError(f"{type(module).__name__} asks for {what}; attn_implementation='coterie' does not support it.")


def _rules(call: Asked, mask: Tensor | None, causal: bool) -> Rules | None:
    """The mask as a rule, if it is one."""
    batch, queries, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if mask is None:
        if causal and 1 < queries != keys:
            raise ValueError(
                f"{type(call.module).__name__} is causal and was called with {queries} queries, {keys} keys and no "
                "mask, so where the queries sit is unknown; pass the model's own mask."
            )
        real = torch.ones(batch, keys, dtype=torch.bool, device=call.q.device)
        offset = torch.zeros(batch, dtype=torch.int32, device=call.q.device)
        return Rules(real, offset, causal and queries > 1)
    rules = Rules.decode(mask)
    if rules is None:
        wanted = (batch, call.q.shape[1], queries, keys)
        fits = mask.ndim == 4 and all(a in (1, b) for a, b in zip(mask.shape, wanted, strict=True))
        if not fits:
            raise ValueError(f"attention_mask: expected a shape that broadcasts to {wanted}, got {tuple(mask.shape)}.")
        return None
    if rules.real.shape != (batch, keys):
        raise ValueError(f"attention_mask: expected one for {(batch, keys)} keys, got {tuple(rules.real.shape)}.")
    return rules


def _clustered(
    call: Asked, mechanism: Mechanism, who: Who, rules: Rules | None, pairs: Tensor | None, bias: Tensor | None
) -> Tensor:
    settings: dict[str, Any] = {"key_mask": who.keys, "query_mask": who.queries}
    if pairs is not None and pairs.is_floating_point():
        pairs = pairs.masked_fill(pairs <= HIDDEN, float("-inf"))
    if torch.compiler.is_compiling() or bool(who.guests.any()):
        settings["guests"] = who.guests
    placed = rules is not None and (rules.causal or rules.window)
    settings["causal_offset"] = rules.offset if rules is not None and placed else who.offset()
    settings["is_causal"] = rules is not None and rules.causal
    try:
        out = attention(
            call.q,
            call.k,
            call.v,
            mechanism,
            attn_mask=_together(pairs, bias),
            dropout_p=call.dropout,
            scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
            layer=choice.draws(call.module),
            **settings,
        )
    except ValueError as error:
        layer = f"layer {choice.index(call.module)} ({type(call.module).__name__})"
        if bias is not None:
            raise ValueError(f"{mechanism} cannot honour the position bias of {layer}: {error}") from error
        if pairs is not None:
            raise ValueError(
                f"{mechanism} cannot honour the mask of {layer}, which is one of pairs (packed sequences, a chunked "
                f"mask, or a 4-D mask of the caller): {error}"
            ) from error
        raise ValueError(f"{mechanism} in {layer}: {error}") from error
    assert isinstance(out, Tensor)
    return out


def _dense(call: Asked, rules: Rules | None, pairs: Tensor | None, bias: Tensor | None) -> Tensor:
    """Every pair, by PyTorch's own attention."""
    causal = False
    if rules is not None:
        square = call.q.shape[2] == call.k.shape[2] and not rules.window and bias is None
        tracing = torch.compiler.is_compiling()
        plain = square and not tracing and bool(rules.real.all()) and not bool(rules.offset.any())
        causal = plain and rules.causal
        pairs = None if plain else rules.pairs(call.q.shape[2])
    return _sdpa(call, _together(pairs, bias), causal)


def _sdpa(call: Asked, mask: Tensor | None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=causal,
        scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )


def _together(pairs: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """A mask of pairs and a position bias as one mask."""
    if pairs is None or bias is None:
        return pairs if bias is None else bias
    return torch.where(pairs, bias, float("-inf")) if pairs.dtype == torch.bool else bias + pairs


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, coterie_mask)
